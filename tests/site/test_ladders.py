"""The ladders' pages in Chromium: the slider, Predict, the code of a step, the roofline, and all without scripts."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder import code
from kernel_twins import OPS
from kernel_twins.harness.ceilings import REFERENCE_GPU
from kernel_twins.report.figures import roofs
from kernel_twins.report.meaning import analysis, judged
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.rows.base import DATA, ROOT
from kernel_twins.spec import Name

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MEASURED = "softmax"
UNMEASURED = "attention"


@pytest.fixture(scope="module")
def loaded() -> dict[str, Results]:
    return {each.op.name: each for each in analysis.load(REFERENCE_GPU, DATA / REFERENCE_GPU)}


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        yield context.new_page()


def address(site: Path, op: str, step: str = "") -> str:
    return (site / "ladders" / f"{op}.html").as_uri() + (f"#{step}" if step else "")


def shown(page: Page) -> list[str]:
    """The steps that can be seen."""
    found: list[str] = page.eval_on_selector_all(
        ".rung", "all => all.filter((each) => each.checkVisibility()).map((each) => each.id)"
    )
    return found


@pytest.mark.parametrize("op", OPS)
def test_arrow_keys_reach_every_step(op: str, site: Path, page: Page) -> None:
    page.goto(address(site, op))
    page.locator("#step").focus()
    for step in OPS[op].steps:
        assert shown(page) == [step.name]
        page.keyboard.press("ArrowRight")
        if len(OPS[op].steps) > 1:
            assert page.evaluate("location.hash") != ""
    assert shown(page) == [OPS[op].steps[-1].name]
    page.keyboard.press("Home")
    assert shown(page) == [OPS[op].steps[0].name]


def test_the_address_names_the_step(site: Path, page: Page) -> None:
    page.goto(address(site, MEASURED, "v04_vectorized"))
    assert shown(page) == ["v04_vectorized"]
    page.get_by_role("button", name="Next step").click()
    assert shown(page) == ["v05_rows_per_block"]
    with page.context.new_page() as other:
        other.goto(page.url)
        assert shown(other) == ["v05_rows_per_block"]
    page.go_back()
    assert shown(page) == ["v04_vectorized"]
    page.go_forward()
    assert shown(page) == ["v05_rows_per_block"]


def test_buttons_end_with_the_ladder(site: Path, page: Page) -> None:
    page.goto(address(site, MEASURED))
    assert page.get_by_role("button", name="Previous step").is_disabled()
    assert page.get_by_role("button", name="Next step").is_enabled()
    page.locator("#step").press("End")
    assert page.get_by_role("button", name="Next step").is_disabled()


def games(results: Results) -> dict[tuple[str, str, str], tuple[str, set[str]]]:
    """By step, language and quantity: which way it went, and the verdicts on its author; of what can be played."""
    found: dict[tuple[str, str, str], tuple[str, set[str]]] = {}
    for step in results.op.steps:
        for backend in step.backends:
            for each in judged.of_step(results, step, backend):
                prediction = each.judgement.prediction
                went = results.went(prediction, step, backend)
                if went and not prediction.case and each.judgement.verdict != "void":
                    key = step.name, backend, prediction.quantity
                    found.setdefault(key, (went, set()))[1].add(each.judgement.verdict)
    return found


def answer(page: Page, op: str, key: tuple[str, str, str], way: str) -> None:
    step, backend, quantity = key
    page.locator(f'input[name="{op}/{step}/{backend}/{quantity}"][value="{way}"]').check()


@pytest.mark.parametrize("verdict", ["hit", "miss"])
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_the_score_is_that_of_the_rows(
    verdict: str, right: bool, site: Path, page: Page, loaded: dict[str, Results]
) -> None:
    key, went = next((key, went) for key, (went, verdicts) in games(loaded[MEASURED]).items() if verdicts == {verdict})
    page.goto(address(site, MEASURED, key[0]))
    rung = page.locator(".rung:visible")
    assert not rung.locator(".outcome").is_visible() and not rung.locator(".verdicts").is_visible()
    answer(page, MEASURED, key, went if right else next(way for way in ("up", "same", "down") if way != went))
    rung.get_by_role("button", name="Show what came").click()
    assert rung.locator(".outcome").is_visible() and rung.locator(".verdicts").is_visible()
    assert not rung.locator("form").is_visible()
    assert rung.locator(".score").inner_text() == f"You {int(right)} of 1, the author {int(verdict == 'hit')} of 1."
    said = rung.locator(f'.question[data-key="{key[1]}/{key[2]}"]').inner_text()
    assert ("right" if right else "wrong") in said and verdict in said


def test_directions_on_the_page_are_those_of_the_rows(site: Path, browser: Browser, loaded: dict[str, Results]) -> None:
    page = browser.new_page(java_script_enabled=False)  # which reads sooner
    for op, results in loaded.items():
        page.goto(address(site, op))
        asked: dict[str, list[str]] = page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll(".question[data-playable]")].map((each) =>
                 [`${each.closest(".rung").id}/${each.dataset.key}`, [each.dataset.went, each.dataset.author]]))"""
        )
        for key, (went, verdicts) in games(results).items():
            author = "open" if verdicts == {"not judged"} else "hit" if verdicts <= {"hit", "not judged"} else "miss"
            assert asked["/".join(key)] == [went, author], f"{op} {key}"
    page.close()


def test_answers_are_kept_and_forgotten(site: Path, page: Page, loaded: dict[str, Results]) -> None:
    key, (went, _) = next(iter(games(loaded[MEASURED]).items()))
    page.goto(address(site, MEASURED, key[0]))
    answer(page, MEASURED, key, went)
    page.locator(".rung:visible").get_by_role("button", name="Show what came").press("Enter")
    page.reload()
    assert page.locator(".rung:visible .outcome").is_visible()
    assert "You 1 of 1" in page.locator(".rung:visible .score").inner_text()
    page.locator(".rung:visible").get_by_role("button", name="Start over").click()
    assert page.locator(".rung:visible form").is_visible()
    assert not page.locator(".rung:visible .outcome").is_visible()


def test_skipping_shows_this_step_or_all(site: Path, page: Page, loaded: dict[str, Results]) -> None:
    steps = list(dict.fromkeys(key[0] for key in games(loaded[MEASURED])))
    page.goto(address(site, MEASURED, steps[0]))
    page.locator(".rung:visible").get_by_role("button", name="Skip", exact=True).click()
    assert page.locator(".rung:visible .outcome").is_visible()
    page.goto(address(site, MEASURED, steps[1]))
    assert not page.locator(".rung:visible .outcome").is_visible()
    page.locator(".rung:visible").get_by_role("button", name="Skip all").click()
    page.goto(address(site, "matmul_bf16", "v03_swizzled"))
    assert page.locator(".rung:visible .outcome").is_visible()


def test_predict_needs_no_storage(site: Path, page: Page, loaded: dict[str, Results]) -> None:
    raised: list[str] = []
    page.on("pageerror", lambda error: raised.append(str(error)))
    page.add_init_script(
        'Object.defineProperty(window, "localStorage", { get() { throw new DOMException("no", "SecurityError"); } })'
    )
    key, (went, _) = next(iter(games(loaded[MEASURED]).items()))
    page.goto(address(site, MEASURED, key[0]))
    answer(page, MEASURED, key, went)
    page.locator(".rung:visible").get_by_role("button", name="Show what came").click()
    assert "You 1 of 1" in page.locator(".rung:visible .score").inner_text()
    assert not raised


def test_an_unmeasured_step_is_played_and_stays_open(site: Path, page: Page) -> None:
    page.goto(address(site, UNMEASURED, "v05_tma"))
    rung = page.locator(".rung:visible")
    rung.locator('input[value="down"]').first.check()
    rung.get_by_role("button", name="Show what came").click()
    assert "open" in rung.locator(".verdicts").inner_text()
    assert "Not measured yet." in rung.locator(".outcome").inner_text()
    assert rung.locator(".score").inner_text() == "You 0 of 0, the author 0 of 0; 1 open."


def test_without_javascript_all_is_there(site: Path, browser: Browser, loaded: dict[str, Results]) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(address(site, MEASURED))
        steps = loaded[MEASURED].op.steps
        assert page.locator(".rung:visible").count() == len(steps)
        assert page.locator("table.moved:visible").count() == sum(len(step.backends) for step in steps)
        claims = [each.claim for step in steps for backend in step.backends for each in
                  judged.of_step(loaded[MEASURED], step, backend)]  # fmt: skip
        said = page.locator("main").inner_text()
        assert all(claim in said for claim in claims)
        assert page.locator("svg.roofline").is_visible()


LISTED = """() => [...document.querySelectorAll(".rung .twin:has(.diff)")].map((twin) => ({
  step: twin.closest(".rung").id,
  language: twin.querySelector("h4").textContent.trim(),
  anew: twin.querySelector(".file").textContent.startsWith("Written anew"),
  lines: [...twin.querySelectorAll(".code .diff > *")]
    .map((line) => [line.tagName, line.textContent.replace(/\\n$/, "")]),
}))"""


@pytest.mark.parametrize("op", ["softmax", "matmul_bf16"])
def test_a_diff_has_the_lines_that_changed(op: str, site: Path, page: Page, loaded: dict[str, Results]) -> None:
    results = loaded[op]
    page.goto(address(site, op))
    listed = {(each["step"], each["language"]): each for each in page.evaluate(LISTED)}
    assert 0 < sum(each["anew"] for each in listed.values()) < len(listed)
    for step in results.op.steps:
        for backend in step.backends:
            found = listed[step.name, {"cuda": "CUDA", "triton": "Triton"}[backend]]
            lines, file = found["lines"], ROOT / results.op.file(step.name, backend)
            case = results.case_of(step, backend)
            ladder = results.op.steps_of(backend)
            before = (results.previous(step, backend, case) if case else None) or next(
                iter(reversed(ladder[: ladder.index(step)])), None
            )
            new = file.read_text().splitlines()
            if before is None or found["anew"]:
                assert [text for _, text in lines] == new[code.header(file) :]
                continue
            earlier = ROOT / results.op.file(before.name, backend)
            old = earlier.read_text().splitlines()
            matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
            changed = [each for each in matcher.get_opcodes() if each[0] != "equal"]
            below = code.header(earlier), code.header(file)
            gone = [old[i] for _, a, b, _, _ in changed for i in range(a, b) if i >= below[0]]
            come = [new[i] for _, _, _, a, b in changed for i in range(a, b) if i >= below[1]]
            assert sorted(text for tag, text in lines if tag == "DEL") == sorted(gone)
            assert sorted(text for tag, text in lines if tag == "INS") == sorted(come)


def test_copied_code_has_no_numbers(site: Path, page: Page) -> None:
    page.goto(address(site, "vector_add", "v03_vectorized"))
    copied = page.evaluate(
        """() => {
          getSelection().selectAllChildren(document.querySelector(".rung:not([hidden]) .code .diff"));
          return getSelection().toString();
        }"""
    )
    files = [(ROOT / OPS["vector_add"].file(step, "cuda")) for step in ("v02_grid_stride", "v03_vectorized")]
    known = {line for file in files for line in file.read_text().splitlines()}
    assert len(copied.splitlines()) >= 3
    assert all(line in known for line in copied.splitlines() if line)


def test_lines_are_numbered_as_in_their_file(site: Path, page: Page) -> None:
    """A line of the new file, by the counters that its hunk begins with."""
    page.goto(address(site, "softmax", "v04_vectorized"))
    hunks: list[tuple[str, list[tuple[str, str]]]] = page.evaluate(
        """() => [...document.querySelectorAll("#v04_vectorized .diff")].map((hunk) =>
             [hunk.getAttribute("style"), [...hunk.children].map((line) => [line.tagName, line.textContent])])"""
    )
    new, old = (
        (ROOT / OPS["softmax"].file(step, "cuda")).read_text().splitlines()
        for step in ("v04_vectorized", "v03_registers")
    )
    for style, lines in hunks:
        counters = re.search(r"o (\d+) n (\d+)", style)
        assert counters
        before, after = map(int, counters.groups())
        for tag, text in lines:
            before, after = before + (tag != "INS"), after + (tag != "DEL")
            assert text.rstrip("\n") == (old[before - 1] if tag == "DEL" else new[after - 1])


def test_a_step_s_file_opens_as_it_is(site: Path, page: Page) -> None:
    page.goto(address(site, "softmax", "v03_registers"))
    page.locator(".rung:visible .file a").first.click()
    page.locator("kt-source .lines li").first.wait_for()
    file = ROOT / OPS["softmax"].file("v03_registers", "cuda")
    told = page.locator("kt-source .lines li").all_text_contents()
    assert [line.removesuffix("\n") for line in told] == file.read_text().splitlines()
    assert page.locator("kt-source h2").inner_text() == OPS["softmax"].file("v03_registers", "cuda")


def points(page: Page) -> list[tuple[str, str, float, float]]:
    """What is solid in the roofline: step, language, and its numbers."""
    found: list[list[str]] = page.evaluate(
        """() => [...document.querySelectorAll(".roofline .step.on .point")]
             .filter((each) => each.getClientRects().length)
             .map((each) => [each.closest(".step").dataset.step,
               each.classList.contains("cuda") ? "cuda" : "triton", each.dataset.x, each.dataset.y])"""
    )
    assert page.eval_on_selector_all(
        ".roofline .step",
        "all => all.every((each) => (getComputedStyle(each).opacity === '1') === each.matches('.on'))",
    )
    return [(step, backend, float(x), float(y)) for step, backend, x, y in found]


def test_the_solid_points_are_those_of_the_step(site: Path, page: Page, loaded: dict[str, Results]) -> None:
    results = loaded[MEASURED]
    page.goto(address(site, MEASURED))
    page.locator("#step").focus()
    for step in results.op.steps:
        expected = []
        for backend in step.backends:
            case = results.op.profile_case_of(step, backend)
            at = roofs.point(results, case, Name(backend, step.name)) if case else {}
            if at:
                expected.append((step.name, backend, at["dram_intensity"], at["tflops"]))
        assert points(page) == [
            (*each[:2], *(pytest.approx(value, rel=1e-5) for value in each[2:])) for each in expected
        ]
        page.keyboard.press("ArrowRight")


def test_roofs_are_switched(site: Path, page: Page, loaded: dict[str, Results]) -> None:
    results, step = loaded[MEASURED], "v03_registers"
    page.goto(address(site, MEASURED, step))
    assert page.locator(".roofline > .dram").is_visible() and not page.locator(".roofline > .l2").is_visible()
    page.get_by_role("checkbox", name="L2").check()
    page.get_by_role("checkbox", name="DRAM").uncheck()
    assert page.locator(".roofline > .l2").is_visible() and not page.locator(".roofline > .dram").is_visible()
    at = roofs.point(results, results.op.profile_case, Name("cuda", step))
    assert list(points(page)[0][2:]) == [
        pytest.approx(at["l2_intensity"], rel=1e-5),
        pytest.approx(at["tflops"], rel=1e-5),
    ]


def test_a_point_lies_where_its_numbers_say(site: Path, page: Page) -> None:
    """Twice the rate is as far up everywhere, since the axis is logarithmic."""
    page.goto(address(site, MEASURED))
    places: list[list[float]] = page.eval_on_selector_all(
        ".roofline .dram circle.point",
        "all => all.map((each) => [each.dataset.y, each.getAttribute('cy')].map(Number))",
    )
    (low, bottom), (high, top) = min(places), max(places)
    for rate, down in places:
        share = math.log(rate / low) / math.log(high / low)
        assert down == pytest.approx(bottom + share * (top - bottom), abs=0.3)


def test_the_index_has_every_ladder(site: Path, page: Page, loaded: dict[str, Results]) -> None:
    page.goto((site / "ladders" / "index.html").as_uri())
    rows = page.locator("tbody tr:has(td)")
    assert rows.count() == len(OPS)
    for name, results in loaded.items():
        row = page.locator(f'tr:has(a[href="{name}.html"])')
        said = row.inner_text()
        assert f"{len(results.op.steps_of('cuda'))} CUDA" in said
        if not results.measured:
            assert "not measured yet" in said
            continue
        case = results.op.headline_cases[0]
        last, best = results.last("triton", case), results.best_baseline(case)
        assert last and best
        ratio = results.ratio(case, last, best)
        assert ratio and f"{ratio.value:.3f} ×" in said and str(results.standing(case, last, best)) in said

"""Compare in a browser: both sides show what the rows say, swapped they are inverted, and own reports are taken."""

from __future__ import annotations

import io
import itertools
import json
import random
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel_twins.report import cli
from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.meaning.verdict import cycle_ratio, paired_ratio
from kernel_twins.report.ncu import extract
from kernel_twins.spec import Case, Name

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from builder.site import Site

REPORT = Path(__file__).resolve().parents[1] / "fixtures" / "ncu" / "base_c.csv"
PAIRS = [
    ("matmul_bf16", "4096x4096x4096-bf16", "cuda/v02_tensor_cores", "cuda/v03_swizzled"),
    ("matmul_bf16", "4096x4096x4096-bf16", "triton/v04_pipelined", "cuda/v04_pipelined"),
    ("softmax", "65536x4096-bf16", "torch/-", "cuda/v03_online"),
    ("reduction", "67108864-fp32", "cub/-", "triton/v01_interleaved"),
]
# How the page tells a value: as text of the data element, whose source names the quantity.
VALUES = """(side) => Object.fromEntries([...document.querySelectorAll(`[aria-label^=Quantities] tbody tr`)]
  .map((row) => [row.dataset.key, row.cells[1 + side].querySelector("data")])
  .filter(([, data]) => data).map(([key, data]) => [key, [Number(data.value), data.textContent, data.dataset.src]]))"""


@pytest.fixture
def page(site: Path, browser: Browser) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        heard: list[str] = []
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: heard.append(request.url) if not request.url.startswith("file:") else None)
        page.goto((site / "compare.html").as_uri())
        page.wait_for_selector("[aria-label^=Quantities] tr[data-key]")
        yield page
        assert heard == []


def choose(page: Page, a: str, b: str) -> None:
    page.evaluate("hash => { location.hash = hash; }", f"a={a}&b={b}")
    page.wait_for_function(
        "([a, b]) => ['op', 'case', 'call'].every((field) => [a, b].every((side, i) =>"
        "side.includes(document.querySelector(`[data-side='${i}'][data-field=${field}]`).value)))",
        arg=[a, b],
    )
    page.wait_for_timeout(50)


def pairs(committed: Site) -> list[tuple[str, str, str, str]]:
    """Those above that exist, and some at random."""
    chance = random.Random(40)
    found = []
    for results in committed.measured:
        if not results.measured:
            continue
        slug = chance.choice(sorted({slug for slug, _ in results.recorded.rows}))
        names = [name for each, name in results.recorded.rows if each == slug]
        two = chance.sample(names, 2)
        a, b = (f"{name.backend}/{name.step or '-'}" for name in two)
        found.append((results.op.name, slug, a, b))
    known = {
        (each.op.name, slug, f"{name.backend}/{name.step or '-'}")
        for each in committed.measured
        for slug, name in each.recorded.rows
    }
    return [each for each in PAIRS if {(*each[:2], each[2]), (*each[:2], each[3])} <= known] + found


def named(call: str) -> Name:
    backend, step = call.split("/")
    return Name(backend, "" if step == "-" else step)


def test_numbers_are_those_of_the_rows_and_swapping_sides_inverts_them(page: Page, committed: Site) -> None:
    from builder import provenance

    tried = pairs(committed)
    assert len(tried) > 15
    for op, slug, a, b in tried:
        choose(page, f"{op}/{slug}/{a}", f"{op}/{slug}/{b}")
        results = next(each for each in committed.measured if each.op.name == op)
        shown = [page.evaluate(VALUES, side) for side in (0, 1)]
        for call, values in zip((a, b), shown, strict=True):
            quantities = results.quantities(named(call), Case.parse(slug))
            assert set(values) == {key for key, value in quantities.items() if value is not None}
            for key, (value, text, source) in values.items():
                assert value == pytest.approx(quantities[key], rel=1e-5)
                assert text == write.number(quantities[key])
                assert value == pytest.approx(provenance.value(committed, source), rel=1e-5)
        page.get_by_role("button", name="Swap A and B").click()
        page.wait_for_function("call => document.querySelector('[name=call0]').value === call", arg=b)
        page.wait_for_timeout(50)
        assert [page.evaluate(VALUES, side) for side in (1, 0)] == shown


def test_the_ratio_of_two_times_is_the_logs(page: Page, committed: Site) -> None:
    for op, slug, a, b in pairs(committed):
        results = next(each for each in committed.measured if each.op.name == op)
        found = results.ratio(Case.parse(slug), named(b), named(a))
        choose(page, f"{op}/{slug}/{a}", f"{op}/{slug}/{b}")
        told = page.locator("kt-compare output").inner_text()
        if found is None:
            assert "interval" not in told or "no interval" in told
        else:
            standing = results.standing(Case.parse(slug), named(b), named(a))
            assert f"is {found.value:.3f} × as fast" in told
            assert f"(99 % interval {found.low:.3f} to {found.high:.3f}): {standing}." in told


def test_intervals_are_pythons(page: Page) -> None:
    chance = random.Random(1)
    for rounds in (1, 2, 3, 10, 19, 20, 40):
        samples = [[chance.lognormvariate(shift, 0.01) for _ in range(rounds)] for shift in (0.0, 0.004)]
        for name, python in (("paired", paired_ratio), ("cycles", cycle_ratio)):
            found = page.evaluate(f"samples => KT.verdict.{name}(...samples)", samples)
            expected = python(*samples)
            for key in ("value", "low", "high"):
                assert found[key] == pytest.approx(getattr(expected, key), rel=1e-12)
            assert found["verdict"] == expected.verdict


def test_numbers_are_written_as_the_log_writes_them(page: Page) -> None:
    chance = random.Random(2)
    values = [
        0,
        0.5,
        1,
        2.5,
        12.25,
        12.35,
        99.95,
        999.5,
        1000.5,
        1234567.8,
        0.0001234,
        0.00001234,
        0.1245,
        1e-9,
        131072,
    ]
    values += [10 ** chance.uniform(-6, 8) for _ in range(3000)] + [chance.randrange(10**6) / 8 for _ in range(1000)]
    assert page.evaluate("values => values.map((each) => KT.number(each))", values) == [*map(write.number, values)]
    pairs = list(zip(values, values[1:] + values[:1], strict=True)) + [(each, each * 1.01) for each in values]
    told = page.evaluate("pairs => pairs.map(([a, b]) => KT.change(a, b))", pairs)
    assert told == [write.change(*pair) for pair in pairs]


def test_the_largest_change_stands_first(page: Page) -> None:
    weights = page.evaluate(
        "[...document.querySelectorAll('[aria-label^=Quantities] tbody tr')].map((row) => "
        "KT.compare.weight(...[1, 2].map((i) => row.cells[i].querySelector('data')).map((d) => d && Number(d.value))))"
    )
    finite = [1e300 if weight is None else weight for weight in weights]
    assert all(one >= other - 1e-4 for one, other in itertools.pairwise(finite))


def test_the_first_view_is_the_largest_step_also_without_scripts(site: Path, browser: Browser, page: Page) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        plain = context.new_page()
        plain.goto((site / "compare.html").as_uri())
        cells = plain.locator("[aria-label^=Quantities] tbody td").all_inner_texts()
        assert plain.locator("noscript a").count() > 10
    assert len(cells) > 40
    assert page.locator("[aria-label^=Quantities] tbody td").all_inner_texts() == cells


def test_stalls_instructions_and_code_are_those_of_both(page: Page, committed: Site) -> None:
    from builder import provenance

    choose(
        page,
        "matmul_bf16/4096x4096x4096-bf16/cuda/v02_tensor_cores",
        "matmul_bf16/4096x4096x4096-bf16/cuda/v03_swizzled",
    )
    for label in ("Stalls", "SASS", "Counters"):
        numbers = page.locator(f"[aria-label^={label}] data")
        assert numbers.count() > 5
        for value, source in numbers.evaluate_all("all => all.map((each) => [Number(each.value), each.dataset.src])"):
            assert value == pytest.approx(provenance.value(committed, source), rel=1e-5), source
    results = next(each for each in committed.measured if each.op.name == "matmul_bf16")
    case = results.op.profile_case
    limits = page.locator(".comparison .limit").all_inner_texts()
    for told, step in zip(limits, ("v02_tensor_cores", "v03_swizzled"), strict=True):
        limit = results.limiter(Name("cuda", step), case)
        assert limit and limit.told() in told
    gone, new = ("".join(page.locator(f".diff .{kind}").all_text_contents()) for kind in ("gone", "new"))
    assert "v02_tensor_cores" in gone and "v03_swizzled" in new
    choose(page, "softmax/65536x4096-bf16/torch/-", "matmul_bf16/4096x4096x4096-bf16/cuda/v03_swizzled")
    assert "has no file here" in page.locator(".comparison").inner_text()


def test_the_hash_restores_both_sides(page: Page, browser: Browser) -> None:
    page.locator("[name=op1]").select_option("softmax")
    page.wait_for_function("location.hash.includes('&b=softmax/')")
    page.locator("[name=call1]").select_option("torch/-")
    page.wait_for_function("location.hash.endsWith('/torch/-')")
    page.wait_for_timeout(100)
    shown = [page.evaluate(VALUES, side) for side in (0, 1)]
    with browser.new_context() as context:
        other = context.new_page()
        other.goto(page.url)
        other.wait_for_function("document.querySelector('[name=call1]').value === 'torch/-'")
        assert [other.evaluate(VALUES, side) for side in (0, 1)] == shown


def test_the_second_side_goes_with_the_first(page: Page) -> None:
    page.locator("[name=op0]").select_option("reduction")
    page.wait_for_function("document.querySelector('[name=op1]').value === 'reduction'")
    assert page.locator("[name=case1]").input_value() == page.locator("[name=case0]").input_value()


def test_a_name_that_nobody_has_shows_the_first_view(page: Page) -> None:
    page.evaluate("location.hash = 'a=nothing/1-fp32/cuda/v01&b=softmax/1-fp32/cuda/v99'")
    page.wait_for_timeout(200)
    assert page.locator("[name=op0]").input_value() == "matmul_bf16"


@pytest.fixture(scope="module")
def printed() -> str:
    """What `extract X --json` prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert cli.main(["extract", "--json", str(REPORT)], "") == 0
    return out.getvalue()


def give(page: Page, name: str, content: str) -> None:
    page.locator("#report").set_input_files({"name": name, "mimeType": "", "buffer": content.encode()})


def test_an_own_report_is_taken(page: Page, printed: str) -> None:
    give(page, "mine.json", printed)
    page.wait_for_function("document.querySelector('[name=op1]').value === 'file'")
    launches = extract.foreign_launches(REPORT)
    assert page.locator("[name=case1] option").count() == len(launches)
    for index, launch in enumerate(launches):
        page.locator("[name=case1]").select_option(str(index))
        page.wait_for_function(f"location.hash.endsWith('b=file/{index}')")
        page.wait_for_timeout(50)
        shown = page.evaluate(VALUES, 1)
        expected = {key: each.compute(launch.metrics) for key, each in QUANTITIES.items()}
        assert set(shown) == {key for key, value in expected.items() if value is not None} and len(shown) > 10
        assert all(value == pytest.approx(expected[key], rel=1e-5) for key, (value, _, _) in shown.items())
    page.locator("[name=op0]").select_option("file")
    page.wait_for_function("document.querySelector('[name=op0]').value === 'file'")
    page.locator(".comparison details summary").click()
    assert page.locator("[aria-label^=Counters] tbody tr").count() > 300


WRONG = [
    ("a.ncu-rep", "NVR\0\1binary", "no JSON: it begins with “NVR·"),
    ("a.json", "", "empty"),
    ("a.json", "{}", "JSON of an object"),
    ("a.json", "[]", "an empty list"),
    ("a.json", '[{"launch": 0, "kernel": "k", "metric": "m"}]', "entry 1 has no value"),
    ("a.json", '[{"launch": 0, "kernel": "k", "metric": "m", "value": "1"}]', "has a string as the value of m"),
    ("a.json", "[1]", "entry 1 has no launch, kernel, metric, value"),
]


@pytest.mark.parametrize(("name", "content", "got"), WRONG)
def test_another_file_is_refused(page: Page, name: str, content: str, got: str) -> None:
    give(page, name, content)
    page.wait_for_function("document.querySelector('kt-compare output').value.includes('Accepted is')")
    told = page.locator("kt-compare output").inner_text()
    assert told.startswith(name) and got in told and "extract X.ncu-rep --json" in told
    assert page.locator("[name=op1]").input_value() == "matmul_bf16"


def test_a_counter_without_a_value_is_left_out(page: Page, printed: str) -> None:
    entries = json.loads(printed)
    for entry in entries:
        if entry["metric"] == "dram__bytes_read.sum":
            entry["value"] = None
    give(page, "mine.json", json.dumps(entries))
    page.wait_for_function("document.querySelector('[name=op1]').value === 'file'")
    assert "dram_bytes" not in page.evaluate(VALUES, 1)


def test_two_are_chosen_by_keyboard(page: Page) -> None:
    page.locator("[name=call1]").focus()
    before = page.locator("[name=call1]").input_value()
    page.keyboard.press("ArrowDown")
    page.wait_for_function("before => document.querySelector('[name=call1]').value !== before", arg=before)
    page.wait_for_function("location.hash.includes('b=')")
    page.get_by_role("button", name="Swap A and B").focus()
    chosen = page.locator("[name=call1]").input_value()
    page.keyboard.press("Enter")
    page.wait_for_function("chosen => document.querySelector('[name=call0]').value === chosen", arg=chosen)

"""What is committed agrees with itself: documents with data, figures with data, bars with measurements."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from kernel_twins import OPS
from kernel_twins.report.drawings import DRAWINGS
from kernel_twins.report.meaning.analysis import Results, load
from kernel_twins.report.ncu import extract
from kernel_twins.report.ncu.reader import Launch
from kernel_twins.report.pages import documents, ladder_page, places
from kernel_twins.report.rows import base, store
from kernel_twins.spec import BACKENDS, Case, Name, Op

FOLDER = store.DATA / store.REFERENCE_GPU
DOCS = store.ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(store.ROOT / f"{name}.md" for name in ("README", "KERNEL_LOG", "CONTRIBUTING"))]
BY_PAGE = pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(store.ROOT).as_posix() for page in PAGES])
BY_OP = pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))


def test_documents_agree_with_the_data() -> None:
    assert documents.disagreements(FOLDER, load(store.REFERENCE_GPU, FOLDER)) == []


@BY_OP
def test_the_cases_that_documents_show_are_timed(op: Op) -> None:
    assert {*op.headline_cases} <= {*op.timed_cases}
    assert op.profile_case in op.bench_cases
    for step in op.steps:
        for backend in step.backends:
            case = op.profile_case_of(step, backend)
            assert case is None or op.times(step, case), f"{step.name} {backend}: {case}"
    assert len({*op.timed_cases}) == len(op.timed_cases)


@BY_OP
def test_torch_compile_is_what_a_user_would_call_instead(op: Op) -> None:
    assert "compile" in op.baselines_at(op.profile_case)
    for name, cases in op.baseline_cases.items():
        assert name in op.baselines and {*cases} <= {*op.timed_cases}


@BY_PAGE
def test_a_page_that_has_an_ambiguous_verdict_says_what_it_is(page: Path) -> None:
    text = page.read_text()
    prose = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    explained = re.search(r"AMBIGUOUS[^|]{0,200}\bcycles\b|\bcycles\b[^|]{0,200}AMBIGUOUS", prose)
    assert explained or "AMBIGUOUS" not in text


def test_the_results_say_what_their_conditions_are() -> None:
    text = (DOCS / "results.md").read_text()
    legend, table = text[: text.index("<!-- conditions:begin -->")], text[text.index("<!-- conditions:begin -->") :]
    for condition in ("Sustained", "Rested", "In a chain"):
        assert f"- *{condition}*: " in legend
    assert "| rested |" in table or "nothing has been recorded yet" in table


def new_cases(results: Results) -> list[Case]:
    """The cases at which nothing was timed yet: they came after the steps were measured, and `check` tells of them."""
    timed = {slug for slug, _ in results.recorded.rows}
    return [case for case in results.op.timed_cases if case.slug not in timed]


@BY_OP
def test_every_cell_of_the_ladders_was_tried_and_none_is_wrong(op: Op) -> None:
    results = Results(op, FOLDER, None)
    measure, new = ladder_page.remedy(op), new_cases(results)
    for case in op.timed_cases:
        if case in new:
            served = [Name(b, step.name) for step in op.steps if op.times(step, case) for b in step.backends]
            awaited = all(name in results.unmeasured for name in served)
            assert not results.measured or awaited or case in [each for each, _ in results.untimed]
            continue
        for step in (step for step in op.steps if op.times(step, case)):
            for name in (Name(backend, step.name) for backend in step.backends):
                status = results.status(case, name)
                told = f"{step.name} {name.backend} {case.slug}: {status or f'not timed there, {measure}'}"
                assert status.startswith(("ok", "skipped")) or name in results.unmeasured, told
    if late := results.unmeasured:
        for backend in BACKENDS:
            newest = [name in late for name in (Name(backend, step.name) for step in op.steps_of(backend))]
            assert newest == sorted(newest), f"{op.name} {backend}: the rows of an earlier step are gone, {measure}"
        pytest.skip(f"{', '.join(f'{name.step} {name.backend}' for name in late)} not measured yet: {measure}")


@BY_OP
def test_every_step_was_profiled_with_its_own_kernel_or_is_told_to_be_yet(op: Op) -> None:
    results = Results(op, FOLDER, None)
    assert results.recorded.foreign == {}
    late, new = results.unprofiled(), new_cases(results)
    for case, name in op.profiled_cells:
        if name.step and (case, name) not in late and name not in results.unmeasured and case not in new:
            assert results.quantities(name, case)["dram_bytes"], f"{name.step} {name.backend} at {case.slug}"
            assert any(
                kernel.startswith(f"{op.name}_{name.step}_") for kernel in results.recorded.kernels[case.slug, name]
            )
    shown = {op.profile_case, *(case for step in op.steps for case in (step.profile_case or {}).values())}
    assert {case for case, _ in late} <= shown


@BY_OP
def test_every_page_is_listed(op: Op) -> None:
    assert f"({op.name}.md)" in (DOCS / "README.md").read_text()


@BY_OP
def test_every_row_names_a_recorded_run(op: Op) -> None:
    assert set(Results(op, FOLDER, None).recorded.runs) <= set(store.read_runs(FOLDER)["run"])


@BY_OP
def test_recorded_counters_extract_to_the_rows_they_came_from(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way from launches to rows, on what the H100 really recorded: the metrics that it recorded."""
    table = store.read_table(FOLDER, op.name, "counters")
    if table.empty:
        pytest.skip(f"{op.name} was never profiled: {ladder_page.remedy(op)}")
    recorded = list(table["metric"].unique())
    monkeypatch.setattr(extract, "names", lambda tier: recorded)
    launches, expected, codes = [], {}, {}
    for (case, backend, step, _), rows in table.groupby(["case", "backend", "step", "launch"], sort=False):
        label = base.label(op, Case.parse(case), Name(backend, step))
        metrics = dict(zip(rows["metric"], rows["value"].astype(float), strict=True))
        units = dict(zip(rows["metric"], rows["unit"], strict=True))
        launches.append(Launch(label, rows["kernel"].iloc[0], metrics, units))
        expected[label] = op.step(step).launches if step else 0
        codes[label] = rows["code"].iloc[0]
    again, refused = extract.counter_rows(launches, expected, op, table["run"].iloc[0], codes, "T3")
    assert refused.empty
    assert list(again["value"].astype(float)) == list(table["value"].astype(float))
    assert again.drop(columns="value").equals(table.drop(columns="value"))


def section(op: Op, step: str) -> str:
    """The part of an operation's page that tells of one step."""
    found = re.findall(rf"^## {step}: .*?(?=^## |\Z)", (DOCS / f"{op.name}.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == 1, f"docs/{op.name}.md has {len(found)} sections on {step}"
    return str(found[0])


@BY_OP
def test_every_step_is_explained_with_a_drawing(op: Op) -> None:
    assert ladder_page.gaps((DOCS / f"{op.name}.md").read_text(), op) == []
    for step in op.steps:
        text = section(op, step.name)
        assert f"<!-- counters:{step.name}:begin -->" in text
        assert set(re.findall(r"\(drawings/([\w-]+)\.svg\)", text)) & DRAWINGS.keys(), f"{step.name} has no drawing"
        for backend in BACKENDS:
            file = f"(../{op.file(step.name, backend)})"
            assert (file in text) == (backend in step.backends), f"{step.name}: {file}"


@BY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@BY_PAGE
def test_no_heading_stands_twice_on_a_page(page: Path) -> None:
    """GitHub numbers those that do, so that a link leads elsewhere once another one comes before it."""
    assert [name for name, count in Counter(anchors(page)).items() if count > 1] == []


@functools.cache
def anchors(page: Path) -> tuple[str, ...]:
    """The names that GitHub gives to a page's headings."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return tuple(places.heading(heading) for heading in headings)


def test_every_step_has_a_row_a_language_in_a_log_that_stays_short() -> None:
    text = (store.ROOT / "KERNEL_LOG.md").read_text()
    rows = re.findall(
        r"^\| \[(\w+)\]\(docs/log/(\w+)\.md#\2-\1\) \| (CUDA|Triton)\b[^|]*\|(?: [^|]+\|){6}$", text, re.MULTILINE
    )
    told = {"CUDA": "cuda", "Triton": "triton"}
    assert [(op, step, told[title]) for step, op, title in rows] == [
        (op.name, step.name, backend) for op in OPS.values() for step in op.steps for backend in step.backends
    ]
    assert len(text.encode()) <= 250 * len(rows) + 10_000


def test_links_to_a_step_follow_its_heading(tmp_path: Path) -> None:
    (tmp_path / "softmax.md").write_text("## v02_online: one pass, by `exp`\n")
    text = (
        "[one](softmax.md#v02_online-maximum-and-sum), [two](docs/softmax.md#v02_online) and [three](softmax.md#v03_x)"
    )
    assert ladder_page.relinked(text, tmp_path) == (
        "[one](softmax.md#v02_online-one-pass-by-exp), [two](docs/softmax.md#v02_online-one-pass-by-exp) "
        "and [three](softmax.md#v03_x)"
    )


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing_is_legible_and_used(name: str) -> None:
    """That a label fits its box and the drawing is asserted where it is drawn."""
    drawing = DRAWINGS[name]()
    ElementTree.fromstring(drawing.svg())
    assert (DOCS / "drawings" / f"{name}.svg").read_text() == drawing.svg()
    assert any(f"(drawings/{name}.svg)" in page.read_text() for page in DOCS.glob("*.md"))
    for index, (text, left, top, right, bottom) in enumerate(drawing.texts):
        for other, its_left, its_top, its_right, its_bottom in drawing.texts[:index]:
            apart = left >= its_right or right <= its_left or top >= its_bottom or bottom <= its_top
            assert apart, f"{text!r} covers {other!r}"

"""The front page: its claims against the tables themselves, its slider, without JavaScript, and on paper."""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from builder import claims, contests, hero, provenance
from builder.site import Site
from kernel_twins import OPS
from kernel_twins.harness.ceilings import REFERENCE_GPU
from kernel_twins.report.meaning import analysis
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import DATA, ROOT
from kernel_twins.spec import BACKENDS
from tests.site import browsing, reading

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER = DATA / REFERENCE_GPU
CONTESTS = ("fast", "slow")  # of sustained times
BUDGET = 350_000  # bytes, compressed


@dataclass(frozen=True)
class Best:
    """A last step at a case against the fastest call that has no step, from the CSV alone."""

    op: str
    case: str
    backend: str
    step: str
    baseline: str
    ratio: float
    fallen: float  # the baseline's rate over its best one, of the operation and dtype


@pytest.fixture(scope="session")
def measured() -> list[Results]:
    return analysis.load(REFERENCE_GPU, FOLDER)


def test_the_products_mean_is_that_of_the_rows(measured: list[Results]) -> None:
    for backend in BACKENDS:
        ratios = [
            each.ratio
            for each in rows_of("matmul_bf16")
            if each.backend == backend and "-bf16" in each.case and "fp16" not in each.case
        ]
        claim = claims.product(measured, backend)
        assert len(ratios) == len(claim.rows) > 30
        assert claim.value == pytest.approx(geometric_mean(ratios))
        assert claim.low < claim.value < claim.high


def test_the_collapse_is_the_largest_ratio_over_a_fallen_baseline(measured: list[Results]) -> None:
    row = claims.collapse(measured).row
    known = {(each.op, each.case, each.backend): each for each in rows()}
    found = known[row.results.op.name, row.case.slug, row.backend]
    assert (found.step, found.baseline) == (row.name.step, row.baseline.backend)
    assert claims.collapse(measured).value == pytest.approx(found.ratio)
    assert found.fallen < 0.5
    larger = [each for each in rows() if each.ratio > found.ratio and each.fallen < 0.5]
    assert not [each for each in larger if standing(measured, each) == "FAST"]


def test_the_slowest_is_the_smallest_ratio(measured: list[Results]) -> None:
    row = claims.slowest(measured).row
    least = min(rows(), key=lambda each: each.ratio)
    assert (least.op, least.case, least.backend) == (row.results.op.name, row.case.slug, row.backend)
    assert claims.slowest(measured).value == pytest.approx(least.ratio)


def test_the_predictions_are_those_of_the_log(measured: list[Results]) -> None:
    told = re.search(r"\*\*(\d+) pre-registered .*?: (\d+) hits, (\d+) misses", (ROOT / "KERNEL_LOG.md").read_text())
    assert told
    frozen, hits, misses = map(int, told.groups())
    assert (claims.count(measured, "frozen"), claims.count(measured, "hits")) == (frozen, hits)
    assert claims.count(measured, "misses") == misses
    claim = claims.predicted(measured)
    assert claim.value == pytest.approx(100 * hits / (hits + misses))
    assert 0 < claim.low < claim.value < claim.high < 100


def test_the_counts_are_those_of_the_tables(measured: list[Results]) -> None:
    timed = [table(op) for op in OPS if store.path(FOLDER, op, "timings").exists()]
    steps = {(op, *key) for op, rows in zip(_timed_ops(), timed, strict=True) for key in _steps(rows, op)}
    assert claims.count(measured, "steps") == len(steps)
    assert claims.count(measured, "unmeasured") == len(OPS) - len(timed)
    assert claims.count(measured, "runs") == len({run for rows in timed for run in rows["run"]} | _profiled_runs())


@pytest.mark.parametrize(
    ("rule", "factor"), [(claims.collapse, 40.0), (claims.slowest, 0.01)], ids=["collapse", "slowest"]
)
def test_a_rule_takes_another_row_when_the_rows_change(
    rule: Callable[[Sequence[Results]], claims.Claim], factor: float, tmp_path: Path, measured: list[Results]
) -> None:
    """The row that a rule took is made ordinary, in a copy of the tables."""
    before = rule(measured).row
    folder = shutil.copytree(FOLDER, tmp_path / REFERENCE_GPU)
    op = before.results.op.name
    timings = store.read_table(folder, op, "timings")
    is_row = (timings["case"] == before.case.slug) & (timings["step"] == before.name.step)
    is_row &= timings["backend"] == before.backend
    timings.loc[is_row, "times_us"] = timings.loc[is_row, "times_us"].map(
        lambda times: " ".join(f"{factor * float(each):.6g}" for each in times.split())
    )
    store.write(store.path(folder, op, "timings"), timings)
    after = rule(analysis.load(REFERENCE_GPU, folder)).row
    assert (after.case, after.name, after.results.op) != (before.case, before.name, before.results.op)


def test_every_figure_resolves(site: Path) -> None:
    built = Site(site.parent / "again")
    numbers = reading.read(site / "index.html").numbers
    assert {each.source for each in numbers} > {"rule#product/cuda", "rule#product/triton/low", "rule#predictions"}
    for each in numbers:
        assert f"{provenance.value(built, each.source):.6g}" == each.value, each.source


def test_the_slider_moves_by_keyboard(site: Path, browser: Browser) -> None:
    steps = [step.name for step in OPS["matmul_bf16"].steps if not step.profile_case]
    with (
        browser.new_context(reduced_motion="reduce") as context,
        browsing.visit(context, site / "index.html") as (page, heard),
    ):
        slider = page.get_by_role("slider", name="Step")
        assert _shown(page) == [steps[-1]]
        last = _mark(page)
        slider.focus()
        page.keyboard.press("Home")
        assert _shown(page) == [steps[0]]
        assert page.url.endswith(f"#{steps[0]}")
        assert _mark(page) != last
        page.keyboard.press("ArrowRight")
        assert _shown(page) == [steps[1]]
        assert "mma.sync" in (slider.get_attribute("aria-valuetext") or "")
        page.keyboard.press("End")
        assert (_shown(page), _mark(page)) == ([steps[-1]], last)
        assert not heard


def test_an_address_names_a_step(site: Path, browser: Browser) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{(site / 'index.html').as_uri()}#v09_warp_specialized")
        assert _shown(page) == ["v09_warp_specialized"]
        assert "Stays at v07" in page.locator(".rung:not([hidden]) .twin.triton").inner_text()


def test_without_javascript_the_last_step_and_a_table_of_all(site: Path, browser: Browser) -> None:
    steps = [step.name for step in OPS["matmul_bf16"].steps if not step.profile_case]
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto((site / "index.html").as_uri())
        assert page.locator(".rung:visible").count() == 1
        assert page.locator(".rung:visible").get_attribute("id") == steps[-1]
        table = page.locator("details.all table")
        assert table.is_visible()
        assert table.locator("tbody th").all_inner_texts() == steps


def test_on_paper_it_is_one_sheet_without_controls(site: Path, browser: Browser) -> None:
    with browser.new_context() as context, browsing.visit(context, site / "index.html") as (page, _):
        sheets = [page.pdf(prefer_css_page_size=True), page.pdf(format="A4")]
        page.emulate_media(media="print")
        assert not page.locator("input:visible, nav:visible, details:visible").count()
        assert page.locator(".figure .big:visible").count() == 5
    assert [len(re.findall(rb"/Type\s*/Page\b", each)) for each in sheets] == [1, 1]


def test_the_first_page_is_light(site: Path) -> None:
    loaded = [site / "index.html", *(site / each for each in reading.read(site / "index.html").loads)]
    assert sum(len(gzip.compress(each.read_bytes())) for each in loaded) < BUDGET


def test_the_hero_shows_few_lines_of_every_step(measured: list[Results]) -> None:
    ladder = next(each for each in measured if each.op.name == claims.PRODUCT)
    for rung in hero.rungs(ladder):
        for side in rung.sides:
            assert 0 < len(side.lines) <= 24, (rung.name, side.backend)
            assert any(line.kind == "new" for line in side.lines), (rung.name, side.backend)


def _shown(page: Page) -> list[str]:
    found: list[str] = page.evaluate("[...document.querySelectorAll('.rung:not([hidden])')].map((each) => each.id)")
    return found


def _mark(page: Page) -> str:
    """Where CUDA's mark stands on the roofline."""
    return str(page.evaluate("getComputedStyle(document.querySelector('g.now.cuda')).transform"))


def standing(measured: list[Results], row: Best) -> str:
    """The log's verdict on a row."""
    for each in contests.contests([each for each in measured if each.op.name == row.op]):
        if (each.case.slug, each.backend) == (row.case, row.backend):
            return each.verdict
    raise AssertionError(row)


@cache
def rows() -> list[Best]:
    return [row for op in _timed_ops() for row in rows_of(op)]


@cache
def rows_of(op: str) -> list[Best]:
    """By the columns alone: the last step that was tried, the fastest baseline, the median of paired rounds."""
    known = table(op)
    is_ours, others = known["backend"].isin(["cuda", "triton"]), list(OPS[op].baselines)
    ours, theirs = known[is_ours], known[known["backend"].isin(others) & (known["status"] == "ok")]
    found = []
    for (case, backend), tried in ours.groupby(["case", "backend"], sort=False):
        at_case = theirs[theirs["case"] == case]
        if at_case.empty:
            continue
        medians = at_case.drop_duplicates("backend").set_index("backend")["times"].map(np.median)
        baseline = min(sorted(medians.index), key=lambda name: (medians[name], name))
        step = max(tried["step"])
        ratio = _paired(tried[tried["step"] == step], at_case[at_case["backend"] == baseline])
        if ratio:
            fallen = _fallen(op, theirs, case, baseline)
            found.append(Best(op, case, backend, step, baseline, ratio, fallen))
    return found


def _paired(ours: pd.DataFrame, theirs: pd.DataFrame) -> float | None:
    for contest in CONTESTS:
        a, b = (each[(each["contest"] == contest) & (each["status"] == "ok")] for each in (ours, theirs))
        if len(a) and len(b) and a["run"].iloc[0] == b["run"].iloc[0]:
            return float(np.exp(np.median(np.log(b["times"].iloc[0]) - np.log(a["times"].iloc[0]))))
    return None


def _fallen(op: str, theirs: pd.DataFrame, case: str, baseline: str) -> float:
    spec = OPS[op]
    work = spec.bytes if spec.ceiling.startswith("dram") else spec.flops
    cases = {each.slug: each for each in spec.timed_cases}
    known = theirs[theirs["backend"] == baseline].drop_duplicates("case").set_index("case")["times"].map(np.median)
    rates = {slug: work(cases[slug]) / time for slug, time in known.items() if slug in cases}
    return float(rates[case] / max(r for slug, r in rates.items() if cases[slug].dtype == cases[case].dtype))


@cache
def table(op: str) -> pd.DataFrame:
    """An operation's sustained times, fast ones first."""
    known = pd.read_csv(FOLDER / f"{op}.timings.csv", comment="#", dtype=str, keep_default_na=False)
    known = known[known["contest"].isin([*CONTESTS, ""])]
    known["times"] = known["times_us"].map(lambda times: np.array(times.split(), dtype=float))
    return known.sort_values("contest", key=lambda each: each.map({"fast": 0, "slow": 1, "": 2}), kind="stable")


def _timed_ops() -> list[str]:
    return [op for op in OPS if (FOLDER / f"{op}.timings.csv").exists()]


def _steps(rows: pd.DataFrame, op: str) -> set[tuple[str, str]]:
    names = {step.name for step in OPS[op].steps}
    return {(row.backend, row.step) for row in rows.itertuples() if row.step in names}


def _profiled_runs() -> set[str]:
    files = FOLDER.glob("*.counters.csv")
    return {run for file in files for run in pd.read_csv(file, comment="#", dtype=str)["run"]}

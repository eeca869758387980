"""The log in short, the full pages that it leads to, and what did not work."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from kernel_twins import OPS
from kernel_twins.report.figures import render
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.judged import Judged
from kernel_twins.report.meaning.judgement import Judgement, Outcome
from kernel_twins.report.meaning.limiter import Limit
from kernel_twins.report.meaning.moved import moved
from kernel_twins.report.ncu.extract import counter_rows
from kernel_twins.report.pages import documents, places, score, scoreboard
from kernel_twins.report.rows import base, store
from kernel_twins.spec import Prediction
from tests import logs
from tests.logs import CASE, OP, launch, timing

LAST = "v06_bulk_tile"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return logs.measured(tmp_path)


def row_of(page: str, step: str, title: str) -> list[str]:
    """A step's cells in the short log."""
    (row,) = [line for line in page.splitlines() if line.startswith(f"| [{step}](log/vector_add.md#") and title in line]
    return row.strip("| ").split(" | ")[2:]


def test_the_short_log_has_a_row_a_step_and_language(folder: Path) -> None:
    page = logs.pages(folder, [Results(OP, folder, None)])["KERNEL_LOG.md"]
    assert "At `67108864-fp32` (best baseline: torch, 300 µs)" in page
    ratios, time = ["1.100 FAST", "1.000 SAME"], "330 → 300 (−9.1 %) †"
    told = [*ratios, time, "DRAM busy 85 → 91 %", "device memory 91 %", "0 / 2"]
    assert row_of(page, "v02_grid_stride", "CUDA") == told
    assert row_of(page, "v06_bulk_tile", "Triton")[0] == "wrong"


def test_a_log_without_rows_says_so_and_leads_nowhere_that_is_not_there(tmp_path: Path) -> None:
    pages = logs.pages(tmp_path, [Results(op, tmp_path, None) for op in OPS.values()])
    assert "Runs: none yet." in pages["KERNEL_LOG.md"]
    for page, text in pages.items():
        for link in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", text):
            target = Path(os.path.normpath((tmp_path / page).parent / link))
            inside = target.is_relative_to(tmp_path)
            assert target.relative_to(tmp_path).as_posix() in pages if inside else target.exists(), link


def test_runs_that_differ_by_their_id_alone_share_a_line(folder: Path) -> None:
    facts = dict.fromkeys(store.PROVENANCE, "1")
    store.write(folder / "runs.csv", pd.DataFrame([facts | {"run": run} for run in ("r1", "r2")]))
    table = store.read_table(folder, "vector_add", "timings")
    table["run"] = ["r1" if step else "r2" for step in table["step"]]
    store.write(folder / "vector_add.timings.csv", table)
    page = logs.pages(folder, [Results(OP, folder, None)])["KERNEL_LOG.md"]
    assert "\n- `r1`, `r2`: 1, driver 1, 1 W;" in page


def test_what_did_not_work_names_steps_and_predictions_with_their_counters(folder: Path) -> None:
    text = logs.pages(folder, [Results(OP, folder, None)])["what-did-not-work.md"]
    assert (
        "- [v02_grid_stride](log/vector_add.md#vector_add-v02_grid_stride) CUDA: time = 1 × ± 4 %, came 0.909 ×" in text
    )
    rows = store.read_table(folder, "vector_add", "timings")
    same = " ".join(["330.0"] * 24)
    rows.loc[rows["step"] == "v02_grid_stride", "times_us"] = same
    store.write(folder / "vector_add.timings.csv", rows)
    text = logs.pages(folder, [Results(OP, folder, None)])["what-did-not-work.md"]
    assert f"CUDA: 1.000 × as fast as v01, SAME at `{CASE.slug}`, as predicted. Beside it: " in text


def test_a_file_in_the_full_log_that_nothing_makes_is_reported(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = places.beside(tmp_path_factory.mktemp("pages"))
    where.full.mkdir()
    stray = where.full / "gone.md"
    stray.write_text("old")
    monkeypatch.setattr(places, "REFERENCE", where)
    lines = documents.disagreements(folder, [Results(OP, folder, None)])
    assert f"{base.shown(stray)} is made of no data: delete it" in lines


def test_the_scoreboard_keeps_the_last_step_that_was_measured(folder: Path) -> None:
    rows = store.read_table(folder, "vector_add", "timings")
    store.write(folder / "vector_add.timings.csv", rows[rows["step"] != "v06_bulk_tile"])
    results = Results(OP, folder, None)
    assert {name.step for name in results.unmeasured} >= {"v06_bulk_tile"}
    (row,) = [line for line in scoreboard.scoreboard([(results, CASE)]) if line.startswith("| vector_add ")]
    assert "| 1.000 × [1.000, 1.000] SAME |" in row  # v02_grid_stride's, of 300 µs


def test_the_scoreboard_has_a_row_for_a_step_that_may_be_copied_beside_the_last(tmp_path: Path) -> None:
    times = {("torch", ""): 300, ("cuda", "v01_scalar"): 240, ("triton", "v01_scalar"): 200, ("triton", LAST): 100}
    rows = [timing(backend, step, [time] * 20) for (backend, step), time in times.items()]
    store.write(tmp_path / "vector_add.timings.csv", pd.DataFrame(rows, columns=store.TABLES["timings"]))
    steps = tuple(replace(step, standalone=step.name in ("v01_scalar", LAST)) for step in OP.steps)
    last, copied = scoreboard.scoreboard([(Results(replace(OP, steps=steps), tmp_path, None), CASE)])[2:4]
    assert last.startswith(f"| vector_add {CASE.slug} | ")
    assert last.endswith("| 2.400 × FAST |")
    assert copied.startswith(f"| vector_add {CASE.slug}, standalone v01 | – | – | – | ")
    assert "| 1.500 × [1.500, 1.500] FAST | 1.200 × FAST |" in copied


def test_rendering_names_the_pages_that_changed_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "draw", lambda *_: None)
    documents.render("another-gpu", folder, Console(quiet=True))
    page = folder / "KERNEL_LOG.md"
    page.write_text("old")
    console = Console(file=(told := io.StringIO()), width=1_000)
    documents.render("another-gpu", folder, console)
    assert page.read_text() != "old"
    assert f"changed: {base.shown(page)}; figures" in told.getvalue()


def test_a_twin_that_is_slower_is_told_with_the_counters_of_a_case_that_was_profiled(tmp_path: Path) -> None:
    """The counters are of another case than the slowest one, and the row says of which."""
    longest = OP.headline_cases[0]
    rows = [timing("cuda", "v01_scalar", [300.0] * 20, case=case.slug) for case in (CASE, longest)]
    rows += [
        timing("triton", "v01_scalar", [time] * 20, case=case.slug) for case, time in ((CASE, 320), (longest, 400))
    ]
    store.write(tmp_path / "vector_add.timings.csv", pd.DataFrame(rows, columns=store.TABLES["timings"]))
    launches = [
        launch(f"kl.vector_add.{backend}.v01_scalar", sm__cycles_elapsed=cycles, smsp__inst_executed=5.0)
        for backend, cycles in (("cuda", 100.0), ("triton", 110.0))
    ]
    counters, _ = counter_rows(launches, {each.label: 1 for each in launches}, OP, "r1", {}, "T3")
    store.write(tmp_path / "vector_add.counters.csv", counters)
    results = Results(OP, tmp_path, None)
    (row,) = scoreboard.slowest_twins([(results, CASE), (results, longest)])[2:]
    assert row.startswith(f"| [vector_add](vector_add.md) {longest.slug} | 0.750 × | v01 beside v01 | ")
    assert f"| at {CASE.slug}, 0.938 ×: cycles × 1.1 = instructions × 1 · cycles an instruction × 1.1" in row


def test_a_step_that_is_not_measured_yet_is_told_to_be_with_what_measures_it(folder: Path) -> None:
    pages = logs.pages(folder, [Results(OP, folder, None)])
    assert row_of(pages["KERNEL_LOG.md"], "v05_bulk_ring", "Triton")[0] == "*not measured*"
    entry = pages["log/vector_add.md"].partition("### vector_add-v05_bulk_ring\n")[2].partition("\n### ")[0]
    measure = "run `python profiling/ncu_report.py --op vector_add` on a machine with the GPU"
    assert f"\n- CUDA: *not measured*: {measure}.\n  Predicted load requests ≤ 0.05 ×: **not judged**" in entry
    assert "| at " not in entry
    assert "v05_bulk_ring" not in pages["what-did-not-work.md"]


def test_causes_are_told_before_outcomes_and_trifles_are_not() -> None:
    before = {"bank_conflicts": 78.1, "occupancy": 50.0, "instructions": 200.0, "dram_share": 0.1, "l2_hit": 50.0}
    after = {"bank_conflicts": 3.0, "occupancy": 40.0, "instructions": 100.0, "dram_share": 0.4, "l2_hit": None}
    told = ["bank conflicts 78.1 → 3 %", "instructions 200 → 100 M", "occupancy 50 → 40 %"]
    assert moved(before, after) == told
    after["bank_conflicts"] = 40.0  # which weighs less than instructions that are predicted
    assert [each.split()[0] for each in moved(before, after, {"instructions"})] == ["instructions", "bank", "occupancy"]
    assert moved({"dram_share": 0.1}, {"dram_share": 0.4}) == moved({}, after) == []


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (Limit("device memory", 91.2, {"device memory": 91.2}, ("wait", 2.0), ""), "device memory 91 %"),
        (Limit("latency", None, {"L2": 20.0}, ("long_scoreboard", 12.3), ""), "long_scoreboard 12.3"),
        (Limit("balanced", 70.0, {"L2": 70.0, "tensor pipe": 69.0}, None, ""), "L2 = tensor pipe"),
        (Limit("launch", None, {}, None, "12 blocks for 132 multiprocessors"), "launch"),
    ],
)
def test_what_limits_a_step_fits_a_cell(limit: Limit, told: str) -> None:
    assert limit.short() == told


def judged(actual: float, verdict: Outcome) -> Judged:
    judgement = Judgement(Prediction("time", "<=", 0.05, relative=True), verdict, actual, "")
    return Judged(OP, OP.steps[0].name, "cuda", judgement, "pre-registered", beside="")


def test_a_miss_has_as_many_digits_as_tell_it_from_what_was_predicted() -> None:
    assert judged(0.05003, "miss").told() == "time ≤ 0.05 ×: **miss** (0.05003 ×)"
    assert judged(0.04997, "hit").told() == "time ≤ 0.05 ×: **hit** (0.05 ×)"


def test_the_score_counts_all_and_the_worst_come_first() -> None:
    near, far, wrong = (judged(*each) for each in ((0.06, "miss"), (0.5, "miss"), (2.0, "wrong direction")))
    hit = judged(0.04, "hit")
    assert score.worst([near, hit, far, wrong], 2) == [wrong, far]
    assert score.total([near, hit, far, wrong]) == (
        "**4 pre-registered predictions: 1 hits, 3 misses**, 1 of them in the wrong direction."
    )

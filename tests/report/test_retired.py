"""Rungs that are folded: their predictions keep their verdicts in the score, and their rows are forgotten."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import pandas as pd
import pytest

from kernel_twins import OPS
from kernel_twins.report import cli
from kernel_twins.report.meaning import predictions, retired, static
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.measure.retire import retire
from kernel_twins.report.pages import checks, documents
from kernel_twins.report.rows import store
from kernel_twins.spec import BACKENDS, Op, Prediction
from tests import logs

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
RUNG, LATER = "v02_grid_stride", "v06_bulk_tile"
WHY = "The last step's table routes to it."
HIT = Prediction("time", "<=", 0.95, relative=True, backends=("cuda",))  # logs.measured has 330 → 300 → 250 µs
MISS = Prediction("time", "<=", 0.5, relative=True, backends=("cuda",))
SHARE = Prediction("dram_share", ">=", 95, backends=("cuda",))
UNMEASURED = Prediction("time", "<=", 0.9, relative=True, backends=("triton",))
OF_LATER = Prediction("time", "<=", 0.9, relative=True)
ITS_OWN = Prediction("time", "<=", 260, backends=("cuda",))


def spec(
    *names: str,
    rung: tuple[Prediction, ...] = (HIT, MISS, SHARE, UNMEASURED),
    later: tuple[Prediction, ...] = (OF_LATER, ITS_OWN),
) -> Op:
    """Vector add with three steps or fewer, whose last predicts its time and a multiple of the step before."""
    op = logs.OP
    steps = {
        "v01_scalar": dataclasses.replace(op.step("v01_scalar"), predictions=()),
        RUNG: dataclasses.replace(op.step(RUNG), predictions=rung),
        LATER: dataclasses.replace(op.step(LATER), predictions=later),
    }
    return dataclasses.replace(op, steps=tuple(steps[name] for name in names or steps))


FOLDED = spec("v01_scalar", LATER, later=(ITS_OWN,))
"""The spec after the rung and what was compared with it were taken out."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    logs.measured(tmp_path)
    predictions.freeze(tmp_path, [spec()], NOW)
    return tmp_path


def fold(folder: Path, op: Op | None = None, *backends: str, why: str = WHY) -> list[str]:
    op = op or spec()
    chosen = [backend for backend in BACKENDS if backend in (backends or BACKENDS)]
    return retire(Results(op, folder, None), op.step(RUNG), chosen, why, NOW)


def test_verdicts_stay_as_they_were(folder: Path) -> None:
    assert fold(folder) == [
        f"vector_add {RUNG} cuda: time <= 0.95 x (hit)",
        f"vector_add {RUNG} cuda: time <= 0.5 x (miss)",
        f"vector_add {RUNG} cuda: dram_share >= 95 % (miss)",
        f"vector_add {LATER} cuda: time <= 0.9 x (hit)",
        f"vector_add {RUNG} triton: time <= 0.9 x (not judged)",
        f"vector_add {LATER} triton: time <= 0.9 x (not judged)",
    ]
    first = retired.read(folder).iloc[0]
    assert first[["mark", "case", "run", "rung", "why"]].tolist() == [
        "pre-registered", logs.CASE.slug, "r1", RUNG, WHY,
    ]  # fmt: skip
    assert float(first["came"]) == pytest.approx(300 / 330)
    text = logs.pages(folder, [Results(FOLDED, folder, None)])["log/predictions.md"]
    assert text.startswith(
        "# Predictions\n\n**7 pre-registered predictions, 6 of them retired: 3 hits, 2 misses**; 2 not judged. "
    )
    assert (
        "| ladder | made | hit | miss | wrong direction | not judged | void | retired among them | withdrawn |" in text
    )
    assert text.endswith("| vector_add | pre-registered | 3 | 2 | 0 | 2 | 0 | 6 | 0 |\n")


def test_the_log_has_them_in_a_table_of_their_own_and_among_the_worst(folder: Path) -> None:
    fold(folder, why=WHY + "  Its\nkernel | lives on.")
    pages = logs.pages(folder, [Results(FOLDED, folder, None)])
    _, table = pages["log/vector_add.md"].split("\n## Retired rungs\n\n<details><summary>")
    why = f"{WHY} Its kernel \\| lives on."
    assert f"\n| {RUNG} | CUDA | time ≤ 0.5 × | 0.909 × | **miss** | {why} |\n" in table
    assert f"\n| {LATER} | CUDA | time ≤ 0.9 × | 0.833 × | **hit** | Was compared with {RUNG}. {why} |\n" in table
    assert f"\n| {RUNG} | Triton | time ≤ 0.9 × | – | **not judged** | {why} |\n" in table
    where = "log/vector_add.md#retired-rungs"
    beside = "cycles × 1 = instructions × 1 · cycles an instruction × 1"
    assert (
        f"| vector_add | [{RUNG}]({where}), retired | CUDA | time ≤ 0.5 × | 0.909 × | {beside} |"
        in pages["KERNEL_LOG.md"]
    )
    assert (
        f"\n- [{RUNG}]({where}) CUDA, retired: time ≤ 0.5 ×, came 0.909 ×. Beside it: {beside}.\n"
        in pages["what-did-not-work.md"]
    )
    assert "| vector_add | 3 | 2 | 0 | 0 | 4 |" in pages["KERNEL_LOG.md"]


def test_nothing_is_said_of_rungs_that_nobody_folded(folder: Path) -> None:
    assert "etired" not in logs.told(folder, [Results(spec(), folder, None)])


def test_rows_of_the_rung_are_forgotten_and_no_others(folder: Path) -> None:
    before = {table: store.read_table(folder, "vector_add", table) for table in ("timings", "counters")}
    fold(folder)
    for table, rows in before.items():
        left = store.read_table(folder, "vector_add", table)
        pd.testing.assert_frame_equal(left, rows[rows["step"] != RUNG].reset_index(drop=True))
    assert len(predictions.read_frozen(folder)) == 7


def test_a_table_without_rows_goes(folder: Path) -> None:
    row = dict.fromkeys(store.TABLES["quarantine"], "") | {"case": logs.CASE.slug, "backend": "cuda", "step": RUNG}
    store.write(store.path(folder, "vector_add", "quarantine"), pd.DataFrame([row]))
    fold(folder)
    assert not store.path(folder, "vector_add", "quarantine").exists()


def test_the_run_that_a_verdict_rests_on_is_named_still(folder: Path) -> None:
    runs = [dict.fromkeys(store.PROVENANCE, "") | {"run": run} for run in ("r1", "r0")]
    store.write(folder / "runs.csv", pd.DataFrame(runs))
    fold(folder)
    store.path(folder, "vector_add", "timings").unlink()
    fold(folder)
    assert store.read_runs(folder)["run"].tolist() == ["r1"]


def test_folding_again_changes_nothing(folder: Path) -> None:
    fold(folder)
    table = (folder / "retired.csv").read_bytes()
    assert fold(folder, why="Another reason.") == []
    assert (folder / "retired.csv").read_bytes() == table


def test_one_language_can_be_folded_alone(folder: Path) -> None:
    assert [line.split(":")[0] for line in fold(folder, None, "triton")] == [
        f"vector_add {RUNG} triton",
        f"vector_add {LATER} triton",
    ]
    assert RUNG in set(store.read_table(folder, "vector_add", "timings")["step"])


def test_what_is_not_frozen_cannot_be_retired(folder: Path) -> None:
    new = Prediction("time", "<=", 0.7, relative=True, backends=("cuda",))
    with pytest.raises(ValueError, match=f"{RUNG}/cuda `time <= 0.7 x` is not frozen: run `ncu_report.py predict`"):
        fold(folder, spec(rung=(new,)))
    with pytest.raises(ValueError, match="why is empty"):
        fold(folder, why=" \n")
    assert not (folder / "retired.csv").exists()
    assert RUNG in set(store.read_table(folder, "vector_add", "timings")["step"])


def test_what_was_withdrawn_before_stays_so(folder: Path) -> None:
    fold(folder, spec(rung=(HIT, SHARE, UNMEASURED)))
    assert retired.withdrawn(folder, FOLDED) == ["pre-registered"]
    text = logs.pages(folder, [Results(FOLDED, folder, None)])["log/predictions.md"]
    assert text.endswith("| vector_add | pre-registered | 3 | 1 | 0 | 2 | 0 | 5 | 1 |\n")
    assert retired.violations(folder, [FOLDED]) == []


def test_the_specs_and_the_tables_must_agree(folder: Path) -> None:
    assert retired.violations(folder, [spec()]) == []
    told = retired.violations(folder, [FOLDED])
    assert told[0].startswith(f"vector_add/{RUNG}/cuda left the spec with 3 frozen predictions that are not retired: ")
    assert f"`ncu_report.py retire vector_add {RUNG} --backend cuda --why REASON`" in told[0]
    assert len(told) == 2
    fold(folder)
    assert retired.violations(folder, [FOLDED]) == predictions.violations(folder) == []
    assert retired.violations(folder, [spec()]) == [
        f"vector_add/{RUNG}/{backend} is retired and stands in the spec: take it out, and delete its file"
        for backend in BACKENDS
    ]
    assert retired.violations(folder, [spec("v01_scalar", LATER)]) == [
        f"vector_add/{LATER}/{backend} `time <= 0.9 x` was compared with {RUNG}, which is retired: take it out of the "
        "spec"
        for backend in BACKENDS
    ]


@pytest.mark.parametrize("change", [{"mark": "post hoc"}, {"prediction": "time <= 1 x"}])
def test_a_row_that_was_changed_by_hand_is_found(folder: Path, change: dict[str, str]) -> None:
    fold(folder)
    store.write(folder / "retired.csv", retired.read(folder).assign(**change))
    assert sum("changed by hand" in line for line in retired.violations(folder, [FOLDED])) >= 5


def test_the_marks_of_retired_predictions_are_checked_on(folder: Path) -> None:
    fold(folder)
    table = predictions.read_measured(folder)
    row = ["vector_add", RUNG, "cuda", "2025-12-31T00:00:00Z", "trials"]
    store.write(folder / "measured.csv", pd.concat([table, pd.DataFrame([row], columns=table.columns)]))
    assert sum("is marked pre-registered, but was frozen" in line for line in predictions.violations(folder)) == 3


def test_every_prediction_can_be_read_back_from_its_spelling() -> None:
    for op in OPS.values():
        for _, text in predictions.standing(op):
            assert predictions.canonical(predictions.parsed(text)) == text
    elsewhere = Prediction("time", "==", 1.25, relative=True, tolerance=0.07, case=logs.OP.bench_cases[1])
    for each in (HIT, SHARE, ITS_OWN, elsewhere, Prediction("instruction_stalls", ">=", 0.5)):
        back = predictions.parsed(predictions.canonical(each))
        assert dataclasses.replace(back, backends=each.backends) == each


def test_the_command_folds_a_step_of_the_spec(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "ledger", lambda gpu: folder)
    (folder / "predictions.csv").unlink()
    predictions.freeze(folder, [logs.OP], NOW)
    monkeypatch.setattr(checks, "FOLDER", folder)
    monkeypatch.setattr(documents, "disagreements", lambda folder, results: [])
    monkeypatch.setattr(static, "differences", lambda thorough: [])
    assert cli.main(["retire", "vector_add", "v99", "--why", WHY], "") == 2
    assert "vector_add has v01_scalar, v02_grid_stride" in capsys.readouterr().err
    assert cli.main(["retire", "vector_add", "v02", "--why", WHY], "") == 0
    said = capsys.readouterr()
    assert (
        said.out.startswith(f"vector_add {RUNG} cuda: ") and "take v02_grid_stride out of vector_add's spec" in said.err
    )
    assert cli.main(["check"], "") == 1
    assert f"vector_add/{RUNG}/cuda is retired and stands in the spec" in capsys.readouterr().err

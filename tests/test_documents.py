"""What is committed agrees with itself: documents with data, figures with data, bars with measurements."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from kernel_twins import OPS
from kernel_twins._profiling.report import documents, store
from kernel_twins._profiling.report.analysis import Results
from kernel_twins._profiling.report.extract import counter_rows
from kernel_twins._profiling.report.metrics import METRICS
from kernel_twins._profiling.report.reader import Launch
from kernel_twins.spec import Name, Op

FOLDER = store.DATA / store.REFERENCE_GPU
BY_OP = pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))


def test_documents_agree_with_the_data() -> None:
    assert documents.disagreements() == []


@BY_OP
def test_every_cell_of_the_ladders_was_tried_and_none_is_wrong(op: Op) -> None:
    results = Results(op, FOLDER, None)
    for case in op.bench_cases:
        for step in op.steps:
            for backend in step.backends:
                status = results.status(case, Name(backend, step.name))
                assert status.startswith(("ok", "skipped")), f"{step.name} {backend} {case.slug}: {status or 'missing'}"


@BY_OP
def test_every_step_was_profiled(op: Op) -> None:
    results = Results(op, FOLDER, None)
    for step in op.steps:
        for backend in step.backends:
            assert results.quantities(Name(backend, step.name))["dram_bytes"], f"{step.name} {backend}"


@BY_OP
def test_every_row_names_a_recorded_run(op: Op) -> None:
    assert set(Results(op, FOLDER, None).runs) <= set(store.read_runs(FOLDER)["run"])


@BY_OP
def test_recorded_counters_extract_to_the_rows_they_came_from(op: Op) -> None:
    """The way from launches to rows, on what the H100 really recorded."""
    table = store.read_counters(FOLDER, op.name)
    launches, expected, codes = [], {}, {}
    for (backend, step, _), rows in table.groupby(["backend", "step", "launch"], sort=False):
        label = f"kl.{op.name}.{backend}.{step or 'baseline'}"
        metrics = dict(zip(rows["metric"], rows["value"].astype(float), strict=True))
        assert set(metrics) == set(METRICS)
        units = dict(zip(rows["metric"], rows["unit"], strict=True))
        launches.append(Launch(label, rows["kernel"].iloc[0], metrics, units))
        expected[label] = op.step(step).launches if step else 0
        codes[label] = rows["code"].iloc[0]
    again = counter_rows(launches, expected, op.profile_case.slug, table["run"].iloc[0], codes)
    assert again.equals(table)

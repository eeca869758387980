"""No wrong kernel passes the checker where it counts: wherever an element is off by more than its last place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS  # noqa: E402
from tests import trials, wrong  # noqa: E402

RECORDED = Path(__file__).parents[1] / "records" / "wrong_kernels.csv"
CELLS = [(op, dtype) for op in wrong.FORMULAS for dtype in trials.DTYPES if trials.cases(OPS[op], dtype)]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are small, and threads of several processes would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("op", "dtype"), CELLS)
def test_wrong_kernels_are_refused_where_they_count(op: str, dtype: str) -> None:
    accepted, counted = [], set()
    for case in dict.fromkeys(trials.cut(OPS[op], each) for each in trials.cases(OPS[op], dtype)):
        for fault, refusal in trials.judged(OPS[op], case, wrong.faults(op), "cpu").items():
            counted.add(fault)
            accepted += [] if refusal else [f"{fault.place} {fault.name} at {case.slug}"]
    assert not accepted
    assert len(counted) >= 8
    if wrong.FORMULAS[op].cases:  # by which each of them counts somewhere
        assert counted == {*wrong.faults(op)}


@pytest.mark.parametrize(("op", "dtype"), CELLS)
def test_right_results_pass(op: str, dtype: str) -> None:
    for case in dict.fromkeys(trials.cut(OPS[op], each) for each in trials.cases(OPS[op], dtype)):
        for trial in trials.trials(OPS[op], case, "cpu"):
            assert trial.refusal(trial.results(wrong.RIGHT)) == ""


@pytest.mark.parametrize(("op", "dtype"), CELLS)
def test_all_were_refused_at_full_size(op: str, dtype: str) -> None:
    """As the committed table has it (tests/trials.py), whose last column names the GPU."""
    table = pd.read_csv(RECORDED)
    rows = table[(table["op"] == op) & (table["dtype"] == dtype)]
    assert list(zip(rows["place"], rows["fault"], strict=True)) == [
        (each.place, each.name) for each in wrong.faults(op)
    ]
    assert (rows["cases"] == len(trials.shown(OPS[op], dtype))).all()
    assert (rows["refused"] == rows["counts"]).all()
    assert (rows["counts"] > 0).sum() >= 8

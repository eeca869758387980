"""dropout_add_backward's last Triton step: its programs' rows and columns, and each way through its kernel."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest

from kernel_twins import load, ops
from kernel_twins.spec import Case
from tests import forks

pytest.importorskip("torch")
pytest.importorskip("triton")

OP, STEP = "dropout_add_backward", "v05_dispatch"
HEIGHTS = (1, 2, 3, 5, 64, 65, 1_000, 4_096, 69_630, 2**31 + 5)
LENGTHS = (*range(1, 40), 127, 128, 257, 504, 654, 1_026, 1_186, 4_096, 5_003, 280_003, 8_687_595, 2**31 + 9)


def kernels() -> Any:
    return importlib.import_module(f"kernel_twins._triton.dropout.{OP}.{STEP}")


@pytest.mark.parametrize(("wide", "slopes"), list(itertools.product((True, False), repeat=2)))
def test_every_row_and_column_is_taken_once(wide: bool, slopes: bool) -> None:
    for m, n in itertools.product(HEIGHTS, LENGTHS):
        way = kernels().tiling(m, n, 132, wide, slopes)
        assert way.PERIOD * n % 4 == 0 or way.PERIOD == 1, (m, n)
        skew = 3 if way.PERIOD > 1 else 0  # at most, and in some row
        assert way.strips * way.BLOCK_N >= n + skew > (way.strips - 1) * way.BLOCK_N, (m, n)
        shares, of_one_skew = way.chunks // way.PERIOD, -(-m // way.PERIOD)
        assert shares * way.PERIOD == way.chunks, (m, n)
        assert shares * way.chunk_rows >= of_one_skew > (shares - 1) * way.chunk_rows, (m, n)
        assert way.strips * way.chunks < 2**31, (m, n)


def test_few_long_rows_need_no_partial_sums() -> None:
    for m, n in ((3, 3_199_808), (7, 8_687_595), (64, 2**20)):
        assert kernels().tiling(m, n, 132, False, False).chunks == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_way_through_the_kernel_is_right_when_interpreted(dtype: str) -> None:
    forks.interpreted("tests.ops.dropout.test_columns", "judge", dtype)


def judge(dtype: str) -> None:
    """Rows of one chunk and of several, of one skew, two and four, by wide and narrow accesses."""
    from kernel_twins.harness.check import Problem, generator

    op, call, ways = ops.get(OP), load(OP, STEP, "triton"), set()
    tiling = kernels().tiling

    def noted(m: int, n: int, *others: Any) -> Any:
        way = tiling(m, n, *others)
        ways.add((way.PERIOD, way.chunks > way.PERIOD, m <= 3 and n > 4_000))
        return way

    setattr(kernels(), "tiling", noted)  # noqa: B010
    bias = {"bias": "yes", "p": "10"}
    sized: list[tuple[int, int, dict[str, str]]] = [
        (3, 4_099, bias),
        (3, 6_144, {**bias, "act": "silu", "x": "spaced"}),
        (290, 64, {**bias, "act": "gelu", "x": "pitched"}),
        (290, 66, {**bias, "dout": "spaced"}),
        (290, 67, {**bias, "act": "gelu"}),
        (3, 66, {**bias, "act": "relu"}),
        (1, 67, bias),
        (33, 254, {**bias, "offset": "1"}),
        (33, 67, {"p": "10", "act": "gelu", "x": "spaced"}),
    ]
    wrong = []
    for m, n, variant in sized:
        for case in op.judged_cases(Case.of(m, n, dtype=dtype, **variant)):
            verdict = Problem(op, case, op.inputs(case, generator(case, "cpu"))).run(call)
            wrong += [] if verdict.ok else [f"{case.slug}: {verdict.reason}"]
    assert not wrong, "\n".join(wrong)
    assert {(1, False, True), (1, True, False), (2, True, False), (4, True, False), (2, False, False)} <= ways

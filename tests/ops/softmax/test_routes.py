"""The last Triton steps of softmax and its gradient: what their routing table gives to rows, and split rows."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest

from kernel_twins import OPS, load, ops
from kernel_twins.compiler import aot
from kernel_twins.spec import Case
from tests import forks

pytest.importorskip("torch")
pytest.importorskip("triton")

LENGTHS = (
    *range(1, 40), 42, 64, 255, 256, 257, 297, 515, 768, 1_000, 1_023, 1_024, 1_280, 1_536, 2_047, 2_048, 2_049, 3_001,
    3_994, 4_096, 4_931, 5_003, 5_120, 7_168, 8_191, 8_192, 12_288, 16_384, 18_688, 19_264, 20_480, 20_481, 39_936,
    40_960, 40_961, 50_257, 65_536, 122_104, 225_344, 262_144, 513_536, 1_103_344, 2**20 + 3, 5_141_221, 2**31 + 9,
)  # fmt: skip
HEIGHTS = (1, 2, 3, 7, 60, 264, 1_000, 4_096, 262_144, 2**30)
APART = (0, 3, 4, 8, 2**31)  # elements between the rows of an input
STEPS = [("softmax", "v13_dispatch"), ("softmax_backward", "v07_dispatch")]
REGISTERS = 65_536
RESIDENT_WARPS, RESIDENT = 64, 32  # of an SM


def routes() -> Any:
    return importlib.import_module("kernel_twins._triton.softmax.routes")


def problems(itemsize: int) -> list[tuple[Any, Any]]:
    """Rows and limits: inputs of softmax, and of its gradient, of which y is contiguous."""
    found = []
    for m, n, apart, aligned in itertools.product(HEIGHTS, LENGTHS, APART, (True, False)):
        strides = (n + apart if m > 1 else n,)
        found.append((routes().Rows(m, n, itemsize, strides, aligned), routes().FORWARD))
        found.append((routes().Rows(m, n, itemsize, (*strides, n), aligned), routes().BACKWARD))
    return found


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_row_has_a_place_and_whole_pieces_need_no_mask(itemsize: int) -> None:
    torch = importlib.import_module("torch")
    kinds = set()
    for rows, limits in problems(itemsize):
        way = routes().route(rows, limits, torch.device("meta"))
        if isinstance(way, routes().Split):
            kinds.add("split")
            assert 1 <= way.parts <= 1_024 and (not way.WIDE or rows.aligned), rows
            assert rows.M * way.parts < 2**31, rows
            continue
        kinds.add("shared" if way.PARTS > 1 else "several" if way.ROWS > 1 else "one")
        assert rows.aligned or way.VECTOR == 1, rows
        if not way.EDGES:
            assert all(size % way.VECTOR == 0 for size in (rows.N, *rows.strides)), rows
        share = -(-(rows.N // way.VECTOR) // way.PARTS)
        for head in range(way.VECTOR if way.EDGES else 1):
            vectors = (rows.N - head) // way.VECTOR
            ends = [min((part + 1) * share, vectors) for part in range(way.PARTS)]
            sizes = [max(0, end - part * share) * way.VECTOR for part, end in enumerate(ends)]
            assert sum(sizes) == vectors * way.VECTOR, (rows, way)
            assert max(sizes) <= way.PIECES * way.BLOCK_N and min(sizes) >= way.WHOLE * way.BLOCK_N, (rows, way)
        assert way.programs * way.ROWS >= rows.M or way.PARTS > 1, (rows, way)
        assert (way.ROWS <= rows.M and way.ROWS * max(*rows.strides, rows.N) < 2**31) or way.ROWS == 1, (rows, way)
    assert kinds == {"several", "one", "shared", "split"}


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_tiling_fits_the_registers_and_programs_that_wait_for_each_other_are_resident(itemsize: int) -> None:
    torch = importlib.import_module("torch")
    for rows, limits in problems(itemsize):
        way = routes().route(rows, limits, torch.device("meta"))
        if isinstance(way, routes().Split):
            continue
        elements = way.ROWS * way.PIECES * way.BLOCK_N / (32 * way.num_warps)
        words = elements * (itemsize if way.VECTOR * itemsize >= 4 else 4) / 4 * limits.matrices
        assert words <= way.maxnreg * 3 / 4, (rows, way)
        if way.PARTS > 1:
            an_sm = min(REGISTERS // (way.maxnreg * 32 * way.num_warps), RESIDENT_WARPS // way.num_warps, RESIDENT)
            assert way.programs <= 132 * an_sm and way.programs % way.PARTS == 0, (rows, way)


def test_longer_rows_have_more_parts_and_more_rows_have_fewer() -> None:
    lengths = sorted(n for n in LENGTHS if n > 20_000)

    def parts(m: int, n: int) -> int:
        return int(routes().split(routes().Rows(m, n, 2, (n,), True), 132).parts)

    for m in HEIGHTS:
        assert [parts(m, n) for n in lengths] == sorted(parts(m, n) for n in lengths)
    for n in lengths:
        assert [parts(m, n) for m in HEIGHTS] == sorted((parts(m, n) for m in HEIGHTS), reverse=True)
        assert 2 * n // parts(1, n) >= 8_192  # bytes


@pytest.mark.parametrize(("op", "step"), STEPS)
def test_few_long_rows_take_two_launches_that_fit_their_gpu(op: str, step: str) -> None:
    spec = OPS[op]
    for slug in ("3x4265152-fp16", "2x1282857-fp32-log.yes"):
        kernels = aot.compiled(spec, spec.step(step), Case.parse(slug))
        assert [kernel.name for kernel in kernels] == [f"{op}_{step}_{launch}_kernel" for launch in ("parts", "rows")]
        for kernel in kernels:
            assert ".v4.b32" in kernel.asm["ptx"]  # accesses of 16 bytes


@pytest.mark.parametrize(("op", "step"), STEPS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_split_rows_are_right_when_interpreted(op: str, step: str, dtype: str) -> None:
    forks.interpreted("tests.ops.softmax.test_routes", "judge", op, step, dtype)


def judge(op_name: str, step_name: str, dtype: str) -> None:
    """Rows of one part and of several, of which some are empty, at each alignment, with each special value."""
    from kernel_twins.harness.check import Problem, generator

    launches = importlib.import_module("kernel_twins._triton.softmax.launches")
    op, call = ops.get(op_name), load(op_name, step_name, "triton")
    name = "x" if op_name == "softmax" else "dout"
    plain: list[tuple[int, int, dict[str, str]]] = [(1, 1, {}), (3, 12, {}), (2, 2_053, {"log": "yes"})]
    sized = [
        (3, 1_000, {}),
        (9, 515, {name: "pitched"}),
        (9, 517, {name: "spaced"}),
        (3, 520, {name: "expanded"}),
        (3, 515, {"offset": "1"}),
        *((3, 1_003, {"values": values}) for values in ("outliers", "inf", "infs", "nan", "masked")),
        (3, 1_003, {"values": "masked", "log": "yes"}),
    ]
    wrong = []
    for parts, m, n, variant in [*((1, *each) for each in plain), *((5, *each) for each in (*plain, *sized))]:
        setattr(launches, "route", lambda rows, *_, parts=parts: routes().Split(parts, rows.together))  # noqa: B010
        for case in op.judged_cases(Case.of(m, n, dtype=dtype, **variant)):
            verdict = Problem(op, case, op.inputs(case, generator(case, "cpu"))).run(call)
            wrong += [] if verdict.ok else [f"{case.slug} in {parts} parts: {verdict.reason}"]
    assert not wrong, "\n".join(wrong)

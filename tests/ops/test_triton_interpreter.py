"""Every Triton step, on small ragged cases, in Triton's interpreter: index arithmetic and masks need no GPU.

Gluon has no interpreter. Interpreting is decided when a kernel is imported, for the whole process, so each step runs in
a process of its own (forks.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kernel_twins import OPS, load, ops
from kernel_twins.spec import Case, Op, Step
from tests import forks
from tests.cases import with_axes_halved, with_few_heads, with_fewer_rows, with_shorter_rows

ROOT = Path(__file__).resolve().parents[2]
# The interpreter takes some ten microseconds an operation, however large its blocks: products of sizes up to which a
# step that multiplies tiles, and one that takes a term at a time, stay within seconds.
LARGEST_BY_TILES = 2**22
LARGEST_BY_TERMS = 2**18
LARGEST_IN_PARTS = 2**15
# Rows of one length: as many as make some full programs, and a last one that is not. One case of each dtype keeps its
# many rows, so that programs which stay take several. Rows are little longer than what any program takes in parts.
ELEMENTS_OF_ROWS = 2**12
LONG_ROW = 2**12
# Rows of which each has programs of its own: one more than show every alignment to 16 bytes twice.
ROWS_APART = 17
# Reductions of which a loop takes a term at a time, and of which each output has a program of its own.
MOST_TERMS = {"v01_thread_per_output": 2**6}
MOST_OUTPUTS = {"v02_block_per_output": 2**4}
# Attention: queries of a head, which one step has a program for each of; the keys stay as many as they were.
MOST_QUERIES = {"v01_one_query": 3}
USUAL_QUERIES = 2**7 + 5


def source(op: str, step: str) -> str:
    return (ROOT / OPS[op].file(step, "triton")).read_text()


def in_gluon(op: str, step: str) -> bool:
    """Whether the kernel is in Gluon, which is compiled for a GPU even where Triton's kernels are interpreted."""
    return "@gluon.jit" in source(op, step)


def by_tiles(op: str, step: str) -> bool:
    return "tl.dot(" in source(op, step)


def is_in_parts(op: str, step: str) -> bool:
    """Whether its launcher takes so many rows at a time."""
    return "in_parts(" in source(op, step)


def takes_rows_apart(op: str, step: str) -> bool:
    """Whether its launcher has a program for each row, and no other kernel, such as one that sums columns."""
    grids = set(re.findall(r"_kernel\[(.+?)\]\(", source(op, step)))
    return bool(grids) and grids <= {"(M,)", "(min(M, MOST_PROGRAMS),)"}


def is_searched(op: str, step: str) -> bool:
    return "@triton.autotune(" in source(op, step)


CELLS = [
    pytest.param(op.name, step.name, dtype, id=f"{op.name}-{step.name}-{dtype}")
    for op in OPS.values()
    for step in op.steps_of("triton")
    if not in_gluon(op.name, step.name)
    for dtype in dict.fromkeys(case.dtype for case in op.test_cases)
]


IN_PARTS = [
    pytest.param(op.name, step.name, id=f"{op.name}-{step.name}")
    for op in OPS.values()
    for step in op.steps_of("triton")
    if is_in_parts(op.name, step.name)
]


ROUTED_NORMS = [
    ("layer_norm", "v12_dispatch"),
    ("rms_norm", "v07_dispatch"),
    ("layer_norm_backward", "v07_dispatch"),
    ("rms_norm_backward", "v05_dispatch"),
]


def small_cases(op: Op, step: Step, dtype: str, largest: int, apart: bool) -> list[Case]:
    cases = [case for case in op.test_cases if case.dtype == dtype and op.serves(step, case)]
    if any("dims" in op.options(case) for case in cases):
        smaller = [reduced(step, case) for case in cases]
    elif any("band" in op.options(case) for case in cases):
        smaller = [with_few_queries(case, MOST_QUERIES.get(step.name, USUAL_QUERIES)) for case in cases]
    else:
        smaller = with_small_rows(cases, apart)
    served = [case for case in dict.fromkeys(smaller) if math.prod(case.shape) <= largest and op.serves(step, case)]
    if dtype == "fp16" and not by_tiles(op.name, step.name):  # other than bf16 in conversions alone
        return list({case.variant: case for case in served}.values())
    return served


def with_small_rows(cases: list[Case], apart: bool) -> list[Case]:
    most = max((case for case in cases if len(case.shape) == 2), key=lambda case: case.shape[0], default=None)

    def small(case: Case) -> Case:
        elements = min(ELEMENTS_OF_ROWS, ROWS_APART * case.shape[-1]) if apart else ELEMENTS_OF_ROWS
        return with_fewer_rows(with_shorter_rows(case, LONG_ROW), elements)

    return [case if case == most else small(case) for case in cases]


def with_few_queries(case: Case, most: int) -> Case:
    """With few heads and queries, and all keys: an aligned band then lies at the last ones."""
    b, h, queries, d = with_few_heads(case).shape
    keys = case.get("keys", str(queries))
    return dataclasses.replace(case, shape=(b, h, min(queries, most), d)).but(keys=keys)


def reduced(step: Step, case: Case) -> Case:
    axes = [int(axis) for axis in case.get("axes", str(len(case.shape) - 1))]
    if step.name in MOST_TERMS:
        return with_axes_halved(case, axes, MOST_TERMS[step.name])
    if step.name in MOST_OUTPUTS:
        kept = [axis for axis in range(len(case.shape)) if axis not in axes]
        return with_axes_halved(case, kept, MOST_OUTPUTS[step.name])
    return with_fewer_rows(case, ELEMENTS_OF_ROWS)


def interpret(function: str, *arguments: str) -> None:
    forks.interpreted("tests.ops.test_triton_interpreter", function, *arguments)


@pytest.mark.parametrize(("op", "step", "dtype"), CELLS)
def test_step_is_right_when_interpreted(op: str, step: str, dtype: str) -> None:
    if dtype == "bf16" and by_tiles(op, step):
        pytest.skip("interpreted, tl.dot of bf16 operands is silently wrong")
    interpret("judge", op, step, dtype)


@pytest.mark.parametrize(("op", "step"), IN_PARTS)
def test_step_is_right_in_parts(op: str, step: str) -> None:
    interpret("judge", op, step, "fp32", "4")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("op", "step"), ROUTED_NORMS)
def test_cooperative_rows_are_right_in_every_configuration(op: str, step: str, dtype: str) -> None:
    interpret("judge_cooperative", op, step, dtype)


@pytest.mark.parametrize(("op", "step"), ROUTED_NORMS[2:])
def test_gradients_of_shared_rows_are_right_where_skews_differ(op: str, step: str) -> None:
    interpret("judge_shared", op, step)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("forced", ["split", "turns"])
@pytest.mark.parametrize(("op", "step"), ROUTED_NORMS)
def test_routes_that_small_cases_do_not_take_are_right(op: str, step: str, forced: str, dtype: str) -> None:
    interpret("judge_route", op, step, forced, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("op", "step"), ROUTED_NORMS)
def test_chunks_of_held_rows_are_right(op: str, step: str, dtype: str) -> None:
    interpret("judge_chunks", op, step, dtype)


def test_the_mean_of_losses_is_right_when_interpreted() -> None:
    interpret("mean_of_losses")


@pytest.mark.parametrize("route", ["lanes", "rows", "argmax", "columns", "narrow", "folded", "matrices"])
def test_routes_of_reductions_are_right(route: str) -> None:
    interpret("judge_reductions", route)


def test_the_gradient_of_maxima_is_right_when_interpreted() -> None:
    interpret("gradient_of_maxima")


@pytest.mark.parametrize("route", ["lanes", "runs"])
def test_routes_of_the_gradient_of_maxima_are_right(route: str) -> None:
    interpret("routes_of_gradients", route)


def test_places_are_right_in_rows_past_two_to_the_31_elements() -> None:
    interpret("places_in_long_rows")


def test_parts_are_all_rows_and_each_is_what_a_launch_takes() -> None:
    torch = pytest.importorskip("torch")
    from kernel_twins._triton.lib.launch_rows import MOST_ROWS, in_parts

    seen: list[tuple[int, int, int]] = []

    def launch(x: Any, y: Any, *, out: Any, log: bool) -> None:
        assert x.shape == y.shape == out.shape and log
        seen.append((x.storage_offset(), out.storage_offset(), len(out)))

    rows = 2**32 + 5
    x = torch.empty(1, 2, device="meta").expand(rows, 2)
    y = out = torch.empty(rows, 2, device="meta")
    assert in_parts(launch, x, y, out=out, log=True)
    assert seen == [*((0, 2 * first, MOST_ROWS) for first in range(0, 2**32, MOST_ROWS)), (0, 2**33, 5)]
    assert not in_parts(launch, x[:MOST_ROWS], y[:MOST_ROWS], out=out[:MOST_ROWS], log=True)


def branches(op: Op, step: Step) -> list[Any]:
    """The configurations of a searched step that take another way through its kernel; [None] of any other step."""
    kernels = importlib.import_module(op.module(step.name))
    found: dict[tuple[bool, bool], Any] = {}
    searched = is_searched(op.name, step.name)
    for config in getattr(kernels, f"{op.name}_{step.name}_kernel").configs if searched else [None]:
        settings = config.kwargs if config else {}
        found.setdefault((settings.get("SPLIT_K", 1) > 1, settings.get("TMA", True)), config)
    return list(found.values())


def chosen(config: Any, kernel: Any, *_: Any) -> tuple[Any, dict[str, Any]]:
    """What ``tuning.choose`` returns where ``config`` has won."""
    return kernel.fn, config.all_kwargs()


def hostile(op: Op, cases: list[Case]) -> tuple[Case, ...]:
    """The hostile inputs of the largest case that has some; a GPU has time for all of them."""
    return op.judged_cases(max(cases, key=lambda case: (case.hostile is not None, math.prod(case.shape))))[1:]


def judge(op_name: str, step_name: str, dtype: str, most_rows: str = "", *, apart: bool = False) -> None:
    from kernel_twins.harness.check import Problem, generator

    tuning = importlib.import_module("kernel_twins._triton.lib.tuning")
    op = ops.get(op_name)
    largest = LARGEST_BY_TILES if by_tiles(op_name, step_name) else LARGEST_BY_TERMS
    if most_rows:
        parts = importlib.import_module("kernel_twins._triton.lib.launch_rows")
        setattr(parts, "MOST_ROWS", int(most_rows))  # noqa: B010
        largest = LARGEST_IN_PARTS
    apart = apart or takes_rows_apart(op_name, step_name)
    cases, configs = small_cases(op, op.step(step_name), dtype, largest, apart), branches(op, op.step(step_name))
    assert cases, "no case is small enough"
    call = load(op_name, step_name, "triton")
    wrong = []
    for turn, config in enumerate(configs):
        if config is not None:
            setattr(tuning, "choose", partial(chosen, config))  # noqa: B010
        judged = [*cases, *hostile(op, cases)]
        for case in judged if turn == 0 else [case for case in judged if math.prod(case.shape) <= LARGEST_BY_TERMS]:
            verdict = Problem(op, case, op.inputs(case, generator(case, "cpu"))).run(call)
            wrong += [] if verdict.ok else [f"{case.slug} {config or ''}: {verdict.reason}"]
    assert not wrong, "\n".join(wrong)


def judge_route(op_name: str, step_name: str, forced: str, dtype: str) -> None:
    """Split rows of several tiles and parts, or held rows of which a program takes as many as it can."""
    routing = importlib.import_module("kernel_twins._triton.norm.routing")
    if forced == "split":
        changed = {"held": lambda *_: None, "_shares": lambda _, row_bytes, *__: row_bytes == 0, "TILE_BYTES": 2048}
    else:
        changed = {"PROGRAMS_PER_SM": 0}
    for name, value in changed.items():
        setattr(routing, name, value)
    # A split row has programs of its own, but of a gradient the sums of columns take many rows.
    judge(op_name, step_name, dtype, apart=forced == "split" and not op_name.endswith("_backward"))


def judge_shared(op_name: str, step_name: str) -> None:
    """Rows that programs share, in two runs: these run one after the other, and the first run leaves the numbers."""
    import triton.language as tl

    from kernel_twins.harness.check import Problem, generator

    routing = importlib.import_module("kernel_twins._triton.norm.routing")
    kernels = importlib.import_module("kernel_twins._triton.norm.layer_norm_backward.cooperative_rows")
    known: dict[tuple[int, int], tuple[Any, Any]] = {}

    def program() -> int:
        return int(tl.program_id(0).handle.data.item())

    def publish(product_sum: Any, gradient_sum: Any, _words: Any, _part: Any, turn: Any, _parts: Any) -> None:
        known[program(), int(turn)] = product_sum, gradient_sum

    def wait(_words: Any, turn: Any, parts: Any, _slots: Any) -> tuple[Any, Any]:
        first, nothing = program() // int(parts) * int(parts), tl.zeros((1, 1), tl.float32)
        numbers = [known.get((each, int(turn)), (nothing, nothing)) for each in range(first, first + int(parts))]
        return sum((number for number, _ in numbers), nothing), sum((number for _, number in numbers), nothing)

    changed = {"_publish": publish, "_await": wait, "_leave": lambda *_: None}
    for name, value in changed.items():
        setattr(kernels, name, value)
    setattr(routing, "_shares", lambda *_: True)  # noqa: B010
    setattr(routing.backward_tiles, "sharing", lambda *_: 24)  # noqa: B010
    op, call = ops.get(op_name), load(op_name, step_name, "triton")
    wrong = []
    for columns, layout in (
        (2_312, {"x": "pitched"}),
        (2_312, {"dout": "pitched", "residual": "yes"}),
        (2_307, {"dout": "pitched", "x": "pitched"}),
    ):
        case = Case.of(9, columns, dtype="bf16", **layout)
        problem = Problem(op, case, op.inputs(case, generator(case, "cpu")))
        known.clear()
        problem.run(call)
        assert known, f"{case.slug} is not shared"
        verdict = problem.run(call)
        wrong += [] if verdict.ok else [f"{case.slug}: {verdict.reason}"]
    assert not wrong, "\n".join(wrong)


def judge_cooperative(op_name: str, step_name: str, dtype: str) -> None:
    """Rows in tiles of every configuration of the table; 19 programs stay, of whose rows every eighth starts alike."""
    from kernel_twins.harness.check import Problem, generator

    routing = importlib.import_module("kernel_twins._triton.norm.routing")
    table = importlib.import_module("kernel_twins._triton.norm.configurations").TABLE
    op, call, itemsize = ops.get(op_name), load(op_name, step_name, "triton"), 4 if dtype == "fp32" else 2
    direction, tiles = "forward", routing.forward_tiles
    if op_name.endswith("_backward"):
        direction, tiles = "backward", routing.backward_tiles
    dispatch = importlib.import_module(op.module(step_name))
    launcher = importlib.import_module(dispatch.launch.__module__)  # rms_norm's is layer_norm's
    setattr(tiles, "resident", lambda *_: 19)  # noqa: B010
    wrong = []
    for n in sorted({n for longest, *_ in table[op_name, itemsize] for n in (min(longest, 2**20) // itemsize,)}):
        for length in (n, n - 1):
            config = routing.cooperative(op_name, length, itemsize)
            setattr(routing, direction, lambda *_, config=config: config)
            for (m, columns), extra in itertools.product(((40, 1_027), (5, 1_024), (3, 64)), ({}, {"residual": "yes"})):
                if columns * itemsize > config["TILE_BYTES"] and direction == "backward":
                    continue  # programs that share a row run one after the other here
                launcher._plans.clear()
                case = Case.of(m, columns, dtype=dtype, **extra)
                verdict = Problem(op, case, op.inputs(case, generator(case, "cpu"))).run(call)
                wrong += [] if verdict.ok else [f"{case.slug} {config}: {verdict.reason}"]
    assert not wrong, "\n".join(wrong)


# By what reduction_nd's routes are called, small problems that take them: axes, and how x lies.
REDUCTIONS: dict[str, list[tuple[tuple[int, ...], str, str]]] = {
    "lanes": [
        ((20, 8, 35), "1", ""),
        ((20, 5, 16), "1", "pitched"),
        ((5, 140, 8), "02", "permuted"),
        ((150, 7), "1", ""),
        ((12, 25, 3, 14), "02", ""),
    ],
    "rows": [
        ((5, 401), "1", "pitched"),
        ((37, 35), "1", ""),  # shorter than a tile
        ((9, 61), "1", "pitched"),
        ((1, 5_003), "1", ""),
        ((301, 17), "0", "permuted"),
        ((17, 89), "01", "pitched"),
        ((6, 7, 117), "02", ""),
    ],
    "argmax": [((6, 256), "1", ""), ((41, 64), "1", ""), ((3, 5, 144), "2", "")],
    "columns": [
        ((70, 131), "0", "pitched"),
        ((2, 40, 101), "1", ""),
        ((40, 300), "0", ""),
        ((131, 70), "1", "permuted"),
    ],
    "narrow": [((2, 75, 35), "1", "pitched"), ((3, 41, 48), "1", "pitched"), ((99, 60), "0", "")],
    "folded": [((1_311, 10), "0", ""), ((8, 1_000), "1", "permuted"), ((777, 31), "0", "")],
    "matrices": [
        ((131, 70), "01", "permuted"),
        ((70, 131), "01", "pitched"),
        ((67, 3, 77), "02", ""),
        ((40, 35, 3), "01", "permuted"),
        ((300, 64), "01", "permuted"),
    ],
}


def judge_reductions(route: str) -> None:
    """Problems that are small for a GPU take the routes of large ones, in several parts."""
    import torch

    from kernel_twins.harness.check import Problem, generator

    routes = importlib.import_module("kernel_twins._triton.reduction.reduction_nd.routes")
    step = importlib.import_module("kernel_twins._triton.reduction.reduction_nd.v06_dispatch")
    changed = {"FEWEST_ROWS": 4, "FEWEST_TURNS": 4, "LEAST_BYTES": 0, "CHUNKS": 1, "PROGRAMS": 4}
    changed |= {"FOLDED_ELEMENTS": 2_000}
    if route in ("rows", "argmax"):  # most of which are then longer than a tile
        changed |= {"TILE": 64, "TILE_OF_PLACES": 64}
    for name, value in (changed | {"LANES": 64 if route == "lanes" else 2**20}).items():
        setattr(routes, name, value)
    find, taken, wrong, op = routes.route_of, [], [], ops.get("reduction_nd")

    def noted(*args: Any) -> Any:
        taken.append(find(*args))
        return taken[-1]

    setattr(step, "route_of", noted)  # noqa: B010
    call = load("reduction_nd", "v06_dispatch", "triton")
    kinds = (("sum", ""), ("max", "nans"), ("argmax", "ties"), ("argmax", "masked"), ("argmax", "nans"))
    for turn, (shape, axes, layout) in enumerate(REDUCTIONS[route]):
        for kind, values in kinds:
            many = len(axes) > 1 and route != "matrices"
            if (many or route == "folded") if kind == "argmax" else route in ("argmax", "narrow", "matrices"):
                continue
            variant = {"axes": axes, "kind": kind, "x": layout, "values": values}
            dtype = ("bf16", "fp16" if route in ("columns", "narrow") else "fp32")[turn % 2]
            case = Case.of(*shape, dtype=dtype, **{key: value for key, value in variant.items() if value})
            inputs = op.inputs(case, generator(case, "cpu"))
            verdict = Problem(op, case, inputs).run(call)
            wrong += [] if verdict.ok else [f"{case.slug}: {verdict.reason}"]
            if kind == "max":  # of nothing but -0.0, which it equals in its sign, too
                out = torch.zeros(op.outputs(case)[0].shape, dtype=inputs[0].dtype)
                call(inputs[0].fill_(-0.0), **op.options(case), out=out)
                wrong += [] if torch.signbit(out).all() else [f"{case.slug}: 0.0 of -0.0"]
    assert not wrong, "\n".join(wrong)
    kernels = {"lanes": "whole_columns", "rows": "packed_rows", "argmax": "packed_rows"}
    kernels |= dict.fromkeys(("columns", "narrow", "folded", "matrices"), "packed_columns")
    assert all(each and kernels[route] in each.kernel.__name__ for each in taken)
    assert all(bool(each.scratch) == (route == "folded") for each in taken)


def judge_chunks(op_name: str, step_name: str, dtype: str) -> None:
    """Rows of several whole chunks and a part of one, in a warp or several, on programs that stay."""
    from kernel_twins.harness.check import Problem, generator

    routing = importlib.import_module("kernel_twins._triton.norm.routing")
    direction = "backward" if op_name.endswith("_backward") else "forward"
    find, taken = getattr(routing, direction), []

    def noted(*args: Any) -> Any:
        taken.append(find(*args))
        return taken[-1]

    setattr(routing, direction, noted)
    op, call = ops.get(op_name), load(op_name, step_name, "triton")
    shapes = [(37, 288), (19, 768), (5, 2_560), (3, 1_288)]
    shapes += [(75, 515), (9, 1_030), (45, 387), (133, 257)]  # rows of a program have different columns
    wrong = []
    for (m, n), extra in itertools.product(shapes, ({}, {"residual": "yes"})):
        case = Case.of(m, n, dtype=dtype, **extra)
        verdict = Problem(op, case, op.inputs(case, generator(case, "cpu"))).run(call)
        wrong += [] if verdict.ok else [f"{case.slug}: {verdict.reason}"]
    assert not wrong, "\n".join(wrong)
    packed = {routing.Held, routing.Skewed} if dtype == "bf16" else {routing.Held}
    assert {type(route) for route in taken} == ({routing.Summed} if direction == "backward" else packed)


def mean_of_losses() -> None:
    """Of one program and of several, whose tickets are taken again and again."""
    import torch

    cross_entropy = importlib.import_module("kernel_twins._triton.loss.cross_entropy.mean").cross_entropy_mean
    for m in (0, 1, 1025, 4096, 4097, 70_000):
        for ignored in (0, m // 2, m):
            losses, target = torch.randn(m, generator=torch.Generator().manual_seed(m)), torch.arange(m)
            target[:ignored] = -7
            losses[:ignored] = 0.0
            for mean, rows in ((True, m - ignored), (False, 1)):
                loss, scale = torch.full((), 5.0), torch.full((), 5.0)
                cross_entropy(losses, target, loss, scale, -7, mean)
                right = losses.double().sum() / torch.tensor(rows, dtype=torch.float64)
                torch.testing.assert_close(loss.double(), right, rtol=2e-7, atol=0.0, equal_nan=True)
                assert scale == torch.tensor(1.0) / rows


def check_gradients(problems: list[tuple[Any, tuple[int, ...]]]) -> None:
    import torch

    kernels = importlib.import_module("kernel_twins._triton.reduction.reduction_nd.amax_backward")
    random = torch.Generator().manual_seed(1)
    for x, dims in problems:
        leaf = x.detach().requires_grad_()
        out = leaf.amax(dims)
        dout = torch.randn(out.shape, generator=random).to(x.dtype)
        (right,) = torch.autograd.grad(out, leaf, dout)
        dx = torch.full_like(x, 7.0) if 0 not in x.stride() else torch.empty_like(x).fill_(7.0)
        kernels.amax_backward(dout, x, out.detach().contiguous(), dx=dx, dims=dims)
        rtol = {torch.float32: 2e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}[x.dtype]
        torch.testing.assert_close(dx, right, rtol=rtol, atol=0, equal_nan=True)


def gradient_of_maxima() -> None:
    """Of any axes and strides, one program and several a tile, with ties, and NaN where a maximum is NaN."""
    import torch

    kernels = importlib.import_module("kernel_twins._triton.reduction.reduction_nd.amax_backward")
    random = torch.Generator().manual_seed(0)
    box = torch.randn(4, 6, 10, generator=random).mul(2).round()
    box[1, 2, 3] = float("nan")
    views = [box, box.transpose(0, 1), box.permute(2, 0, 1), box[..., ::2], box[..., 1:], box[:1].expand(box.shape)]
    problems: list[tuple[Any, tuple[int, ...]]]
    problems = [(x, dims) for x in views for dims in ((0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2))]
    for shape, axis in (((20_000,), 0), ((2, 9_000), 1), ((9_000, 3), 0), ((9_000, 3), 1), ((1,), 0)):
        problems += [(torch.randn(shape, generator=random), (axis,)), (torch.zeros(shape), (axis,))]
    problems += [(torch.randn(2, 3, 4, 2, 3, generator=random).half(), dims) for dims in ((0, 2, 3, 4), (1, 3))]
    check_gradients(problems)
    # Small tiles, so that a program has more of them than a word has bits, or a word of each size.
    with mock.patch.multiple(kernels, sm_count=lambda _: 1, **SMALL_TILES):
        lengths = (100, 200, 400, 1_200)
        check_gradients([(torch.randn(n, generator=random).round(), (0,)) for n in lengths])
        check_gradients([(torch.randn(n, 24, generator=random).half(), (0,)) for n in (20, 70)])
        check_gradients([(torch.randn(n, 3, generator=random).round(), (0,)) for n in (128, 301)])


SMALL_TILES: dict[str, Any] = {
    "TILE": 16,
    "WIDEST": 16,
    "NARROWEST": 8,
    "SHORTEST": 8,
    "FOLD": 64,
    "PER_SM": 1,
    "LAUNCH_BYTES": 0,
}

# Lines and runs of any length, pitched, permuted and repeated: what is in memory, the view of it, and its axes.
GRADIENTS: dict[str, list[tuple[tuple[int, ...], Callable[[Any], Any], tuple[int, ...]]]] = {
    "lanes": [
        ((5, 8, 35), lambda x: x, (1,)),
        ((9, 25, 16), lambda x: x, (1,)),
        ((2_100, 3, 5), lambda x: x, (1,)),
        ((5, 9, 6, 14), lambda x: x, (0, 2)),
        ((5, 8, 40), lambda x: x[..., :35], (1,)),
        ((5, 8, 40), lambda x: x[..., :32], (1,)),
        ((13, 9, 12), lambda x: x.permute(2, 1, 0)[1:], (1,)),
        ((1, 8, 35), lambda x: x.expand(5, 8, 35), (1,)),
        ((5, 1, 35), lambda x: x.expand(5, 8, 35), (1,)),
    ],
    "runs": [
        ((21, 7), lambda x: x[..., :6], (0, 1)),
        ((13, 32), lambda x: x[..., :20], (0, 1)),
        ((13, 32), lambda x: x[..., :24], (0, 1)),
        ((13, 32), lambda x: x[..., :21], (0, 1)),
        ((3, 6, 16), lambda x: x[:, :5, :12], (0, 1, 2)),
        ((3, 6, 16), lambda x: x[:, :5, :11], (0, 1, 2)),
        ((3, 9, 11), lambda x: x[..., :10], (1, 2)),
        ((7, 3, 8), lambda x: x, (0, 2)),
        ((9, 3, 7), lambda x: x.permute(2, 1, 0), (0, 2)),
        ((1, 5, 4), lambda x: x.expand(9, 5, 4), (0, 1, 2)),
    ],
}


def routes_of_gradients(route: str) -> None:
    """Problems that are small for a GPU take the routes of large ones, with ties, and maxima of NaN, 0.0 and -0.0."""
    import torch

    kernels = importlib.import_module("kernel_twins._triton.reduction.reduction_nd.amax_backward")
    random, problems = torch.Generator().manual_seed(0), []
    for shape, view, dims in GRADIENTS[route]:
        x = torch.randn(shape, generator=random).mul(2).round()
        nans = x.masked_fill(torch.rand(shape, generator=random) < 0.02, float("nan"))
        # Interpreted, bf16 is compared as bits, and is 0.0 beyond the end.
        variants = x.half(), -x.abs(), nans, x.abs().add(1).bfloat16()
        problems += [(view(each), dims) for each in variants]
    taken: list[tuple[str, int, dict[str, Any]]] = []
    launch = kernels.plans.launch

    def noted(kernel: Any, grid: Any, tensors: Any, behind: Any, constants: Any) -> Any:
        taken.append((kernel.__name__, math.prod(grid[1:]), constants))
        return launch(kernel, grid, tensors, behind, constants)

    several = SMALL_TILES | {"TILE": 64, "SHORTEST_OF_SEVERAL": 8, "PER_SM": 3}
    changes = [{"LANES": 1}] if route == "lanes" else [several, several | {"LAUNCH_BYTES": 2**17}]
    for changed in changes:
        with (
            mock.patch.multiple(kernels, sm_count=lambda _: 1, **changed),
            mock.patch.object(kernels.plans, "launch", noted),
        ):
            check_gradients(problems)
    found = [constants for *_, constants in taken]
    if route == "lanes":
        assert {name for name, *_ in taken} == {"amax_backward_columns_kernel"}
        assert {(each["VECTOR"], each["ORDERED"]) for each in found} >= {(1, True), (1, False), (4, True), (8, True)}
        assert {each["BLOCK"] // each["VECTOR"] for each in found} == {128, 512}
    else:
        assert {name for name, *_ in taken} == {"amax_backward_kernel"}
        assert all(each["RUNS"] > 1 for each in found) and {each["VECTOR"] for each in found} == {1, 2, 4, 8}
        assert {(each["COUNTS"] and each["WRITES"], parts > 1) for _, parts, each in taken} >= {
            (True, False),
            (False, True),
        }


places: Any
tl: Any


def places_in_long_rows() -> None:
    global places, tl  # where a kernel looks for them
    import torch
    import triton

    tl = triton.language
    places = importlib.import_module("kernel_twins._triton.dropout.philox").places

    @triton.jit
    def kernel(rows, cols, first, n, block: tl.constexpr, span: tl.constexpr):
        row, col = places(tl.cast(first, tl.int64), n, block, span)
        tl.store(rows + tl.arange(0, block), row)
        tl.store(cols + tl.arange(0, block), col)

    for n in (1, 8, 11, 1_000, 2**31 - 8, 2**31 + 64):
        for first in (0, 2**31 - 1024, 2**31, 2**32):
            for span in (1, 8, 1024) if n >= 1024 else (1, 8) if n >= 8 else (1,):
                rows, cols = torch.empty(2, 1024, dtype=torch.int64)
                kernel[(1,)](rows, cols, first, n, 1024, span)
                i = first + torch.arange(1024)
                torch.testing.assert_close(rows, i // n)
                torch.testing.assert_close(cols, i % n)

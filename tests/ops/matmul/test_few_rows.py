"""Products of few rows or columns: which ones v18's kernel computes, and what its programs do to tiles they share.

Interpreting is decided when a kernel is imported, for the whole process, so those tests run in processes of their own
(forks.py): of float16 alone, because interpreted, tl.dot of bf16 operands is silently wrong.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from kernel_twins import ops
from kernel_twins._triton.lib.workspace import COUNTERS
from kernel_twins._triton.matmul.matmul_bf16.few_rows import TICKETS, Choice, choice
from kernel_twins.compiler import aot, disassembly
from kernel_twins.ops import ptx
from kernel_twins.spec import Case
from tests import forks
from tests.compiled import SHARED_LIMIT

STEPS = [("matmul_bf16", "v18_few_rows"), ("linear", "v02_few_rows")]
BY_STEP = pytest.mark.parametrize(("op", "step"), STEPS, ids=[f"{op}-{step}" for op, step in STEPS])
SMS = 132

# ----------------------------------------------------------------------------------------------------------------------
# The choice
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ((16, 4096, 4096), Choice(transposed=True, programs=128)),
        ((4096, 1, 4096), Choice(transposed=False, programs=128)),
        ((5, 14336, 4096), Choice(transposed=True, programs=112)),
        ((1, 20000, 4096), Choice(transposed=True, programs=SMS)),
        ((16, 16, 71_680), Choice(transposed=True, programs=70)),
    ],
)
def test_the_few_lines_are_a_tiles_columns(sizes: tuple[int, int, int], chosen: Choice) -> None:
    assert choice(*sizes, SMS) == chosen


@pytest.mark.parametrize(
    ("units", "programs"), [(16 * 66, 66), (16 * 67 - 1, 66), (16 * SMS - 1, SMS - 1), (16 * SMS, SMS), (10**6, SMS)]
)
def test_a_part_of_a_tile_has_at_least_sixteen_blocks_of_k(units: int, programs: int) -> None:
    assert choice(5, 128, 64 * units, SMS) == Choice(transposed=True, programs=programs)


@pytest.mark.parametrize("tiles", [1, 5, 44, 66, 67, SMS - 1])
def test_programs_are_whole_parts_of_tiles_where_tiles_are_fewer_than_sms(tiles: int) -> None:
    chosen = choice(5, 128 * tiles, 2**20, SMS)
    assert chosen and chosen.programs == SMS // tiles * tiles


def test_there_are_tickets_for_all_programs() -> None:
    most = choice(1, 2**20, 2**20, 10**6)
    assert most and 0 <= COUNTERS - TICKETS * most.programs < TICKETS


@pytest.mark.parametrize(
    "sizes",
    [
        (17, 4096, 4096), (4096, 17, 4096), (5, 4096, 64), (5, 128, 64 * (16 * 66 - 1)), (1, 1, 1),
        (65, 4096, 4096), (4096, 65, 4096), (0, 5, 7), (5, 0, 7), (5, 7, 0),
        (1, 1, 2**31), (1, 2**31, 1), (2**31, 1, 1), (1, 2**31 - 1, 2**20),
    ],
)  # fmt: skip
def test_products_that_v17_computes(sizes: tuple[int, int, int]) -> None:
    assert choice(*sizes, SMS) is None


# ----------------------------------------------------------------------------------------------------------------------
# Shared tiles, interpreted
# ----------------------------------------------------------------------------------------------------------------------

# Of matmul_bf16 and linear, with the number of programs and of tiles.
SHARED: list[tuple[int, tuple[int, int, int], dict[str, str], dict[str, str], int, int]] = [
    (7, (12, 1500, 130), {"b": "col"}, {"act": "gelu"}, 7, 12),  # some tiles are one program's
    (12, (300, 9, 3000), {"out": "fp32"}, {"w": "col"}, 6, 3),
    (9, (5, 128, 9216), {"a": "col"}, {"act": "relu"}, 9, 1),  # two groups of neighbours
    (4, (16, 700, 1100), {"pitch": "1"}, {"act": "silu"}, 4, 6),
    (65, (3, 100, 66_560), {"b": "col", "out": "fp32"}, {}, 65, 1),  # more groups than neighbours
    (8, (1000, 2, 64), {}, {"act": "gelu_tanh"}, 8, 8),  # nothing is shared
]


@pytest.mark.parametrize("turn", range(len(SHARED)))
@BY_STEP
def test_shared_tiles_are_right_in_any_order_of_arrival(op: str, step: str, turn: int) -> None:
    forks.interpreted("tests.ops.matmul.test_few_rows", "judge_shared", op, step, turn)


def judge_shared(op_name: str, step_name: str, turn: int) -> None:
    """In three orders of the programs: right, the same bits, and all tickets given back; memory begins as NaN."""
    import torch

    from kernel_twins.harness.check import Problem, generator

    torch.use_deterministic_algorithms(True)
    op, module = ops.get(op_name), importlib.import_module(ops.get(op_name).module(step_name))
    before = importlib.import_module("kernel_twins._triton.matmul.matmul_bf16.v17_prologue")
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    sms, shape, of_matmul, of_linear, programs, tiles = SHARED[turn]
    chosen = choice(*shape, sms)
    assert chosen and chosen.programs == programs and -(-max(shape[:2]) // 128) == tiles
    case = Case.of(*shape, dtype="fp16", **(of_matmul if op_name == "matmul_bf16" else of_linear))
    problem = Problem(op, case, op.inputs(case, generator(case, "cpu")))
    tickets, launch, place = torch.zeros(COUNTERS, dtype=torch.int32), getattr(module, f"{op_name}_{step_name}"), {}
    setattr(module, "sm_count", lambda _: sms)  # noqa: B010
    setattr(before, "counter", lambda _: tickets)  # noqa: B010
    outs: list[Any] = []

    def call(*inputs: Any, out: Any, **options: Any) -> None:
        launch(*inputs, **options, out=out)
        assert not tickets.any()
        outs.append(out.clone())

    put = builder.set_grid_idx
    random = torch.randperm(programs, generator=torch.Generator().manual_seed(0)).tolist()
    for order in (list(range(programs)), list(reversed(range(programs))), random):
        place["order"] = order

        def put_in_order(x: int, y: int, z: int) -> None:
            order = place["order"]
            put(order[x] if builder.grid_dim[0] == len(order) else x, y, z)

        setattr(builder, "set_grid_idx", put_in_order)  # noqa: B010
        verdict = problem.run(call)
        assert verdict.ok, f"{case.slug}: {verdict.reason}"
    assert all(torch.equal(out, outs[0]) for out in outs)


# ----------------------------------------------------------------------------------------------------------------------
# Compiled
# ----------------------------------------------------------------------------------------------------------------------


@BY_STEP
def test_both_orientations_fit_without_spills(op: str, step: str) -> None:
    found = forks.call("tests.ops.matmul.test_few_rows", "compile_orientations", op, step)
    assert len(found) == 2
    for slug, shared_bytes, stack_bytes, lacking in found:
        assert shared_bytes <= SHARED_LIMIT[90], slug
        assert stack_bytes == 0, f"{slug}: registers spill, {stack_bytes} bytes"
        assert not lacking, f"{slug}: no {lacking}"


def compile_orientations(op_name: str, step_name: str) -> list[tuple[str, int, int, list[str]]]:
    """Kernels for few rows, and for few columns, with a result that is stored by pointers."""
    op, found = ops.get(op_name), []
    if op_name == "linear":  # with pre, which holds as much as out
        op, variants = dataclasses.replace(op, outputs=lambda case: 2 * ops.get(op_name).outputs(case)), {"act": "gelu"}
    else:
        variants = {"out": "fp32", "b": "col"}
    for shape in ((16, 4096, 4096), (4097, 15, 4096)):
        case = Case.of(*shape, dtype="bf16", **variants)
        *_, kernel = aot.compiled(op, op.step(step_name), case)  # behind those that repack
        assert kernel.name == f"{op_name}_{step_name}_kernel"
        with aot.cubin(kernel) as cubin:
            stack_bytes = disassembly.resource_usage(cubin)[kernel.name].stack_bytes
        wanted = [ptx.WGMMA, ptx.TMA_LOAD, ptx.EARLY, ptx.TICKET] + [ptx.TMA_STORE] * (shape[1] % 8 == 0)
        lacking = [each for each in wanted if not re.search(each, kernel.asm["ptx"])]
        found.append((case.slug, kernel.metadata.shared, stack_bytes, lacking))
    return found

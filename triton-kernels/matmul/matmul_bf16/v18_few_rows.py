"""matmul_bf16 v18_few_rows: few rows or columns are a tile's columns, and programs get equal shares of the work.

Change:   the operand with many lines, which are a's rows or b's columns, gives a tile its rows, so that a tile has 16
          columns: where a has few rows, the product is computed transposed. A program's share is a run of blocks of K,
          whatever tile they belong to (stream-K), or a whole part of a tile where tiles are fewer than SMs. Programs
          that share a tile write their sums to a workspace, and the last to arrive adds them up, always in the same
          order. All other products are v17's.
Why:      memory bounds a product with few rows. Of a tile with 64 or 128 rows most would be zeros, which take shared
          memory from loads that could be in flight. Whole tiles leave SMs without work in the last wave.
Counter:  time at few rows or columns falls; DRAM bytes stay.
Requires: compute capability 9.0; M, N and K below 2^31; nothing of strides.
Source:   Osama, Merrill, Cecka, Garland and Owens, "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-
          Matrix Multiplication on the GPU" (2023).
Twin:     cuda-kernels/matmul/matmul_bf16/v18_few_rows.cu
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.device import layout_of, sm_count
from kernel_twins._triton.matmul.matmul_bf16.few_rows import Choice, choice
from kernel_twins._triton.matmul.matmul_bf16.v15_dispatch import _store_part, repacked
from kernel_twins._triton.matmul.matmul_bf16.v17_prologue import (
    Plan,
    described,
    launch,
    matmul_bf16_v17_prologue,
    moved,
    replay,
    stored_as,
)

NEIGHBOURS = tl.constexpr(8)  # parts of a tile that are added up first, where there are more


@triton.jit
def _share_begin(program, units):
    # The first unit of a program's share; units are numbered tile by tile.
    return (units * program // tl.num_programs(0)).to(tl.int32)


@triton.jit
def _program_of(unit, units):
    # The program whose share has that unit.
    return (((unit + 1) * tl.num_programs(0) - 1) // units).to(tl.int32)


@triton.jit
def _slot(first, part):
    # Where a part's sums lie: of a tile's part 0, which the program ``first`` computes, or of another one, which the
    # programs behind it compute. A program has two slots, since its share may end one tile and begin another one.
    return (first + part + tl.where(part == 0, tl.num_programs(0), 0)).to(tl.int64)


@triton.jit
def _place(sums, slot, BLOCK_WIDE: tl.constexpr, BLOCK_FEW: tl.constexpr):
    # sums: [slots, BLOCK_WIDE, BLOCK_FEW]
    within = tl.arange(0, BLOCK_WIDE)[:, None] * BLOCK_FEW + tl.arange(0, BLOCK_FEW)[None, :]
    return sums + slot * (BLOCK_WIDE * BLOCK_FEW) + within


@triton.jit
def _add_up(sums, first, part, step, end, BLOCK_WIDE: tl.constexpr, BLOCK_FEW: tl.constexpr):
    # Every step-th part's sums. They come from L2 (.cg), where other programs have written them.
    total = tl.zeros((BLOCK_WIDE, BLOCK_FEW), dtype=tl.float32)
    for start in tl.range(part, end, step * NEIGHBOURS):
        for each in tl.static_range(NEIGHBOURS):
            place = _place(sums, _slot(first, start + each * step), BLOCK_WIDE, BLOCK_FEW)
            total += tl.load(place, mask=start + each * step < end, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _arrive(ticket, programs):
    # True in the last of so many programs. The barrier is for all threads' stores, before one thread takes the ticket,
    # which is release and acquire in one: its holder may read what the others have written.
    tl.debug_barrier()
    is_last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == programs - 1
    if is_last:
        tl.store(ticket, 0)
    return is_last


@triton.jit
def _meet(sums, tickets, first, parts, BLOCK_WIDE: tl.constexpr, BLOCK_FEW: tl.constexpr):
    # True in the last program of a tile to arrive. If parts are many, the last of each NEIGHBOURS first adds up theirs,
    # in the slot of the leader.
    leader = (tl.program_id(0) - first) // NEIGHBOURS * NEIGHBOURS
    end = tl.minimum(leader + NEIGHBOURS, parts)
    is_last = _arrive(tickets + _slot(first, leader), end - leader)
    if is_last & (parts > NEIGHBOURS):
        total = _add_up(sums, first, leader, 1, end, BLOCK_WIDE, BLOCK_FEW)
        tl.debug_barrier()  # for all threads to have read the slot
        tl.store(_place(sums, _slot(first, leader), BLOCK_WIDE, BLOCK_FEW), total)
        is_last = _arrive(tickets + 2 * tl.num_programs(0) + first, (parts - 1) // NEIGHBOURS + 1)
    return is_last


@triton.jit
def _store(part, out, out_desc, M, N, first_wide, TRANSPOSED: tl.constexpr):
    # part: [BLOCK_WIDE, BLOCK_FEW], of out: [M, N] or, if TRANSPOSED, of out.T
    first_wide, first_few = tl.cast(first_wide, tl.int64), tl.cast(0, tl.int64)
    if TRANSPOSED:
        _store_part(part.T, out, out_desc, M, N, first_few, first_wide)
    else:
        _store_part(part, out, out_desc, M, N, first_wide, first_few)


@triton.jit(do_not_specialize=["M", "N", "K"])
def matmul_bf16_v18_few_rows_kernel(
    a_desc, b_desc, out_desc, out, sums, tickets, M, N, K,
    A_COL: tl.constexpr, B_COL: tl.constexpr, EARLY: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_WIDE: tl.constexpr, BLOCK_FEW: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # a: [M, K], b: [K, N], what is column-major described as its transpose; out: [M, N] row-major, without a descriptor
    # where the copy engine cannot store it; sums: [2 * programs, BLOCK_WIDE, BLOCK_FEW]; tickets: [3 * programs]. The
    # wide operand is b.T if TRANSPOSED, else a; the other one's lines are few.
    if EARLY:
        # Programmatic dependent launch: the next kernel may be set up beside this one, as this one was beside the
        # kernel before it, which must be done before anything that it wrote or reads is touched.
        gdc_launch_dependents()
        gdc_wait()
    tiles = ((N if TRANSPOSED else M) - 1) // BLOCK_WIDE + 1
    steps = (K - 1) // BLOCK_K + 1
    units_of_tile = steps.to(tl.int64)  # 64 bits are for products with the number of programs
    units = units_of_tile * tiles
    begin, end = _share_begin(tl.program_id(0), units), _share_begin(tl.program_id(0) + 1, units)
    # One loop over all tiles of the share, so that the next tile's loads are under way while one is stored. It holds no
    # barrier, which would keep the compiler from pipelining it: shared tiles are completed behind it.
    total = tl.zeros((BLOCK_WIDE, BLOCK_FEW), dtype=tl.float32)
    for unit in tl.range(begin, end):
        tile, step = unit // steps, unit % steps
        first_wide, first_k = tile * BLOCK_WIDE, step * BLOCK_K
        if TRANSPOSED:
            wide_tile = b_desc.load([first_wide, first_k]) if B_COL else b_desc.load([first_k, first_wide]).T
            few_tile = a_desc.load([first_k, 0]) if A_COL else a_desc.load([0, first_k]).T
        else:
            wide_tile = a_desc.load([first_k, first_wide]).T if A_COL else a_desc.load([first_wide, first_k])
            few_tile = b_desc.load([0, first_k]).T if B_COL else b_desc.load([first_k, 0])
        total = tl.dot(wide_tile, few_tile, total)
        if (step == steps - 1) | (unit == end - 1):
            if (step == steps - 1) & (unit - step >= begin):
                _store(total, out, out_desc, M, N, first_wide, TRANSPOSED)
            else:
                first = _program_of(tile * units_of_tile, units)
                slot = _slot(first, tl.program_id(0) - first)
                tl.store(_place(sums, slot, BLOCK_WIDE, BLOCK_FEW), total)
            total = tl.zeros((BLOCK_WIDE, BLOCK_FEW), dtype=tl.float32)
    # Only the first and the last tile of a share can be shared.
    first_tile, last_tile = begin // steps, (end - 1) // steps
    for tile in tl.range(first_tile, last_tile + 1, max(1, last_tile - first_tile)):
        first = _program_of(tile * units_of_tile, units)
        parts = _program_of((tile + 1) * units_of_tile - 1, units) - first + 1
        if parts > 1:  # noqa: SIM102 - Triton evaluates both sides of an and
            if _meet(sums, tickets, first, parts, BLOCK_WIDE, BLOCK_FEW):
                stride = tl.where(parts > NEIGHBOURS, NEIGHBOURS, 1)
                total = _add_up(sums, first, 0, stride, parts, BLOCK_WIDE, BLOCK_FEW)
                _store(total, out, out_desc, M, N, tile * BLOCK_WIDE, TRANSPOSED)


_plans: dict[tuple[Any, ...], Plan] = {}


def matmul_bf16_v18_few_rows(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides, both bf16 or fp16; out: [M, N], row-major, the same or fp32."""
    (M, K), N = a.shape, b.shape[1]
    chosen = choice(M, N, K, sm_count(a.device))
    if chosen is None:
        matmul_bf16_v17_prologue(a, b, out=out)
        return
    aligned = a.data_ptr() % 16 == 0, b.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0
    key = a.shape, a.stride(), b.shape, b.stride(), a.dtype, out.dtype, aligned, a.get_device()
    plan = _plans.get(key)
    if plan is None:
        plan = _first(a, b, out, chosen)
        if plan is not None:
            plans.keep(_plans, key, plan)
        return
    replay(plan, (a, b, out), (out,))


def _first(a: Tensor, b: Tensor, out: Tensor, chosen: Choice) -> Plan | None:
    """Run a product that is not in the launch cache, and make its plan, unless it is interpreted."""
    repack_a, repack_b = (layout_of(x) == "pointers" for x in (a, b))
    a, b = repacked(a) if repack_a else a, repacked(b) if repack_b else b
    descriptors = (
        described(a, chosen.a_block),
        described(b, chosen.b_block),
        described(out, chosen.out_block) if stored_as(out) == "row" else None,
    )
    sizes = a.shape[0], b.shape[1], a.shape[1]
    constants = chosen.constants | {"A_COL": layout_of(a) == "col", "B_COL": layout_of(b) == "col"}
    return launch_shares(
        matmul_bf16_v18_few_rows_kernel, chosen, (repack_a, repack_b), descriptors, (out,), sizes, constants
    )


def launch_shares(
    kernel: Any,
    chosen: Choice,
    repack: tuple[bool, bool],
    descriptors: tuple[TensorDescriptor | None, ...],
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, int, int],
    constants: dict[str, Any],
) -> Plan | None:
    """Launch the kernel, and return the launch as a plan for later calls; None in the interpreter."""
    grid = chosen.programs, 1, 1
    constants = constants | {"EARLY": not triton.knobs.runtime.interpret}  # which never has two kernels under way
    compiled = launch(kernel, grid, (*descriptors, *tensors), chosen.sums, sizes, constants)
    if not isinstance(compiled, CompiledKernel):
        return None
    named = tuple(constants[name] for name in compiled.src.fn.arg_names if name in constants)
    without_tensors = tuple(moved(each, None) for each in descriptors)
    return Plan(compiled, grid, *repack, without_tensors, chosen.sums, (*sizes, *named))

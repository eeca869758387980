"""The gradient of a maximum over any axes: dx = dout / ties where x is the maximum, else 0; x is read once.

Programs walk x as v05's do, in tiles of outputs and elements. Each element that equals its maximum is marked by a bit
of the tile's words, one for each of up to 32 tiles in turn, and counted; then dx is written from bits and counts. If
outputs fill the GPU and their elements are at most 32 tiles, a program has all of them, and its words in registers. If
not, each tile has several programs, which store words to a workspace, and writing is a second launch: counts meet by
atomic additions of integers, which give the same sum in any order. Rows of few columns that continue in memory are
folded then: several are side by side as one row, whose columns repeat the outputs. Many outputs of up to 32 elements
leave such tiles nearly empty: there lanes have whole outputs (amax_backward_columns.py). Few outputs of short runs do,
too: there a tile has several runs.
Twin: cuda-kernels/reduction/reduction_nd/function_amax_backward.cu
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.reduction.reduction_nd.amax_backward_bits import ones_of, share_of
from kernel_twins._triton.reduction.reduction_nd.amax_backward_columns import amax_backward_columns_kernel
from kernel_twins._triton.reduction.reduction_nd.axes import least_padded
from kernel_twins._triton.reduction.reduction_nd.routes import (
    LANES,
    LARGEST,
    WARPS,
    are_ordered,
    tile_of_lanes,
)

TILE, WIDEST, NARROWEST = 4096, 256, 64  # elements of a tile; most columns, and fewest of those that are wider
SHORTEST, SHORTEST_OF_SEVERAL = 128, 64  # elements along a longer run; along each one if a tile has several
WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}  # by their bits
MOST_BITS = max(WORDS)
FOLD = 2048  # elements of a folded row, about
PER_SM = 8  # programs, if a tile has several
MOST_PARTS = 65535  # of a grid's second axis
NUM_WARPS = 8
REGISTERS = 80  # of a thread down columns, so that several programs overlap: each row's address would take more
SATURATING = 3  # programs whose loads saturate an SM's share of the memory's bandwidth
LAUNCH_BYTES = 2**17  # that an SM moves while a kernel is launched and the counts are cleared


@triton.jit
def offset_of(index, sizes, strides, LAST: tl.constexpr):
    # The offset of the element with this number among the axes up to LAST, of which the outermost needs no division.
    offset = (index * 0).to(tl.int64)
    for axis in tl.static_range(LAST, -1, -1):
        at = index % sizes[axis] if axis > 0 else index
        offset += at.to(tl.int64) * strides[axis]
        index = index // sizes[axis] if axis > 0 else index
    return offset


@triton.jit
def tile_of(
    tensor, offset, chunk, inside, column, run, last_run, elements, sizes, strides, kept_stride, ALONG: tl.constexpr,
    FOLDS: tl.constexpr, NEAR: tl.constexpr, VECTOR: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    # The addresses of a tile, and which elements it has. offset: of its outputs, or of its first column. The last row
    # of a folded problem has only last_run columns. Accesses of VECTOR elements are aligned, of which the compiler sees
    # no more than it is told.
    INDEX: tl.constexpr = tl.int32 if NEAR else tl.int64
    LAST: tl.constexpr = len(sizes) - 1
    if ALONG:
        WIDTH: tl.constexpr = BLOCK_R // RUNS
        within = chunk
        if LAST > 0:
            chunks = (run - 1) // WIDTH + 1  # tl.cdiv adds first, which wraps near 2^31
            number, within = chunk // chunks * RUNS, chunk % chunks
        begin = within * WIDTH
        in_tile = tl.arange(0, BLOCK_R)[None, :]
        index, pack = in_tile, in_tile // VECTOR
        offset, mask = (offset + begin.to(tl.int64) * strides[LAST])[:, None], inside[:, None]
        if LAST > 0:
            if RUNS > 1:
                # Fewer than 2^30 in all, as they have two elements or more: their numbers have 32 bits, fast to divide.
                number = number.to(tl.int32) + in_tile // WIDTH
                mask &= number < elements // run
                index, pack = in_tile % WIDTH, pack % (WIDTH // VECTOR)
            offset += offset_of(number, sizes, strides, LAST - 1)
        mask &= begin // VECTOR + pack < run // VECTOR
        where = tensor + offset // VECTOR * VECTOR + index.to(INDEX) * strides[LAST]
    else:
        in_columns = tl.arange(0, BLOCK_K)[None, :].to(INDEX) * kept_stride
        begin = chunk * BLOCK_R
        row = tl.arange(0, BLOCK_R)[:, None]
        mask = inside[None, :] & (row < tl.minimum(elements - begin, BLOCK_R))
        if FOLDS:
            mask &= (column // VECTOR < last_run // VECTOR)[None, :] | (begin + row < elements - 1)
        if LAST == 0:
            offset += begin.to(tl.int64) * strides[0]
            where = tensor + offset // VECTOR * VECTOR + (row.to(INDEX) * strides[0] // VECTOR * VECTOR + in_columns)
        else:
            in_rows = offset + offset_of(begin + row, sizes, strides, LAST)
            where = tensor + in_rows // VECTOR * VECTOR + in_columns
    return where, mask


@triton.jit
def amax_backward_kernel(
    x, out, dout, ties, marks, dx, kept_sizes, kept_strides, kept_targets, kept_steps, sizes, strides, targets,
    outputs, elements, period, last_run, COUNTS: tl.constexpr, WRITES: tl.constexpr, BITS: tl.constexpr,
    ALONG: tl.constexpr, FOLDS: tl.constexpr, NEAR: tl.constexpr, FEW: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    # x: addressed by strides; dx: by targets; out, dout, ties: by steps. marks: [parts, tiles, words of a part], absent
    # if one program counts and writes. BITS: of a word. FOLDS: columns repeat the `period` outputs. NEAR: the offsets
    # within a tile fit 32 bits. FEW: so do numbers of elements. RUNS: that BLOCK_R covers, if ALONG.
    INDEX: tl.constexpr = tl.int32 if FEW else tl.int64
    KEPT: tl.constexpr = len(kept_sizes) - 1
    AXIS: tl.constexpr = 1 if ALONG else 0  # of elements
    program, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(INDEX)
    if ALONG:
        output = program * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = output < outputs
        from_, to = offset_of(output, kept_sizes, kept_strides, KEPT), offset_of(output, kept_sizes, kept_targets, KEPT)
        step = offset_of(output, kept_sizes, kept_steps, KEPT)
        run, column = sizes[len(sizes) - 1], output
        all_chunks = ((elements // run - 1) // RUNS + 1) * ((run - 1) // (BLOCK_R // RUNS) + 1)
    else:
        run = kept_sizes[KEPT]
        blocks = (run - 1) // BLOCK_K + 1
        outer, first = program // blocks, program % blocks * BLOCK_K
        from_, to, step = first * kept_strides[KEPT], first * kept_targets[KEPT], first * 0
        if KEPT > 0:
            from_ += offset_of(outer, kept_sizes, kept_strides, KEPT - 1)
            to += offset_of(outer, kept_sizes, kept_targets, KEPT - 1)
            step += offset_of(outer, kept_sizes, kept_steps, KEPT - 1)
        column = first + tl.arange(0, BLOCK_K)
        if FOLDS:
            step += column % period * kept_steps[KEPT]
        else:
            step += column * kept_steps[KEPT]
        inside = column // VECTOR < run // VECTOR
        all_chunks = (elements - 1) // BLOCK_R + 1
    each = ((all_chunks - 1) // tl.num_programs(1) + 1).to(INDEX)
    begin = part * each
    end = tl.minimum(begin + each, all_chunks)
    groups = (each - 1) // BITS + 1
    SHAPE: tl.constexpr = (BLOCK_K, BLOCK_R) if ALONG else (BLOCK_R, BLOCK_K)
    if not (COUNTS and WRITES):
        words = marks + (part.to(tl.int64) * tl.num_programs(0) + program) * groups * (BLOCK_K * BLOCK_R)
        words += tl.arange(0, SHAPE[0])[:, None] * SHAPE[1] + tl.arange(0, SHAPE[1])[None, :]

    bits = tl.zeros(SHAPE, dtype=tl.uint32)
    if COUNTS:
        largest = tl.expand_dims(tl.load(out + step, mask=inside, other=float("nan")), AXIS)
        found = tl.zeros(SHAPE, dtype=tl.int32)
        for group in tl.range(0, 1 if WRITES else groups):
            first_chunk = begin + group * BITS
            bits = tl.zeros(SHAPE, dtype=tl.uint32)
            # Down columns, single elements are many addresses of one tile already.
            for chunk in tl.range(
                first_chunk, tl.minimum(first_chunk + BITS, end), loop_unroll_factor=2 if ALONG or VECTOR > 1 else 1
            ):
                where, mask = tile_of(
                    x, from_, chunk, inside, column, run, last_run, elements, sizes, strides, kept_strides[KEPT], ALONG,
                    FOLDS, NEAR, VECTOR, BLOCK_K, BLOCK_R, RUNS,
                )  # fmt: skip
                is_largest = tl.load(where, mask=mask, other=float("nan")) == largest
                bits |= is_largest.to(tl.uint32) << (chunk - first_chunk).to(tl.uint32)
            found += ones_of(bits) if BITS > 1 else bits.to(tl.int32)
            if not WRITES:
                tl.store(words + group * (BLOCK_K * BLOCK_R), bits.to(marks.dtype.element_ty))
        number = tl.sum(found, axis=AXIS)
        if not WRITES:
            tl.atomic_add(ties + step, number, mask=inside & (number > 0), sem="relaxed")
    if WRITES:
        if not COUNTS:
            number = tl.load(ties + step, mask=inside, other=1)
        share, nothing = share_of(dout, step, number, inside)
        share, nothing = tl.expand_dims(share, AXIS), tl.expand_dims(nothing, AXIS)
        for group in tl.range(0, 1 if COUNTS else groups):
            first_chunk = begin + group * BITS
            if not COUNTS:
                bits = tl.load(words + group * (BLOCK_K * BLOCK_R)).to(tl.uint32)
            for chunk in tl.range(first_chunk, tl.minimum(first_chunk + BITS, end)):
                write, mask = tile_of(
                    dx, to, chunk, inside, column, run, last_run, elements, sizes, targets, kept_targets[KEPT], ALONG,
                    FOLDS, NEAR, VECTOR, BLOCK_K, BLOCK_R, RUNS,
                )  # fmt: skip
                is_largest = ((bits >> (chunk - first_chunk).to(tl.uint32)) & 1) != 0
                tl.store(write, tl.where(is_largest, share, nothing), mask=mask)


class Axis(NamedTuple):
    size: int
    stride: int  # in elements of x
    target: int  # in elements of dx
    step: int  # in elements of out; 0 if it is reduced


def axes_of(sizes: Sequence[int], strides: Sequence[int], targets: Sequence[int], kept: bool) -> tuple[Axis, ...]:
    """The axes, all kept or all reduced, merged where they continue in x, dx and out; the last has x's least stride."""
    step, axes = 1, []
    for size, stride, target in zip(reversed(sizes), reversed(strides), reversed(targets), strict=True):
        if size != 1:
            axes.append(Axis(size, stride, target, step if kept else 0))
        step *= size
    merged: list[Axis] = []
    for outer in sorted(axes, key=lambda axis: axis.stride or math.inf):
        inner = merged[-1] if merged else None
        if inner is not None and outer[1:] == tuple(inner.size * each for each in inner[1:]):
            merged[-1] = inner._replace(size=outer.size * inner.size)
        else:
            merged.append(outer)
    return tuple(merged[::-1]) or (Axis(1, 0, 0, 0),)


def vector_of(tensor: Tensor, inner: int, others: Iterable[int], run: int) -> int:
    """Elements of an aligned access along runs of ``run`` elements: up to 16 bytes, as all distances are multiples."""
    if inner != 1 or tensor.data_ptr() % 16:
        return 1
    return math.gcd(16 // tensor.element_size(), run, *others)


def are_folded(kept: Sequence[Axis], reduced: Sequence[Axis]) -> bool:
    """Whether rows of few columns continue in x's memory and in dx's, and are many."""
    columns, rows = kept[-1], reduced[-1]
    continue_ = rows.stride == rows.target == columns.size and columns.stride == columns.target == 1
    return len(kept) == len(reduced) == 1 and continue_ and columns.size <= FOLD // 16 and rows.size >= 2 * FOLD


def folded(columns: Axis, rows: Axis) -> tuple[tuple[Axis], tuple[Axis], int]:
    """The axes of a row that is several, in whole vectors, and of such rows; and the elements of the last one."""
    together = FOLD // columns.size // 8 * 8
    width, count = together * columns.size, triton.cdiv(rows.size, together)
    last_run = rows.size * columns.size - (count - 1) * width
    return (Axis(width, 1, 1, columns.step),), (Axis(count, width, width, 0),), last_run


def fill_lanes(x: Tensor, kept: Sequence[Axis], reduced: Sequence[Axis], along: bool, width: int) -> bool:
    """Whether lanes with whole outputs keep the memory busy, as routes.py has it for maxima; a word has their bits.

    Not along short runs: a warp would store one element of each run at once, and so a part of each sector.
    """
    outputs, elements = (math.prod(axis.size for axis in each) for each in (kept, reduced))
    if len(reduced) > 2 or elements > MOST_BITS or not LANES * sm_count(x.device) * width <= outputs < LARGEST:
        return False
    return kept[-1].stride > 0 and not along


class Plan(NamedTuple):
    """The prepared launches of a call, for calls that differ only in values and in equally aligned addresses."""

    counts: plans.Plan | None  # None if the other one counts as well
    writes: plans.Plan
    words: int  # of the workspace
    bits: int  # of a word


_plans: dict[tuple[Any, ...], Plan] = {}


def amax_backward(dout: Tensor, x: Tensor, out: Tensor, *, dx: Tensor, dims: Sequence[int]) -> None:
    """dx from dout and out = amax(x, dims); both contiguous, with the kept axes alone.

    x: any strides, elements along dims, fewer than 2^31 an output; dx: of x's shape, with its order of axes in memory.
    """
    key = x.shape, x.stride(), dx.stride(), x.dtype, plans.alignment(x, out, dout, dx), tuple(dims), x.get_device()
    plan = _plans.get(key)
    if plan is None:
        if (plan := _first(dout, x, out, dx, dims)) is not None:
            plans.keep(_plans, key, plan)
    elif plan.counts is None:
        plan.writes(x, out, dout, None, None, dx)
    else:
        tensors = x, out, dout, *_workspace(out, plan.words, plan.bits), dx
        plan.counts(*tensors)
        plan.writes(*tensors)


def _workspace(out: Tensor, words: int, bits: int) -> tuple[Tensor, Tensor]:
    """Counts, which are zeros, and words of bits."""
    ties = torch.zeros(out.shape, dtype=torch.int32, device=out.device)
    return ties, torch.empty(words, dtype=WORDS[bits], device=out.device)


def _first(dout: Tensor, x: Tensor, out: Tensor, dx: Tensor, dims: Sequence[int]) -> Plan | None:
    """Run a problem without a plan and return its plan; None if it is interpreted or captured."""

    def axes(chosen: list[int], kept: bool) -> tuple[Axis, ...]:
        sizes, strides, targets = ([of[axis] for axis in chosen] for of in (x.shape, x.stride(), dx.stride()))
        return axes_of(sizes, strides, targets, kept)

    kept = axes([axis for axis in range(x.dim()) if axis not in dims], True)
    reduced = axes([axis for axis in range(x.dim()) if axis in dims], False)
    outputs, elements = (math.prod(axis.size for axis in each) for each in (kept, reduced))
    along = (reduced[-1].stride or math.inf) <= (kept[-1].stride or math.inf)
    width = min(
        vector_of(tensor, kept[-1][at], [axis[at] for axis in (*kept[:-1], *reduced)], kept[-1].size)
        for tensor, at in ((x, 1), (dx, 2))
    )
    if fill_lanes(x, kept, reduced, along, width):
        return _whole_columns(dout, x, out, dx, kept, reduced, width)
    period = last_run = kept[-1].size
    folds = are_folded(kept, reduced)
    if folds:
        kept, reduced, last_run = folded(kept[0], reduced[0])
        outputs, elements = kept[0].size, reduced[0].size
    line, run = (outputs, reduced[-1].size) if along else (kept[-1].size, elements)
    runs = 1
    if along:
        block_r = least_padded(run, TILE, SHORTEST)
        block_k = min(TILE // block_r, triton.next_power_of_2(outputs))
        if len(reduced) > 1 and block_k * block_r < TILE:
            block_r = least_padded(run, TILE, SHORTEST_OF_SEVERAL)
            runs = min(TILE // (block_k * block_r), triton.next_power_of_2(elements // run))
            block_r *= runs
    else:
        block_k = least_padded(line, WIDEST, NARROWEST)
        while block_k > NARROWEST and not folds and elements > MOST_BITS * (TILE // block_k):
            block_k //= 2
        block_r = min(TILE // block_k, triton.next_power_of_2(elements))
    inner, others = (reduced[-1], (*kept, *reduced[:-1])) if along else (kept[-1], (*kept[:-1], *reduced))
    run_ends = math.gcd(inner.size, last_run if folds else 0)
    from_x = vector_of(x, inner.stride, [axis.stride for axis in others], run_ends)
    from_dx = vector_of(dx, inner.target, [axis.target for axis in others], run_ends)
    tiles = outputs // line * triton.cdiv(line, block_k)
    chunks = triton.cdiv(elements // run, runs) * triton.cdiv(run, block_r // runs)
    farthest = max(abs(block_r // runs * reduced[-1][at]) + abs(block_k * kept[-1][at]) for at in (1, 2))
    behind = *zip(*kept, strict=True), *tuple(zip(*reduced, strict=True))[:3], outputs, elements, period, last_run
    near = {"NEAR": farthest < 2**31, "FEW": elements < 2**30}
    blocks = {"BLOCK_K": block_k, "BLOCK_R": block_r, "RUNS": runs, "num_warps": NUM_WARPS}
    registers = {} if along else {"maxnreg": REGISTERS}
    constants = {"ALONG": along, "FOLDS": folds} | blocks | near | registers

    def launch(
        parts: int, ties: Tensor | None, marks: Tensor | None, bits: int, counts: bool, writes: bool, vector: int
    ) -> plans.Plan | None:
        tensors, passes = (x, out, dout, ties, marks, dx), {"COUNTS": counts, "WRITES": writes, "BITS": bits}
        return plans.launch(
            amax_backward_kernel, (tiles, parts), tensors, behind, constants | passes | {"VECTOR": vector}
        )

    # The bytes that an SM moves: in whole tiles, of which one alone does not saturate it, or evenly and with the bits.
    sms, tile = sm_count(x.device), 2 * chunks * block_k * block_r * x.element_size()
    whole = tile * max(triton.cdiv(tiles, sms), SATURATING)
    if not folds and chunks <= MOST_BITS and whole <= tile * tiles * 17 // (sms * 16) + LAUNCH_BYTES:
        bits = 1 if chunks == 1 else MOST_BITS
        both = launch(1, None, None, bits, True, True, min(from_x, from_dx))
        return None if both is None else Plan(None, both, 0, bits)
    parts = max(min(PER_SM * sms // tiles, chunks, MOST_PARTS), 1)
    each = triton.cdiv(chunks, parts)
    if each > MOST_BITS:  # whole words
        each = max(each // MOST_BITS, triton.cdiv(chunks, MOST_PARTS * MOST_BITS)) * MOST_BITS
        parts = triton.cdiv(chunks, each)
    bits = min(size for size in WORDS if size >= min(each, MOST_BITS))
    words = parts * tiles * triton.cdiv(each, bits) * block_k * block_r
    ties, marks = _workspace(out, words, bits)
    counting = launch(parts, ties, marks, bits, True, False, from_x)
    writing = launch(parts, ties, marks, bits, False, True, from_dx)
    return None if counting is None or writing is None else Plan(counting, writing, words, bits)


def _whole_columns(
    dout: Tensor, x: Tensor, out: Tensor, dx: Tensor, kept: Sequence[Axis], reduced: Sequence[Axis], width: int
) -> Plan | None:
    """Run a problem whose lanes have whole outputs."""
    outputs, elements = (math.prod(axis.size for axis in each) for each in (kept, reduced))
    block, turns = tile_of_lanes(x, outputs, elements, width)
    kept_axes, reduced_axes = (tuple(zip(*each, strict=True)) for each in (kept, reduced))
    is_ordered = are_ordered(kept_axes[0], kept_axes[3])
    constants = {"BLOCK": block, "TURNS": turns, "VECTOR": width, "ORDERED": is_ordered, "num_warps": WARPS}
    behind = *kept_axes, *reduced_axes[:3], outputs, elements
    grid, tensors = (triton.cdiv(outputs, block),), (x, out, dout, None, None, dx)
    whole = plans.launch(amax_backward_columns_kernel, grid, tensors, behind, constants)
    return None if whole is None else Plan(None, whole, 0, MOST_BITS)

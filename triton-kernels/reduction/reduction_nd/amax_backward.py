"""The gradient of a maximum over any axes: dx = dout / ties where x is the maximum, else 0; two passes over x.

The first pass counts the elements that equal their maximum, the second writes. Both walk x as v05 does, in tiles of
outputs and elements. If tiles fill the GPU, a program makes both passes over its own, and finds its elements in a cache
at the second one. If they are few, each has several programs and the passes are two launches: counts meet by atomic
additions of integers, which give the same sum in any order.
Twin: cuda-kernels/reduction/reduction_nd/function_amax_backward.cu
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.reduction.reduction_nd.totals import place_of, run_of

TILE, WIDEST = 4096, 256  # elements of a tile, and columns
PER_SM = 8  # programs, if a tile has several
NUM_WARPS = 4


@triton.jit
def share_of(dout, step, ties, mask):
    # What each maximum gets, and what all others get: 0, but NaN where nothing equals the maximum, which is NaN then.
    share = tl.load(dout + step, mask=mask, other=0.0).to(tl.float32)
    share = tl.div_rn(share, ties.to(tl.float32)).to(dout.dtype.element_ty)
    return share, (share.to(tl.float32) * 0.0).to(dout.dtype.element_ty)


@triton.jit
def amax_backward_kernel(
    x, out, dout, ties, dx, kept_sizes, kept_strides, kept_targets, kept_steps, sizes, strides, targets, steps,
    outputs, elements, COUNTS: tl.constexpr, WRITES: tl.constexpr, ALONG: tl.constexpr, NEAR: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # x: addressed by strides; dx: by targets; out, dout, ties: by steps, which are 0 along reduced axes.
    # NEAR: the offsets within a tile of columns fit 32 bits.
    LAST: tl.constexpr = len(sizes) - 1 if ALONG else len(kept_sizes) - 1
    AXIS: tl.constexpr = 1 if ALONG else 0  # of elements
    program, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    if ALONG:
        output = program * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = output < outputs
        offset, step = place_of(output, kept_sizes, kept_strides, kept_steps)
        target, _ = place_of(output, kept_sizes, kept_targets, kept_steps)
        run = sizes[LAST]
        chunks = (run - 1) // BLOCK_R + 1  # tl.cdiv adds first, which wraps near 2^31
        all_chunks = elements // run * chunks
        each = tl.cdiv(all_chunks, count)
    else:
        run = kept_sizes[LAST]
        blocks = (run - 1) // BLOCK_K + 1
        first_column = program % blocks * BLOCK_K
        column = first_column + tl.arange(0, BLOCK_K)
        inside = column < run
        offset, first = run_of(program // blocks, kept_sizes, kept_strides, kept_steps)
        target, _ = run_of(program // blocks, kept_sizes, kept_targets, kept_steps)
        step = first + column * kept_steps[LAST]
        offset += first_column * kept_strides[LAST]
        target += first_column * kept_targets[LAST]
        chunks = 1
        all_chunks = (elements - 1) // BLOCK_R + 1
        each = tl.cast((all_chunks - 1) // count + 1, tl.int64)
        INDEX: tl.constexpr = tl.int32 if NEAR else tl.int64
        in_rows = tl.arange(0, BLOCK_R)[:, None].to(INDEX)
        in_columns = tl.arange(0, BLOCK_K)[None, :].to(INDEX)
    largest = tl.expand_dims(tl.load(out + step, mask=inside, other=0.0), AXIS)
    begin, end = part * each, tl.minimum((part + 1) * each, all_chunks)
    for pass_ in tl.static_range(0 if COUNTS else 1, 2 if WRITES else 1):
        if pass_ == 0:
            found = tl.zeros((BLOCK_K, BLOCK_R) if ALONG else (BLOCK_R, BLOCK_K), dtype=tl.int32)
        else:
            number = tl.sum(found, axis=AXIS) if COUNTS else tl.load(ties + step, mask=inside, other=1)
            share, nothing = share_of(dout, step, number, inside)
            share, nothing = tl.expand_dims(share, AXIS), tl.expand_dims(nothing, AXIS)
        for chunk in tl.range(begin, end):
            if ALONG:
                outer, to = run_of(chunk // chunks if LAST > 0 else chunk * 0, sizes, strides, targets)
                index = (chunk % chunks if LAST > 0 else chunk) * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
                mask = inside[:, None] & (index < run)
                where = x + offset[:, None] + outer + index * strides[LAST]
                write = dx + target[:, None] + to + index * targets[LAST]
            elif len(sizes) == 1:
                start = chunk * BLOCK_R
                mask = inside[None, :] & (tl.arange(0, BLOCK_R)[:, None] < tl.minimum(elements - start, BLOCK_R))
                where = x + offset + start * strides[0] + (in_rows * strides[0] + in_columns * kept_strides[LAST])
                write = dx + target + start * targets[0] + (in_rows * targets[0] + in_columns * kept_targets[LAST])
            else:
                row = chunk * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
                element, to = place_of(row, sizes, strides, targets)
                mask = inside[None, :] & (row < elements)
                where = x + offset + in_columns * kept_strides[LAST] + element
                write = dx + target + in_columns * kept_targets[LAST] + to
            is_largest = tl.load(where, mask=mask, other=0.0) == largest
            if pass_ == 0:
                found += (mask & is_largest).to(tl.int32)
            else:
                tl.store(write, tl.where(is_largest, share, nothing), mask=mask)
    if COUNTS and not WRITES:
        number = tl.sum(found, axis=AXIS)
        tl.atomic_add(ties + step, number, mask=inside & (number > 0), sem="relaxed")


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


class Plan(NamedTuple):
    """The prepared launches of a call, for calls that differ only in values and in equally aligned addresses."""

    counts: plans.Plan | None  # None if the other one counts as well
    writes: plans.Plan


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
        plan.writes(x, out, dout, None, dx)
    else:
        tensors = x, out, dout, torch.zeros(out.shape, dtype=torch.int32, device=x.device), dx
        plan.counts(*tensors)
        plan.writes(*tensors)


def _first(dout: Tensor, x: Tensor, out: Tensor, dx: Tensor, dims: Sequence[int]) -> Plan | None:
    """Run a problem without a plan and return its plan; None if it is interpreted or captured."""

    def axes(chosen: list[int], kept: bool) -> tuple[Axis, ...]:
        sizes, strides, targets = ([of[axis] for axis in chosen] for of in (x.shape, x.stride(), dx.stride()))
        return axes_of(sizes, strides, targets, kept)

    kept = axes([axis for axis in range(x.dim()) if axis not in dims], True)
    reduced = axes([axis for axis in range(x.dim()) if axis in dims], False)
    outputs, elements = (math.prod(axis.size for axis in each) for each in (kept, reduced))
    along = (reduced[-1].stride or math.inf) <= (kept[-1].stride or math.inf)
    line, run = (outputs, reduced[-1].size) if along else (kept[-1].size, elements)
    if along:
        block_r = min(triton.next_power_of_2(run), TILE)
        block_k = min(TILE // block_r, triton.next_power_of_2(outputs))
    else:
        block_k = min(triton.next_power_of_2(line), WIDEST)
        block_r = min(TILE // block_k, triton.next_power_of_2(elements))
    tiles = outputs // line * triton.cdiv(line, block_k)
    chunks = elements // run * triton.cdiv(run, block_r)
    grid = tiles, max(min(PER_SM * sm_count(x.device) // tiles, chunks), 1)
    farthest = max(abs(block_r * reduced[-1][at]) + abs(block_k * kept[-1][at]) for at in (1, 2))
    behind = *zip(*kept, strict=True), *zip(*reduced, strict=True), outputs, elements
    constants = {"ALONG": along, "NEAR": farthest < 2**31, "BLOCK_K": block_k, "BLOCK_R": block_r}

    def launch(ties: Tensor | None, counts: bool, writes: bool) -> plans.Plan | None:
        passes = {"COUNTS": counts, "WRITES": writes, "num_warps": NUM_WARPS}
        return plans.launch(amax_backward_kernel, grid, (x, out, dout, ties, dx), behind, constants | passes)

    if grid[1] == 1:
        both = launch(None, True, True)
        return None if both is None else Plan(None, both)
    ties = torch.zeros(out.shape, dtype=torch.int32, device=x.device)
    counting, writing = launch(ties, True, False), launch(ties, False, True)
    return None if counting is None or writing is None else Plan(counting, writing)

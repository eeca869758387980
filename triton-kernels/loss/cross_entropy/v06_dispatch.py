"""cross_entropy v06_dispatch: rows of any alignment by vectors, and few rows split over several programs.

Change:   a row of more than LONG_BYTES is read by vectors of 16 bytes that are counted from its first whole one; the
          elements before that and behind the last one are loaded one by one. If the rows are too few to fill the GPU,
          a row is split into PARTS. Each program writes its part's maximum and sums, and a second launch merges them,
          always in the same order. Of shorter rows a program takes several, by the widest access that divides N and
          the rows' distance; v04's kernel takes those that fill a warp and of which its compiler sees 16 bytes.
Why:      v04's compiler knows where a row starts only if N and the rows' distance are multiples of 16, and loads single
          elements elsewhere. And a program a row leaves most SMs without work where there are few rows.
Counter:  time stays at many rows of a multiple of 16 elements, and falls at few rows and at misaligned ones.
Requires: rows whose elements are contiguous, at any distance from each other. An address that is no multiple of 16
          bytes makes all loads single elements.
Source:   softmax's v13, for parts and ends of rows
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.loss.cross_entropy.short_rows import cross_entropy_short_rows, held
from kernel_twins._triton.loss.cross_entropy.v04_rows_per_block import _write, cross_entropy_v04_rows_per_block
from kernel_twins._triton.softmax.routes import Rows, split
from kernel_twins._triton.softmax.split import constants_of, edges_of, part_of

LONG_BYTES = 8_192  # rows up to which v04's tiles hold a whole one, or several
SEEN = 16  # what N and the rows' distance must be multiples of for v04's compiler to load vectors
NUMBERS = 3  # of a part: the maximum, the sum of exponentials, and that of the logits

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cross_entropy_v06_dispatch_kernel(
    logits, target, losses, lse, numbers, N, stride_lm, PARTS, ignore_index: tl.int64, smoothing,
    SMOOTHED: tl.constexpr, ONE: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    # logits: [M, N]; target, losses: [M]; lse: [M] or None; numbers: [M, NUMBERS, PARTS], or None if ONE part is a row.
    # Offsets and columns have 64 bits: a row may pass 2^31.
    row, part = tl.program_id(0).to(tl.int64) // PARTS, tl.program_id(0).to(tl.int64) % PARTS
    row_class = tl.load(target + row)
    start_of_row = tl.cdiv(row * stride_lm, VECTOR) * VECTOR
    head = start_of_row - row * stride_lm if EDGES else 0
    first, end = part_of(N, head, part, PARTS, VECTOR)
    end = tl.where(row_class == ignore_index, first, end)  # an ignored row is not read
    pack, place = tl.arange(0, BLOCK // VECTOR)[:, None], tl.arange(0, VECTOR)[None, :]

    # Each pack of a vector's places carries a running maximum and the sum of exponentials relative to it. The maximum
    # of several pieces comes first, so that the sum is scaled once for all of them.
    maxima = tl.full((BLOCK // VECTOR,), -float("inf"), dtype=tl.float32)
    sums, totals = tl.zeros_like(maxima), tl.zeros_like(maxima)
    for start in tl.range(first, end, BLOCK * PIECES):
        left = tl.minimum(end - start, BLOCK * PIECES).to(tl.int32) // VECTOR
        tiles = ()
        for piece in tl.static_range(PIECES):
            # The mask is the same for a whole vector, so that it is loaded by one access.
            where = logits + start_of_row + start + piece * BLOCK + (pack * VECTOR + place)
            tiles += (tl.load(where, mask=pack + piece * (BLOCK // VECTOR) < left, other=-float("inf")),)
        new = maxima
        for piece in tl.static_range(PIECES):
            new = tl.maximum(new, tl.max(tiles[piece].to(tl.float32), axis=1))
        # While a pack has seen only -inf, its sum must stay 0: -inf - -inf would make it NaN.
        base = tl.where(new == -float("inf"), 0.0, new)
        sums *= tl.exp2((maxima - base) * LOG2_E)
        for piece in tl.static_range(PIECES):
            sums += tl.sum(tl.exp2((tiles[piece].to(tl.float32) - base[:, None]) * LOG2_E), axis=1)
        maxima = new
        if SMOOTHED:  # for smoothing alone: masked logits make the sum -inf
            for piece in tl.static_range(PIECES):
                values = tiles[piece].to(tl.float32)
                totals += tl.sum(tl.where(pack + piece * (BLOCK // VECTOR) < left, values, 0.0), axis=1)

    part_max, total = tl.max(maxima), tl.sum(totals) if SMOOTHED else 0.0
    if EDGES:
        edge_col, edge_mask = edges_of(N, head, part, VECTOR)
        edge_mask = edge_mask & (row_class != ignore_index)
        edges = tl.load(logits + start_of_row + edge_col, mask=edge_mask, other=-float("inf")).to(tl.float32)
        part_max = tl.maximum(part_max, tl.max(edges))
        if SMOOTHED:
            total += tl.sum(tl.where(edge_mask, edges, 0.0))
    base = tl.where(part_max == -float("inf"), 0.0, part_max)
    part_sum = tl.sum(sums * tl.exp2((maxima - base) * LOG2_E))
    if EDGES:
        part_sum += tl.sum(tl.exp2((edges - base) * LOG2_E))

    if ONE:
        is_class = (row_class >= 0) & (row_class < N)
        logit = tl.load(logits + row * stride_lm + row_class, mask=is_class, other=float("nan")).to(tl.float32)
        _write(
            losses, lse, row, None, row_class, ignore_index, logit, part_max, part_sum, total, N, smoothing, SMOOTHED
        )  # fmt: skip
    else:
        of_part = numbers + row * 3 * PARTS + part
        tl.store(of_part, part_max)
        tl.store(of_part + PARTS, part_sum)
        if SMOOTHED:
            tl.store(of_part + 2 * PARTS, total)


@triton.jit
def cross_entropy_v06_dispatch_rows_kernel(
    logits, target, losses, lse, numbers, N, stride_lm, PARTS, ignore_index: tl.int64, smoothing,
    SMOOTHED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    # One row a program. numbers: [M, NUMBERS, PARTS], of which there are no more than SLOTS.
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    of_parts, mask = numbers + row * 3 * PARTS + slot, slot < PARTS
    maxima = tl.load(of_parts, mask=mask, other=-float("inf"))
    sums = tl.load(of_parts + PARTS, mask=mask, other=0.0)
    row_class = tl.load(target + row)
    is_class = (row_class >= 0) & (row_class < N)
    logit = tl.load(logits + row * stride_lm + row_class, mask=is_class, other=float("nan")).to(tl.float32)
    row_max = tl.max(maxima)
    base = tl.where(row_max == -float("inf"), 0.0, row_max)
    row_sum = tl.sum(sums * tl.exp2((maxima - base) * LOG2_E))
    total = tl.sum(tl.load(of_parts + 2 * PARTS, mask=mask, other=0.0)) if SMOOTHED else 0.0
    _write(
        losses, lse, row, None, row_class, ignore_index, logit, row_max, row_sum, total, N, smoothing, SMOOTHED
    )  # fmt: skip


class Prepared(NamedTuple):
    """The prepared launches over long rows, for calls that differ only in values and in equally aligned addresses."""

    first: plans.Plan
    second: plans.Plan | None  # of split rows
    numbers: int  # in the workspace of split rows

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on logits, target, losses and lse."""
        logits, *others = tensors
        assert logits is not None
        numbers = _workspace(self.numbers, logits.device) if self.second else None
        self.first(logits, *others, numbers)
        if self.second:
            self.second(logits, *others, numbers)


_plans: dict[tuple[Any, ...], Prepared | plans.Plan] = {}


def cross_entropy_v06_dispatch(
    logits: Tensor, target: Tensor, *, out: Any, ignore_index: int = -100, label_smoothing: float = 0.0
) -> None:
    """out = the rows' losses, or a tuple of them and lse; logits: [M, N], contiguous rows; target and out: [M]."""
    M, N = logits.shape
    stride = logits.stride(0) if M > 1 else N
    rows = Rows(M, N, logits.element_size(), (stride,), logits.data_ptr() % 16 == 0)
    short, seen = N * logits.element_size() <= LONG_BYTES, N % SEEN == stride % SEEN == logits.data_ptr() % 16 == 0
    way = held(rows, sm_count(logits.device)) if short and M * N > 0 else None
    if M * N == 0 or (short and seen and (way is None or not way.shares_warps)):
        cross_entropy_v04_rows_per_block(
            logits, target, out=out, ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        return
    losses, lse = out if isinstance(out, tuple) else (out, None)
    tensors, options = (logits, target, losses, lse), (ignore_index, label_smoothing)
    key = logits.shape, logits.stride(0), logits.dtype, plans.alignment(*tensors), options, logits.get_device()
    known = _plans.get(key)
    if known is not None:
        known(*tensors)
        return
    if way is not None:
        plan = cross_entropy_short_rows(way, tensors, (M, N, stride), options)
        if plan is not None:
            plans.keep(_plans, key, plan)
        return
    parts = split(rows, sm_count(logits.device)).parts
    size = NUMBERS * M * parts if parts > 1 else 0
    numbers = _workspace(size, logits.device) if parts > 1 else None
    behind, smoothed = (N, stride, parts, *options), {"SMOOTHED": label_smoothing > 0}
    constants = constants_of(rows, rows.inputs_together) | smoothed | {"ONE": parts == 1}
    first = plans.launch(cross_entropy_v06_dispatch_kernel, (M * parts,), (*tensors, numbers), behind, constants)
    second = None
    if parts > 1:
        constants = smoothed | {"SLOTS": triton.next_power_of_2(parts), "num_warps": 1}
        second = plans.launch(cross_entropy_v06_dispatch_rows_kernel, (M,), (*tensors, numbers), behind, constants)
    if first is not None and (second is not None or parts == 1):
        plans.keep(_plans, key, Prepared(first, second, size))


def _workspace(size: int, device: torch.device) -> Tensor:
    """Memory of torch's allocator: later work on the stream may reuse it, and a captured graph owns its own."""
    return torch.empty(size, dtype=torch.float32, device=device)

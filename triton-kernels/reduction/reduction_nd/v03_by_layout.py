"""reduction_nd v03_by_layout: threads lie along the axis that is contiguous in memory.

Change:   a program has a tile of outputs and their elements, whose last dimension is the contiguous one: elements if
          that axis is reduced, outputs if it is kept. It adds tile after tile, and reduces along the elements once, at
          the end.
Why:      in both cases a warp reads whole lines, and outputs of few elements lie side by side in a tile. But a tile has
          no explicit lanes: the compiler must find out which thread reads what, and an offset from a division hides
          that elements are contiguous. So loads are wide if there is one axis, or if sizes are multiples of 16, and
          take single elements otherwise.
Error:    at most (R / 16 + 16) eps/2 sum|x| down columns, less along rows.
Counter:  time falls along rows, and most over the middle axis; down a single axis of columns it may rise.
Requires: nothing. If no axis is contiguous, the tile's last dimension is the axis with the smallest stride.
Twin:     cuda-kernels/reduction/reduction_nd/v03_by_layout.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.reduction.reduction_nd.axes import along_reduced, count, split
from kernel_twins._triton.reduction.reduction_nd.totals import add, none, place_of, reduce, store

NUM_WARPS = 4
TILE = 2048
LONGEST = 1024  # elements of a tile, along rows
WIDEST = 128  # columns of a tile, down columns


@triton.jit
def reduction_nd_v03_by_layout_kernel(
    x, out, kept_sizes, kept_strides, kept_steps, sizes, strides, steps, outputs: tl.int64, elements: tl.int64, divisor,
    KIND: tl.constexpr, ALONG: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # x, out: addressed by the kept axes and the reduced axes. A tile is [BLOCK_K, BLOCK_R], or down columns [BLOCK_R,
    # BLOCK_K].
    AXIS: tl.constexpr = 1 if ALONG else 0
    output = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.expand_dims(tl.arange(0, BLOCK_K), AXIS)
    offset, step = place_of(output, kept_sizes, kept_strides, kept_steps)
    values, places = none((BLOCK_K, BLOCK_R) if ALONG else (BLOCK_R, BLOCK_K), KIND)
    for start in tl.range(0, elements, BLOCK_R):
        index = start + tl.expand_dims(tl.arange(0, BLOCK_R), 1 - AXIS)
        element, at = place_of(index, sizes, strides, steps)
        mask = (output < outputs) & (index < elements)
        values, places = add(values, places, x + offset + element, at, mask, KIND)
    value, place = reduce(values, places, AXIS, KIND)
    store(out, tl.reshape(step, (BLOCK_K,)), value, place, divisor, tl.reshape(output, (BLOCK_K,)) < outputs, KIND)


def reduction_nd_v03_by_layout(x: Tensor, *, out: Tensor, dims: tuple[int, ...] = (-1,), kind: str = "sum") -> None:
    """out = the sum of x over the axes dims, or mean, max or argmax; fp32, bf16 or fp16 in, argmax int64 out."""
    kept, reduced = split(x.shape, x.stride(), [dim % x.dim() for dim in dims], kind == "argmax")
    outputs, elements = count(kept), count(reduced)
    if outputs == 0:
        return
    along = along_reduced(kept, reduced)
    if along:
        block_r = min(triton.next_power_of_2(max(elements, 1)), LONGEST)
        block_k = TILE // block_r if block_r < LONGEST else 1
    else:
        block_k = min(triton.next_power_of_2(outputs), WIDEST)
        block_r = TILE // block_k
    divisor = float(elements) if kind == "mean" else 1.0
    reduction_nd_v03_by_layout_kernel[(triton.cdiv(outputs, block_k),)](
        x, out, *zip(*kept, strict=True), *zip(*reduced, strict=True), outputs, elements, divisor,
        KIND="sum" if kind == "mean" else kind, ALONG=along, BLOCK_K=block_k, BLOCK_R=block_r, num_warps=NUM_WARPS,
    )  # fmt: skip

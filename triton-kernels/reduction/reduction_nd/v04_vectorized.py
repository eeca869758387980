"""reduction_nd v04_vectorized: loads of 16 bytes in both directions, with four of a thread in flight.

Change:   the tile's last dimension lies within one run of the innermost axis: a chunk of a run of elements, or all rows
          of a tile of columns. Only the outer axes need divisions. A thread has 32 elements of a tile, or 16 if it must
          keep their indices.
Why:      if an offset contains only a block's own indices, the compiler sees contiguous elements, and loads 16 bytes if
          the axes' strides are multiples of 16. The price is padding: runs of 49 elements fill tiles of 64, where a
          lane in CUDA goes on with the next run. Misaligned runs are loaded by single elements, since the compiler
          cannot know where in a row a multiple of 16 bytes is.
Error:    at most (R / 32 + 16) eps/2 sum|x| down columns, less along rows.
Counter:  time stays along rows; dram_share rises. Down 4,096 columns the programs are only 16, and the time rises,
          which v05 mends.
Requires: nothing. If no axis is contiguous, tiles lie along the axis with the smallest stride.
Twin:     cuda-kernels/reduction/reduction_nd/v04_vectorized.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.reduction.reduction_nd.axes import along_reduced, count, split
from kernel_twins._triton.reduction.reduction_nd.totals import add, none, place_of, reduce, run_of, store

NUM_WARPS = 4
TILE, TILE_OF_PLACES = 4096, 2048
WIDEST = 256  # columns of a tile


@triton.jit
def reduction_nd_v04_vectorized_kernel(
    x, out, kept_sizes, kept_strides, kept_steps, sizes, strides, steps, outputs: tl.int64, elements: tl.int64, divisor,
    KIND: tl.constexpr, ALONG: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # x, out: addressed by the kept axes and the reduced axes. A tile is [BLOCK_K, BLOCK_R], or down columns [BLOCK_R,
    # BLOCK_K].
    LAST: tl.constexpr = len(sizes) - 1 if ALONG else len(kept_sizes) - 1
    program = tl.program_id(0).to(tl.int64)
    if ALONG:
        output = program * BLOCK_K + tl.arange(0, BLOCK_K)
        offset, step = place_of(output, kept_sizes, kept_strides, kept_steps)
        inside = output < outputs
        pointers = x + offset[:, None]
        run = sizes[LAST]
        in_chunk = tl.arange(0, BLOCK_R)[None, :]
        chunks = (run - 1) // BLOCK_R + 1  # tl.cdiv adds first, which wraps near 2^31
        values, places = none((BLOCK_K, BLOCK_R), KIND)
        for chunk in tl.range(0, elements // tl.maximum(run, 1) * chunks):
            outer, at = run_of(chunk // chunks, sizes, strides, steps)
            index = chunk % chunks * BLOCK_R + in_chunk
            mask = inside[:, None] & (index < run)
            where = pointers + outer + index * strides[LAST]
            values, places = add(values, places, where, at + index * steps[LAST], mask, KIND)
        value, place = reduce(values, places, 1, KIND)
    else:
        run = kept_sizes[LAST]
        blocks = (run - 1) // BLOCK_K + 1
        column = program % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
        offset, first = run_of(program // blocks, kept_sizes, kept_strides, kept_steps)
        step = first + column * kept_steps[LAST]
        inside = column < run
        pointers = x + offset + column[None, :] * kept_strides[LAST]
        values, places = none((BLOCK_R, BLOCK_K), KIND)
        for start in tl.range(0, elements, BLOCK_R):
            row = start + tl.arange(0, BLOCK_R)[:, None]
            element, at = place_of(row, sizes, strides, steps)
            mask = inside[None, :] & (row < elements)
            values, places = add(values, places, pointers + element, at, mask, KIND)
        value, place = reduce(values, places, 0, KIND)
    store(out, step, value, place, divisor, inside, KIND)


def reduction_nd_v04_vectorized(x: Tensor, *, out: Tensor, dims: tuple[int, ...] = (-1,), kind: str = "sum") -> None:
    """out = the sum of x over the axes dims, or mean, max or argmax; fp32, bf16 or fp16 in, argmax int64 out."""
    kept, reduced = split(x.shape, x.stride(), [dim % x.dim() for dim in dims], kind == "argmax")
    outputs, elements = count(kept), count(reduced)
    if outputs == 0:
        return
    tile = TILE_OF_PLACES if kind == "argmax" else TILE
    along = along_reduced(kept, reduced)
    if along:
        block_r = min(triton.next_power_of_2(max(reduced[-1].size, 1)), tile)
        block_k = min(tile // block_r, triton.next_power_of_2(outputs))
        programs = triton.cdiv(outputs, block_k)
    else:
        block_k = min(triton.next_power_of_2(kept[-1].size), WIDEST)
        block_r = min(tile // block_k, triton.next_power_of_2(max(elements, 1)))
        programs = outputs // kept[-1].size * triton.cdiv(kept[-1].size, block_k)
    divisor = float(elements) if kind == "mean" else 1.0
    reduction_nd_v04_vectorized_kernel[(programs,)](
        x, out, *zip(*kept, strict=True), *zip(*reduced, strict=True), outputs, elements, divisor,
        KIND="sum" if kind == "mean" else kind, ALONG=along, BLOCK_K=block_k, BLOCK_R=block_r, num_warps=NUM_WARPS,
    )  # fmt: skip

"""A norm of rows of any length in two launches: every row is split into parts, which need not run at once.

The first kernel reads the rows and leaves the numbers of every part in a workspace. The second one merges the numbers
of a row's parts, always in the same order, and writes the result. It reads the rows again, beginning with those that
were read last: what is still in L2 comes from there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.norm.routing import NUM_WARPS, STAGES, Split


@triton.jit
def part_of(index, parts, share_tiles, N, BLOCK: tl.constexpr):
    # The row, the part's number, its first column and its number of columns, in 64 bits; index counts all parts.
    part, share = index % parts, tl.cast(share_tiles, tl.int64) * BLOCK
    return (index // parts).to(tl.int64), part, part * share, tl.minimum(share, N - part * share)


@triton.jit
def tile_mask(count, first, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    # One comparison a vector, so that it is loaded as one.
    return tl.arange(0, BLOCK) // VECTOR < tl.minimum(count - first, BLOCK).to(tl.int32) // VECTOR


@triton.jit
def at(matrix, row, stride, start, VECTOR: tl.constexpr):
    # Written so that the compiler sees a multiple of VECTOR.
    return matrix + (row * stride + start) // VECTOR * VECTOR


@triton.jit
def norm_parts_kernel(
    x, residual, added, numbers, M: tl.int64, N: tl.int64, stride_xm: tl.int64, stride_rm: tl.int64, parts, share_tiles,
    CENTERED: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # x, residual: [M, N]; added: [M, N] contiguous; numbers: [1 or 2, M, parts], a part's sum of squares or, if
    # CENTERED, of squared distances from its mean, and then the mean. Missing tensors are None.
    row, part, start, count = part_of(tl.program_id(0), parts, share_tiles, N, BLOCK)
    place = tl.arange(0, BLOCK)
    x_part = at(x, row, stride_xm, start, VECTOR) + place
    residual_part = None if residual is None else at(residual, row, stride_rm, start, VECTOR) + place
    added_part = None if residual is None else at(added, row, N, start, VECTOR) + place
    # Each place of the tile has a mean and squares of its own, by Welford's formula: one reduction at the end.
    means, squares = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.range(0, count, BLOCK, num_stages=STAGES):
        mask = tile_mask(count, first, BLOCK, VECTOR)
        tile = tl.load(x_part + first, mask=mask, other=0.0)
        if residual is not None:
            more = tl.load(residual_part + first, mask=mask, other=0.0)
            tile = (tile.to(tl.float32) + more.to(tl.float32)).to(tile.dtype)
            tl.store(added_part + first, tile, mask=mask)
        values = tile.to(tl.float32)
        if CENTERED:
            # Places that the last tile does not reach stay as they are.
            distance = tl.where(mask, values - means, 0.0)
            means += distance * (1.0 / tl.cast(first // BLOCK + 1, tl.float32))
            squares += distance * (values - means)
        else:
            squares += values * values
    result = numbers + row * parts + part
    if CENTERED:
        # Chan's formula, for all places at once.
        counts = (count // BLOCK + tl.where(place < count % BLOCK, 1, 0)).to(tl.float32)
        mean = tl.sum(counts * means) / count
        squares += counts * (means - mean) * (means - mean)
        tl.store(result + M * parts, mean)
    tl.store(result, tl.sum(squares))


@triton.jit
def norm_split_rows_kernel(
    x, weight, bias, out, mean, rstd, numbers, M: tl.int64, N: tl.int64, stride_xm: tl.int64, parts, share_tiles, eps,
    CENTERED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # x: [M, N], what is normalised; weight, bias: [N]; out: [M, N] contiguous; mean, rstd: [M]. Missing ones are None.
    # The parts in reverse: those that were read last may still be in L2.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    row, part, start, count = part_of(index, parts, share_tiles, N, BLOCK)
    slot = tl.arange(0, SLOTS)
    known = numbers + row * parts + slot
    squares = tl.load(known, mask=slot < parts, other=0.0)
    row_mean = 0.0
    if CENTERED:
        # Chan's formula, for all parts at once.
        means = tl.load(known + M * parts, mask=slot < parts, other=0.0)
        share = tl.cast(share_tiles, tl.int64) * BLOCK
        counts = tl.maximum(tl.minimum(N - slot * share, share), 0).to(tl.float32)
        row_mean = tl.sum(counts * means) / N
        squares += counts * (means - row_mean) * (means - row_mean)
    row_rstd = 1.0 / tl.sqrt_rn(tl.sum(squares) / N + eps)
    if part == 0:
        if CENTERED:
            tl.store(mean + row, row_mean)
        tl.store(rstd + row, row_rstd)

    place = tl.arange(0, BLOCK)
    x_part, out_part = at(x, row, stride_xm, start, VECTOR) + place, at(out, row, N, start, VECTOR) + place
    for first in tl.range(0, count, BLOCK, num_stages=STAGES):
        mask = tile_mask(count, first, BLOCK, VECTOR)
        # Subtracts first: the difference is exact where the mean is large.
        tile = tl.load(x_part + first, mask=mask, other=0.0, eviction_policy="evict_first")
        values = (tile.to(tl.float32) - row_mean) * row_rstd
        if weight is not None:
            values *= tl.load(weight + start + first + place, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            values += tl.load(bias + start + first + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_part + first, values.to(out.dtype.element_ty), mask=mask)


def norm_split_rows(
    route: Split, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], eps: float, vector: int
) -> Callable[..., None] | None:
    """Launch both kernels on x, weight, bias, residual, y, mean, rstd and the sum, and return a plan of the two.

    ``sizes``: M, N, and the strides of rows of x and residual; ``vector``: elements of an access, of which N and the
    strides are multiples.
    """
    M, N, stride_xm, _ = sizes
    centered = tensors[5] is not None
    constants = {"CENTERED": centered, "BLOCK": route.block, "VECTOR": vector, "STAGES": STAGES, "num_warps": NUM_WARPS}

    def operands(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        y: Tensor, mean: Tensor | None, rstd: Tensor, added: Tensor | None,
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:  # fmt: skip
        numbers = torch.empty((1 + centered, M, route.parts), dtype=torch.float32, device=x.device)
        source = x if added is None else added
        return (x, residual, added, numbers), (source, weight, bias, y, mean, rstd, numbers)

    of_parts, of_rows = operands(*tensors)  # type: ignore[arg-type]
    shares = route.parts, route.share_tiles
    grid = (M * route.parts,)
    first = plans.launch(norm_parts_kernel, grid, of_parts, (*sizes, *shares), constants)
    behind = M, N, stride_xm if tensors[3] is None else N, *shares, eps
    second = plans.launch(norm_split_rows_kernel, grid, of_rows, behind, {"SLOTS": route.slots, **constants})
    if first is None or second is None:
        return None

    def again(*tensors: Tensor) -> None:
        of_parts, of_rows = operands(*tensors)
        first(*of_parts)  # type: ignore[arg-type]
        second(*of_rows)  # type: ignore[arg-type]

    return again

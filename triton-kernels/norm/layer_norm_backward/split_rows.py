"""A norm's backward pass for rows of any length in two launches: every row is split into parts, every column summed.

The first kernel leaves the two sums of every part of a row in a workspace. A program of the second one has a block of
columns and takes rows one after the other: it merges the sums of a row's parts, always in the same order, and writes
dx. So the sums of its columns stay in its registers. It begins with the rows that were read last: what is still in L2
comes from there. Where columns are too few for all SMs, rows are sliced, too, and a third kernel adds the slices' sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.norm.layer_norm.split_rows import at, part_of, tile_mask
from kernel_twins._triton.norm.layer_norm_backward.column_sums import SUM_WARPS, norm_backward_sum_kernel, summing
from kernel_twins._triton.norm.routing import NUM_WARPS, STAGES, Split


@triton.jit
def norm_backward_parts_kernel(
    dout, x, mean, rstd, weight, numbers, M: tl.int64, N: tl.int64, stride_dm: tl.int64, stride_xm: tl.int64,
    parts, share_tiles, BLOCK: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # dout, x: [M, N]; mean, rstd: [M]; weight: [N]; numbers: [1 or 2, M, parts], the sum of a part's gradient * xhat
    # and, if there is a mean, that of its gradient. Missing tensors are None.
    row, part, start, count = part_of(tl.program_id(0), parts, share_tiles, N, BLOCK)
    place = tl.arange(0, BLOCK)
    row_mean = tl.load(mean + row) if mean is not None else 0.0
    row_rstd = tl.load(rstd + row)
    dout_part, x_part = at(dout, row, stride_dm, start, VECTOR) + place, at(x, row, stride_xm, start, VECTOR) + place
    # A sum for each place of the tile, and one reduction at the end. dout is 0 behind the row.
    products, sums = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.range(0, count, BLOCK, num_stages=STAGES):
        mask = tile_mask(count, first, BLOCK, VECTOR)
        gradient = tl.load(dout_part + first, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(x_part + first, mask=mask, other=0.0).to(tl.float32)
        if weight is not None:
            gradient *= tl.load(weight + start + first + place, mask=mask, other=0.0).to(tl.float32)
        products += gradient * ((values - row_mean) * row_rstd)
        sums += gradient
    result = numbers + row * parts + part
    tl.store(result, tl.sum(products))
    if mean is not None:
        tl.store(result + M * parts, tl.sum(sums))


@triton.jit
def norm_backward_columns_kernel(
    dout, x, mean, rstd, weight, dadded, dx, dweight, dbias, numbers, M: tl.int64, N: tl.int64, stride_dm: tl.int64,
    stride_xm: tl.int64, stride_am: tl.int64, parts, slice_rows: tl.int64,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # dout, x, dadded: [M, N]; mean, rstd: [M]; weight: [N]; dx: [M, N] contiguous; dweight, dbias: [slices, N], sums of
    # slice_rows rows. Missing tensors are None.
    # Slices in reverse, and the rows of each: those that were read last may still be in L2.
    blocks = (N - 1) // BLOCK + 1
    index = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    number, start = index // blocks, index % blocks * BLOCK
    begin = number * slice_rows
    end = tl.minimum(begin + slice_rows, M)
    place, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    mask = tile_mask(N, start, BLOCK, VECTOR)
    weights = None if weight is None else tl.load(weight + start + place, mask=mask, other=0.0).to(tl.float32)
    dweights, dbiases = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    for back in tl.range(begin, end, num_stages=STAGES):
        row = begin + end - 1 - back
        one = row + tl.zeros((1,), dtype=tl.int64)  # a tensor, so that its loads travel ahead, too
        known = numbers + row * parts + slot
        product_mean, gradient_mean, row_mean = tl.sum(tl.load(known, mask=slot < parts, other=0.0)) / N, 0.0, 0.0
        if mean is not None:
            gradient_mean = tl.sum(tl.load(known + M * parts, mask=slot < parts, other=0.0)) / N
            row_mean = tl.load(mean + one)
        row_rstd = tl.load(rstd + one)
        gradient = tl.load(at(dout, row, stride_dm, start, VECTOR) + place, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(at(x, row, stride_xm, start, VECTOR) + place, mask=mask, other=0.0).to(tl.float32)
        xhat = (values - row_mean) * row_rstd
        if weight is not None:
            dweights += gradient * xhat
            dbiases += gradient
            gradient *= weights
        result = row_rstd * (gradient - gradient_mean - xhat * product_mean)
        if dadded is not None:
            result += tl.load(at(dadded, row, stride_am, start, VECTOR) + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(at(dx, row, N, start, VECTOR) + place, result.to(dx.dtype.element_ty), mask=mask)
    if weight is not None:
        tl.store(at(dweight, number, N, start, VECTOR) + place, dweights.to(dweight.dtype.element_ty), mask=mask)
        if mean is not None:
            tl.store(at(dbias, number, N, start, VECTOR) + place, dbiases.to(dbias.dtype.element_ty), mask=mask)


def norm_backward_split_rows(
    route: Split, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], vector: int
) -> Callable[..., None] | None:
    """Launch the kernels on dout, x, mean, rstd, weight, dadded, dx, dweight and dbias, and return a plan of them.

    ``sizes``: M, N, and the strides of rows of dout, x and dadded; ``vector``: elements of an access, of which N and
    the strides are multiples.
    """
    M, N, stride_dm, stride_xm, _ = sizes
    dout, x, mean, rstd, weight, dadded, dx, dweight, dbias = tensors
    assert dout is not None
    device, sums = dout.device, 2 if mean is not None else 1
    slices, slice_rows = route.sliced(M, N, weight is not None, sm_count(device))
    constants = {"BLOCK": route.block, "VECTOR": vector, "STAGES": STAGES, "num_warps": NUM_WARPS}

    def workspace() -> tuple[Tensor, Tensor | None]:
        numbers = torch.empty((sums, M, route.parts), dtype=torch.float32, device=device)
        if slices == 1 or weight_is_none:
            return numbers, None
        return numbers, torch.empty((sums, slices, N), dtype=torch.float32, device=device)

    weight_is_none = weight is None
    numbers, partials = workspace()
    of_slices = _of_slices(partials, dweight, dbias)
    behind = M, N, stride_dm, stride_xm, route.parts, route.share_tiles
    read = dout, x, mean, rstd, weight
    first = plans.launch(norm_backward_parts_kernel, (M * route.parts,), (*read, numbers), behind, constants)
    second = plans.launch(
        norm_backward_columns_kernel, (triton.cdiv(N, route.block) * slices,),
        (*read, dadded, dx, *of_slices, numbers), (*sizes, route.parts, slice_rows),
        {"SLOTS": route.slots, **constants},
    )  # fmt: skip
    third = None
    if partials is not None:
        grid, sizes_behind = summing(sums, slices, N, sm_count(device))
        third = plans.launch(
            norm_backward_sum_kernel, grid, (partials, dweight, dbias), sizes_behind, {"num_warps": SUM_WARPS}
        )
    if first is None or second is None or (partials is not None and third is None):
        return None

    def again(*tensors: Tensor) -> None:
        *read, dadded, dx, dweight, dbias = tensors
        numbers, partials = workspace()
        first(*read, numbers)
        second(*read, dadded, dx, *_of_slices(partials, dweight, dbias), numbers)
        if third is not None and partials is not None:
            third(partials, dweight, dbias)

    return again


def _of_slices(
    partials: Tensor | None, dweight: Tensor | None, dbias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Where the slices' sums of columns go: to the results themselves if there is one slice."""
    if partials is None:
        return dweight, dbias
    return partials[0], None if dbias is None else partials[1]

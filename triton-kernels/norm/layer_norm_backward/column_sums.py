"""The last kernel of a norm's backward pass: the sums of columns, from the partial sums of groups of rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib.device import sm_count

SUM_WARPS = 4
SUM_TILE = 4096  # elements of the partial sums that a program has under way
SUM_WIDTHS = 8, 512  # columns of such a tile: a sector of memory at least


@triton.jit(do_not_specialize=["groups"])
def norm_backward_sum_kernel(partials, dweight, dbias, groups, N, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr):
    # partials: [2, groups, N], or of rms_norm, whose dbias is None, [1, groups, N]; dweight, dbias: [N].
    col = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    partials += tl.program_id(1).to(tl.int64) * groups * N
    sums = tl.zeros((GROUPS, BLOCK_N), dtype=tl.float32)
    for first in tl.range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)[:, None]
        sums += tl.load(partials + group.to(tl.int64) * N + col, mask=(group < groups) & (col < N), other=0.0)
    total = tl.sum(sums, axis=0, keep_dims=True)
    if tl.program_id(1) == 0:
        tl.store(dweight + col, total.to(dweight.dtype.element_ty), mask=col < N)
    elif dbias is not None:
        tl.store(dbias + col, total.to(dbias.dtype.element_ty), mask=col < N)


def summing(outputs: int, groups: int, N: int, sms: int) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """The kernel's grid, a program or two for each SM, and its arguments behind dbias."""
    narrowest, widest = SUM_WIDTHS
    width = min(max(triton.next_power_of_2(triton.cdiv(N * outputs, 2 * sms)), narrowest), widest)
    return (triton.cdiv(N, width), outputs, 1), (groups, N, SUM_TILE // width, width)


def add_up(partials: Tensor, dweight: Tensor, dbias: Tensor | None = None) -> None:
    """dweight and dbias = sums of partials, [2, groups, N] or without dbias [1, groups, N], over the groups."""
    grid, arguments = summing(*partials.shape, sm_count(partials.device))  # type: ignore[call-arg]
    norm_backward_sum_kernel[grid](partials, dweight, dbias, *arguments, num_warps=SUM_WARPS)

"""rms_norm_backward v01_rows_then_columns: one kernel for sums along rows, another for sums along columns.

Change:   none yet, this is where the ladder starts.
Why:      as layer_norm_backward's v01: dx needs one sum of each row here, and dweight one of each column. A program of
          the second kernel takes a strip of columns over a slice of the rows, and a third kernel adds the slices,
          always in the same order.
Counter:  dram_share stays below what memory gives; bytes_over_minimum is above five thirds: both kernels read x and
          dout, and the first does not find all of its rows in L1 the second time.
Requires: rows whose elements are contiguous, at any distance from each other. Where N and those distances are multiples
          of 16, loads take 16 bytes; elsewhere the compiler cannot know where a row starts, and loads one element at a
          time.
Twin:     cuda-kernels/norm/rms_norm_backward/v01_rows_then_columns.cu
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.norm.layer_norm_backward.column_sums import add_up
from kernel_twins._triton.norm.layer_norm_backward.v01_rows_then_columns import (
    BLOCK,
    BLOCK_M,
    BLOCK_N,
    MOST_PROGRAMS,
    NUM_WARPS,
    sliced,
)


@triton.jit
def rms_norm_backward_v01_rows_then_columns_kernel(
    dout, x, rstd, weight, dadded, dx, M: tl.int64, N: tl.int64, stride_dm: tl.int64, stride_xm: tl.int64,
    stride_am: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    # dout, x, dadded: [M, N]; rstd: [M]; weight: [N]; dx: [M, N] contiguous. Missing tensors are None. Offsets of rows
    # have 64 bits: row * N may pass 2^31. More rows than a grid has programs are taken in turns.
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0)):
        row_rstd = tl.load(rstd + row)

        # A running sum for each place of the block, and one reduction at the end. Elements behind the row are 0.
        product_sum = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in tl.range(0, N, BLOCK):
            col = start + tl.arange(0, BLOCK)
            gradient = tl.load(dout + row * stride_dm + col, mask=col < N, other=0.0).to(tl.float32)
            if weight is not None:
                gradient *= tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
            values = tl.load(x + row * stride_xm + col, mask=col < N, other=0.0).to(tl.float32)
            product_sum += gradient * (values * row_rstd)
        product_mean = tl.sum(product_sum) / N

        for start in tl.range(0, N, BLOCK):
            col = start + tl.arange(0, BLOCK)
            gradient = tl.load(dout + row * stride_dm + col, mask=col < N, other=0.0).to(tl.float32)
            if weight is not None:
                gradient *= tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
            values = tl.load(x + row * stride_xm + col, mask=col < N, other=0.0).to(tl.float32)
            result = row_rstd * (gradient - values * row_rstd * product_mean)
            if dadded is not None:
                result += tl.load(dadded + row * stride_am + col, mask=col < N, other=0.0).to(tl.float32)
            tl.store(dx + row * N + col, result.to(dx.dtype.element_ty), mask=col < N)


@triton.jit
def rms_norm_backward_v01_rows_then_columns_columns_kernel(
    dout, x, rstd, partials, M: tl.int64, N, stride_dm, stride_xm, slice_rows: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # partials: [1, slices, N].
    strips = tl.cdiv(N, BLOCK_N)
    part = (tl.program_id(0) // strips).to(tl.int64)
    col = tl.program_id(0) % strips * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dweight = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    end = tl.minimum((part + 1) * slice_rows, M)
    for first in tl.range(part * slice_rows, end, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)[:, None]
        mask = (row < end) & (col < N)
        gradient = tl.load(dout + row * stride_dm + col, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(x + row * stride_xm + col, mask=mask, other=0.0).to(tl.float32)
        dweight += gradient * (values * tl.load(rstd + row, mask=row < end, other=0.0))
    tl.store(partials + part * N + col, tl.sum(dweight, axis=0, keep_dims=True), mask=col < N)


def rms_norm_backward_v01_rows_then_columns(
    dout: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dadded: Tensor | None = None,
    *,
    out: Tensor | tuple[Tensor, ...],
) -> None:
    """out = dx and dweight, or without a weight dx alone; fp32, bf16 or fp16.

    dout, x, and dadded, the gradient of x + residual: [M, N], contiguous rows; rstd: [M], fp32; weight, dweight: [N];
    dx: [M, N].
    """
    (M, N), (dx, *sums) = dout.shape, out if isinstance(out, tuple) else (out,)
    if M == 0 or N == 0:
        for each in sums:
            each.zero_()
        return
    rms_norm_backward_v01_rows_then_columns_kernel[(min(M, MOST_PROGRAMS),)](
        dout, x, rstd, weight, dadded, dx, M, N, dout.stride(0), x.stride(0),
        0 if dadded is None else dadded.stride(0), BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    if sums:
        strips, slice_rows, slices = sliced(M, N, sm_count(dout.device))
        partials = torch.empty((1, slices, N), dtype=torch.float32, device=dout.device)
        rms_norm_backward_v01_rows_then_columns_columns_kernel[(strips * slices,)](
            dout, x, rstd, partials, M, N, dout.stride(0), x.stride(0), slice_rows,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=NUM_WARPS,
        )  # fmt: skip
        add_up(partials, *sums)

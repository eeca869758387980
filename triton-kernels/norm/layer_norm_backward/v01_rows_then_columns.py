"""layer_norm_backward v01_rows_then_columns: one kernel for sums along rows, another for sums along columns.

Change:   none yet, this is where the ladder starts.
Why:      dx needs two sums of each row, and dweight and dbias one sum of each column. A program that walks along rows
          meets every column once a row, so the columns get a kernel of their own: there a program takes a strip of
          columns over a slice of the rows, and a third kernel adds the slices, always in the same order.
Counter:  dram_share stays below what memory gives; bytes_over_minimum is about five thirds, as both kernels read x and
          dout.
Requires: rows whose elements are contiguous, at any distance from each other. Where N and those distances are multiples
          of 16, loads take 16 bytes; elsewhere the compiler cannot know where a row starts, and loads one element at a
          time.
Twin:     cuda-kernels/norm/layer_norm_backward/v01_rows_then_columns.cu
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.norm.layer_norm_backward.column_sums import add_up

NUM_WARPS = 4
BLOCK = 1024
BLOCK_M, BLOCK_N = 16, 128  # of a strip's tile
SLICES_PER_SM = 8  # programs that sum columns
MOST_PROGRAMS = 2**31 - 1


@triton.jit
def layer_norm_backward_v01_rows_then_columns_kernel(
    dout, x, mean, rstd, weight, dadded, dx, M: tl.int64, N: tl.int64, stride_dm: tl.int64, stride_xm: tl.int64,
    stride_am: tl.int64, BLOCK: tl.constexpr,
):  # fmt: skip
    # dout, x, dadded: [M, N]; mean, rstd: [M]; weight: [N]; dx: [M, N] contiguous. Missing tensors are None. Offsets
    # of rows have 64 bits: row * N may pass 2^31. More rows than a grid has programs are taken in turns.
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0)):
        row_mean, row_rstd = tl.load(mean + row), tl.load(rstd + row)

        # Running sums for each place of the block, and one reduction at the end. Elements behind the row are 0.
        product_sum = tl.zeros((BLOCK,), dtype=tl.float32)
        gradient_sum = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in tl.range(0, N, BLOCK):
            col = start + tl.arange(0, BLOCK)
            gradient = tl.load(dout + row * stride_dm + col, mask=col < N, other=0.0).to(tl.float32)
            if weight is not None:
                gradient *= tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
            values = tl.load(x + row * stride_xm + col, mask=col < N, other=0.0).to(tl.float32)
            product_sum += gradient * ((values - row_mean) * row_rstd)
            gradient_sum += gradient
        product_mean, gradient_mean = tl.sum(product_sum) / N, tl.sum(gradient_sum) / N

        for start in tl.range(0, N, BLOCK):
            col = start + tl.arange(0, BLOCK)
            gradient = tl.load(dout + row * stride_dm + col, mask=col < N, other=0.0).to(tl.float32)
            if weight is not None:
                gradient *= tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
            values = tl.load(x + row * stride_xm + col, mask=col < N, other=0.0).to(tl.float32)
            xhat = (values - row_mean) * row_rstd
            result = row_rstd * (gradient - gradient_mean - xhat * product_mean)
            if dadded is not None:
                result += tl.load(dadded + row * stride_am + col, mask=col < N, other=0.0).to(tl.float32)
            tl.store(dx + row * N + col, result.to(dx.dtype.element_ty), mask=col < N)


@triton.jit
def layer_norm_backward_v01_rows_then_columns_columns_kernel(
    dout, x, mean, rstd, partials, M: tl.int64, N, stride_dm, stride_xm, slice_rows: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # partials: [2, slices, N], of dweight and dbias.
    strips = tl.cdiv(N, BLOCK_N)
    part, slices = (tl.program_id(0) // strips).to(tl.int64), tl.num_programs(0) // strips
    col = tl.program_id(0) % strips * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dweight = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    end = tl.minimum((part + 1) * slice_rows, M)
    for first in tl.range(part * slice_rows, end, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)[:, None]
        mask = (row < end) & (col < N)
        gradient = tl.load(dout + row * stride_dm + col, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(x + row * stride_xm + col, mask=mask, other=0.0).to(tl.float32)
        row_mean, row_rstd = tl.load(mean + row, row < end, other=0.0), tl.load(rstd + row, row < end, other=0.0)
        dweight += gradient * ((values - row_mean) * row_rstd)
        dbias += gradient
    place = partials + part * N + col
    tl.store(place, tl.sum(dweight, axis=0, keep_dims=True), mask=col < N)
    tl.store(place + slices * N, tl.sum(dbias, axis=0, keep_dims=True), mask=col < N)


def layer_norm_backward_v01_rows_then_columns(
    dout: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dadded: Tensor | None = None,
    *,
    out: Tensor | tuple[Tensor, ...],
) -> None:
    """out = dx, dweight and dbias, or without a weight dx alone; fp32, bf16 or fp16.

    dout, x, and dadded, the gradient of x + residual: [M, N], contiguous rows; mean, rstd: [M], fp32; weight, dweight,
    dbias: [N]; dx: [M, N].
    """
    (M, N), (dx, *sums) = dout.shape, out if isinstance(out, tuple) else (out,)
    if M == 0 or N == 0:
        for each in sums:
            each.zero_()
        return
    layer_norm_backward_v01_rows_then_columns_kernel[(min(M, MOST_PROGRAMS),)](
        dout, x, mean, rstd, weight, dadded, dx, M, N, dout.stride(0), x.stride(0),
        0 if dadded is None else dadded.stride(0), BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    if sums:
        strips, slice_rows, slices = sliced(M, N, sm_count(dout.device))
        partials = torch.empty((2, slices, N), dtype=torch.float32, device=dout.device)
        layer_norm_backward_v01_rows_then_columns_columns_kernel[(strips * slices,)](
            dout, x, mean, rstd, partials, M, N, dout.stride(0), x.stride(0), slice_rows,
            BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=NUM_WARPS,
        )  # fmt: skip
        add_up(partials, *sums)


def sliced(M: int, N: int, sms: int) -> tuple[int, int, int]:
    """Strips of columns, rows of a slice, and slices, so that the GPU is full and no two slices share a tile."""
    strips = triton.cdiv(N, BLOCK_N)
    wanted = max(1, SLICES_PER_SM * sms // strips)
    slice_rows = triton.cdiv(triton.cdiv(M, wanted), BLOCK_M) * BLOCK_M
    return strips, slice_rows, triton.cdiv(M, slice_rows)

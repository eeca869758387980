"""dropout_add_backward v01_rows_then_columns: one kernel for dx, another for the sums of its columns.

Change:   none yet, this is where the ladder starts.
Why:      the definition, word for word: dbias sums dx before it is rounded, so a second kernel reads everything again,
          a strip of columns over a slice of the rows, and a third one adds the slices, always in the same order. Both
          draw the words of the forward pass again, one element at a time.
Counter:  bytes_over_minimum is about 1.5 without an activation; dram_share is low.
Requires: rows whose elements are contiguous, at any distance from each other.
Twin:     cuda-kernels/dropout/dropout_add_backward/v01_rows_then_columns.cu
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.dropout.philox import gradient, keeps_each, numbers, places
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.norm.layer_norm_backward.column_sums import add_up
from kernel_twins._triton.norm.layer_norm_backward.v01_rows_then_columns import BLOCK_M, BLOCK_N, sliced

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def _dx(
    dout, x, bias, N, stride_dm, stride_xm, seed, offset, threshold, scale, row, col, mask, ALL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    # dx before it is rounded.
    dx = tl.load(dout + row * stride_dm + col, mask=mask, other=0.0).to(tl.float32)
    z = dx  # of no meaning without an activation
    if ACTIVATION != "none":
        z = tl.load(x + row * stride_xm + col, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            z += tl.load(bias + col, mask=mask, other=0.0).to(tl.float32)
    kept = keeps_each(seed, offset, threshold, ALL, row * N + col)
    return tl.where(kept, gradient(dx, z, scale, ACTIVATION), 0.0)


@triton.jit(do_not_specialize=["seed", "offset"])
def dropout_add_backward_v01_rows_then_columns_kernel(
    dout, x, bias, dx, M: tl.int64, N, stride_dm, stride_xm, seed, offset, threshold: tl.uint32, scale,
    ALL: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # dout, x: [M, N]; bias: [N]; dx: [M, N] contiguous. Missing tensors are None. Elements are counted in 64 bits.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    row, col = places(first, N, BLOCK, 1)
    values = _dx(
        dout, x, bias, N, stride_dm, stride_xm, seed, offset, threshold, scale, row, col, i < M * N, ALL, ACTIVATION
    )
    tl.store(dx + i, values.to(dx.dtype.element_ty), mask=i < M * N)


@triton.jit(do_not_specialize=["seed", "offset"])
def dropout_add_backward_v01_rows_then_columns_columns_kernel(
    dout, x, bias, partials, M: tl.int64, N, stride_dm, stride_xm, slice_rows: tl.int64, seed, offset,
    threshold: tl.uint32, scale, ALL: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    # partials: [slices, N].
    strips = (N - 1) // BLOCK_N + 1  # tl.cdiv adds first, which wraps near 2^31
    part = (tl.program_id(0) // strips).to(tl.int64)
    col = tl.program_id(0) % strips * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    end = tl.minimum((part + 1) * slice_rows, M)
    for start in tl.range(part * slice_rows, end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)[:, None]
        mask = (row < end) & (col < N)
        sums += _dx(
            dout, x, bias, N, stride_dm, stride_xm, seed, offset, threshold, scale, row, col, mask, ALL, ACTIVATION
        )
    tl.store(partials + part * N + col, tl.sum(sums, axis=0, keep_dims=True), mask=col < N)


def dropout_add_backward_v01_rows_then_columns(
    dout: Tensor,
    x: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    p: float = 0.5,
    activation: str = "none",
    seed: int | Tensor = 0,
    offset: int | None = 0,
    out: Tensor | tuple[Tensor, ...],
) -> None:
    """out = dx, or dx and dbias; fp32, bf16 or fp16.

    dout, x: [M, N], contiguous rows, x only with an activation; bias, dbias: [N]; dx: [M, N]. Where offset is None,
    seed holds both: [2], int64.
    """
    (M, N), (dx, *sums) = dout.shape, out if isinstance(out, tuple) else (out,)
    if M == 0 or N == 0:
        for each in sums:
            each.zero_()
        return
    threshold, scale, drops_all = numbers(p)
    inputs = (dout, x, bias)
    sizes = (M, N, dout.stride(0), 0 if x is None else x.stride(0))
    options = {"ALL": drops_all, "ACTIVATION": activation, "num_warps": NUM_WARPS}
    dropout_add_backward_v01_rows_then_columns_kernel[(triton.cdiv(M * N, BLOCK),)](
        *inputs, dx, *sizes, seed, offset, threshold, scale, BLOCK=BLOCK, **options
    )
    for dbias in sums:
        strips, slice_rows, slices = sliced(M, N, sm_count(dout.device))
        partials = torch.empty((1, slices, N), dtype=torch.float32, device=dout.device)
        dropout_add_backward_v01_rows_then_columns_columns_kernel[(strips * slices,)](
            *inputs, partials, *sizes, slice_rows, seed, offset, threshold, scale, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
            **options,
        )  # fmt: skip
        add_up(partials, dbias)

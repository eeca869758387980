"""softmax v02_online: maximum and sum in one pass over the row, and a second pass to write.

Change:   every place of the block carries a running maximum and the sum of exponentials relative to it; when the
          maximum grows, the sum so far is scaled down. Pairs of the two are combined after the pass.
Why:      one pass fewer to wait for, at the price of one more exponential for each element that is read.
Counter:  time falls.
Requires: rows whose elements are contiguous, at any distance from each other. Loads take 16 bytes if N and that
          distance are multiples of 16; otherwise the compiler cannot know where a row starts, and loads single
          elements.
Source:   Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867).
Twin:     cuda-kernels/softmax/softmax/v02_online.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib.launch_rows import in_parts

NUM_WARPS = 4
BLOCK = 1024

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_v02_online_kernel(x, out, N: tl.int64, stride_xm: tl.int64, LOG: tl.constexpr, BLOCK: tl.constexpr):
    # x: [M, N], out: [M, N] contiguous. Offsets of rows have 64 bits: row * N may pass 2^31.
    row = tl.program_id(0).to(tl.int64)
    x_row, out_row = x + row * stride_xm, out + row * N

    maxima = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        values = tl.load(x_row + col, mask=col < N, other=-float("inf")).to(tl.float32)
        new_maxima = tl.maximum(maxima, values)
        # While a place has seen only -inf, its sum must stay 0: -inf - -inf would make it NaN.
        base = tl.where(new_maxima == -float("inf"), 0.0, new_maxima)
        sums = sums * tl.exp2((maxima - base) * LOG2_E) + tl.exp2((values - base) * LOG2_E)
        maxima = new_maxima

    # Here a row of nothing but -inf becomes NaN, as does one with a NaN or +inf.
    row_max = tl.max(maxima)
    row_sum = tl.sum(sums * tl.exp2((maxima - row_max) * LOG2_E))

    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        values = tl.load(x_row + col, mask=col < N, other=-float("inf")).to(tl.float32) - row_max
        values = values - tl.log(row_sum) if LOG else tl.exp2(values * LOG2_E) / row_sum
        tl.store(out_row + col, values.to(out.dtype.element_ty), mask=col < N)


def softmax_v02_online(x: Tensor, *, out: Tensor, log: bool = False) -> None:
    """out = softmax of x's rows, or its logarithm; x: [M, N], contiguous rows; out: [M, N]; fp32, bf16 or fp16."""
    M, N = x.shape
    if M == 0 or N == 0 or in_parts(softmax_v02_online, x, out=out, log=log):
        return
    softmax_v02_online_kernel[(M,)](x, out, N, x.stride(0), LOG=log, BLOCK=BLOCK, num_warps=NUM_WARPS)

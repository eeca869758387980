"""softmax v01_three_passes: a program reads its row three times: for the maximum, for the sum, and to write.

Change:   none yet, this is where the ladder starts.
Why:      the definition, word for word. A row of 4096 stays in L1 between the passes, so device memory sees it once;
          but every pass waits for its loads, and then for the slowest warp.
Counter:  dram_share stays low; bytes_over_minimum is near 1, as far as rows stay in L1 between the passes.
Requires: rows whose elements are contiguous, at any distance from each other. Loads take 16 bytes if N and that
          distance are multiples of 16; otherwise the compiler cannot know where a row starts, and loads single
          elements.
Twin:     cuda-kernels/softmax/softmax/v01_three_passes.cu
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
def softmax_v01_three_passes_kernel(
    x, out, N: tl.int64, stride_xm: tl.int64, LOG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # x: [M, N], out: [M, N] contiguous. Offsets of rows have 64 bits: row * N may pass 2^31.
    row = tl.program_id(0).to(tl.int64)
    x_row, out_row = x + row * stride_xm, out + row * N

    # A running maximum for each place of the block, and one reduction at the end. Elements beyond the row count as
    # -inf: no maximum, and 0 in the sum.
    row_max = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        row_max = tl.maximum(row_max, tl.load(x_row + col, mask=col < N, other=-float("inf")).to(tl.float32))
    row_max = tl.max(row_max)

    # The difference comes first: it is exact for nearby values, while multiplying a large maximum and x by log2(e)
    # first would lose digits. A NaN or +inf, and a row of nothing but -inf, make the difference NaN and with it the
    # sum.
    row_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        values = tl.load(x_row + col, mask=col < N, other=-float("inf")).to(tl.float32)
        row_sum += tl.exp2((values - row_max) * LOG2_E)
    row_sum = tl.sum(row_sum)

    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        values = tl.load(x_row + col, mask=col < N, other=-float("inf")).to(tl.float32) - row_max
        values = values - tl.log(row_sum) if LOG else tl.exp2(values * LOG2_E) / row_sum
        tl.store(out_row + col, values.to(out.dtype.element_ty), mask=col < N)


def softmax_v01_three_passes(x: Tensor, *, out: Tensor, log: bool = False) -> None:
    """out = softmax of x's rows, or its logarithm; x: [M, N], contiguous rows; out: [M, N]; fp32, bf16 or fp16."""
    M, N = x.shape
    if M == 0 or N == 0 or in_parts(softmax_v01_three_passes, x, out=out, log=log):
        return
    softmax_v01_three_passes_kernel[(M,)](x, out, N, x.stride(0), LOG=log, BLOCK=BLOCK, num_warps=NUM_WARPS)

"""softmax_backward v01_two_passes: a program reads its rows of dout and y twice: for the sum, and to write.

Change:   none yet, this is where the ladder starts.
Why:      one number of a row is needed instead of softmax's two, from two matrices. The second pass finds both rows in
          L1, but every pass waits for its loads, and then for the slowest warp.
Counter:  dram_share stays low; bytes_over_minimum is near 1, as far as rows stay in L1 between the passes.
Requires: rows whose elements are contiguous, at any distance from each other. Loads take 16 bytes if N and those
          distances are multiples of 16; otherwise the compiler cannot know where a row starts, and loads single
          elements.
Twin:     cuda-kernels/softmax/softmax_backward/v01_two_passes.cu
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
def softmax_backward_v01_two_passes_kernel(
    dout, y, out, N: tl.int64, stride_dm: tl.int64, stride_ym: tl.int64, LOG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # dout, y: [M, N], out: [M, N] contiguous. Offsets of rows have 64 bits: row * N may pass 2^31.
    row = tl.program_id(0).to(tl.int64)
    dout_row, y_row, out_row = dout + row * stride_dm, y + row * stride_ym, out + row * N

    # A running sum for each place of the block, and one reduction at the end. Elements beyond the row count as 0.
    row_sum = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        gradient = tl.load(dout_row + col, mask=col < N, other=0.0).to(tl.float32)
        row_sum += gradient if LOG else gradient * tl.load(y_row + col, mask=col < N, other=0.0).to(tl.float32)
    row_sum = tl.sum(row_sum)

    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        gradient = tl.load(dout_row + col, mask=col < N, other=0.0).to(tl.float32)
        values = tl.load(y_row + col, mask=col < N, other=0.0).to(tl.float32)
        result = gradient - tl.exp2(values * LOG2_E) * row_sum if LOG else values * (gradient - row_sum)
        tl.store(out_row + col, result.to(out.dtype.element_ty), mask=col < N)


def softmax_backward_v01_two_passes(dout: Tensor, y: Tensor, *, out: Tensor, log: bool = False) -> None:
    """out = gradient of softmax's input, or of log_softmax's; fp32, bf16 or fp16.

    dout, its result's gradient, and y, its result: [M, N], contiguous rows; out: [M, N].
    """
    M, N = dout.shape
    if M == 0 or N == 0 or in_parts(softmax_backward_v01_two_passes, dout, y, out=out, log=log):
        return
    softmax_backward_v01_two_passes_kernel[(M,)](
        dout, y, out, N, dout.stride(0), y.stride(0), LOG=log, BLOCK=BLOCK, num_warps=NUM_WARPS
    )

"""softmax_backward v02_registers: register-resident rows, each read once.

Change:   the block is as long as the row, rounded up to a power of 2, and is loaded once from each matrix.
Why:      all loads of a thread are in flight at once, and none is repeated. Two rows need twice the registers of the
          forward pass, so a row may be half as long.
Counter:  time falls, and dram_share rises.
Requires: rows of at most 8,192 elements: rows whose elements are contiguous, at any distance from each other. Loads
          take 16 bytes if N and those distances are multiples of 16; otherwise the compiler cannot know where a row
          starts, and loads single elements.
Twin:     cuda-kernels/softmax/softmax_backward/v02_registers.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib.launch_rows import in_parts

ELEMENTS_PER_THREAD = 16  # of each matrix

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_backward_v02_registers_kernel(
    dout, y, out, N, stride_dm, stride_ym, LOG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # dout, y: [M, N], out: [M, N] contiguous. Offsets of rows have 64 bits: row * N may pass 2^31.
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)

    # Elements beyond the row count as 0.
    gradient = tl.load(dout + row * stride_dm + col, mask=col < N, other=0.0).to(tl.float32)
    values = tl.load(y + row * stride_ym + col, mask=col < N, other=0.0).to(tl.float32)
    row_sum = tl.sum(gradient if LOG else gradient * values)
    result = gradient - tl.exp2(values * LOG2_E) * row_sum if LOG else values * (gradient - row_sum)
    tl.store(out + row * N + col, result.to(out.dtype.element_ty), mask=col < N)


def softmax_backward_v02_registers(dout: Tensor, y: Tensor, *, out: Tensor, log: bool = False) -> None:
    """out = gradient of softmax's input, or of log_softmax's; fp32, bf16 or fp16.

    dout, its result's gradient, and y, its result: [M, N], contiguous rows, N at most 8,192; out: [M, N].
    """
    M, N = dout.shape
    if M == 0 or N == 0 or in_parts(softmax_backward_v02_registers, dout, y, out=out, log=log):
        return
    block = triton.next_power_of_2(N)
    num_warps = min(max(block // (32 * ELEMENTS_PER_THREAD), 4), 32)
    softmax_backward_v02_registers_kernel[(M,)](
        dout, y, out, N, dout.stride(0), y.stride(0), LOG=log, BLOCK=block, num_warps=num_warps
    )

"""softmax v03_registers: a register-resident row, which is read once.

Change:   the block is as long as the row, rounded up to a power of 2, and is loaded once.
Why:      the loads of a thread are all in flight at once, and none is repeated. The registers of a program now bound
          the length of a row.
Counter:  time falls, and dram_share rises.
Requires: rows of at most 16,384 elements: rows whose elements are contiguous, at any distance from each other. Loads
          take 16 bytes if N and that distance are multiples of 16; otherwise the compiler cannot know where a row
          starts, and loads single elements.
Twin:     cuda-kernels/softmax/softmax/v03_registers.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib.launch_rows import in_parts

ELEMENTS_PER_THREAD = 32

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_v03_registers_kernel(x, out, N: tl.int64, stride_xm: tl.int64, LOG: tl.constexpr, BLOCK: tl.constexpr):
    # x: [M, N], out: [M, N] contiguous. Offsets of rows have 64 bits: row * N may pass 2^31.
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)

    # Elements beyond the row count as -inf: no maximum, and 0 in the sum.
    values = tl.load(x + row * stride_xm + col, mask=col < N, other=-float("inf")).to(tl.float32)
    # The difference comes first: it is exact for nearby values, while multiplying a large maximum and x by log2(e)
    # first would lose digits. A NaN or +inf, and a row of nothing but -inf, make the difference NaN and with it the
    # sum.
    values = values - tl.max(values)
    powers = tl.exp2(values * LOG2_E)
    row_sum = tl.sum(powers)
    values = values - tl.log(row_sum) if LOG else powers / row_sum
    tl.store(out + row * N + col, values.to(out.dtype.element_ty), mask=col < N)


def softmax_v03_registers(x: Tensor, *, out: Tensor, log: bool = False) -> None:
    """out = softmax of x's rows, or its logarithm; x: [M, N], contiguous rows; out: [M, N]; fp32, bf16 or fp16.

    N is at most 16,384.
    """
    M, N = x.shape
    if M == 0 or N == 0 or in_parts(softmax_v03_registers, x, out=out, log=log):
        return
    block = triton.next_power_of_2(N)
    num_warps = min(max(block // (32 * ELEMENTS_PER_THREAD), 4), 32)
    softmax_v03_registers_kernel[(M,)](x, out, N, x.stride(0), LOG=log, BLOCK=block, num_warps=num_warps)

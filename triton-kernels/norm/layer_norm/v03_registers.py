"""layer_norm v03_registers: the row is register-resident: it is read once.

Change:   the block is as long as the row, rounded up to a power of 2, and is loaded once.
Why:      the passes over the row become passes over registers, where a second one is cheap: the mean is subtracted
          before anything is squared. All loads of a thread are under way at once. The registers of a program now bound
          the length of a row.
Counter:  time falls; dram_share rises.
Requires: rows of at most 16,384 elements, contiguous, at any distance from each other. Where N and that distance are
          multiples of 16, loads take 16 bytes; elsewhere the compiler cannot know where a row starts, and loads one
          element at a time.
Twin:     cuda-kernels/norm/layer_norm/v03_registers.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_THREAD = 32
MOST_PROGRAMS = 2**31 - 1


@triton.jit
def layer_norm_v03_registers_kernel(
    x, weight, bias, residual, out, mean, rstd, added, M: tl.int64, N: tl.int64, stride_xm: tl.int64,
    stride_rm: tl.int64, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    # x, residual: [M, N]; weight, bias: [N]; out, added: [M, N] contiguous; mean, rstd: [M]. Missing tensors are None.
    # Offsets of rows have 64 bits: row * N may pass 2^31. More rows than a grid has programs are taken in turns.
    col = tl.arange(0, BLOCK)
    mask = col < N
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0)):
        values = tl.load(x + row * stride_xm + col, mask=mask, other=0.0)
        if residual is not None:
            # The sum is rounded to x's dtype, as it is returned; the norm is that of the rounded sum.
            terms = tl.load(residual + row * stride_rm + col, mask=mask, other=0.0).to(tl.float32)
            values = (values.to(tl.float32) + terms).to(values.dtype)
            tl.store(added + row * N + col, values, mask=mask)
        values = values.to(tl.float32)

        # Subtracts first: the difference is exact where the mean is large. Elements behind the row were read as 0:
        # their distance from the mean must not count.
        row_mean = tl.sum(values) / N
        values = tl.where(mask, values - row_mean, 0.0)
        row_rstd = 1.0 / tl.sqrt_rn(tl.sum(values * values) / N + eps)
        tl.store(mean + row, row_mean)
        tl.store(rstd + row, row_rstd)

        values *= row_rstd
        if weight is not None:
            values *= tl.load(weight + col, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            values += tl.load(bias + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * N + col, values.to(out.dtype.element_ty), mask=mask)


def layer_norm_v03_registers(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-5,
    out: tuple[Tensor, ...],
) -> None:
    """out = y, mean, rstd, and with a residual the sum x + residual, which y then normalises; fp32, bf16 or fp16.

    x, residual: [M, N], contiguous rows; weight, bias: [N]; y and the sum: [M, N]; mean and rstd: [M], fp32. N is at
    most 16,384.
    """
    (M, N), (y, mean, rstd, *rest) = x.shape, out
    if M == 0:
        return
    block = triton.next_power_of_2(max(N, 1))
    layer_norm_v03_registers_kernel[(min(M, MOST_PROGRAMS),)](
        x, weight, bias, residual, y, mean, rstd, rest[0] if rest else None, M, N, x.stride(0),
        0 if residual is None else residual.stride(0), eps, BLOCK=block,
        num_warps=min(max(block // (32 * ELEMENTS_PER_THREAD), 4), 32),
    )  # fmt: skip

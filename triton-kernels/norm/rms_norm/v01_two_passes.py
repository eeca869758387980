"""rms_norm v01_two_passes: a program reads its row twice: for the sum of the squares, and to write.

Change:   none yet, this is where the ladder starts. What layer_norm's ladder has tried is not tried again.
Why:      the definition, word for word. Without a mean there is one number to wait for instead of two, and nothing is
          subtracted, so a single sum loses no digits.
Counter:  dram_share stays below what memory gives; bytes_over_minimum is above 1, so not every row stays in L1.
Requires: rows whose elements are contiguous, at any distance from each other. Where N and that distance are multiples
          of 16, loads take 16 bytes; elsewhere the compiler cannot know where a row starts, and loads one element at a
          time.
Source:   Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
Twin:     cuda-kernels/norm/rms_norm/v01_two_passes.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4
BLOCK = 1024
MOST_PROGRAMS = 2**31 - 1


@triton.jit
def _values(x_row, residual_row, col, mask):
    # The row, or its sum with the residual, in fp32; the sum is rounded to x's dtype first, as it is returned.
    values = tl.load(x_row + col, mask=mask, other=0.0)
    if residual_row is not None:
        residual = tl.load(residual_row + col, mask=mask, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) + residual).to(values.dtype)
    return values.to(tl.float32)


@triton.jit
def rms_norm_v01_two_passes_kernel(
    x, weight, residual, out, rstd, added, M: tl.int64, N: tl.int64, stride_xm: tl.int64, stride_rm: tl.int64, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # x, residual: [M, N]; weight: [N]; out, added: [M, N] contiguous; rstd: [M]. Missing tensors are None.
    # Offsets of rows have 64 bits: row * N may pass 2^31. More rows than a grid has programs are taken in turns.
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0)):
        x_row, out_row = x + row * stride_xm, out + row * N
        residual_row = None if residual is None else residual + row * stride_rm

        # A sum for each place of the block, and one reduction at the end. Elements behind the row count as 0.
        squares = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in tl.range(0, N, BLOCK):
            col = start + tl.arange(0, BLOCK)
            values = _values(x_row, residual_row, col, col < N)
            squares += values * values
        row_rstd = 1.0 / tl.sqrt_rn(tl.sum(squares) / N + eps)
        tl.store(rstd + row, row_rstd)

        for start in tl.range(0, N, BLOCK):
            col = start + tl.arange(0, BLOCK)
            values = _values(x_row, residual_row, col, col < N)
            if residual is not None:
                tl.store(added + row * N + col, values.to(added.dtype.element_ty), mask=col < N)
            values *= row_rstd
            if weight is not None:
                values *= tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
            tl.store(out_row + col, values.to(out.dtype.element_ty), mask=col < N)


def rms_norm_v01_two_passes(
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-6,
    out: tuple[Tensor, ...],
) -> None:
    """out = y, rstd, and with a residual the sum x + residual, which y then normalises; fp32, bf16 or fp16.

    x, residual: [M, N], contiguous rows; weight: [N]; y and the sum: [M, N]; rstd: [M], fp32.
    """
    (M, N), (y, rstd, *rest) = x.shape, out
    if M == 0:
        return
    rms_norm_v01_two_passes_kernel[(min(M, MOST_PROGRAMS),)](
        x, weight, residual, y, rstd, rest[0] if rest else None, M, N, x.stride(0),
        0 if residual is None else residual.stride(0), eps, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip

"""layer_norm v01_three_passes: a program reads its row three times: for the mean, for the distances from it, to write.

Change:   none yet, this is where the ladder starts.
Why:      the definition, word for word: the variance is the mean of the squared distances from the mean, so no digits
          are lost where the mean is large. A row of 4096 stays in L1 between the passes, so device memory sees it once;
          but every pass waits for its loads, and then for the slowest warp.
Counter:  dram_share is below its peak, and a little more is read than each element once, so not every row stays in L1.
          Not steady: time and dram_share differ between runs of the same code.
Requires: rows whose elements are contiguous, at any distance from each other. Where N and that distance are multiples
          of 16, loads take 16 bytes; elsewhere the compiler cannot know where a row starts, and loads one element at a
          time.
Twin:     cuda-kernels/norm/layer_norm/v01_three_passes.cu
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
def layer_norm_v01_three_passes_kernel(
    x, weight, bias, residual, out, mean, rstd, added, M: tl.int64, N: tl.int64, stride_xm: tl.int64,
    stride_rm: tl.int64, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    # x, residual: [M, N]; weight, bias: [N]; out, added: [M, N] contiguous; mean, rstd: [M]. Missing tensors are None.
    # Offsets of rows have 64 bits: row * N may pass 2^31. More rows than a grid has programs are taken in turns.
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0)):
        x_row, out_row = x + row * stride_xm, out + row * N
        residual_row = None if residual is None else residual + row * stride_rm

        # A sum for each place of the block, and one reduction at the end.
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in tl.range(0, N, BLOCK):
            col = start + tl.arange(0, BLOCK)
            total += _values(x_row, residual_row, col, col < N)
        row_mean = tl.sum(total) / N

        # Elements behind the row were read as 0: their distance must not count.
        squares = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in tl.range(0, N, BLOCK):
            col = start + tl.arange(0, BLOCK)
            distance = tl.where(col < N, _values(x_row, residual_row, col, col < N) - row_mean, 0.0)
            squares += distance * distance
        row_rstd = 1.0 / tl.sqrt_rn(tl.sum(squares) / N + eps)
        tl.store(mean + row, row_mean)
        tl.store(rstd + row, row_rstd)

        for start in tl.range(0, N, BLOCK):
            col = start + tl.arange(0, BLOCK)
            values = _values(x_row, residual_row, col, col < N)
            if residual is not None:
                tl.store(added + row * N + col, values.to(added.dtype.element_ty), mask=col < N)
            # Subtracts first: the difference is exact where the mean is large.
            values = (values - row_mean) * row_rstd
            if weight is not None:
                values *= tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
            if bias is not None:
                values += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)
            tl.store(out_row + col, values.to(out.dtype.element_ty), mask=col < N)


def layer_norm_v01_three_passes(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-5,
    out: tuple[Tensor, ...],
) -> None:
    """out = y, mean, rstd, and with a residual the sum x + residual, which y then normalises; fp32, bf16 or fp16.

    x, residual: [M, N], contiguous rows; weight, bias: [N]; y and the sum: [M, N]; mean and rstd: [M], fp32.
    """
    (M, N), (y, mean, rstd, *rest) = x.shape, out
    if M == 0:
        return
    layer_norm_v01_three_passes_kernel[(min(M, MOST_PROGRAMS),)](
        x, weight, bias, residual, y, mean, rstd, rest[0] if rest else None, M, N, x.stride(0),
        0 if residual is None else residual.stride(0), eps, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip

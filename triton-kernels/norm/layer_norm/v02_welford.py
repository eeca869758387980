"""layer_norm v02_welford: mean and squared distances from it in one pass over the row, and a second pass to write.

Change:   every place of the block carries a running mean and the sum of the squared distances from it, and updates both
          with each element. Places are merged after the pass by Chan's formula, which adds a term for the distance of
          their means.
Why:      one pass less to wait for, without the loss of digits of mean(x^2) - mean(x)^2, at the price of more
          arithmetic an element.
Counter:  load requests fall; time falls, though not against every run of v01.
Requires: rows whose elements are contiguous, at any distance from each other. Where N and that distance are multiples
          of 16, loads take 16 bytes; elsewhere the compiler cannot know where a row starts, and loads one element at a
          time.
Source:   Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products" (Technometrics 4, 1962);
          to combine: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
          Variances" (Stanford CS-79-773).
Twin:     cuda-kernels/norm/layer_norm/v02_welford.cu
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
def layer_norm_v02_welford_kernel(
    x, weight, bias, residual, out, mean, rstd, added, M: tl.int64, N: tl.int64, stride_xm: tl.int64,
    stride_rm: tl.int64, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    # x, residual: [M, N]; weight, bias: [N]; out, added: [M, N] contiguous; mean, rstd: [M]. Missing tensors are None.
    # Offsets of rows have 64 bits: row * N may pass 2^31. More rows than a grid has programs are taken in turns.
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0)):
        x_row, out_row = x + row * stride_xm, out + row * N
        residual_row = None if residual is None else residual + row * stride_rm

        counts = tl.zeros((BLOCK,), dtype=tl.float32)
        means = tl.zeros((BLOCK,), dtype=tl.float32)
        squares = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in tl.range(0, N, BLOCK):
            col = start + tl.arange(0, BLOCK)
            values = _values(x_row, residual_row, col, col < N)
            # Every place has one element more after each block, but for places that the last block does not reach: they
            # stay as they are.
            counts += tl.where(col < N, 1.0, 0.0)
            distance = tl.where(col < N, values - means, 0.0)
            means += distance * (1.0 / (start // BLOCK + 1))
            squares += distance * (values - means)
        # Chan's formula, for all places at once.
        row_mean = tl.sum(counts * means) / N
        distance = means - row_mean
        row_rstd = 1.0 / tl.sqrt_rn(tl.sum(squares + counts * distance * distance) / N + eps)
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


def layer_norm_v02_welford(
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
    layer_norm_v02_welford_kernel[(min(M, MOST_PROGRAMS),)](
        x, weight, bias, residual, y, mean, rstd, rest[0] if rest else None, M, N, x.stride(0),
        0 if residual is None else residual.stride(0), eps, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip

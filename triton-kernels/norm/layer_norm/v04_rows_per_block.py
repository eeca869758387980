"""layer_norm v04_rows_per_block: a program takes a tile of several short rows, or as many warps as a long row needs.

Change:   a program holds a tile of TILE_BYTES: several rows side by side if they are shorter. A longer row is read
          twice, in blocks of half a tile, as in v02. The tile's size and the number of warps are searched over the list
          below (see tuning.py).
Why:      a program for a row of 256 leaves most of its threads idle, and still waits at barriers. In a tile, one warp
          takes such a row and needs shuffles alone, and a program has many rows under way. Weight and bias are loaded
          once for all of them, and marked to leave L1 last.
Counter:  time falls for rows of 256, and rises a little for rows of 4096.
Requires: rows of at most 64 KiB whose elements are contiguous, at any distance from each other. Where N and that
          distance are multiples of 16, loads take 16 bytes; elsewhere the compiler cannot know where a row starts, and
          loads one element at a time.
Twin:     cuda-kernels/norm/layer_norm/v04_rows_per_block.cu
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning

CONFIGS = [
    triton.Config({"TILE_BYTES": size}, num_warps=warps)
    for size, warps in (
        (8192, 4), (2048, 1), (4096, 2), (4096, 4), (8192, 8), (16384, 4), (32768, 8), (32768, 16), (65536, 16),
        (65536, 32),
    )
]  # fmt: skip


def tile_of(args: dict[str, Any]) -> int:
    """Elements of a tile."""
    return args["TILE_BYTES"] // args["x"].element_size()


@triton.jit
def _values(x_rows, residual_rows, added_rows, col, mask):
    # The rows, or their sums with the residual, in fp32; sums are rounded to x's dtype first, as they are returned.
    values = tl.load(x_rows + col, mask=mask, other=0.0)
    if residual_rows is not None:
        residual = tl.load(residual_rows + col, mask=mask, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) + residual).to(values.dtype)
        if added_rows is not None:
            tl.store(added_rows + col, values, mask=mask)
    return values.to(tl.float32)


@triton.jit
def _affine(values, weight, bias, col, N):
    if weight is not None:
        values *= tl.load(weight + col, mask=col < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if bias is not None:
        values += tl.load(bias + col, mask=col < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return values


@triton.autotune(CONFIGS, key=["N"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(
    {
        "WHOLE": lambda args: args["N"] <= tile_of(args),
        "BLOCK_N": lambda args: triton.next_power_of_2(max(args["N"], 1)) if args["WHOLE"] else tile_of(args) // 2,
        "ROWS": lambda args: tile_of(args) // args["BLOCK_N"] if args["WHOLE"] else 1,
    }
)
@triton.jit
def layer_norm_v04_rows_per_block_kernel(
    x, weight, bias, residual, out, mean, rstd, added, M, N, stride_xm, stride_rm, eps,
    TILE_BYTES: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # x, residual: [M, N]; weight, bias: [N]; out, added: [M, N] contiguous; mean, rstd: [M]. Missing tensors are None.
    # Offsets of rows have 64 bits: row * N may pass 2^31.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK_N)[None, :]
    x_rows, out_rows = x + row * stride_xm, out + row * N
    residual_rows = None if residual is None else residual + row * stride_rm
    added_rows = None if residual is None else added + row * N

    if WHOLE:
        mask = (row < M) & (col < N)
        values = _values(x_rows, residual_rows, added_rows, col, mask)
        # Subtracts first: the difference is exact where the mean is large. Elements behind a row were read as 0: their
        # distance from the mean must not count.
        row_mean = tl.sum(values, axis=1, keep_dims=True) / N
        values = tl.where(col < N, values - row_mean, 0.0)
        row_rstd = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=1, keep_dims=True) / N + eps)
        values = _affine(values * row_rstd, weight, bias, col, N)
        tl.store(out_rows + col, values.to(out.dtype.element_ty), mask=mask)
    else:
        counts = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        means = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        squares = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        for start in tl.range(0, N, BLOCK_N):
            mask = start + col < N
            values = _values(x_rows, residual_rows, None, start + col, mask)
            # Every place has one element more after each block, but for places that the last block does not reach: they
            # stay as they are.
            counts += tl.where(mask, 1.0, 0.0)
            distance = tl.where(mask, values - means, 0.0)
            means += distance * (1.0 / (start // BLOCK_N + 1))
            squares += distance * (values - means)
        row_mean = tl.sum(counts * means, axis=1, keep_dims=True) / N
        distance = means - row_mean
        squares += counts * distance * distance
        row_rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1, keep_dims=True) / N + eps)
        for start in tl.range(0, N, BLOCK_N):
            mask = start + col < N
            values = _values(x_rows, residual_rows, added_rows, start + col, mask)
            values = _affine((values - row_mean) * row_rstd, weight, bias, start + col, N)
            tl.store(out_rows + start + col, values.to(out.dtype.element_ty), mask=mask)

    tl.store(mean + row, row_mean, mask=row < M)
    tl.store(rstd + row, row_rstd, mask=row < M)


def layer_norm_v04_rows_per_block(
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
    problem = tuning.problem_of(M, N, dtype=x.dtype)
    step = "layer_norm/v04_rows_per_block"
    kernel, config = tuning.choose(layer_norm_v04_rows_per_block_kernel, step, problem, x.device)
    kernel[lambda args: (triton.cdiv(M, args["ROWS"]),)](
        x, weight, bias, residual, y, mean, rstd, rest[0] if rest else None, M, N, x.stride(0),
        0 if residual is None else residual.stride(0), eps, **config,
    )  # fmt: skip

"""layer_norm v04_rows_per_block: a program takes a tile of several short rows, or as many warps as a long row needs.

Change:   a program holds a tile of rows, or reads a longer row in blocks; tile and warps are searched (see tuning.py).
Why:      a warp has whole short rows, so shuffles suffice, and weight and bias are loaded once for all rows of a tile.
Counter:  time falls for rows of 256, and rises a little for rows of 4096.
Requires: contiguous rows of at most 64 KiB; loads take 16 bytes where N and the rows' distance are multiples of 16.
Twin:     cuda-kernels/norm/layer_norm/v04_rows_per_block.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning

SIZES = ((8, 4), (2, 1), (4, 2), (4, 4), (8, 8), (16, 4), (32, 8), (32, 16), (64, 16), (64, 32))  # KiB, and warps
CONFIGS = [triton.Config({"TILE_BYTES": kib * 1024}, num_warps=warps) for kib, warps in SIZES]


@triton.jit
def _values(x, residual, added, col, mask):
    # The rows, or their sums with the residual, in fp32; sums are rounded to x's dtype first, as they are returned.
    values = tl.load(x + col, mask=mask, other=0.0)
    if residual is not None:
        values = (values.to(tl.float32) + tl.load(residual + col, mask=mask, other=0.0).to(tl.float32)).to(values.dtype)
        if added is not None:
            tl.store(added + col, values, mask=mask)
    return values.to(tl.float32)


@triton.jit
def _write(out_rows, values, weight, bias, col, mask, N):
    if weight is not None:
        values *= tl.load(weight + col, mask=col < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if bias is not None:
        values += tl.load(bias + col, mask=col < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(out_rows + col, values.to(out_rows.dtype.element_ty), mask=mask)


@triton.autotune(CONFIGS, key=["N"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(
    {
        "TILE": lambda args: args["TILE_BYTES"] // args["x"].element_size(),
        "WHOLE": lambda args: args["N"] <= args["TILE"],
        "BLOCK_N": lambda args: triton.next_power_of_2(max(args["N"], 1)) if args["WHOLE"] else args["TILE"] // 2,
    }
)
@triton.jit
def layer_norm_v04_rows_per_block_kernel(
    x, weight, bias, residual, out, mean, rstd, added, M, N, stride_xm, stride_rm, eps,
    TILE_BYTES: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # x, residual, out, added: [M, N]; weight, bias: [N]; mean, rstd: [M]. Missing tensors are None.
    ROWS: tl.constexpr = TILE // BLOCK_N if WHOLE else 1
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_N)[None, :]
    x_rows, out_rows = x + row * stride_xm, out + row * N
    residual_rows = None if residual is None else residual + row * stride_rm
    added_rows = None if residual is None else added + row * N
    if WHOLE:
        mask = (row < M) & (col < N)
        values = _values(x_rows, residual_rows, added_rows, col, mask)
        # The difference is exact where the mean is large; behind a row, where 0 was read, it must not count.
        row_mean = tl.sum(values, axis=1, keep_dims=True) / N
        values = tl.where(col < N, values - row_mean, 0.0)
        row_rstd = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=1, keep_dims=True) / N + eps)
        _write(out_rows, values * row_rstd, weight, bias, col, mask, N)
    else:
        sums, squares = tl.zeros((ROWS, BLOCK_N), tl.float32), tl.zeros((ROWS, BLOCK_N), tl.float32)
        for start in tl.range(0, N, BLOCK_N):
            sums += _values(x_rows, residual_rows, added_rows, start + col, start + col < N)
        row_mean = tl.sum(sums, axis=1, keep_dims=True) / N
        for start in tl.range(0, N, BLOCK_N):
            values = _values(x_rows, residual_rows, None, start + col, start + col < N) - row_mean
            squares += tl.where(start + col < N, values * values, 0.0)
        row_rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1, keep_dims=True) / N + eps)
        for start in tl.range(0, N, BLOCK_N):
            values = _values(x_rows, residual_rows, None, start + col, start + col < N) - row_mean
            _write(out_rows, values * row_rstd, weight, bias, start + col, start + col < N, N)
    tl.store(mean + row, row_mean, mask=row < M)
    tl.store(rstd + row, row_rstd, mask=row < M)


def layer_norm_v04_rows_per_block(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None, *,
    eps: float = 1e-5, out: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """out = y, mean, rstd: [M], fp32, and, with a residual, x + residual, which y normalises; x: [M, N]."""
    (M, N), (y, mean, rstd, *rest) = x.shape, out
    if M == 0:
        return
    kernel, config = tuning.choose(
        layer_norm_v04_rows_per_block_kernel, "layer_norm/v04_rows_per_block", tuning.problem_of(M, N, dtype=x.dtype),
        x.device,
    )  # fmt: skip
    kernel[lambda args: (triton.cdiv(M, args["TILE"] // args["BLOCK_N"] if args["WHOLE"] else 1),)](
        x, weight, bias, residual, y, mean, rstd, rest[0] if rest else None, M, N, x.stride(0),
        0 if residual is None else residual.stride(0), eps, **config,
    )  # fmt: skip

"""rms_norm v04_rows_per_block: a program takes a tile of several short rows, or as many warps as a long row needs.

Change:   of v03's kernels there is one, in a file of its own: a program holds a tile of TILE_BYTES, or reads a longer
          row twice, in blocks of half a tile. Tile and warps are searched over the list below (see tuning.py).
Why:      a warp has whole short rows, so shuffles suffice, and weight is loaded once for all rows of a tile.
Counter:  time stays where a program's registers hold a row.
Requires: contiguous rows of at most 64 KiB; loads take 16 bytes where N and the rows' distance are multiples of 16.
Twin:     none, see the spec
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning

CONFIGS = [
    triton.Config({"TILE_BYTES": size}, num_warps=warps)
    for size, warps in (
        (8192, 4), (2048, 1), (4096, 4), (8192, 8), (16384, 4), (32768, 8), (32768, 16), (65536, 16), (65536, 32),
    )
]  # fmt: skip


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
def _write(out_rows, values, row_rstd, weight, col, mask, N):
    values *= row_rstd
    if weight is not None:
        values *= tl.load(weight + col, mask=col < N, other=0.0, eviction_policy="evict_last").to(tl.float32)
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
def rms_norm_v04_rows_per_block_kernel(
    x, weight, residual, out, rstd, added, M, N, stride_xm, stride_rm, eps,
    TILE_BYTES: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # x, residual, out, added: [M, N]; weight: [N]; rstd: [M]. Missing tensors are None. Rows' offsets have 64 bits.
    ROWS: tl.constexpr = TILE // BLOCK_N if WHOLE else 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK_N)[None, :]
    x_rows, out_rows = x + row * stride_xm, out + row * N
    residual_rows = None if residual is None else residual + row * stride_rm
    added_rows = None if residual is None else added + row * N
    if WHOLE:
        mask = (row < M) & (col < N)
        values = _values(x_rows, residual_rows, added_rows, col, mask)
        row_rstd = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=1, keep_dims=True) / N + eps)
        tl.store(rstd + row, row_rstd, mask=row < M)
        _write(out_rows, values, row_rstd, weight, col, mask, N)
    else:
        squares = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        for start in tl.range(0, N, BLOCK_N):
            values = _values(x_rows, residual_rows, None, start + col, start + col < N)
            squares += values * values
        row_rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1, keep_dims=True) / N + eps)
        tl.store(rstd + row, row_rstd, mask=row < M)
        for start in tl.range(0, N, BLOCK_N):
            values = _values(x_rows, residual_rows, added_rows, start + col, start + col < N)
            _write(out_rows, values, row_rstd, weight, start + col, start + col < N, N)


def rms_norm_v04_rows_per_block(
    x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, *, out: tuple[Tensor, ...],
    eps: float = 1e-6,
) -> None:  # fmt: skip
    """out = y, rstd [M] in fp32 and, with a residual, x + residual, which y normalises; x: [M, N], contiguous rows."""
    (M, N), (y, rstd, *rest) = x.shape, out
    if M == 0:
        return
    kernel, config = tuning.choose(
        rms_norm_v04_rows_per_block_kernel, "rms_norm/v04_rows_per_block", tuning.problem_of(M, N, dtype=x.dtype),
        x.device,
    )  # fmt: skip
    kernel[lambda args: (triton.cdiv(M, args["TILE"] // args["BLOCK_N"] if args["WHOLE"] else 1),)](
        x, weight, residual, y, rstd, rest[0] if rest else None, M, N, x.stride(0),
        0 if residual is None else residual.stride(0), eps, **config,
    )  # fmt: skip

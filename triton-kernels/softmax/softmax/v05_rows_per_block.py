"""softmax v05_rows_per_block: a program takes a tile of several short rows, or as many warps as a long row needs.

Change:   a program holds a tile of TILE_BYTES: several rows if they are shorter than that. A longer row is read twice,
          in blocks of half a tile, as in v02. Tile size and number of warps are searched over the list below (see
          tuning.py).
Why:      a program for a row of 256 leaves most of its threads idle, and still pays for barriers. In a tile, one warp
          has such a row, shuffles suffice, and a program has many rows in flight.
Counter:  time stays at rows that fill a program, and falls at rows of 256.
Requires: rows of at most 64 KiB: rows whose elements are contiguous, at any distance from each other. Loads take 16
          bytes if N and that distance are multiples of 16; otherwise the compiler cannot know where a row starts, and
          loads single elements.
Twin:     cuda-kernels/softmax/softmax/v05_rows_per_block.cu
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning

LOG2_E = tl.constexpr(1.4426950408889634)

CONFIGS = [
    triton.Config({"TILE_BYTES": size}, num_warps=warps)
    for size, warps in (
        (8192, 4), (1024, 1), (2048, 1), (2048, 2), (4096, 2), (4096, 4), (8192, 8), (16384, 4), (16384, 8),
        (32768, 8), (32768, 16), (65536, 16), (65536, 32),
    )
]  # fmt: skip


def tile_of(args: dict[str, Any]) -> int:
    """Elements of a tile."""
    return args["TILE_BYTES"] // args["x"].element_size()


@triton.autotune(CONFIGS, key=["N"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(
    {
        "WHOLE": lambda args: args["N"] <= tile_of(args),
        "BLOCK_N": lambda args: triton.next_power_of_2(args["N"]) if args["WHOLE"] else tile_of(args) // 2,
        "ROWS": lambda args: tile_of(args) // args["BLOCK_N"] if args["WHOLE"] else 1,
    }
)
@triton.jit
def softmax_v05_rows_per_block_kernel(
    x, out, M, N, stride_xm, LOG: tl.constexpr,
    TILE_BYTES: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # x: [M, N], out: [M, N] contiguous. Offsets of rows have 64 bits: row * N may pass 2^31.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK_N)[None, :]
    x_rows, out_rows = x + row * stride_xm, out + row * N

    if WHOLE:
        # Elements beyond a row count as -inf: no maximum, and 0 in the sum.
        mask = (row < M) & (col < N)
        values = tl.load(x_rows + col, mask=mask, other=-float("inf")).to(tl.float32)
        # The difference comes first: it is exact for nearby values. A NaN or +inf, and a row of nothing but -inf, make
        # it NaN and with it the sum.
        values = values - tl.max(values, axis=1, keep_dims=True)
        powers = tl.exp2(values * LOG2_E)
        row_sum = tl.sum(powers, axis=1, keep_dims=True)
        values = values - tl.log(row_sum) if LOG else powers * (1.0 / row_sum)
        tl.store(out_rows + col, values.to(out.dtype.element_ty), mask=mask)
    else:
        maxima = tl.full((ROWS, BLOCK_N), -float("inf"), dtype=tl.float32)
        sums = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        for start in tl.range(0, N, BLOCK_N):
            values = tl.load(x_rows + start + col, mask=start + col < N, other=-float("inf")).to(tl.float32)
            new_maxima = tl.maximum(maxima, values)
            # While a place has seen only -inf, its sum must stay 0: -inf - -inf would make it NaN.
            base = tl.where(new_maxima == -float("inf"), 0.0, new_maxima)
            sums = sums * tl.exp2((maxima - base) * LOG2_E) + tl.exp2((values - base) * LOG2_E)
            maxima = new_maxima
        row_max = tl.max(maxima, axis=1, keep_dims=True)
        row_sum = tl.sum(sums * tl.exp2((maxima - row_max) * LOG2_E), axis=1, keep_dims=True)
        for start in tl.range(0, N, BLOCK_N):
            mask = start + col < N
            values = tl.load(x_rows + start + col, mask=mask, other=-float("inf")).to(tl.float32) - row_max
            values = values - tl.log(row_sum) if LOG else tl.exp2(values * LOG2_E) * (1.0 / row_sum)
            tl.store(out_rows + start + col, values.to(out.dtype.element_ty), mask=mask)


def softmax_v05_rows_per_block(x: Tensor, *, out: Tensor, log: bool = False) -> None:
    """out = softmax of x's rows, or its logarithm; x: [M, N], contiguous rows; out: [M, N]; fp32, bf16 or fp16."""
    M, N = x.shape
    if M == 0 or N == 0:
        return
    kernel, config = tuning.choose(
        softmax_v05_rows_per_block_kernel,
        "softmax/v05_rows_per_block",
        tuning.problem_of(M, N, dtype=x.dtype),
        x.device,
    )
    kernel[lambda args: (triton.cdiv(M, args["ROWS"]),)](x, out, M, N, x.stride(0), LOG=log, **config)

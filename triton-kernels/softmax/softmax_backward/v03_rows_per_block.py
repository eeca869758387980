"""softmax_backward v03_rows_per_block: a program takes a tile of several short rows, or as many warps as a row needs.

Change:   a program holds a tile of TILE_BYTES of each matrix: several rows if they are shorter. A longer row is read
          twice, in blocks of half a tile, as in v01. Tile size and number of warps are searched over the list below
          (see tuning.py).
Why:      as in softmax's v05. With two rows to read, a thread has twice as many bytes in flight, which should be enough
          to saturate device memory at a row of 4096.
Counter:  dram_share rises; time falls at rows of 256.
Requires: rows of at most 32 KiB: rows whose elements are contiguous, at any distance from each other. Loads take 16
          bytes if N and those distances are multiples of 16; otherwise the compiler cannot know where a row starts, and
          loads single elements.
Twin:     cuda-kernels/softmax/softmax_backward/v03_rows_per_block.cu
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning

LOG2_E = tl.constexpr(1.4426950408889634)

SEVERAL = 16_384  # most elements of a tile with several rows

CONFIGS = [
    triton.Config({"TILE_BYTES": size}, num_warps=warps)
    for size, warps in (
        (8192, 8), (1024, 1), (2048, 1), (2048, 2), (4096, 2), (4096, 4), (8192, 4), (16384, 8), (16384, 16),
        (32768, 8), (32768, 16), (65536, 32),
    )
]  # fmt: skip


def tile_of(args: dict[str, Any]) -> int:
    """Elements of a tile."""
    return args["TILE_BYTES"] // args["dout"].element_size()


@triton.autotune(CONFIGS, key=["N"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(
    {
        "WHOLE": lambda args: args["N"] <= tile_of(args),
        "BLOCK_N": lambda args: triton.next_power_of_2(args["N"]) if args["WHOLE"] else tile_of(args) // 2,
        "ROWS": lambda args: max(1, min(tile_of(args), SEVERAL) // args["BLOCK_N"]) if args["WHOLE"] else 1,
    }
)
@triton.jit
def softmax_backward_v03_rows_per_block_kernel(
    dout, y, out, M, N, stride_dm, stride_ym, LOG: tl.constexpr,
    TILE_BYTES: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # dout, y: [M, N], out: [M, N] contiguous. Offsets of rows have 64 bits: row * N may pass 2^31.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK_N)[None, :]
    dout_rows, y_rows, out_rows = dout + row * stride_dm, y + row * stride_ym, out + row * N

    if WHOLE:
        # Elements beyond a row count as 0.
        mask = (row < M) & (col < N)
        gradient = tl.load(dout_rows + col, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(y_rows + col, mask=mask, other=0.0).to(tl.float32)
        row_sum = tl.sum(gradient if LOG else gradient * values, axis=1, keep_dims=True)
        result = gradient - tl.exp2(values * LOG2_E) * row_sum if LOG else values * (gradient - row_sum)
        tl.store(out_rows + col, result.to(out.dtype.element_ty), mask=mask)
    else:
        sums = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        for start in tl.range(0, N, BLOCK_N):
            mask = start + col < N
            gradient = tl.load(dout_rows + start + col, mask=mask, other=0.0).to(tl.float32)
            sums += gradient if LOG else gradient * tl.load(y_rows + start + col, mask=mask, other=0.0).to(tl.float32)
        row_sum = tl.sum(sums, axis=1, keep_dims=True)
        for start in tl.range(0, N, BLOCK_N):
            mask = start + col < N
            gradient = tl.load(dout_rows + start + col, mask=mask, other=0.0).to(tl.float32)
            values = tl.load(y_rows + start + col, mask=mask, other=0.0).to(tl.float32)
            result = gradient - tl.exp2(values * LOG2_E) * row_sum if LOG else values * (gradient - row_sum)
            tl.store(out_rows + start + col, result.to(out.dtype.element_ty), mask=mask)


def softmax_backward_v03_rows_per_block(dout: Tensor, y: Tensor, *, out: Tensor, log: bool = False) -> None:
    """out = gradient of softmax's input, or of log_softmax's; fp32, bf16 or fp16.

    dout, its result's gradient, and y, its result: [M, N], contiguous rows; out: [M, N].
    """
    M, N = dout.shape
    if M == 0 or N == 0:
        return
    kernel, config = tuning.choose(
        softmax_backward_v03_rows_per_block_kernel,
        "softmax_backward/v03_rows_per_block",
        tuning.problem_of(M, N, dtype=dout.dtype),
        dout.device,
    )
    grid = lambda args: (triton.cdiv(M, args["ROWS"]),)  # noqa: E731
    kernel[grid](dout, y, out, M, N, dout.stride(0), y.stride(0), LOG=log, **config)

"""softmax v06_pipelined: persistent programs; the next rows travel to shared memory while one is computed.

Change:   PER_SM programs an SM loop over the tiles. The loop has several STAGES, from which the compiler makes a ring
          of tiles in shared memory, filled by asynchronous copies. A row longer than a tile travels twice, in blocks of
          half a tile: once for maximum and sum, and once to be written.
Why:      a program that loads, computes and stores leaves the memory idle unless other programs fill in, and few
          programs with long rows fit on an SM. A copy that needs no registers can always be in flight.
Counter:  stalls on long_scoreboard fall; dram_share should stay near v05's.
Requires: compute capability 9.0, for the shared memory; rows of at most 220 KiB, whose elements are contiguous, at any
          distance from each other. If N or that distance is no multiple of 16, the compiler cannot know where a row
          starts: it loads single elements, and not ahead, as an asynchronous copy takes at least 4 bytes.
Twin:     cuda-kernels/softmax/softmax/v06_pipelined.cu
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.lib.launch_rows import in_parts

LOG2_E = tl.constexpr(1.4426950408889634)

# STAGES - 1 tiles of all PER_SM programs lie in shared memory; the one being computed is in registers.
CONFIGS = [
    triton.Config({"TILE_BYTES": size, "PER_SM": per_sm, "STAGES": stages}, num_warps=warps)
    for size, per_sm, stages, warps in (
        (8192, 8, 3, 4), (4096, 8, 4, 2), (8192, 8, 4, 4), (16384, 4, 3, 8), (16384, 4, 4, 8),
        (32768, 3, 3, 8), (32768, 2, 3, 16), (65536, 1, 3, 16), (65536, 1, 4, 16),
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
def softmax_v06_pipelined_kernel(
    x, out, M, N, stride_xm, LOG: tl.constexpr, TILE_BYTES: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # x: [M, N], out: [M, N] contiguous. Offsets of rows have 64 bits: row * N may pass 2^31.
    col = tl.arange(0, BLOCK_N)[None, :]
    if WHOLE:
        # num_stages makes the compiler build the ring: it waits for a tile's copies, loads the tile to registers, and
        # refills its place when it is done.
        for first in tl.range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS, num_stages=STAGES):
            row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)[:, None]
            # Elements beyond a row count as -inf: no maximum, and 0 in the sum.
            mask = (row < M) & (col < N)
            values = tl.load(x + row * stride_xm + col, mask=mask, other=-float("inf")).to(tl.float32)
            # The difference comes first: it is exact for nearby values. A NaN or +inf, and a row of nothing but -inf,
            # make it NaN and with it the sum.
            values = values - tl.max(values, axis=1, keep_dims=True)
            powers = tl.exp2(values * LOG2_E)
            row_sum = tl.sum(powers, axis=1, keep_dims=True)
            values = values - tl.log(row_sum) if LOG else powers * (1.0 / row_sum)
            tl.store(out + row * N + col, values.to(out.dtype.element_ty), mask=mask)
    else:
        for index in tl.range(tl.program_id(0), M, tl.num_programs(0)):
            row = tl.cast(index, tl.int64)
            maxima = tl.full((1, BLOCK_N), -float("inf"), dtype=tl.float32)
            sums = tl.zeros((1, BLOCK_N), dtype=tl.float32)
            for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
                mask = start + col < N
                values = tl.load(x + row * stride_xm + start + col, mask=mask, other=-float("inf")).to(tl.float32)
                new_maxima = tl.maximum(maxima, values)
                # While a place has seen only -inf, its sum must stay 0: -inf - -inf would make it NaN.
                base = tl.where(new_maxima == -float("inf"), 0.0, new_maxima)
                sums = sums * tl.exp2((maxima - base) * LOG2_E) + tl.exp2((values - base) * LOG2_E)
                maxima = new_maxima
            row_max = tl.max(maxima)
            row_sum = tl.sum(sums * tl.exp2((maxima - row_max) * LOG2_E))
            for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
                mask = start + col < N
                values = tl.load(x + row * stride_xm + start + col, mask=mask, other=-float("inf")).to(tl.float32)
                values = values - row_max
                values = values - tl.log(row_sum) if LOG else tl.exp2(values * LOG2_E) * (1.0 / row_sum)
                tl.store(out + row * N + start + col, values.to(out.dtype.element_ty), mask=mask)


def softmax_v06_pipelined(x: Tensor, *, out: Tensor, log: bool = False) -> None:
    """out = softmax of x's rows, or its logarithm; x: [M, N], contiguous rows; out: [M, N]; fp32, bf16 or fp16."""
    M, N = x.shape
    if M == 0 or N == 0 or in_parts(softmax_v06_pipelined, x, out=out, log=log):
        return

    def grid(args: dict[str, int]) -> tuple[int]:
        # All programs take the same number of tiles, except in the last round, so that none ends a whole tile late.
        tiles = triton.cdiv(M, args["ROWS"])
        return (triton.cdiv(tiles, triton.cdiv(tiles, args["PER_SM"] * sm_count(x.device))),)

    problem = tuning.problem_of(M, N, dtype=x.dtype)
    kernel, config = tuning.choose(softmax_v06_pipelined_kernel, "softmax/v06_pipelined", problem, x.device)
    kernel[grid](x, out, M, N, x.stride(0), LOG=log, **config)

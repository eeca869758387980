"""cross_entropy v04_rows_per_block: a program takes a tile of several short rows, or walks along one row in large
tiles.

Change:   a program holds a tile of TILE_BYTES: several rows if they are shorter than that. A longer row is read in such
          tiles, as packs of 16 bytes; each pack has one maximum, so its sum is rescaled once a pack. Tile size, warps,
          and tiles in flight are searched over the list below (see tuning.py).
Why:      v02's rescaling takes a second exponential for each element, which is all that the special function units
          (MUFU) can do at the rate of the memory. And with few KiB in flight, a program waits more than it reads.
Counter:  dram_share rises.
Requires: rows whose elements are contiguous, at any distance from each other. Loads take 16 bytes if N and that
          distance are multiples of 16; otherwise the compiler cannot know where a row starts, and loads single
          elements.
Twin:     cuda-kernels/loss/cross_entropy/v04_rows_per_block.cu
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans, tuning

LOG2_E = tl.constexpr(1.4426950408889634)

CONFIGS = [
    triton.Config({"TILE_BYTES": size, "STAGES": stages}, num_warps=warps)
    for size, warps, stages in (
        (16384, 8, 1), (2048, 1, 1), (4096, 2, 1), (8192, 4, 1), (16384, 4, 1), (32768, 8, 1), (32768, 16, 1),
        (65536, 16, 1), (8192, 4, 3), (16384, 8, 3),
    )
]  # fmt: skip


def tile_of(args: dict[str, Any]) -> int:
    """Elements of a tile."""
    return args["TILE_BYTES"] // args["logits"].element_size()


@triton.jit
def _write(
    losses, lse, row, mask, row_class, ignore_index, logit, row_max, row_sum, total, N, smoothing,
    SMOOTHED: tl.constexpr,
):  # fmt: skip
    # Differences come first: they are exact for nearby values, while adding to a large maximum loses digits.
    log_sum = tl.log(row_sum)
    loss = log_sum + (1.0 - smoothing) * (row_max - logit)
    if SMOOTHED:
        loss += smoothing * (row_max - total / N)
    ignored = row_class == ignore_index
    tl.store(losses + row, tl.where(ignored, 0.0, loss), mask=mask)
    if lse is not None:
        tl.store(lse + row, tl.where(ignored, 0.0, row_max + log_sum), mask=mask)


@triton.autotune(CONFIGS, key=["N"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(
    {
        "WHOLE": lambda args: args["N"] <= tile_of(args),
        "BLOCK_N": lambda args: triton.next_power_of_2(max(1, args["N"])) if args["WHOLE"] else tile_of(args),
        "ROWS": lambda args: tile_of(args) // args["BLOCK_N"],
        "VECTOR": lambda args: 16 // args["logits"].element_size(),
    }
)
@triton.jit
def cross_entropy_v04_rows_per_block_kernel(
    logits, target, losses, lse, M, N, stride_lm, ignore_index: tl.int64, smoothing, SMOOTHED: tl.constexpr,
    TILE_BYTES: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    # logits: [M, N]; target, losses: [M]; lse: [M] or None. Offsets of rows have 64 bits.
    if WHOLE:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        col = tl.arange(0, BLOCK_N)[None, :]
        row_logits = logits + row * stride_lm
        # Elements beyond a row count as -inf: no maximum, and 0 in the sum.
        mask = (row < M)[:, None] & (col < N)
        values = tl.load(row_logits[:, None] + col, mask=mask, other=-float("inf")).to(tl.float32)
        row_max = tl.max(values, axis=1)
        # A row of nothing but -inf must have the sum 0; -inf - -inf would make it NaN. A NaN or +inf makes it NaN.
        base = tl.where(row_max == -float("inf"), 0.0, row_max)
        row_sum = tl.sum(tl.exp2((values - base[:, None]) * LOG2_E), axis=1)
        total = tl.sum(tl.where(mask, values, 0.0), axis=1) if SMOOTHED else 0.0
        row_class = tl.load(target + row, mask=row < M, other=0)
        # The loss of a target that is no class is NaN.
        is_class = (row < M) & (row_class >= 0) & (row_class < N)
        logit = tl.load(row_logits + row_class, mask=is_class, other=float("nan")).to(tl.float32)
        _write(
            losses, lse, row, row < M, row_class, ignore_index, logit, row_max, row_sum, total, N, smoothing, SMOOTHED
        )  # fmt: skip
    else:
        row = tl.program_id(0).to(tl.int64)
        row_logits, row_class = logits + row * stride_lm, tl.load(target + row)
        pack, place = tl.arange(0, BLOCK_N // VECTOR)[:, None], tl.arange(0, VECTOR)[None, :]
        maxima = tl.full((BLOCK_N // VECTOR,), -float("inf"), dtype=tl.float32)
        sums, totals = tl.zeros_like(maxima), tl.zeros_like(maxima)
        # An ignored row is not read.
        for start in tl.range(0, tl.where(row_class == ignore_index, 0, N), BLOCK_N, num_stages=STAGES):
            col = start + pack * VECTOR + place
            values = tl.load(row_logits + col, mask=col < N, other=-float("inf")).to(tl.float32)
            new_maxima = tl.maximum(maxima, tl.max(values, axis=1))
            base = tl.where(new_maxima == -float("inf"), 0.0, new_maxima)
            powers = tl.sum(tl.exp2((values - base[:, None]) * LOG2_E), axis=1)
            sums = sums * tl.exp2((maxima - base) * LOG2_E) + powers
            maxima = new_maxima
            if SMOOTHED:  # for smoothing alone: masked logits make the sum -inf
                totals += tl.sum(tl.where(col < N, values, 0.0), axis=1)
        row_max = tl.max(maxima)
        base = tl.where(row_max == -float("inf"), 0.0, row_max)
        row_sum = tl.sum(sums * tl.exp2((maxima - base) * LOG2_E))
        is_class = (row_class >= 0) & (row_class < N)
        logit = tl.load(row_logits + row_class, mask=is_class, other=float("nan")).to(tl.float32)
        total = tl.sum(totals) if SMOOTHED else 0.0
        _write(
            losses, lse, row, None, row_class, ignore_index, logit, row_max, row_sum, total, N, smoothing, SMOOTHED
        )  # fmt: skip


_plans: dict[tuple[Any, ...], plans.Plan] = {}


def cross_entropy_v04_rows_per_block(
    logits: Tensor, target: Tensor, *, out: Any, ignore_index: int = -100, label_smoothing: float = 0.0
) -> None:
    """out = the rows' losses, or a tuple of them and lse; logits: [M, N], contiguous rows; target and out: [M]."""
    losses, lse = out if isinstance(out, tuple) else (out, None)
    tensors, options = (logits, target, losses, lse), (ignore_index, label_smoothing)
    key = logits.shape, logits.stride(0), logits.dtype, plans.alignment(*tensors), options, logits.get_device()
    plan = _plans.get(key)
    if plan is not None and not tuning.is_recording():
        plan(*tensors)
        return
    M, N = logits.shape
    if M == 0:
        return
    problem = tuning.problem_of(M, N, dtype=logits.dtype)
    step = "cross_entropy/v04_rows_per_block"
    kernel, config = tuning.choose(cross_entropy_v04_rows_per_block_kernel, step, problem, logits.device)
    grid = lambda args: (triton.cdiv(M, args["ROWS"]),)  # noqa: E731
    behind, constants = (M, N, logits.stride(0), *options), {"SMOOTHED": label_smoothing > 0}
    if not config:
        kernel[grid](*tensors, *behind, **constants)
        kernel, config = kernel.fn, kernel.best_config.all_kwargs()
    plan = plans.launch(kernel, grid, tensors, behind, constants | config)
    if plan is not None:
        plans.keep(_plans, key, plan)

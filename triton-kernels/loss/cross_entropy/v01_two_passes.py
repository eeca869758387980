"""cross_entropy v01_two_passes: a program reads its row for the maximum, and again for the sum.

Change:   none yet, this is where the ladder starts.
Why:      the definition, word for word: loss = log(sum(exp(x - max))) + max - x[target]. The second pass misses L2,
          too: the rows in flight at once are several times as large.
Counter:  bytes_over_minimum is 2.
Requires: rows whose elements are contiguous, at any distance from each other. Loads take 16 bytes if N and that
          distance are multiples of 16; otherwise the compiler cannot know where a row starts, and loads single
          elements.
Twin:     cuda-kernels/loss/cross_entropy/v01_two_passes.cu
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4
BLOCK = 1024

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cross_entropy_v01_two_passes_kernel(
    logits, target, losses, lse, N: tl.int64, stride_lm: tl.int64, ignore_index: tl.int64, smoothing,
    SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # logits: [M, N]; target, losses: [M]; lse: [M] or None. Offsets of rows have 64 bits.
    row = tl.program_id(0).to(tl.int64)
    row_logits, row_class = logits + row * stride_lm, tl.load(target + row)
    if row_class == ignore_index:
        tl.store(losses + row, 0.0)
        if lse is not None:
            tl.store(lse + row, 0.0)
        return

    # A running maximum for each place of the block, and one reduction at the end. Elements beyond the row count as
    # -inf: no maximum, and 0 in the sum.
    row_max = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        row_max = tl.maximum(row_max, tl.load(row_logits + col, mask=col < N, other=-float("inf")).to(tl.float32))
    row_max = tl.max(row_max)

    # If the whole row is -inf, exponents are relative to 0, as -inf - -inf would be NaN; its sum is 0. A NaN or +inf
    # makes the sum NaN. The sum of the logits is computed for smoothing alone, as masked logits make it -inf.
    base = tl.where(row_max == -float("inf"), 0.0, row_max)
    row_sum, total = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        values = tl.load(row_logits + col, mask=col < N, other=-float("inf")).to(tl.float32)
        row_sum += tl.exp2((values - base) * LOG2_E)
        if SMOOTHED:
            total += tl.where(col < N, values, 0.0)

    # The loss of a target that is no class is NaN.
    is_class = (row_class >= 0) & (row_class < N)
    logit = tl.load(row_logits + row_class, mask=is_class, other=float("nan")).to(tl.float32)
    # Differences come first: they are exact for nearby values, while adding to a large maximum loses digits.
    log_sum = tl.log(tl.sum(row_sum))
    loss = log_sum + (1.0 - smoothing) * (row_max - logit)
    if SMOOTHED:
        loss += smoothing * (row_max - tl.sum(total) / N)
    tl.store(losses + row, loss)
    if lse is not None:
        tl.store(lse + row, row_max + log_sum)


def cross_entropy_v01_two_passes(
    logits: Tensor, target: Tensor, *, out: Any, ignore_index: int = -100, label_smoothing: float = 0.0
) -> None:
    """out = the rows' losses, or a tuple of them and lse; logits: [M, N], contiguous rows; target and out: [M]."""
    losses, lse = out if isinstance(out, tuple) else (out, None)
    M, N = logits.shape
    if M == 0:
        return
    cross_entropy_v01_two_passes_kernel[(M,)](
        logits, target, losses, lse, N, logits.stride(0), ignore_index, label_smoothing,
        SMOOTHED=label_smoothing > 0, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip

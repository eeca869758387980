"""Sequences of different lengths in one tensor, one behind the other, as their starts tell.

Sequence n has the tokens starts[n] to starts[n + 1] - 1. Tiles of tokens are numbered without a pass over the lengths:
the tiles of sequence n begin at slot starts[n] // BLOCK + n, so that some slots have no tile. All sequences together
have tokens // BLOCK + N slots.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_of(slot, starts, N, BLOCK: tl.constexpr):
    """The sequence of a slot: the last of N whose first slot does not lie behind it."""
    low = tl.full((), 0, tl.int32)
    high = N - 1
    while low < high:
        middle = (low + high + 1) // 2
        begins = tl.load(starts + middle) // BLOCK + middle
        low = tl.where(begins <= slot, middle, low)
        high = tl.where(begins <= slot, high, middle - 1)
    return low

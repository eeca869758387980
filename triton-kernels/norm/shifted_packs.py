"""Packs of 16 bytes that start at any element: each lies in two of memory's packs, which are loaded and shifted."""

from __future__ import annotations

import triton
import triton.language as tl

WORDS = tl.constexpr(4)  # of a pack, 32 bits each


@triton.jit
def _low(low, high, bits):
    # One shift of both words, where two of one word each would have to be chosen against none.
    return ((high.to(tl.uint64) << 32 | low.to(tl.uint64)) >> bits.to(tl.uint64)).to(tl.uint32)


@triton.jit
def shift_packs(first, second, skew, PER_WORD: tl.constexpr):
    # first, second: words of memory's packs, and of those behind them; skew: elements of the first pack that are not
    # ours. Returns our words, [packs, 2, 2]: shifted by two words, by one, and by half a word.
    SHAPE: tl.constexpr = (first.numel // WORDS, 2, 2)
    w02, w13 = tl.split(first.reshape(SHAPE))
    w46, w57 = tl.split(second.reshape(SHAPE))
    w0, w2 = tl.split(w02)
    w1, w3 = tl.split(w13)
    w4, w6 = tl.split(w46)
    w5, w7 = tl.split(w57)
    two = skew // PER_WORD >= 2
    w0, w1, w2 = tl.where(two, w2, w0), tl.where(two, w3, w1), tl.where(two, w4, w2)
    w3, w4, w5 = tl.where(two, w5, w3), tl.where(two, w6, w4), tl.where(two, w7, w5)
    one = skew // PER_WORD % 2 == 1
    w0, w1, w2 = tl.where(one, w1, w0), tl.where(one, w2, w1), tl.where(one, w3, w2)
    w3, w4 = tl.where(one, w4, w3), tl.where(one, w5, w4)
    if PER_WORD == 2:
        bits = (skew & 1) * 16
        w0, w1, w2, w3 = _low(w0, w1, bits), _low(w1, w2, bits), _low(w2, w3, bits), _low(w3, w4, bits)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))

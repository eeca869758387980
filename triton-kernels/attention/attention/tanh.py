"""tanh of fp32 values by exponentials."""

from __future__ import annotations

import triton
import triton.language as tl

TWICE_LOG2_E = tl.constexpr(2.8853900817779268)
SMALL = tl.constexpr(0.25)


@triton.jit
def tanh(x):
    # tanh(x) = 1 - 2 / (1 + e^2x), since the hardware's tanh has half the digits; the series near 0, where the
    # difference has few. The square of a reciprocal root takes fewer instructions than a division, which looks for
    # large divisors.
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15 - square * (17 / 315)))
    root = tl.rsqrt(1 + tl.exp2(x * TWICE_LOG2_E))
    return tl.where(tl.abs(x) < SMALL, series, 1 - 2 * root * root)

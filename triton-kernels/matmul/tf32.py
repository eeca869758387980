"""Rounding to TF32, for the kernels of matmul_tf32x3."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to_tf32(value):
    # To nearest, ties away from zero: half of the 13 bits' range is added, then the 13 bits are cut off.
    return ((value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)

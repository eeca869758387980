"""What the kernels of a maximum's gradient share: how many bits of a word are set, and what elements get."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ones_of(bits):
    # How many bits are set, of each word: sums of neighbouring bits, pairs, fours, and bytes.
    bits -= (bits >> 1) & 0x55555555
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits += bits >> 8
    return ((bits + (bits >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def share_of(dout, step, ties, mask):
    # What each maximum gets, and what all others get: 0, but NaN where nothing equals the maximum, which is NaN then.
    share = tl.load(dout + step, mask=mask, other=0.0).to(tl.float32)
    share = tl.div_rn(share, ties.to(tl.float32)).to(dout.dtype.element_ty)
    return share, (share.to(tl.float32) * 0.0).to(dout.dtype.element_ty)

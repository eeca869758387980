"""vector_add v01_scalar: one thread adds one element.

Change:   none yet, this is where the ladder starts. A program of 128 threads adds 128 elements.
Why:      the grid alone covers the vector; a warp's 32 loads are neighbours, so access is coalesced already.
Counter:  sectors_per_load is 4 (fp32): 32 lanes of 4 bytes are four sectors of 32 bytes.
Requires: contiguous tensors of any size and alignment.
Twin:     cuda-kernels/elementwise/vector_add/v01_scalar.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4
BLOCK = NUM_WARPS * 32


@triton.jit
def vector_add_v01_scalar_kernel(a, b, out, n: tl.int64, BLOCK: tl.constexpr):
    # a, b, out: [n]. The program's index is widened first: 2^31 elements and more overflow 32 bits.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(a + offsets, mask=mask).to(tl.float32) + tl.load(b + offsets, mask=mask).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


def vector_add_v01_scalar(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a + b for contiguous tensors of one shape; fp32, bf16 or fp16."""
    n = a.numel()
    if n == 0:
        return
    grid = (triton.cdiv(n, BLOCK),)
    vector_add_v01_scalar_kernel[grid](a, b, out, n, BLOCK=BLOCK, num_warps=NUM_WARPS)

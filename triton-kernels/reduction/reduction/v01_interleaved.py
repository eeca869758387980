"""reduction v01_interleaved: a program sums a small block; the sums are summed again until one is left.

Change:   none yet, this is where the ladder starts. A program of 256 threads sums 256 elements and writes one.
Why:      the textbook's first step: a tree in every block, a barrier at every level, and as many launches as it
          takes. In CUDA the tree's active threads are picked with a modulo. That cannot be written in Triton: tl.sum
          lays out the tree by itself (shuffles in a warp, shared memory between warps), so this twin shares the
          blocks and the launches, and starts ahead.
Counter:  dram_share stays low; launches is 4 for 2^26 elements.
Requires: a contiguous tensor of any size and alignment.
Twin:     cuda-kernels/reduction/reduction/v01_interleaved.cu
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 8
BLOCK = NUM_WARPS * 32


@triton.jit
def reduction_v01_interleaved_kernel(x, sums, n: tl.int64, BLOCK: tl.constexpr):
    # x: [n], sums: [programs]. The program's index is widened first: 2^31 elements and more overflow 32 bits.
    program = tl.program_id(0).to(tl.int64)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    tl.store(sums + program, tl.sum(values))


def reduction_v01_interleaved(x: Tensor, *, out: Tensor) -> None:
    """out = sum of x, contiguous and of any shape; fp32, bf16 or fp16 in, fp32 without dimensions out."""
    while True:
        n = x.numel()
        programs = max(1, triton.cdiv(n, BLOCK))
        sums = out if programs == 1 else torch.empty(programs, dtype=torch.float32, device=x.device)
        reduction_v01_interleaved_kernel[(programs,)](x, sums, n, BLOCK=BLOCK, num_warps=NUM_WARPS)
        if programs == 1:
            return
        x = sums

"""reduction v02_grid_stride: a few programs an SM stride over the vector with wide loads, adding in registers.

Change:   a program takes every so-many-th block, adds it to an accumulator as wide as the block, and sums that once
          at its end. A second launch sums the programs' results, always in the same order: runs agree bit by bit.
Why:      all but the last few thousand additions happen in registers, without a barrier, while four 16-byte loads a
          thread are in flight.
Counter:  dram_share should pass 85 %; sectors_per_load rises to 16; launches falls to 2.
Requires: a contiguous tensor of any size; an address that is a multiple of 16 bytes gets the wide loads (the
          launcher tells the compiler), others are read one element at a time.
Twin:     cuda-kernels/reduction/v02_grid_stride.cu
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.device import sm_count

NUM_WARPS = 4
THREADS = NUM_WARPS * 32
VECTOR_BYTES = 16
VECTORS = 4
PROGRAMS_PER_SM = 8  # 1024 threads with 64 bytes each on their way: 64 KiB an SM


@triton.jit
def reduction_v02_grid_stride_kernel(x, sums, n: tl.int64, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    # x: [n], sums: [programs]. The program's index is widened first: 2^31 elements and more overflow 32 bits.
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    whole = n - n % BLOCK
    wide = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(program * BLOCK, whole, programs * BLOCK):
        wide += tl.load(x + start + tl.arange(0, BLOCK)).to(tl.float32)

    # What is left is shared out one element a thread; without a mask above, all its loads stay wide for every n.
    narrow = tl.zeros((TAIL,), dtype=tl.float32)
    for start in tl.range(whole + program * TAIL, n, programs * TAIL):
        offsets = start + tl.arange(0, TAIL)
        narrow += tl.load(x + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    tl.store(sums + program, tl.sum(wide) + tl.sum(narrow))


def reduction_v02_grid_stride(x: Tensor, *, out: Tensor) -> None:
    """out = sum of x, contiguous and of any shape; fp32, bf16 or fp16 in, fp32 without dimensions out."""
    while True:
        n = x.numel()
        block = THREADS * VECTORS * VECTOR_BYTES // x.element_size()
        programs = max(1, min(n // block, PROGRAMS_PER_SM * sm_count(x.device)))
        sums = out if programs == 1 else torch.empty(programs, dtype=torch.float32, device=x.device)
        reduction_v02_grid_stride_kernel[(programs,)](x, sums, n, BLOCK=block, TAIL=THREADS, num_warps=NUM_WARPS)
        if programs == 1:
            return
        x = sums

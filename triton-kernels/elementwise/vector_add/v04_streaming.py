"""vector_add v04_streaming: several independent 16-byte loads in flight a thread, with streaming hints.

Change:   a block holds two vectors of 16 bytes a thread and operand, instead of going round a loop, and the grid covers
          the vector again; loads are marked evict-first, stores streaming.
Why:      all four loads are issued before the first add needs one, so one memory latency is paid for all of them;
          evict-first tells the caches that nothing here is read twice. Programs that loop drift apart and end apart;
          programs of one block each are dealt out in order, to whichever SM is free.
Counter:  time falls, and dram_share rises.
Requires: contiguous tensors of any size. Accesses take 16 bytes if the addresses are multiples of 16, which the
          launcher tells the compiler; otherwise they take one element.
Twin:     cuda-kernels/elementwise/vector_add/v04_streaming.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib.device import sm_count

NUM_WARPS = 4
THREADS = NUM_WARPS * 32
VECTOR_BYTES = 16
VECTORS = 2  # with four, ptxas saves registers and adds before all loads are issued


@triton.jit
def vector_add_v04_streaming_kernel(a, b, out, n: tl.int64, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    # a, b, out: [n]. The program's index is widened first: 2^31 elements and more overflow 32 bits.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    whole = n - n % BLOCK
    if start < whole:
        offsets = start + tl.arange(0, BLOCK)
        a_block = tl.load(a + offsets, eviction_policy="evict_first")
        b_block = tl.load(b + offsets, eviction_policy="evict_first")
        total = a_block.to(tl.float32) + b_block.to(tl.float32)
        tl.store(out + offsets, total.to(out.dtype.element_ty), cache_modifier=".cs")

    # The remainder, one element a thread, as in v02.
    first = whole + tl.program_id(0).to(tl.int64) * TAIL
    for start in tl.range(first, n, tl.num_programs(0).to(tl.int64) * TAIL):
        offsets = start + tl.arange(0, TAIL)
        mask = offsets < n
        total = tl.load(a + offsets, mask=mask).to(tl.float32) + tl.load(b + offsets, mask=mask).to(tl.float32)
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


def vector_add_v04_streaming(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a + b for contiguous tensors of one shape; fp32, bf16 or fp16."""
    n = a.numel()
    if n == 0:
        return
    block = THREADS * VECTOR_BYTES // a.element_size()
    if n >= 2 * sm_count(a.device) * VECTORS * block:  # fewer vectors spread a smaller one over more programs
        block *= VECTORS
    grid = (triton.cdiv(n, block),)
    vector_add_v04_streaming_kernel[grid](a, b, out, n, BLOCK=block, TAIL=THREADS, num_warps=NUM_WARPS)

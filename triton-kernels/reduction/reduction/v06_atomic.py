"""reduction v06_atomic: programs add their sums to the result themselves.

Change:   instead of writing its sum for a second launch, a program adds it to out by an atomic, in L2.
Why:      one launch instead of two, which is most of the time of a short vector (out must be zeroed first; that is a
          fill). But programs add in the order in which they end, and floating-point addition is not associative: the
          last bits of the result change from run to run.
Error:    19 roundings as in v05's first launch, and one for each of the programs: at most (programs + 19) / 2
          eps sum|x| on the way of the first program's sum. The hardware flushes subnormal sums to zero.
Counter:  time falls by 1 % at 2^26 elements and by 9 % at 2^16.
Requires: a contiguous tensor of any size; an address that is a multiple of 16 bytes gets the wide loads (the
          launcher tells the compiler), others are read one element at a time.
Twin:     cuda-kernels/reduction/reduction/v06_atomic.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib.device import sm_count

NUM_WARPS = 4  # half of v04's, so that a short vector spreads over more SMs
THREADS = NUM_WARPS * 32
VECTOR_BYTES = 16
LOADS = 4  # independent loads a thread
PROGRAMS_PER_SM = 8  # 1024 threads with 64 bytes each on their way: 64 KiB an SM


@triton.jit
def reduction_v06_atomic_kernel(x, out, n: tl.int64, LOADS: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    # x: [n], out: one number. The program's index is widened first: 2^31 elements and more overflow 32 bits.
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    thread, load, element = tl.arange(0, THREADS), tl.arange(0, LOADS), tl.arange(0, VECTOR)
    offsets = (load[None, :, None] * THREADS + thread[:, None, None]) * VECTOR + element[None, None, :]
    BLOCK: tl.constexpr = LOADS * THREADS * VECTOR
    whole = n - n % BLOCK
    total = tl.zeros((THREADS,), dtype=tl.float32)
    error = tl.zeros((THREADS,), dtype=tl.float32)
    for start in tl.range(program * BLOCK, whole, programs * BLOCK):
        values = tl.load(x + start + offsets).to(tl.float32)  # [THREADS, LOADS, VECTOR]
        value = tl.sum(tl.sum(values, axis=2), axis=1)
        new_total = total + value
        added = new_total - total  # what of value arrived; the rest of new_total came from total
        error += (total - (new_total - added)) + (value - added)
        total = new_total
    # Once the total has become infinite or NaN, as plain addition makes it, the error is NaN and stays out.
    total += tl.where(tl.abs(total) < float("inf"), error, 0.0)

    # What is left, less than a block, is the last program's; without a mask above, all its loads stay wide for every n.
    if (program == programs - 1) & (whole < n):
        values = tl.load(x + whole + offsets, mask=whole + offsets < n, other=0.0).to(tl.float32)
        total += tl.sum(tl.sum(values, axis=2), axis=1)
    tl.atomic_add(out, tl.sum(total), sem="relaxed")


def reduction_v06_atomic(x: Tensor, *, out: Tensor) -> None:
    """out = sum of x, contiguous and of any shape; fp32, bf16 or fp16 in, fp32 without dimensions out."""
    n = x.numel()
    vector = VECTOR_BYTES // x.element_size()
    blocks = max(1, n // (LOADS * THREADS * vector))
    # All programs take the same number of blocks, but for the last round: none ends a block late.
    rounds = triton.cdiv(blocks, PROGRAMS_PER_SM * sm_count(x.device))
    programs = triton.cdiv(blocks, rounds)
    out.zero_()
    reduction_v06_atomic_kernel[(programs,)](
        x, out, n, LOADS=LOADS, THREADS=THREADS, VECTOR=vector, num_warps=NUM_WARPS
    )

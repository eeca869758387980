"""reduction v06_atomic: programs add their sums to the result themselves.

Change:   instead of writing its sum for a second launch, a program adds it to out by an atomic, in L2.
Why:      one launch instead of two, which is most of the time of a short vector; a fill that zeroes out takes its
          place. But programs add in the order in which they end, and floating-point addition is not associative: the
          last bits of the result change from run to run.
Error:    19 roundings as in v05's first launch, and one for each program: at most (programs + 19) / 2 eps sum|x|, for
          the elements of the program that adds first. The hardware flushes subnormal sums to zero.
Counter:  time falls, most at 2^16 elements.
Requires: a contiguous tensor of any size. Loads take 16 bytes if the address is a multiple of 16, which the launcher
          tells the compiler; otherwise they take one element.
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
PROGRAMS_PER_SM = 8  # 1024 threads with 64 bytes each in flight: 64 KiB an SM


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
    # Without the error if that is NaN: once the total is infinite or NaN, its error is meaningless.
    total += tl.where(tl.abs(total) < float("inf"), error, 0.0)

    # The last program adds the remainder, less than a block. The loop above needs no mask, so all its loads stay wide.
    if (program == programs - 1) & (whole < n):
        values = tl.load(x + whole + offsets, mask=whole + offsets < n, other=0.0).to(tl.float32)
        total += tl.sum(tl.sum(values, axis=2), axis=1)
    tl.atomic_add(out, tl.sum(total), sem="relaxed")


def reduction_v06_atomic(x: Tensor, *, out: Tensor) -> None:
    """out = sum of x, contiguous and of any shape; fp32, bf16 or fp16 in, fp32 without dimensions out."""
    n = x.numel()
    vector = VECTOR_BYTES // x.element_size()
    blocks = max(1, n // (LOADS * THREADS * vector))
    # All programs take the same number of blocks, except in the last round, so that none ends a whole block late.
    rounds = triton.cdiv(blocks, PROGRAMS_PER_SM * sm_count(x.device))
    programs = triton.cdiv(blocks, rounds)
    out.zero_()
    reduction_v06_atomic_kernel[(programs,)](
        x, out, n, LOADS=LOADS, THREADS=THREADS, VECTOR=vector, num_warps=NUM_WARPS
    )

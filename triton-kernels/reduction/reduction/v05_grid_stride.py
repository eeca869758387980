"""reduction v05_grid_stride: persistent programs stride over the vector, adding in registers.

Change:   a few programs an SM loop over the blocks of the vector; each thread keeps a running total, and the totals are
          summed once, at the end. A second launch of one program sums the programs' sums, always in the same order, so
          runs agree bit by bit.
Why:      shuffles, barrier and set-up are paid once a program instead of once a block, and two launches do for any n.
          A total that took one element after the other would err more the longer the vector is, so a block's elements
          are summed first, within the thread, and join the total by Knuth's TwoSum, which keeps what the addition
          rounds away (TAOCP 4.2.2, theorem B).
Error:    at most 18 eps sum|x|, eps = 2^-23, for any n. To first order a sum errs by eps/2 for every rounding that an
          element passes through: 10 in the thread (fp32: 6), 1 where total and error are added, 1 where the rest
          joins, 5 in the warp, 2 in the program, and in the second launch, which is of fp32, 15 again. The
          compensated loop adds (m eps/2)^2 for m blocks a thread (Ogita, Rump and Oishi 2005, proposition 4.5),
          which is below eps/2 until m = 4096: 8 * 10^9 fp32 elements on 132 SMs.
Counter:  time falls a little, and dram_share rises; launches falls to 2.
Requires: a contiguous tensor of any size. Loads take 16 bytes if the address is a multiple of 16, which the launcher
          tells the compiler; otherwise they take one element.
Twin:     cuda-kernels/reduction/reduction/v05_grid_stride.cu
"""

from __future__ import annotations

import torch
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
def reduction_v05_grid_stride_kernel(
    x, sums, n: tl.int64, LOADS: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr
):
    # x: [n], sums: [programs]. The program's index is widened first: 2^31 elements and more overflow 32 bits.
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
    tl.store(sums + program, tl.sum(total))


def reduction_v05_grid_stride(x: Tensor, *, out: Tensor) -> None:
    """out = sum of x, contiguous and of any shape; fp32, bf16 or fp16 in, fp32 without dimensions out."""
    while True:
        n = x.numel()
        vector = VECTOR_BYTES // x.element_size()
        blocks = max(1, n // (LOADS * THREADS * vector))
        # All programs take the same number of blocks, except in the last round, so that none ends a whole block late.
        rounds = triton.cdiv(blocks, PROGRAMS_PER_SM * sm_count(x.device))
        programs = triton.cdiv(blocks, rounds)
        sums = out if programs == 1 else torch.empty(programs, dtype=torch.float32, device=x.device)
        reduction_v05_grid_stride_kernel[(programs,)](
            x, sums, n, LOADS=LOADS, THREADS=THREADS, VECTOR=vector, num_warps=NUM_WARPS
        )
        if programs == 1:
            return
        x = sums

"""reduction v07_last_block: the program that ends last sums what all programs have written.

Change:   a program writes its sum to a workspace and takes a ticket from a counter. The program with the last ticket
          knows that all sums are there and adds them in a fixed order: one launch, and the same bits every time. It
          also resets the counter to zero.
Why:      v06's single launch without its changing order. One thread of a program stores the sum and takes the ticket,
          which is release and acquire in one: a program's sum is visible before its ticket, and the holder of a later
          ticket may read it.
Error:    at most 21 eps sum|x|, eps = 2^-23, for any n, as in v05: 19 roundings in a program, and among the programs'
          sums 15 in a thread, 5 in the warp and 2 in the program.
Counter:  time at 2^26 elements stays v06's, and falls at 2^16; launches is 1.
Requires: a contiguous tensor of any size. Loads take 16 bytes if the address is a multiple of 16, which the launcher
          tells the compiler; otherwise they take one element.
Twin:     cuda-kernels/reduction/reduction/v07_last_block.cu
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.lib.workspace import counter

NUM_WARPS = 4  # half of v04's, so that a short vector spreads over more SMs
THREADS = NUM_WARPS * 32
VECTOR_BYTES = 16
LOADS = 4  # independent loads a thread
PROGRAMS_PER_SM = 8  # 1024 threads with 64 bytes each in flight: 64 KiB an SM
MOST_PROGRAMS = 2048  # whose sums the last program can add: enough for 256 SMs


@triton.jit
def reduction_v07_last_block_kernel(
    x, sums, counter, out, n: tl.int64,
    LOADS: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr, MOST_PROGRAMS: tl.constexpr,
):  # fmt: skip
    # x: [n], sums: [programs], counter and out: one number. The program's index is widened first: 2^31 elements and
    # more overflow 32 bits.
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

    # One thread stores the sum and takes the ticket. Triton then has a barrier, after which all threads may read.
    ticket = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if ticket == programs - 1:
        slot = tl.arange(0, MOST_PROGRAMS)
        # .cg loads from L2: L1 may hold stale sums of other programs.
        parts = tl.load(sums + slot, mask=slot < programs, other=0.0, cache_modifier=".cg")
        tl.store(out, tl.sum(parts))
        tl.store(counter, 0)


def reduction_v07_last_block(x: Tensor, *, out: Tensor) -> None:
    """out = sum of x, contiguous and of any shape; fp32, bf16 or fp16 in, fp32 without dimensions out."""
    n = x.numel()
    vector = VECTOR_BYTES // x.element_size()
    blocks = max(1, n // (LOADS * THREADS * vector))
    # All programs take the same number of blocks, except in the last round, so that none ends a whole block late.
    rounds = triton.cdiv(blocks, min(PROGRAMS_PER_SM * sm_count(x.device), MOST_PROGRAMS))
    programs = triton.cdiv(blocks, rounds)
    sums = torch.empty(programs, dtype=torch.float32, device=x.device)
    reduction_v07_last_block_kernel[(programs,)](
        x, sums, counter(x.device), out, n,
        LOADS=LOADS, THREADS=THREADS, VECTOR=vector, MOST_PROGRAMS=MOST_PROGRAMS, num_warps=NUM_WARPS,
    )  # fmt: skip

"""The mean or sum of the rows' losses, always added in the same order, so runs agree bit by bit.

Each program adds a share of the rows. If there are several, the one that takes the last ticket adds their sums, as in
reduction's v07. The mean of no rows is NaN, as in PyTorch.

Twin: cuda-kernels/loss/cross_entropy/function_mean.cu
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.workspace import counter

BLOCK = 1024  # losses a program loads at once
ROWS_PER_PROGRAM = 4 * BLOCK
MOST_PROGRAMS = 512


@triton.jit
def _write(loss, scale, total, count, MEAN: tl.constexpr):
    rows = count.to(tl.float64) if MEAN else tl.full((), 1.0, dtype=tl.float64)
    tl.store(loss, (total / rows).to(tl.float32).to(loss.dtype.element_ty))
    tl.store(scale, (1.0 / rows).to(tl.float32))


@triton.jit
def cross_entropy_mean_kernel(
    losses, target, loss, scale, totals, counts, tickets, M, ignore_index: tl.int64,
    MEAN: tl.constexpr, BLOCK: tl.constexpr, MOST_PROGRAMS: tl.constexpr,
):  # fmt: skip
    # losses, target: [M]; loss, scale: one number. With several programs: totals, counts: [programs], and tickets: one
    # number, 0 before and after. Otherwise None.
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    sums, rows = tl.zeros((BLOCK,), dtype=tl.float64), tl.zeros((BLOCK,), dtype=tl.int64)
    for start in tl.range(program * BLOCK, M, programs * BLOCK):
        row = start + tl.arange(0, BLOCK)
        sums += tl.load(losses + row, mask=row < M, other=0.0)
        rows += tl.load(target + row, mask=row < M, other=ignore_index) != ignore_index
    total, count = tl.sum(sums), tl.sum(rows)
    if tickets is None:
        _write(loss, scale, total, count, MEAN)
    else:
        tl.store(totals + program, total)
        tl.store(counts + program, count)
        # One thread stores both and takes the ticket. Triton then has a barrier, after which all threads may read.
        if tl.atomic_add(tickets, 1, sem="acq_rel", scope="gpu") == programs - 1:
            slot = tl.arange(0, MOST_PROGRAMS)
            # .cg loads from L2: L1 may hold stale numbers of other programs.
            total = tl.sum(tl.load(totals + slot, mask=slot < programs, other=0.0, cache_modifier=".cg"))
            count = tl.sum(tl.load(counts + slot, mask=slot < programs, other=0, cache_modifier=".cg"))
            _write(loss, scale, total, count, MEAN)
            tl.store(tickets, 0)


_plans: dict[tuple[Any, ...], plans.Plan] = {}


def cross_entropy_mean(
    losses: Tensor, target: Tensor, loss: Tensor, scale: Tensor, ignore_index: int, mean: bool
) -> None:
    """loss = the mean of the losses whose target is not ignored, or the sum; scale = the weight of a row's loss in it.

    losses: [M], fp32; target: [M], int64; loss: one number, fp32, bf16 or fp16; scale: one number, fp32.
    """
    M, device = losses.numel(), losses.device
    programs = min(max(-(-M // ROWS_PER_PROGRAM), 1), MOST_PROGRAMS)  # triton.cdiv takes as long as the launch
    shared: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if programs > 1:
        totals = torch.empty(programs, dtype=torch.float64, device=device)
        shared = totals, torch.empty_like(totals, dtype=torch.int64), counter(device)
    tensors = losses, target, loss, scale, *shared
    key = M, loss.dtype, ignore_index, mean, plans.alignment(*tensors), losses.get_device()
    plan = _plans.get(key)
    if plan is not None:
        plan(*tensors)
        return
    constants = {"MEAN": mean, "BLOCK": BLOCK, "MOST_PROGRAMS": MOST_PROGRAMS}
    plan = plans.launch(cross_entropy_mean_kernel, (programs,), tensors, (M, ignore_index), constants)
    if plan is not None:
        plans.keep(_plans, key, plan)

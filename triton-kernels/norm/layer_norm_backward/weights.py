"""A norm's backward pass without dx: the sums over all rows for dweight, dbias or both.

A program takes rows of a strip of columns and adds up its columns in fp32. A second, small launch adds the programs'
sums in a fixed order, so that every run gives the same bits. Only what is needed is read: dbias needs dout alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.norm.layer_norm_backward.column_sums import SUM_WARPS, norm_backward_sum_kernel, summing

TILE = 4096  # elements that a program has under way
COLUMNS = 256  # of a tile, as a warp reads 8 neighbours a lane
NUM_WARPS = 8
PROGRAMS_PER_SM = 4


@triton.jit(do_not_specialize=["M", "chunk_rows"])
def norm_weights_kernel(
    dout, x, mean, rstd, partials, M, N, stride_dm, stride_xm, chunk_rows,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # dout, x: [M, N]; mean, rstd: [M]; partials: [sums, chunks, N], of dweight where there is an x, then of dbias where
    # there is BIAS. Missing tensors are None. Offsets of rows have 64 bits.
    strips = (N - 1) // BLOCK_N + 1  # tl.cdiv adds first, which wraps near 2^31
    chunk, chunks = (tl.program_id(0) // strips).to(tl.int64), tl.num_programs(0) // strips
    col = (tl.program_id(0) % strips).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dweight = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    end = tl.minimum((chunk + 1) * chunk_rows, M)
    for first in tl.range(chunk * chunk_rows, end, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)[:, None]
        mask = (row < end) & (col < N)
        gradient = tl.load(dout + row * stride_dm + col, mask=mask, other=0.0).to(tl.float32)
        if x is not None:
            values = tl.load(x + row * stride_xm + col, mask=mask, other=0.0).to(tl.float32)
            if mean is not None:
                values -= tl.load(mean + row, mask=row < end, other=0.0)
            dweight += gradient * (values * tl.load(rstd + row, mask=row < end, other=0.0))
        if BIAS:
            dbias += gradient
    place = partials + chunk * N + col
    if x is not None:
        tl.store(place, tl.sum(dweight, axis=0, keep_dims=True), mask=col < N)
        place += chunks.to(tl.int64) * N
    if BIAS:
        tl.store(place, tl.sum(dbias, axis=0, keep_dims=True), mask=col < N)


_plans: dict[tuple[Any, ...], tuple[plans.Plan, plans.Plan]] = {}


def norm_weights(
    dout: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """dweight and dbias of layer_norm, or without a mean of rms_norm; None is not computed, and not both are None.

    dout, x: [M, N], contiguous rows, fp32, bf16 or fp16; mean, rstd: [M], fp32; dweight, dbias: [N].
    """
    (M, N), device = dout.shape, dout.device
    sums = [each for each in (dweight, dbias) if each is not None]
    if M == 0 or N == 0:
        for each in sums:
            each.zero_()
        return
    inputs = (dout, None, None, None) if dweight is None else (dout, x, mean, rstd)
    strides = dout.stride(0), 0 if dweight is None else x.stride(0)
    block_n = min(COLUMNS, triton.next_power_of_2(N))
    block_m = TILE // block_n
    strips = triton.cdiv(N, block_n)
    wanted = max(1, PROGRAMS_PER_SM * sm_count(device) // strips)
    chunk_rows = triton.cdiv(triton.cdiv(M, wanted), block_m) * block_m  # whole tiles: no two chunks share one
    chunks = triton.cdiv(M, chunk_rows)
    partials = torch.empty((len(sums), chunks, N), dtype=torch.float32, device=device)
    tensors, results = (*inputs, partials), (partials, sums[0], sums[1] if len(sums) > 1 else None)
    key = M, N, strides, dout.dtype, dbias is None, plans.alignment(*tensors, *sums), dout.get_device()
    kept = _plans.get(key)
    if kept is not None:
        kept[0](*tensors)
        kept[1](*results)
        return
    constants = {"BIAS": dbias is not None, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": NUM_WARPS}
    first = plans.launch(norm_weights_kernel, (strips * chunks,), tensors, (M, N, *strides, chunk_rows), constants)
    grid, behind = summing(len(sums), chunks, N, sm_count(device))
    second = plans.launch(norm_backward_sum_kernel, grid, results, behind, {"num_warps": SUM_WARPS})
    if first is not None and second is not None:
        plans.keep(_plans, key, (first, second))

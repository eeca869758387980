"""layer_norm_backward v03_pipelined: the next rows travel to shared memory while one is worked on.

Change:   the loop over the rows has several STAGES, from which the compiler makes a ring of tiles in shared memory,
          filled by asynchronous copies.
Why:      a persistent program has no other to fill in while it waits for its rows, at a barrier, or for its stores. A
          copy that needs no registers can be under way all the time, and leaves them to the sums.
Counter:  time falls; dram_share rises.
Requires: compute capability 9.0, for the shared memory. Rows of at most 16 KiB whose elements are contiguous, at any
          distance from each other. Where N or those distances are not multiples of 16, the compiler cannot know where a
          row starts: elements are loaded one by one, and nothing travels ahead, as an asynchronous copy takes 4 bytes
          at least.
Twin:     cuda-kernels/norm/layer_norm_backward/v03_pipelined.cu
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning
from kernel_twins._triton.norm.layer_norm_backward.column_sums import add_up
from kernel_twins._triton.norm.layer_norm_backward.v02_persistent import DIVIDED, programs, row_sums

# Shared memory holds STAGES - 1 tiles of both matrices for all PER_SM programs; the tiles in work are in registers.
CONFIGS = [
    triton.Config({"TILE_BYTES": size, "PER_SM": per_sm, "STAGES": stages}, num_warps=warps)
    for size, per_sm, stages, warps in (
        (4096, 4, 3, 4), (1024, 16, 3, 1), (2048, 8, 3, 2), (4096, 5, 3, 4), (4096, 4, 2, 4), (8192, 2, 3, 8),
        (16384, 1, 3, 16), (16384, 1, 2, 16), (4096, 4, 3, 2), (8192, 2, 3, 4),
    )
]  # fmt: skip


@triton.autotune(CONFIGS, key=["N"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(DIVIDED)
@triton.jit
def layer_norm_backward_v03_pipelined_kernel(
    dout, x, mean, rstd, weight, dadded, dx, partials, M, N, stride_dm, stride_xm, stride_am,
    TILE_BYTES: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # dout, x, dadded: [M, N]; mean, rstd: [M]; weight: [N]; dx: [M, N] contiguous; partials: [2, programs, N], of
    # dweight and dbias. Missing tensors are None.
    col = tl.broadcast_to(tl.arange(0, BLOCK_N)[None, :], (ROWS, BLOCK_N))
    if weight is not None:
        # Repeated for every row of the tile, so that threads hold it in the layout of the rows.
        row_weight = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
        dweight = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        dbias = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)

    # num_stages makes the compiler build the ring: it waits for a tile's copies, takes the tile to registers, and
    # starts the next copy into its place. Rows are numbered, and their offsets computed, in 64 bits.
    program, count = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for first in tl.range(program * ROWS, M, count * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        # Elements behind a row, and rows behind the last one, are 0 in dout, and add nothing.
        mask = (row < M) & (col < N)
        gradient = tl.load(dout + row * stride_dm + col, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(x + row * stride_xm + col, mask=mask, other=0.0).to(tl.float32)
        row_mean = tl.load(mean + row, mask=row < M, other=0.0)
        row_rstd = tl.load(rstd + row, mask=row < M, other=0.0)
        xhat = (values - row_mean) * row_rstd
        if weight is not None:
            dweight += gradient * xhat
            dbias += gradient
            gradient *= row_weight
        product_sum, gradient_sum = row_sums(gradient * xhat, gradient)
        result = row_rstd * (gradient - gradient_sum / N - xhat * (product_sum / N))
        if dadded is not None:
            result += tl.load(dadded + row * stride_am + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + row * N + col, result.to(dx.dtype.element_ty), mask=mask)

    if weight is not None:
        place = tl.arange(0, BLOCK_N)
        partials += program * N + place
        tl.store(partials, tl.sum(dweight, axis=0), mask=place < N)
        tl.store(partials + count.to(tl.int64) * N, tl.sum(dbias, axis=0), mask=place < N)


def layer_norm_backward_v03_pipelined(
    dout: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dadded: Tensor | None = None,
    *,
    out: Tensor | tuple[Tensor, ...],
) -> None:
    """out = dx, dweight and dbias, or without a weight dx alone; fp32, bf16 or fp16.

    dout, x, and dadded, the gradient of x + residual: [M, N], contiguous rows of at most 16 KiB; mean, rstd: [M], fp32;
    weight, dweight, dbias: [N]; dx: [M, N].
    """
    (M, N), (dx, *sums) = dout.shape, out if isinstance(out, tuple) else (out,)
    if M == 0 or N == 0:
        for each in sums:
            each.zero_()
        return
    problem, step = tuning.problem_of(M, N, dtype=dout.dtype), "layer_norm_backward/v03_pipelined"
    kernel, config = tuning.choose(layer_norm_backward_v03_pipelined_kernel, step, problem, dout.device)
    grid = lambda config: (programs(M, N, dout.element_size(), config, dout.device),)  # noqa: E731
    most = max(grid(each)[0] for each in ([config] if config else [each.kwargs for each in CONFIGS]))
    partials = torch.empty(2 * most * N if sums else 0, dtype=torch.float32, device=dout.device)
    kernel[grid](
        dout, x, mean, rstd, weight, dadded, dx, partials if sums else None, M, N, dout.stride(0), x.stride(0),
        0 if dadded is None else dadded.stride(0), **config,
    )  # fmt: skip
    if sums:
        (count,) = grid(config or kernel.best_config.kwargs)
        add_up(partials[: 2 * count * N].view(2, count, N), *sums)

"""layer_norm_backward v03_pipelined: the next rows travel to shared memory while one is worked on.

Change:   the loop over the rows has several STAGES, from which the compiler makes a ring of tiles in shared memory,
          filled by asynchronous copies. A row whose sums of columns are too many for a program's registers is divided
          into PARTS: each program reads all of the row, for its sums, but keeps and writes its own part.
Why:      programs that stay have no others to fill in while they wait for their rows, for each other at a barrier, and
          for their stores. A copy that needs no registers can be under way all the time, and leaves them to the sums.
Counter:  time falls by 5 % and more; dram_share should pass 76 %.
Requires: compute capability 9.0, for the shared memory. Rows of at most 32 KiB whose elements are contiguous, at any
          distance from each other. Where N or those distances are no multiples of 16, the compiler cannot know where a
          row starts: elements are loaded one by one, and nothing travels ahead, as an asynchronous copy takes 4 bytes
          at least.
Twin:     cuda-kernels/layer_norm_backward/v03_pipelined.cu
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton import tuning
from kernel_twins._triton.device import sm_count
from kernel_twins._triton.layer_norm_backward.v01_rows_then_columns import add_up
from kernel_twins._triton.layer_norm_backward.v02_persistent import registers, row_sums, rows_of, times

# STAGES - 1 tiles of both matrices and all PER_SM programs lie in shared memory; those being computed are in registers.
CONFIGS = [
    triton.Config({"TILE_BYTES": size, "PER_SM": per_sm, "STAGES": stages}, num_warps=warps)
    for size, per_sm, stages, warps in (
        (4096, 4, 3, 4), (1024, 16, 3, 1), (2048, 8, 3, 2), (4096, 5, 3, 4), (4096, 4, 2, 4), (8192, 2, 3, 8),
        (16384, 1, 3, 16), (16384, 1, 2, 16), (4096, 4, 3, 2), (8192, 2, 3, 4),
    )
]  # fmt: skip


def parts_of(N: int, itemsize: int, config: dict[str, Any]) -> int:
    """Programs that a row is divided among."""
    return triton.cdiv(N * itemsize, config["TILE_BYTES"] * times(N, itemsize, config))


def programs(M: int, N: int, itemsize: int, config: dict[str, Any], device: torch.device) -> int:
    """All that run at once, or fewer that take as many tiles, but for the last round: none ends a tile late."""
    tiles, parts = triton.cdiv(M, rows_of(N, itemsize, config)), parts_of(N, itemsize, config)
    groups = config["PER_SM"] // times(N, itemsize, config) * sm_count(device) // parts
    return triton.cdiv(tiles, triton.cdiv(tiles, groups)) * parts


DIVIDED = {
    "PARTS": lambda args: parts_of(args["N"], args["dout"].element_size(), args),
    "BLOCK_N": lambda args: triton.next_power_of_2(triton.cdiv(args["N"], args["PARTS"])),
    "ROWS": lambda args: rows_of(args["N"], args["dout"].element_size(), args),
    "maxnreg": lambda args: registers(args["N"], args["dout"].element_size(), args),
    "num_warps": lambda args: args["num_warps"] * times(args["N"], args["dout"].element_size(), args),
}


@triton.jit
def _loaded(dout_rows, x_rows, row_mean, row_rstd, col, mask):
    # dout and xhat. What lies behind a row, or behind the last one, is 0 in dout, and adds nothing.
    gradient = tl.load(dout_rows + col, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(x_rows + col, mask=mask, other=0.0).to(tl.float32)
    return gradient, (values - row_mean) * row_rstd


@triton.autotune(CONFIGS, key=["N"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(DIVIDED)
@triton.jit
def layer_norm_backward_v03_pipelined_kernel(
    dout, x, mean, rstd, weight, dadded, dx, partials, M, N, stride_dm, stride_xm, stride_am,
    TILE_BYTES: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # dout, x, dadded: [M, N]; mean, rstd: [M]; weight: [N]; dx: [M, N] contiguous; partials: [2, groups of PARTS
    # programs, N], of dweight and dbias. What is not there is None.
    part, group, groups = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
    share = tl.cdiv(N, 16 * PARTS) * 16  # columns, whole vectors of them
    place = tl.broadcast_to(tl.arange(0, BLOCK_N)[None, :], (ROWS, BLOCK_N))
    col = part * share + place
    held = (place < share) & (col < N)
    if weight is not None:
        # Of every row of the tile, so that threads have it as they have the rows.
        row_weight = tl.load(weight + col, mask=held, other=0.0).to(tl.float32)
        dweight = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        dbias = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)

    # num_stages on the loop makes the compiler build the ring: it waits for a tile's copies, takes the tile into
    # registers, and has its place filled again. Numbers and offsets of rows have 64 bits.
    for first in tl.range(group.to(tl.int64) * ROWS, M, groups * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = row < M
        row_mean = tl.load(mean + row, mask=inside, other=0.0)
        row_rstd = tl.load(rstd + row, mask=inside, other=0.0)
        dout_rows, x_rows = dout + row * stride_dm, x + row * stride_xm
        gradient, xhat = _loaded(dout_rows, x_rows, row_mean, row_rstd, col, inside & held)
        if weight is not None:
            dweight += gradient * xhat
            dbias += gradient
            gradient *= row_weight
        product_sum, gradient_sum = row_sums(gradient * xhat, gradient)
        for another in tl.static_range(1, PARTS):
            start = (part + another) % PARTS * share
            mask = inside & (place < tl.minimum(share, N - start))
            its_gradient, its_xhat = _loaded(dout_rows, x_rows, row_mean, row_rstd, start + place, mask)
            if weight is not None:
                its_gradient *= tl.load(weight + start + place, mask=mask, other=0.0).to(tl.float32)
            its_product_sum, its_gradient_sum = row_sums(its_gradient * its_xhat, its_gradient)
            product_sum += its_product_sum
            gradient_sum += its_gradient_sum
        result = row_rstd * (gradient - gradient_sum / N - xhat * (product_sum / N))
        if dadded is not None:
            result += tl.load(dadded + row * stride_am + col, mask=inside & held, other=0.0).to(tl.float32)
        tl.store(dx + row * N + col, result.to(dx.dtype.element_ty), mask=inside & held)

    if weight is not None:
        place = tl.arange(0, BLOCK_N)
        col = part * share + place
        partials += group.to(tl.int64) * N + col
        tl.store(partials, tl.sum(dweight, axis=0), mask=(place < share) & (col < N))
        tl.store(partials + groups.to(tl.int64) * N, tl.sum(dbias, axis=0), mask=(place < share) & (col < N))


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

    dout, x, and dadded, the gradient of x + residual: [M, N], contiguous rows of at most 32 KiB; mean, rstd: [M], fp32;
    weight, dweight, dbias: [N]; dx: [M, N].
    """
    (M, N), (dx, *sums) = dout.shape, out if isinstance(out, tuple) else (out,)
    if M == 0 or N == 0:
        for each in sums:
            each.zero_()
        return
    problem, step = tuning.problem_of(M, N, dtype=dout.dtype), "layer_norm_backward/v03_pipelined"
    kernel, config = tuning.choose(layer_norm_backward_v03_pipelined_kernel, step, problem, dout.device)
    itemsize = dout.element_size()
    grid = lambda config: (programs(M, N, itemsize, config, dout.device),)  # noqa: E731
    groups = lambda config: grid(config)[0] // parts_of(N, itemsize, config)  # noqa: E731
    most = max(groups(each) for each in ([config] if config else [each.kwargs for each in CONFIGS]))
    partials = torch.empty(2 * most * N if sums else 0, dtype=torch.float32, device=dout.device)
    kernel[grid](
        dout, x, mean, rstd, weight, dadded, dx, partials if sums else None, M, N, dout.stride(0), x.stride(0),
        0 if dadded is None else dadded.stride(0), **config,
    )  # fmt: skip
    if sums:
        count = groups(config or kernel.best_config.kwargs)
        add_up(partials[: 2 * count * N].view(2, count, N), *sums)

"""layer_norm_backward v02_persistent: a persistent kernel adds up dweight and dbias of its columns in registers.

Change:   as many programs as the GPU runs at once take every so-many-th tile of rows. They load it once, and add its
          terms of dweight and dbias to sums that stay in registers. A second kernel adds the programs' sums, always in
          the same order. The tile's size and the numbers of warps and programs are searched over the list below (see
          tuning.py).
Why:      a thread has the same columns of every row, so their sums cost two additions an element, and no memory. The
          rows of a tile have sums of their own until the end: threads exchange them once, instead of once a tile.
Counter:  bytes_over_minimum falls to 1; time falls.
Requires: rows of at most 16 KiB whose elements are contiguous, at any distance from each other. Where N and those
          distances are multiples of 16, loads take 16 bytes; elsewhere the compiler cannot know where a row starts, and
          loads one element at a time.
Twin:     cuda-kernels/norm/layer_norm_backward/v02_persistent.cu
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.norm.layer_norm_backward.column_sums import add_up

REGISTERS = 65_536  # of an SM
MOST_REGISTERS = 248  # of a thread: they are allotted in units of 8
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# A thread has 16 or 32 elements of 16 bits.
CONFIGS = [
    triton.Config({"TILE_BYTES": size, "PER_SM": per_sm}, num_warps=warps)
    for size, per_sm, warps in (
        (4096, 4, 4), (1024, 16, 1), (2048, 8, 2), (4096, 5, 4), (8192, 2, 8), (16384, 1, 16), (4096, 4, 2),
        (8192, 2, 4),
    )
]  # fmt: skip


def times(N: int, itemsize: int, config: dict[str, Any]) -> int:
    """By how much a program grows beyond its configuration to hold a row longer than its tile; an SM bounds it."""
    row = triton.next_power_of_2(N) * itemsize
    return min(max(row // config["TILE_BYTES"], 1), 2 ** (config["PER_SM"].bit_length() - 1))


def registers(N: int, itemsize: int, config: dict[str, Any]) -> int:
    """Registers of a thread, rationed for all programs that run at once. The hardware allots them in units of 8."""
    larger = times(N, itemsize, config)
    threads = config["PER_SM"] // larger * config["num_warps"] * larger * 32
    return min(REGISTERS // threads // 8 * 8, MOST_REGISTERS)


def rows_of(N: int, itemsize: int, config: dict[str, Any]) -> int:
    """Rows of a tile."""
    return max(config["TILE_BYTES"] // (triton.next_power_of_2(N) * itemsize), 1)


def programs(M: int, N: int, itemsize: int, config: dict[str, Any], device: torch.device) -> int:
    """All programs that run at once, or fewer that need as many rounds of tiles: none ends a tile late."""
    tiles = triton.cdiv(M, rows_of(N, itemsize, config))
    resident = config["PER_SM"] // times(N, itemsize, config) * sm_count(device)
    return triton.cdiv(tiles, triton.cdiv(tiles, resident))


DIVIDED = {
    "BLOCK_N": lambda args: triton.next_power_of_2(args["N"]),
    "ROWS": lambda args: rows_of(args["N"], args["dout"].element_size(), args),
    "maxnreg": lambda args: registers(args["N"], args["dout"].element_size(), args),
    # Last, since it replaces the configured number.
    "num_warps": lambda args: args["num_warps"] * times(args["N"], args["dout"].element_size(), args),
}


@triton.jit
def row_sums(a, b):
    # The sums of every row of a and of b. Joined to one tensor they take one exchange among threads instead of two. The
    # interpreter would add a joined tensor's elements one after the other, and lose digits that a GPU keeps.
    if INTERPRETED:
        a_sums, b_sums = tl.sum(a, axis=1, keep_dims=True), tl.sum(b, axis=1, keep_dims=True)
    else:
        a_sums, b_sums = tl.split(tl.sum(tl.join(a, b), axis=1))
        a_sums, b_sums = a_sums[:, None], b_sums[:, None]
    return a_sums, b_sums


@triton.autotune(CONFIGS, key=["N"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(DIVIDED)
@triton.jit
def layer_norm_backward_v02_persistent_kernel(
    dout, x, mean, rstd, weight, dadded, dx, partials, M, N, stride_dm, stride_xm, stride_am,
    TILE_BYTES: tl.constexpr, PER_SM: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # dout, x, dadded: [M, N]; mean, rstd: [M]; weight: [N]; dx: [M, N] contiguous; partials: [2, programs, N], of
    # dweight and dbias. Missing tensors are None.
    col = tl.broadcast_to(tl.arange(0, BLOCK_N)[None, :], (ROWS, BLOCK_N))
    if weight is not None:
        # Repeated for every row of the tile, so that threads hold it in the layout of the rows.
        row_weight = tl.load(weight + col, mask=col < N, other=0.0).to(tl.float32)
        dweight = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        dbias = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)

    # Rows are numbered, and their offsets computed, in 64 bits.
    program, count = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for first in tl.range(program * ROWS, M, count * ROWS):
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


def layer_norm_backward_v02_persistent(
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
    problem, step = tuning.problem_of(M, N, dtype=dout.dtype), "layer_norm_backward/v02_persistent"
    kernel, config = tuning.choose(layer_norm_backward_v02_persistent_kernel, step, problem, dout.device)
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

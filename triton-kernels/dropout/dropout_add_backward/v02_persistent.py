"""dropout_add_backward v02_persistent: a persistent kernel sums strips of columns in registers.

Change:   as many programs as the GPU runs at once take a strip of columns each, over a chunk of the rows. They load a
          tile once, write its dx, and add dx, before it is rounded, to sums that stay in registers; a second kernel
          adds the programs' sums, always in the same order. Four neighbours share a Philox call. The tile and the
          numbers of warps and programs are searched over the list below (see tuning.py).
Why:      a thread has the same columns of every row, so their sums cost an addition an element, and no memory. The rows
          of a tile have sums of their own until the end: threads exchange them once.
Counter:  bytes_over_minimum falls to 1; time falls.
Requires: rows whose elements are contiguous, at any distance from each other. Where N and those distances are multiples
          of 16, loads take 16 bytes; where N is not a multiple of 4, every four elements take two Philox calls.
Twin:     cuda-kernels/dropout/dropout_add_backward/v02_persistent.cu
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.dropout.philox import gradient, keeps, keeps_anywhere, numbers
from kernel_twins._triton.lib import tuning
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.norm.layer_norm_backward.column_sums import add_up

CONFIGS = [
    triton.Config({"TILE": tile, "COLUMNS": columns, "PER_SM": per_sm}, num_warps=warps)
    for tile, columns, per_sm, warps in (
        (2048, 512, 8, 4), (4096, 512, 4, 8), (4096, 1024, 4, 8), (2048, 1024, 8, 4), (2048, 256, 8, 4),
        (2048, 2048, 4, 8), (1024, 1024, 8, 4),
    )
]  # fmt: skip


def block_n(N: int, config: dict[str, Any]) -> int:
    """Columns of a tile: all of a short row, and four at least."""
    return min(config["COLUMNS"], max(triton.next_power_of_2(N), 4))


def chunked(M: int, N: int, config: dict[str, Any], device: torch.device) -> tuple[int, int, int]:
    """Strips of columns, rows of a chunk, and chunks: as many as run at once, of which no two share a tile."""
    rows = config["TILE"] // block_n(N, config)
    strips = triton.cdiv(N, block_n(N, config))
    wanted = max(1, config["PER_SM"] * sm_count(device) // strips)
    chunk_rows = triton.cdiv(triton.cdiv(M, wanted), rows) * rows
    return strips, chunk_rows, triton.cdiv(M, chunk_rows)


@triton.autotune(CONFIGS, key=["N"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(
    {
        "BLOCK_N": lambda args: block_n(args["N"], args),
        "BLOCK_M": lambda args: args["TILE"] // block_n(args["N"], args),
        "WORDS_ALIGNED": lambda args: args["N"] % 4 == 0,
        "chunk_rows": lambda args: chunked(args["M"], args["N"], args, args["dout"].device)[1],
    }
)
@triton.jit(do_not_specialize=["seed", "offset", "chunk_rows"])
def dropout_add_backward_v02_persistent_kernel(
    dout, x, bias, dx, partials, M: tl.int64, N, stride_dm, stride_xm, seed, offset, threshold: tl.uint32, scale,
    chunk_rows, ALL: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    PER_SM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORDS_ALIGNED: tl.constexpr,
):  # fmt: skip
    # dout, x: [M, N]; bias: [N]; dx: [M, N] contiguous; partials: [chunks, N]. Missing tensors are None.
    strips = (N - 1) // BLOCK_N + 1  # tl.cdiv adds first, which wraps near 2^31
    chunk = (tl.program_id(0) // strips).to(tl.int64)
    first_col = tl.program_id(0) % strips * BLOCK_N
    col = first_col + tl.arange(0, BLOCK_N)[None, :]
    if bias is not None:
        shift = tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    end = tl.minimum((chunk + 1) * chunk_rows, M)
    for start in tl.range(chunk * chunk_rows, end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)[:, None]
        mask = (row < end) & (col < N)
        values = tl.load(dout + row * stride_dm + col, mask=mask, other=0.0, eviction_policy="evict_first")
        values = values.to(tl.float32)
        z = values  # unused without an activation
        if ACTIVATION != "none":
            z = tl.load(x + row * stride_xm + col, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            if bias is not None:
                z += shift
        if WORDS_ALIGNED:
            block = (row * N + first_col) // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
            kept = keeps(seed, offset, threshold, ALL, block, BLOCK_N)
        else:
            four = row * N + first_col + 4 * tl.arange(0, BLOCK_N // 4)[None, :]
            kept = keeps_anywhere(seed, offset, threshold, ALL, four, BLOCK_N)
        # Elements behind the matrix were read as 0, whose gradient is 0, too.
        values = tl.where(kept, gradient(values, z, scale, ACTIVATION), 0.0)
        tl.store(dx + row * N + col, values.to(dx.dtype.element_ty), mask=mask)
        if partials is not None:
            sums += values
    if partials is not None:
        tl.store(partials + chunk * N + col, tl.sum(sums, axis=0, keep_dims=True), mask=col < N)


def dropout_add_backward_v02_persistent(
    dout: Tensor,
    x: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    p: float = 0.5,
    activation: str = "none",
    seed: int | Tensor = 0,
    offset: int | None = 0,
    out: Tensor | tuple[Tensor, ...],
) -> None:
    """out = dx, or dx and dbias; fp32, bf16 or fp16.

    dout, x: [M, N], contiguous rows, x only with an activation; bias, dbias: [N]; dx: [M, N]. Where offset is None,
    seed holds both: [2], int64.
    """
    (M, N), (dx, *sums) = dout.shape, out if isinstance(out, tuple) else (out,)
    if M == 0 or N == 0:
        for each in sums:
            each.zero_()
        return
    threshold, scale, drops_all = numbers(p)
    problem, step = tuning.problem_of(M, N, dtype=dout.dtype), "dropout_add_backward/v02_persistent"
    kernel, config = tuning.choose(dropout_add_backward_v02_persistent_kernel, step, problem, dout.device)
    chunks = lambda config: chunked(M, N, config, dout.device)[2]  # noqa: E731
    # A search appends the count of each candidate, and at last that of what this call launches.
    counts = list(map(chunks, [config] if config else [each.kwargs for each in CONFIGS]))
    partials = torch.empty(max(counts) * N, dtype=torch.float32, device=dout.device) if sums else None

    def grid(args: dict[str, Any]) -> tuple[int]:
        counts.append(chunks(args))
        return (triton.cdiv(N, block_n(N, args)) * counts[-1],)

    kernel[grid](
        dout, x, bias, dx, partials, M, N, dout.stride(0), 0 if x is None else x.stride(0), seed, offset, threshold,
        scale, ALL=drops_all, ACTIVATION=activation, **config,
    )  # fmt: skip
    if partials is not None:
        add_up(partials[: counts[-1] * N].view(1, counts[-1], N), *sums)

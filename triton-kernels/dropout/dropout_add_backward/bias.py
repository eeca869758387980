"""dropout_add's backward pass for dbias alone, from masks that are drawn again.

As in v02, a persistent program sums a strip of columns over a chunk of the rows in registers, and a second kernel adds
the programs' sums, always in the same order; but dx is not written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.dropout.philox import gradient, keeps, keeps_anywhere, numbers
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.norm.layer_norm_backward.column_sums import add_up

TILE = 4096  # elements that a program has under way
COLUMNS = 512  # of a tile
NUM_WARPS = 8
PROGRAMS_PER_SM = 4


@triton.jit(do_not_specialize=["seed", "offset", "M", "chunk_rows"])
def dropout_add_bias_kernel(
    dout, x, bias, partials, seed, offset, M, N, stride_dm, stride_xm, threshold: tl.uint32, scale, chunk_rows,
    ALL: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WORDS_ALIGNED: tl.constexpr,
):  # fmt: skip
    # dout, x: [M, N]; bias: [N]; partials: [chunks, N]. Missing tensors are None. Elements are counted in 64 bits.
    strips = (N - 1) // BLOCK_N + 1  # tl.cdiv adds first, which wraps near 2^31
    chunk = (tl.program_id(0) // strips).to(tl.int64)
    first_col = (tl.program_id(0) % strips).to(tl.int64) * BLOCK_N
    col = first_col + tl.arange(0, BLOCK_N)[None, :]
    if bias is not None:
        shift = tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    end = tl.minimum((chunk + 1) * chunk_rows, M)
    for start in tl.range(chunk * chunk_rows, end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)[:, None]
        mask = (row < end) & (col < N)
        values = tl.load(dout + row * stride_dm + col, mask=mask, other=0.0).to(tl.float32)
        z = values  # unused without an activation
        if ACTIVATION != "none":
            z = tl.load(x + row * stride_xm + col, mask=mask, other=0.0).to(tl.float32)
            if bias is not None:
                z += shift
        if WORDS_ALIGNED:
            block = (row * N + first_col) // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
            kept = keeps(seed, offset, threshold, ALL, block, BLOCK_N)
        else:
            four = row * N + first_col + 4 * tl.arange(0, BLOCK_N // 4)[None, :]
            kept = keeps_anywhere(seed, offset, threshold, ALL, four, BLOCK_N)
        # Elements behind the matrix were read as 0, whose gradient is 0, too.
        sums += tl.where(kept, gradient(values, z, scale, ACTIVATION), 0.0)
    tl.store(partials + chunk * N + col, tl.sum(sums, axis=0, keep_dims=True), mask=col < N)


def dropout_add_bias(
    dout: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    dbias: Tensor,
    *,
    p: float,
    activation: str,
    seed: int | Tensor,
    offset: int | None,
) -> None:
    """dbias of dropout_add.

    dout, x: [M, N], contiguous rows, x only with an activation, fp32, bf16 or fp16; bias, dbias: [N]. Where offset is
    None, seed holds both: [2], int64.
    """
    (M, N), device = dout.shape, dout.device
    if M == 0 or N == 0:
        dbias.zero_()
        return
    block_n = min(COLUMNS, max(triton.next_power_of_2(N), 4))  # four elements share a Philox call
    block_m = TILE // block_n
    strips = triton.cdiv(N, block_n)
    wanted = max(1, PROGRAMS_PER_SM * sm_count(device) // strips)
    chunk_rows = triton.cdiv(triton.cdiv(M, wanted), block_m) * block_m  # whole tiles: no two chunks share one
    chunks = triton.cdiv(M, chunk_rows)
    partials = torch.empty((1, chunks, N), dtype=torch.float32, device=device)
    threshold, scale, drops_all = numbers(p)
    dropout_add_bias_kernel[(strips * chunks,)](
        dout, x, bias, partials, seed, offset, M, N, dout.stride(0), 0 if x is None else x.stride(0), threshold, scale,
        chunk_rows, ALL=drops_all, ACTIVATION=activation, BLOCK_M=block_m, BLOCK_N=block_n, WORDS_ALIGNED=N % 4 == 0,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    add_up(partials, dbias)

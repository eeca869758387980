"""matmul_bf16 v05_grouped: programs are numbered so that neighbours share rows and columns of tiles.

Change:   programs walk down 8 rows of tiles before they move on to the next column, instead of along a whole row.
Why:      programs that run at the same time then touch a near-square patch of the output, so the tiles of A and B
          that they need are few and found in L2 instead of device memory. At 4096 x 4096, where the programs of one
          moment cover eight rows of 32 tiles in either order, little should move; it is kept for larger products.
Counter:  dram_bytes and time rise.
Requires: nothing of sizes and strides. K that is no multiple of 64 costs a mask.
Twin:     cuda-kernels/matmul/matmul_bf16/v05_grouped.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 128
BLOCK_N = 128
BLOCK_K = 64
GROUP_M = 8
NUM_WARPS = 8
STAGES = 3


@triton.jit
def matmul_bf16_v05_grouped_kernel(
    a, b, out, M: tl.int64, N: tl.int64, K: tl.int64, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    # a: [M, K], b: [K, N], out: [M, N] row-major. Indices have 64 bits: row * stride may pass 2^31.
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # Within a group the tile's row varies fastest; the last group may have fewer rows.
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
    row = (group * GROUP_M + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    col = within // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_mask = row < M if EVEN_K else (row < M) & (k[None, :] < K)
        b_mask = col < N if EVEN_K else (k[:, None] < K) & (col < N)
        a_tile = tl.load(a + row * stride_am + k[None, :] * stride_ak, mask=a_mask, other=0.0)
        b_tile = tl.load(b + k[:, None] * stride_bk + col * stride_bn, mask=b_mask, other=0.0)
        total = tl.dot(a_tile, b_tile, total)
    tl.store(out + row * N + col, total.to(out.dtype.element_ty), mask=(row < M) & (col < N))


def matmul_bf16_v05_grouped(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides; out: [M, N], row-major; all bf16 or all fp16."""
    (M, K), N = a.shape, b.shape[1]
    if M == 0 or N == 0:
        return
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    matmul_bf16_v05_grouped_kernel[grid](
        a, b, out, M, N, K, *a.stride(), *b.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, EVEN_K=K % BLOCK_K == 0,
        num_warps=NUM_WARPS, num_stages=STAGES,
    )  # fmt: skip

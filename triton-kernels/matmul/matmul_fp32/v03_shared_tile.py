"""matmul_fp32 v03_shared_tile: tiles of A and B are staged in shared memory and used by the whole block.

Change:   a step takes 32 columns of A and 32 rows of B and multiplies the tiles with tl.dot, which stages them in
          shared memory by itself. input_precision="ieee" keeps it on the FMA pipes: the default rounds to TF32.
Why:      each element fetched serves a whole row or column of the tile, so global traffic falls by the tile's width.
Counter:  time and load_requests fall.
Requires: nothing of sizes and strides.
Twin:     cuda-kernels/matmul/matmul_fp32/v03_shared_tile.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 32
BLOCK_N = 32
BLOCK_K = 32
NUM_WARPS = 8


@triton.jit
def matmul_fp32_v03_shared_tile_kernel(
    a, b, out, M: tl.int64, N: tl.int64, K: tl.int64, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # a: [M, K], b: [K, N], out: [M, N] row-major. Indices have 64 bits: row * stride may pass 2^31.
    tiles_n = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    col = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_tile = tl.load(a + row * stride_am + k[None, :] * stride_ak, mask=(row < M) & (k[None, :] < K), other=0.0)
        b_tile = tl.load(b + k[:, None] * stride_bk + col * stride_bn, mask=(k[:, None] < K) & (col < N), other=0.0)
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
    tl.store(out + row * N + col, total, mask=(row < M) & (col < N))


def matmul_fp32_v03_shared_tile(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides; out: [M, N], row-major; fp32."""
    (M, K), N = a.shape, b.shape[1]
    if M == 0 or N == 0:
        return
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    matmul_fp32_v03_shared_tile_kernel[grid](
        a, b, out, M, N, K, *a.stride(), *b.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=NUM_WARPS, num_stages=1,
    )  # fmt: skip

"""matmul_fp32 v05_register_tile_2d: a thread computes a patch of results, as outer products from registers.

Change:   tiles of 64 x 128 instead of 32 x 32, by 4 warps instead of 8: 64 results a thread, not 4. The compiler gives
          it 16 rows of 4 columns, and takes operands from shared memory 16 bytes at a time. An SM holds three programs.
Why:      20 elements from shared memory serve 64 FMAs, where 4 served 4; and each element fetched serves 64 rows or 128
          columns. Nothing is fetched ahead (num_stages=1): a program waits for every fetch, and only the other two can
          use the time.
Counter:  time falls; fma_pipe rises.
Requires: nothing of sizes and strides.
Twin:     cuda-kernels/matmul/matmul_fp32/v05_register_tile_2d.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 64
BLOCK_N = 128
BLOCK_K = 32
NUM_WARPS = 4


@triton.jit
def matmul_fp32_v05_register_tile_2d_kernel(
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


def matmul_fp32_v05_register_tile_2d(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides; out: [M, N], row-major; fp32."""
    (M, K), N = a.shape, b.shape[1]
    if M == 0 or N == 0:
        return
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    matmul_fp32_v05_register_tile_2d_kernel[grid](
        a, b, out, M, N, K, *a.stride(), *b.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=NUM_WARPS, num_stages=1,
    )  # fmt: skip

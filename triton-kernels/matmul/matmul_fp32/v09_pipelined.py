"""matmul_fp32 v09_pipelined: tiles arrive several steps ahead.

Change:   num_stages=3: the compiler fetches by cp.async, two steps ahead of the one that is multiplied, into a ring of
          tiles in shared memory.
Why:      a fetch needs no registers, and no warp waits for it: the FMAs of two steps cover the latency of device
          memory.
Counter:  time falls; fma_pipe rises.
Requires: nothing of sizes and strides.
Twin:     cuda-kernels/matmul/matmul_fp32/v09_pipelined.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 64
BLOCK_N = 128
BLOCK_K = 32
GROUP_M = 8
NUM_WARPS = 4
STAGES = 3


@triton.jit
def matmul_fp32_v09_pipelined_kernel(
    a, b, out, M: tl.int64, N: tl.int64, K: tl.int64, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
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
        a_tile = tl.load(a + row * stride_am + k[None, :] * stride_ak, mask=(row < M) & (k[None, :] < K), other=0.0)
        b_tile = tl.load(b + k[:, None] * stride_bk + col * stride_bn, mask=(k[:, None] < K) & (col < N), other=0.0)
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
    tl.store(out + row * N + col, total, mask=(row < M) & (col < N))


def matmul_fp32_v09_pipelined(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides; out: [M, N], row-major; fp32."""
    (M, K), N = a.shape, b.shape[1]
    if M == 0 or N == 0:
        return
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    matmul_fp32_v09_pipelined_kernel[grid](
        a, b, out, M, N, K, *a.stride(), *b.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, num_warps=NUM_WARPS, num_stages=STAGES,
    )  # fmt: skip

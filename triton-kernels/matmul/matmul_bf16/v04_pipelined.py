"""matmul_bf16 v04_pipelined: tiles arrive several steps ahead.

Change:   num_stages=3: the compiler fetches by cp.async, two steps ahead of the one that is multiplied, into a ring of
          tiles in shared memory.
Why:      a fetch needs no registers, and no warp waits for it: the products of two steps cover the latency of device
          memory.
Counter:  time falls; tensor_pipe rises.
Requires: nothing of sizes and strides. K that is no multiple of 64 costs a mask.
Twin:     cuda-kernels/matmul/matmul_bf16/v04_pipelined.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 128
BLOCK_N = 128
BLOCK_K = 64
NUM_WARPS = 8
STAGES = 3


@triton.jit
def matmul_bf16_v04_pipelined_kernel(
    a, b, out, M: tl.int64, N: tl.int64, K: tl.int64, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # a: [M, K], b: [K, N], out: [M, N] row-major. Indices have 64 bits: row * stride may pass 2^31.
    tiles_n = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    col = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_mask = row < M if EVEN_K else (row < M) & (k[None, :] < K)
        b_mask = col < N if EVEN_K else (k[:, None] < K) & (col < N)
        a_tile = tl.load(a + row * stride_am + k[None, :] * stride_ak, mask=a_mask, other=0.0)
        b_tile = tl.load(b + k[:, None] * stride_bk + col * stride_bn, mask=b_mask, other=0.0)
        total = tl.dot(a_tile, b_tile, total)
    tl.store(out + row * N + col, total.to(out.dtype.element_ty), mask=(row < M) & (col < N))


def matmul_bf16_v04_pipelined(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides; out: [M, N], row-major; all bf16 or all fp16."""
    (M, K), N = a.shape, b.shape[1]
    if M == 0 or N == 0:
        return
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    matmul_bf16_v04_pipelined_kernel[grid](
        a, b, out, M, N, K, *a.stride(), *b.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, EVEN_K=K % BLOCK_K == 0,
        num_warps=NUM_WARPS, num_stages=STAGES,
    )  # fmt: skip

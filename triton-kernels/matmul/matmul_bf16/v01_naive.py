"""matmul_bf16 v01_naive: one element a thread, one term of the sum at a time, no tensor cores.

Change:   none yet, this is where the ladder starts. A program of 256 threads computes a tile of 16 x 16; every step
          takes one column of A and one row of B, widens them to fp32 and adds their outer product.
Why:      the formula as it is written, with the lanes along the columns so that loads are coalesced. The tensor
          cores, which hold nearly all of this chip's arithmetic, stay idle.
Counter:  tensor_pipe is 0; ceiling_share stays next to nothing.
Requires: nothing of sizes and strides.
Twin:     cuda-kernels/matmul/matmul_bf16/v01_naive.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 16
BLOCK_N = 16
NUM_WARPS = BLOCK_M * BLOCK_N // 32


@triton.jit
def matmul_bf16_v01_naive_kernel(
    a, b, out, M: tl.int64, N: tl.int64, K: tl.int64, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # a: [M, K], b: [K, N], out: [M, N] row-major. Indices have 64 bits: row * stride may pass 2^31.
    tiles_n = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    col = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    a_ptrs = a + row * stride_am  # [BLOCK_M, 1]
    b_ptrs = b + col * stride_bn  # [1, BLOCK_N]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(K):
        total += tl.load(a_ptrs, mask=row < M).to(tl.float32) * tl.load(b_ptrs, mask=col < N).to(tl.float32)
        a_ptrs += stride_ak
        b_ptrs += stride_bk
    tl.store(out + row * N + col, total.to(out.dtype.element_ty), mask=(row < M) & (col < N))


def matmul_bf16_v01_naive(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides; out: [M, N], row-major; all bf16 or all fp16."""
    (M, K), N = a.shape, b.shape[1]
    if M == 0 or N == 0:
        return
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    matmul_bf16_v01_naive_kernel[grid](
        a, b, out, M, N, K, *a.stride(), *b.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=NUM_WARPS,
    )  # fmt: skip

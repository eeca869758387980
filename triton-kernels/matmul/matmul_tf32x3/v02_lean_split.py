"""matmul_tf32x3 v02_lean_split: fewer instructions beside the products.

Change:   the split and the three products are written out. The compiler's own split, in v01, rounds with four
          instructions an element, not two, and clears NaNs from the small products in every step; here a tile's NaNs
          are dealt with at its end.
Why:      what is issued beside the tensor cores' instructions takes time from them. Each step's sums start from zero
          and are added to running sums by FADDs, as in v01: the tensor cores round toward zero when they add, so sums
          of theirs over all of K would err more and more. (Ootomo and Yokota, "Recovering single precision accuracy
          from Tensor Cores while surpassing the FP32 theoretical peak performance", IJHPCA 2022.)
Counter:  instructions and time fall; the error does not move.
Requires: nothing of sizes and strides. Infinities and NaNs come out as in fp32, by a slow loop for their tile.
Twin:     cuda-kernels/matmul/matmul_tf32x3/v02_lean_split.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.matmul.tf32 import round_to_tf32

BLOCK_M = 64
BLOCK_N = 128
BLOCK_K = 32
NUM_WARPS = 8


@triton.jit
def matmul_tf32x3_v02_lean_split_kernel(
    a, b, out, M: tl.int64, N: tl.int64, K: tl.int64, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # a: [M, K], b: [K, N], out: [M, N] row-major. Indices have 64 bits: row * stride may pass 2^31.
    tiles_n = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    col = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_mask = row < M if EVEN_K else (row < M) & (k[:, None] < K)
        b_mask = col < N if EVEN_K else (k[None, :] < K) & (col < N)
        a_tile = tl.load(a + row * stride_am + k[:, None] * stride_ak, mask=a_mask, other=0.0)  # [BLOCK_K, BLOCK_M]
        b_tile = tl.load(b + k[None, :] * stride_bk + col * stride_bn, mask=b_mask, other=0.0)  # [BLOCK_N, BLOCK_K]
        a_big, b_big = round_to_tf32(a_tile), round_to_tf32(b_tile)
        a_small, b_small = a_tile - a_big, b_tile - b_big
        # A single dot from zero, added to total, would be merged into one that starts from total. A chain is not: its
        # last dot starts from the small products.
        part = tl.dot(b_small, a_big, input_precision="tf32")
        part = tl.dot(b_big, a_small, part, input_precision="tf32")
        part = tl.dot(b_big, a_big, part, input_precision="tf32")
        total += part
    tl.store(out + row * N + col, total, mask=(row < M) & (col < N))

    # The small part of an infinity, of a NaN, or of a number that TF32 rounds to infinity is not finite, and neither is
    # its sum: a tile with such an element is computed again as in fp32, one term at a time.
    if tl.min((tl.abs(total) < float("inf")).to(tl.int32)) == 0:
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for k in range(K):
            a_row = tl.load(a + row * stride_am + k * stride_ak, mask=row < M)  # [1, BLOCK_M]
            total += a_row * tl.load(b + k * stride_bk + col * stride_bn, mask=col < N)
        tl.store(out + row * N + col, total, mask=(row < M) & (col < N))


def matmul_tf32x3_v02_lean_split(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides; out: [M, N], row-major; fp32."""
    (M, K), N = a.shape, b.shape[1]
    if M == 0 or N == 0:
        return
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    matmul_tf32x3_v02_lean_split_kernel[grid](
        a, b, out, M, N, K, *a.stride(), *b.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, EVEN_K=K % BLOCK_K == 0,
        num_warps=NUM_WARPS, num_stages=1,
    )  # fmt: skip

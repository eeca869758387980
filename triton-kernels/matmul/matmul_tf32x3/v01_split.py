"""matmul_tf32x3 v01_split: an fp32 product is made of three TF32 products on the tensor cores.

Change:   none yet, this is where the ladder starts. tl.dot with input_precision="tf32x3" splits each operand in two:
          big, its value rounded to TF32, and small, what is left of it. The tensor cores sum small * big + big * small
          + big * big. The product is computed transposed, out^T = b^T a^T: Hopper's wgmma wants TF32 operands in
          shared memory with K along the rows, as a has it, but takes the left one, b^T, from registers in any order.
Why:      TF32 keeps 11 of fp32's 24 bits, so two of them hold a value but for its last bit, and what small * small
          would add lies below 2^-22 of the product. (CUTLASS calls this 3xTF32.) Per SM the tensor cores do eight times
          the multiplications of the FMA pipes; three are spent on one.
Counter:  tensor_pipe rises above 0. The error is like fp32's: the tensor cores round toward zero when they add, so
          Triton's tf32x3 starts every step's sums from zero and adds them to running sums outside.
Requires: nothing of sizes and strides. Infinities and NaNs come out as in fp32, by a slow loop for their tile.
Twin:     cuda-kernels/matmul/matmul_tf32x3/v01_split.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 64
BLOCK_N = 128
BLOCK_K = 32
NUM_WARPS = 8


@triton.jit
def matmul_tf32x3_v01_split_kernel(
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
        total = tl.dot(b_tile, a_tile, total, input_precision="tf32x3")
    tl.store(out + row * N + col, total, mask=(row < M) & (col < N))

    # The small part of an infinity, of a NaN, or of a number that TF32 rounds to infinity is not finite, and neither is
    # its sum: a tile with such an element is computed again as in fp32, one term at a time.
    if tl.min((tl.abs(total) < float("inf")).to(tl.int32)) == 0:
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for k in range(K):
            a_row = tl.load(a + row * stride_am + k * stride_ak, mask=row < M)  # [1, BLOCK_M]
            total += a_row * tl.load(b + k * stride_bk + col * stride_bn, mask=col < N)
        tl.store(out + row * N + col, total, mask=(row < M) & (col < N))


def matmul_tf32x3_v01_split(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides; out: [M, N], row-major; fp32."""
    (M, K), N = a.shape, b.shape[1]
    if M == 0 or N == 0:
        return
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    matmul_tf32x3_v01_split_kernel[grid](
        a, b, out, M, N, K, *a.stride(), *b.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, EVEN_K=K % BLOCK_K == 0,
        num_warps=NUM_WARPS, num_stages=1,
    )  # fmt: skip

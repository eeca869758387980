"""matmul_tf32x3 v03_pipelined: tiles arrive several steps ahead, and programs are numbered in groups.

Change:   num_stages=3: the compiler fetches by cp.async, two steps ahead of the one that is multiplied. Programs walk
          down 8 rows of tiles before they move on to the next column.
Why:      no warp waits for device memory any more; and programs that run at the same time share rows and columns of
          tiles, which they find in L2. Beside the tensor cores' work the splitting remains: three instructions an
          element, and a way through registers and back to shared memory for both halves of a.
Counter:  time falls; tensor_pipe rises.
Requires: nothing of sizes and strides. Infinities and NaNs come out as in fp32, by a slow loop for their tile.
Twin:     cuda-kernels/matmul/matmul_tf32x3/v03_pipelined.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.matmul.tf32 import round_to_tf32

BLOCK_M = 64
BLOCK_N = 128
BLOCK_K = 32
GROUP_M = 8
NUM_WARPS = 8
STAGES = 3


@triton.jit
def matmul_tf32x3_v03_pipelined_kernel(
    a, b, out, M: tl.int64, N: tl.int64, K: tl.int64, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    # a: [M, K], b: [K, N], out: [M, N] row-major. Indices have 64 bits: row * stride may pass 2^31.
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    # Within a group the tile's row varies fastest; the last group may have fewer rows.
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
    row = (group * GROUP_M + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    col = within // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
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


def matmul_tf32x3_v03_pipelined(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides; out: [M, N], row-major; fp32."""
    (M, K), N = a.shape, b.shape[1]
    if M == 0 or N == 0:
        return
    grid = (triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N),)
    matmul_tf32x3_v03_pipelined_kernel[grid](
        a, b, out, M, N, K, *a.stride(), *b.stride(),
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=GROUP_M, EVEN_K=K % BLOCK_K == 0,
        num_warps=NUM_WARPS, num_stages=STAGES,
    )  # fmt: skip

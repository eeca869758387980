"""matmul_fp32 v10_autotuned: tile shape, warps and pipeline stages are searched over a short list.

Change:   the list below is searched (see tuning.py). Where K is a multiple of BLOCK_K, its mask is left out.
Why:      a larger tile needs fewer bytes and instructions for each FMA; a smaller one leaves registers for more
          programs an SM, and fewer SMs idle in the last wave. Which is best differs from product to product.
Counter:  time falls.
Requires: nothing of sizes and strides.
Twin:     none, see the spec
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning

CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        (64, 128, 32, 4, 3), (64, 128, 32, 4, 2), (64, 128, 16, 4, 2), (64, 128, 16, 8, 3), (128, 128, 32, 8, 3),
        (128, 128, 16, 8, 2), (64, 256, 32, 8, 2), (64, 256, 16, 8, 3), (32, 256, 32, 4, 3), (64, 64, 32, 2, 3),
        (64, 64, 16, 4, 3), (32, 128, 32, 4, 3), (32, 64, 32, 4, 3),
    )
]  # fmt: skip


@triton.autotune(
    CONFIGS,
    key=["M", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn"],
    cache_results=True,
    do_bench=tuning.bench,
)
@triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BLOCK_K"] == 0})
@triton.jit
def matmul_fp32_v10_autotuned_kernel(
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
    row = (group * GROUP_M + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    col = within // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_mask = row < M if EVEN_K else (row < M) & (k[None, :] < K)
        b_mask = col < N if EVEN_K else (k[:, None] < K) & (col < N)
        a_tile = tl.load(a + row * stride_am + k[None, :] * stride_ak, mask=a_mask, other=0.0)
        b_tile = tl.load(b + k[:, None] * stride_bk + col * stride_bn, mask=b_mask, other=0.0)
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
    tl.store(out + row * N + col, total, mask=(row < M) & (col < N))


def matmul_fp32_v10_autotuned(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides; out: [M, N], row-major; fp32."""
    (M, K), N = a.shape, b.shape[1]
    if M == 0 or N == 0:
        return

    def grid(args: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(M, args["BLOCK_M"]) * triton.cdiv(N, args["BLOCK_N"]),)

    problem = tuning.problem_of(M, N, K, dtype=a.dtype, **tuning.layouts(a=a, b=b))
    kernel, config = tuning.choose(matmul_fp32_v10_autotuned_kernel, "matmul_fp32/v10_autotuned", problem, a.device)
    kernel[grid](a, b, out, M, N, K, *a.stride(), *b.stride(), **config)

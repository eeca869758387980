"""A product of two tiles and nothing else, by which the grid finds when Triton uses which instruction."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot_kernel(
    a, b, out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # a: [BLOCK_M, BLOCK_K], b: [BLOCK_K, BLOCK_N], out: [BLOCK_M, BLOCK_N], all row-major.
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a_tile = tl.load(a + m[:, None] * BLOCK_K + k[None, :])
    b_tile = tl.load(b + k[:, None] * BLOCK_N + n[None, :])
    total = tl.dot(a_tile, b_tile, input_precision=PRECISION)
    tl.store(out + m[:, None] * BLOCK_N + n[None, :], total)

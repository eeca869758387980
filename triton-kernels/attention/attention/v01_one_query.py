"""attention v01_one_query: a program has one query, walks over its keys, and keeps a running maximum and sum.

Change:   none yet, this is where the ladder starts. A program of 128 threads has one query. Of each block of 64 keys it
          computes the scores, and with them adds the block's rows of V to the output in registers; when the maximum
          grows, output and sum so far are scaled down.
Why:      scores and probabilities, Sq * Sk of each for every head, never lie in device memory. But every query fetches
          all keys and values anew, and the tensor cores stay idle.
Counter:  tensor_pipe is 0; dram_bytes do not grow with Sq * Sk.
Requires: rows of D contiguous elements, at any distance from each other; D of at most 256; fewer than 2^31 queries in
          all heads, and sequences below 2^30. Loads take 16 bytes if strides are multiples of 16; otherwise the
          compiler cannot know where a row starts, and loads single elements.
Source:   Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867); Dao et al.,
          "FlashAttention" (arXiv:2205.14135).
Twin:     cuda-kernels/attention/attention/v01_one_query.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_N = 64
NUM_WARPS = 4


@triton.jit(do_not_specialize=["H", "group", "Sq", "Sk", "first", "last"])
def attention_v01_one_query_kernel(
    q, k, v, out, lse, H, group, Sq, Sk, scale, first, last,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], out: [B, H, Sq, D] and lse: [B, H, Sq] contiguous. Query i sees the keys
    # from i + first to i + last. Offsets have 64 bits: row * stride may pass 2^31.
    row = tl.program_id(0) % Sq
    head = (tl.program_id(0) // Sq).to(tl.int64)  # of B * H
    batch, kv_head = head // H, head % H // group
    d = tl.arange(0, BLOCK_D)
    q_row = q + batch * stride_qb + head % H * stride_qh + row.to(tl.int64) * stride_qm
    k_head = k + batch * stride_kb + kv_head * stride_kh
    v_head = v + batch * stride_vb + kv_head * stride_vh
    query = tl.load(q_row + d, mask=d < D, other=0.0).to(tl.float32)

    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    row_max = tl.full((), -float("inf"), dtype=tl.float32)
    row_sum = tl.zeros((), dtype=tl.float32)
    for start in range(0, Sk, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # What lies behind the last key is read as 0, since even a probability of 0 times NaN is NaN.
        mask = (key < Sk)[:, None] & (d < D)[None, :]
        k_tile = tl.load(k_head + key.to(tl.int64)[:, None] * stride_kn + d[None, :], mask=mask, other=0.0)
        v_tile = tl.load(v_head + key.to(tl.int64)[:, None] * stride_vn + d[None, :], mask=mask, other=0.0)
        scores = tl.sum(k_tile.to(tl.float32) * query[None, :], axis=1) * scale
        visible = (key >= row + first) & (key <= row + last) & (key < Sk)
        scores = tl.where(visible, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=0))
        # While no key has been seen, the sum must stay 0: -inf - -inf would make it NaN.
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
        p = tl.exp(scores - base)
        shrink = tl.exp(row_max - base)
        row_sum = row_sum * shrink + tl.sum(p, axis=0)
        total = total * shrink + tl.sum(p[:, None] * v_tile.to(tl.float32), axis=0)
        row_max = new_max

    # A row that sees no key: 0 / 1, and -inf + log(0).
    total = total / tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(out + (head * Sq + row) * D + d, total.to(out.dtype.element_ty), mask=d < D)
    tl.store(lse + head * Sq + row, row_max + tl.log(row_sum))


def attention_v01_one_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: tuple[Tensor, Tensor],
    scale: float | None = None,
    band: tuple[int, int] | None = None,
) -> None:
    """out = softmax(scale * q @ k^T + mask) @ v, and the logarithm of each row's sum.

    q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], contiguous rows, bf16 or fp16; out: [B, H, Sq, D] and fp32 [B, H, Sq].
    Query i sees the keys from i + band[0] to i + band[1]. Without them, the scale is 1 / sqrt(D), and it sees all.
    """
    (B, H, Sq, D), (H_KV, Sk) = q.shape, k.shape[1:3]
    if B * H * Sq == 0:
        return
    scale = D**-0.5 if scale is None else scale
    # Limits that lie beyond every key bind no more there, and have 32 bits.
    first, last = (max(-Sq, min(limit, Sk)) for limit in band or (-Sq, Sk))
    attention_v01_one_query_kernel[(B * H * Sq,)](
        q, k, v, *out, H, H // H_KV, Sq, Sk, scale, first, last,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        D=D, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(D)), num_warps=NUM_WARPS,
    )  # fmt: skip

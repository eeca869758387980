"""attention v02_tensor_cores: blocks of queries and keys are multiplied by the tensor cores.

Change:   a program has a block of 128 queries. Of every block of 64 keys, tl.dot computes the scores, and after the
          softmax's exponentials the product of the probabilities, rounded to 16 bits, with the block of V; the compiler
          turns it into the tensor cores' instructions (wgmma, or mma.sync before compute capability 9.0).
Why:      both products run on the tensor cores, and each block of K and V that is fetched serves 128 queries. Nothing
          is fetched ahead (num_stages=1): the tensor cores wait for every fetch.
Counter:  time falls steeply; tensor_pipe rises.
Requires: rows of D contiguous elements, at any distance from each other; D of at most 256; fewer than 2^31 blocks of
          queries, and sequences below 2^30. Loads take 16 bytes if strides are multiples of 16; otherwise the compiler
          cannot know where a row starts, and loads single elements.
Source:   Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867); Dao et al.,
          "FlashAttention" (arXiv:2205.14135).
Twin:     cuda-kernels/attention/attention/v02_tensor_cores.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 128
BLOCK_N = 64
NUM_WARPS = 8


@triton.jit(do_not_specialize=["H", "group", "Sq", "Sk", "first", "last"])
def attention_v02_tensor_cores_kernel(
    q, k, v, out, lse, H, group, Sq, Sk, scale, first, last,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], out: [B, H, Sq, D] and lse: [B, H, Sq] contiguous. Query i sees the keys
    # from i + first to i + last. Offsets have 64 bits: row * stride may pass 2^31.
    blocks = tl.cdiv(Sq, BLOCK_M)
    row = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    head = (tl.program_id(0) // blocks).to(tl.int64)  # of B * H
    batch, kv_head = head // H, head % H // group
    d = tl.arange(0, BLOCK_D)
    q_rows = q + batch * stride_qb + head % H * stride_qh + row.to(tl.int64)[:, None] * stride_qm
    k_head = k + batch * stride_kb + kv_head * stride_kh
    v_head = v + batch * stride_vb + kv_head * stride_vh
    q_mask = (row < Sq)[:, None] & (d < D)[None, :]
    q_tile = tl.load(q_rows + d[None, :], mask=q_mask, other=0.0)

    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in range(0, Sk, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # What lies behind the last key is read as 0, since even a probability of 0 times NaN is NaN.
        mask = (key < Sk)[:, None] & (d < D)[None, :]
        k_tile = tl.load(k_head + key.to(tl.int64)[:, None] * stride_kn + d[None, :], mask=mask, other=0.0)
        scores = tl.dot(q_tile, k_tile.T) * scale
        visible = (key[None, :] >= (row + first)[:, None]) & (key[None, :] <= tl.minimum(row + last, Sk - 1)[:, None])
        scores = tl.where(visible, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # While a row has seen no key, its sum must stay 0: -inf - -inf would make it NaN.
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
        p = tl.exp(scores - base[:, None])
        shrink = tl.exp(row_max - base)
        row_sum = row_sum * shrink + tl.sum(p, axis=1)
        v_tile = tl.load(v_head + key.to(tl.int64)[:, None] * stride_vn + d[None, :], mask=mask, other=0.0)
        total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None])
        row_max = new_max

    # A row that sees no key: 0 / 1, and -inf + log(0).
    total = total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_rows = out + (head * Sq + row)[:, None] * D
    tl.store(out_rows + d[None, :], total.to(out.dtype.element_ty), mask=q_mask)
    tl.store(lse + head * Sq + row, row_max + tl.log(row_sum), mask=row < Sq)


def attention_v02_tensor_cores(
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
    grid = (B * H * triton.cdiv(Sq, BLOCK_M),)
    attention_v02_tensor_cores_kernel[grid](
        q, k, v, *out, H, H // H_KV, Sq, Sk, scale, first, last,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        D=D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=max(16, triton.next_power_of_2(D)),
        num_warps=NUM_WARPS, num_stages=1,
    )  # fmt: skip

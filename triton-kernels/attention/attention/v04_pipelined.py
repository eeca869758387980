"""attention v04_pipelined: blocks of K and V arrive ahead, and the list of tiles below is searched.

Change:   the compiler fetches by cp.async, num_stages - 1 blocks ahead of the one that is multiplied, into a ring of
          blocks in shared memory. Of the list below, the fastest tile, number of warps and of stages is searched, once
          for each D, kind of mask and power of two of Sq (see tuning.py).
Why:      a fetch needs no registers, and no warp waits for it: the products and exponentials of one block cover the
          latency of the next. How many queries and keys a program should hold depends on D, and on how many queries
          there are.
Counter:  time falls; tensor_pipe rises.
Requires: rows of D contiguous elements, at any distance from each other; D of at most 128; fewer than 2^31 blocks of
          queries, and sequences below 2^30. Loads take 16 bytes if strides are multiples of 16; otherwise the compiler
          cannot know where a row starts, and loads single elements.
Source:   Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867); Dao,
          "FlashAttention-2" (arXiv:2307.08691).
Twin:     cuda-kernels/attention/attention/v04_pipelined.cu
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.attention.attention.mask import mask_of
from kernel_twins._triton.lib import tuning

CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in (
        # 128 queries of 4 warps would spill registers where D is 128.
        (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 2),
        (64, 64, 4, 3), (64, 64, 4, 4),
    )
]  # fmt: skip

LN_2 = tl.constexpr(0.6931471805599453)
SMALLEST_FACTOR = 2.0**-126  # a scale of 0 becomes this: -inf * 0 would be NaN


@triton.jit
def _add_block(
    total, row_max, row_sum, q_tile, k_head, v_head, stride_kn, stride_vn, start, lowest, highest, Sk, factor,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Output, maximum and sum of a block of queries with the keys from start on."""
    key = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)[None, :]
    # What lies behind the last key is read as 0, since even a probability of 0 times NaN is NaN.
    mask = (key < Sk)[:, None] & (d < D) if MASKED else d < D
    k_rows = k_head + key.to(tl.int64)[:, None] * stride_kn
    v_rows = v_head + key.to(tl.int64)[:, None] * stride_vn
    k_tile = tl.load(k_rows + d, mask=mask, other=0.0) if MASKED or D < BLOCK_D else tl.load(k_rows + d)
    scores = tl.dot(q_tile, k_tile.T)
    if MASKED:
        visible = (key[None, :] >= lowest[:, None]) & (key[None, :] <= highest[:, None])
        scores = tl.where(visible, scores, -float("inf"))
    # Maxima are kept as they were rounded: a factor for no growth is then 1, however many blocks follow.
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * factor)
    base = new_max
    if MASKED:
        # While a row has seen no key, its sum must stay 0: -inf - -inf would make it NaN.
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
    p = tl.exp2(scores * factor - base[:, None])
    shrink = tl.exp2(row_max - base)
    row_sum = row_sum * shrink + tl.sum(p, axis=1)
    v_tile = tl.load(v_rows + d, mask=mask, other=0.0) if MASKED or D < BLOCK_D else tl.load(v_rows + d)
    total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None])
    return total, new_max, row_sum


@triton.autotune(CONFIGS, key=["D", "MASK", "length"], cache_results=True, do_bench=tuning.bench)
@triton.jit(do_not_specialize=["H", "group", "Sq", "Sk", "first", "last", "length"])
def attention_v04_pipelined_kernel(
    q, k, v, out, lse, H, group, Sq, Sk, factor, first, last, length,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    MASK: tl.constexpr, NEGATIVE: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # MASK and length tell problems apart in the search.
    # q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], out: [B, H, Sq, D] and lse: [B, H, Sq] contiguous. Query i sees the keys
    # from i + first to i + last. Offsets have 64 bits: row * stride may pass 2^31.
    blocks = tl.cdiv(Sq, BLOCK_M)
    first_row = tl.program_id(0) % blocks * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, Sq) - 1
    row = first_row + tl.arange(0, BLOCK_M)
    head = (tl.program_id(0) // blocks).to(tl.int64)  # of B * H
    batch, kv_head = head // H, head % H // group
    d = tl.arange(0, BLOCK_D)
    q_rows = q + batch * stride_qb + head % H * stride_qh + row.to(tl.int64)[:, None] * stride_qm
    k_head = k + batch * stride_kb + kv_head * stride_kh
    v_head = v + batch * stride_vb + kv_head * stride_vh
    q_mask = (row < Sq)[:, None] & (d < D)[None, :]
    q_tile = tl.load(q_rows + d[None, :], mask=q_mask, other=0.0)
    if NEGATIVE:
        # With the scale's sign in q, the largest product is the largest score. For other scales q stays as it was
        # loaded, so that wgmma reads it from shared memory instead of registers.
        q_tile = (-q_tile.to(tl.float32)).to(q.dtype.element_ty)

    # Blocks are counted from the first key that any row sees. Those from clean to clean_end all rows see whole.
    lowest, highest = row + first, tl.minimum(row + last, Sk - 1)
    begin = tl.maximum(first_row + first, 0)
    end = tl.cdiv(tl.maximum(tl.minimum(last_row + last + 1, Sk) - begin, 0), BLOCK_N)
    clean = tl.minimum(tl.cdiv(tl.maximum(last_row + first, 0) - begin, BLOCK_N), end)
    clean_end = tl.maximum((tl.minimum(first_row + last + 1, Sk) - begin) // BLOCK_N, clean)

    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for block in range(clean, clean_end):
        total, row_max, row_sum = _add_block(
            total, row_max, row_sum, q_tile, k_head, v_head, stride_kn, stride_vn, begin + block * BLOCK_N,
            lowest, highest, Sk, factor, D, BLOCK_N, BLOCK_D, MASKED=False,
        )  # fmt: skip
    # At the band's edges on both sides.
    for edge in range(end - (clean_end - clean)):
        block = tl.where(edge < clean, edge, edge + clean_end - clean)
        total, row_max, row_sum = _add_block(
            total, row_max, row_sum, q_tile, k_head, v_head, stride_kn, stride_vn, begin + block * BLOCK_N,
            lowest, highest, Sk, factor, D, BLOCK_N, BLOCK_D, MASKED=True,
        )  # fmt: skip

    # A row that sees no key: 0 / 1, and -inf + log(0).
    total = total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_rows = out + (head * Sq + row)[:, None] * D
    tl.store(out_rows + d[None, :], total.to(out.dtype.element_ty), mask=q_mask)
    tl.store(lse + head * Sq + row, row_max * LN_2 + tl.log(row_sum), mask=row < Sq)


def attention_v04_pipelined(
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
    factor = max(abs(scale) * math.log2(math.e), SMALLEST_FACTOR)

    def grid(args: dict[str, int]) -> tuple[int]:
        return (B * H * triton.cdiv(Sq, args["BLOCK_M"]),)

    mask = mask_of(first, last, -Sq, Sk)
    variant = {} if mask == "full" else {"mask": mask}
    problem = tuning.problem_of(B, H, Sq, D, dtype=q.dtype, **variant)
    kernel, config = tuning.choose(attention_v04_pipelined_kernel, "attention/v04_pipelined", problem, q.device)
    kernel[grid](
        q, k, v, *out, H, H // H_KV, Sq, Sk, factor, first, last,
        triton.next_power_of_2(Sq), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        MASK=mask, NEGATIVE=scale < 0, D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), **config,
    )  # fmt: skip

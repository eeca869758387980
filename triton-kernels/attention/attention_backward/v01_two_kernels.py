"""attention_backward v01_two_kernels: one kernel for dk and dv, another for dq.

Change:   none yet. The ladder starts with tiles on the tensor cores, and the two loops that the gradients ask for.
Why:      dk and dv are sums over the queries, dq is one over the keys. A program that owns a tile of keys and walks
          along the queries keeps dk and dv in registers, but would have to send its part of dq elsewhere: so dq gets a
          kernel of its own, whose programs own tiles of queries and walk along the keys. Both recompute the
          probabilities from the row's lse, seven products of tiles instead of five. No two programs add to one
          gradient, so every run gives the same bits.
Counter:  tensor_pipe is far from full: each product waits for the one before it, and for the exponentials.
Requires: rows of D contiguous elements, at any distance from each other; D of at most 128; fewer than 2^31 tiles, and
          sequences below 2^30. Loads take 16 bytes if strides are multiples of 16; otherwise the compiler cannot know
          where a row starts, and loads single elements.
Source:   Dao et al., "FlashAttention" (arXiv:2205.14135); Dao, "FlashAttention-2" (arXiv:2307.08691).
Twin:     cuda-kernels/attention/attention_backward/v01_two_kernels.cu
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.attention.attention_backward.delta import deltas

KEYS_M, KEYS_N = 64, 128  # tiles of queries and keys where dk and dv are summed
QUERIES_M, QUERIES_N = 128, 64  # and where dq is
NUM_WARPS = 8
NUM_STAGES = 2


@triton.jit
def _load_tile(head, row, end, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a head. What lies behind its end is read as 0, since even a probability of 0 times NaN is NaN."""
    d = tl.arange(0, BLOCK_D)[None, :]
    rows = head + row.to(tl.int64)[:, None] * stride
    if MASKED:
        return tl.load(rows + d, mask=(row < end)[:, None] & (d < D), other=0.0)
    return tl.load(rows + d, mask=d < D, other=0.0) if D < BLOCK_D else tl.load(rows + d)


@triton.jit
def _add_queries(
    dk_sum, dv_sum, k_tile, v_tile, q_head, dout_head, delta, lse2, stride_qm, stride_om, start, key, first, last, Sq,
    factor, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys with the queries from start on added. Tiles of scores are transposed."""
    i = tl.arange(0, BLOCK_M)
    row = start + i
    q_tile = _load_tile(q_head, row, Sq, stride_qm, D, BLOCK_D, MASKED)
    dout_tile = _load_tile(dout_head, row, Sq, stride_om, D, BLOCK_D, MASKED)
    scores = tl.dot(k_tile, q_tile.T)
    # A thread needs many rows' values: with start added to the pointer, they lie at known distances from one address.
    p = tl.exp2(scores * factor - tl.load(lse2 + start + i)[None, :])
    if MASKED:
        ahead = key[:, None] - row[None, :]
        visible = (ahead >= first) & (ahead <= last) & (row < Sq)[None, :]
        p = tl.where(visible, p, 0.0)
    dv_sum = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_sum)
    dp = tl.dot(v_tile, dout_tile.T)
    ds = p * (dp - tl.load(delta + start + i)[None, :])
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    dk_sum = tl.dot(ds.to(q_tile.dtype), q_tile, dk_sum)
    return dk_sum, dv_sum


@triton.jit(do_not_specialize=["H", "group", "Sq", "Sk", "first", "last"])
def attention_backward_v01_two_kernels_kernel(
    dout, q, k, v, delta, lse2, dk, dv, H, group, Sq, Sk, pitch, factor, scale, first, last,
    stride_ob, stride_oh, stride_om, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # dout, q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], delta, lse2: [B, H, pitch] and dk, dv: [B, H_KV, Sk, D]
    # contiguous. Query i sees the keys from i + first to i + last: key j is seen by the queries from j - last to
    # j - first. Offsets have 64 bits: row * stride may pass 2^31.
    blocks = tl.cdiv(Sk, BLOCK_N)
    first_key = tl.program_id(0) % blocks * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, Sk) - 1
    key = first_key + tl.arange(0, BLOCK_N)
    kv_head = (tl.program_id(0) // blocks).to(tl.int64)  # of B * H_KV
    kv_heads = H // group
    batch = kv_head // kv_heads
    k_head = k + batch * stride_kb + kv_head % kv_heads * stride_kh
    v_head = v + batch * stride_vb + kv_head % kv_heads * stride_vh
    k_tile = _load_tile(k_head, key, Sk, stride_kn, D, BLOCK_D, MASKED=True)
    v_tile = _load_tile(v_head, key, Sk, stride_vn, D, BLOCK_D, MASKED=True)

    # Tiles with a query that sees a key; in those from clean to clean_end every query sees all keys.
    begin = tl.maximum(first_key - last, 0) // BLOCK_M
    end = tl.maximum(tl.cdiv(tl.minimum(tl.maximum(last_key - first + 1, 0), Sq), BLOCK_M), begin)
    clean = tl.minimum(tl.cdiv(tl.maximum(last_key - last, 0), BLOCK_M), end)
    clean_end = tl.maximum(tl.minimum(tl.maximum(first_key - first + 1, 0), Sq) // BLOCK_M, clean)

    dk_sum = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv_sum = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    # One loop over the group's heads and a head's tiles: around two loops, another one would cost registers. No divisor
    # is 0, since the first step's tiles are fetched before it is known whether there is a step.
    head, inner = kv_head % kv_heads * group, clean_end - clean
    for step in range(group * inner):
        member, block = step // tl.maximum(inner, 1), clean + step % tl.maximum(inner, 1)
        stats = (kv_head * group + member) * pitch
        q_head = q + batch * stride_qb + (head + member) * stride_qh
        dout_head = dout + batch * stride_ob + (head + member) * stride_oh
        dk_sum, dv_sum = _add_queries(
            dk_sum, dv_sum, k_tile, v_tile, q_head, dout_head, delta + stats, lse2 + stats,
            stride_qm, stride_om, block * BLOCK_M, key, first, last, Sq, factor, D, BLOCK_M, BLOCK_D, MASKED=False,
        )  # fmt: skip
    # At the band's edges on both sides.
    edges = end - begin - inner
    for step in range(group * edges):
        member, edge = step // tl.maximum(edges, 1), begin + step % tl.maximum(edges, 1)
        block = tl.where(edge < clean, edge, edge + inner)
        stats = (kv_head * group + member) * pitch
        q_head = q + batch * stride_qb + (head + member) * stride_qh
        dout_head = dout + batch * stride_ob + (head + member) * stride_oh
        dk_sum, dv_sum = _add_queries(
            dk_sum, dv_sum, k_tile, v_tile, q_head, dout_head, delta + stats, lse2 + stats,
            stride_qm, stride_om, block * BLOCK_M, key, first, last, Sq, factor, D, BLOCK_M, BLOCK_D, MASKED=True,
        )  # fmt: skip

    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (key < Sk)[:, None] & (d < D)
    place = (kv_head * Sk + key)[:, None] * D + d
    tl.store(dk + place, (dk_sum * scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + place, dv_sum.to(dv.dtype.element_ty), mask=mask)


@triton.jit
def _add_keys(
    dq_sum, q_tile, dout_tile, row_delta, row_lse2, k_head, v_head, stride_kn, stride_vn, start, row, first, last, Sk,
    factor, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries with the keys from start on added."""
    key = start + tl.arange(0, BLOCK_N)
    k_tile = _load_tile(k_head, key, Sk, stride_kn, D, BLOCK_D, MASKED)
    v_tile = _load_tile(v_head, key, Sk, stride_vn, D, BLOCK_D, MASKED)
    p = tl.exp2(tl.dot(q_tile, k_tile.T) * factor - row_lse2[:, None])
    ds = p * (tl.dot(dout_tile, v_tile.T) - row_delta[:, None])
    if MASKED:
        ahead = key[None, :] - row[:, None]
        visible = (ahead >= first) & (ahead <= last) & (key < Sk)[None, :]
        ds = tl.where(visible, ds, 0.0)
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq_sum)


@triton.jit(do_not_specialize=["H", "group", "Sq", "Sk", "first", "last"])
def attention_backward_v01_two_kernels_dq_kernel(
    dout, q, k, v, delta, lse2, dq, H, group, Sq, Sk, pitch, factor, scale, first, last,
    stride_ob, stride_oh, stride_om, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # As above, and dq: [B, H, Sq, D] contiguous.
    blocks = tl.cdiv(Sq, BLOCK_M)
    first_row = tl.program_id(0) % blocks * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, Sq) - 1
    row = first_row + tl.arange(0, BLOCK_M)
    head = (tl.program_id(0) // blocks).to(tl.int64)  # of B * H
    batch, kv_head = head // H, head % H // group
    q_head = q + batch * stride_qb + head % H * stride_qh
    dout_head = dout + batch * stride_ob + head % H * stride_oh
    k_head = k + batch * stride_kb + kv_head * stride_kh
    v_head = v + batch * stride_vb + kv_head * stride_vh
    q_tile = _load_tile(q_head, row, Sq, stride_qm, D, BLOCK_D, MASKED=True)
    dout_tile = _load_tile(dout_head, row, Sq, stride_om, D, BLOCK_D, MASKED=True)
    row_delta, row_lse2 = tl.load(delta + head * pitch + row), tl.load(lse2 + head * pitch + row)

    # Tiles are counted from the first key that any row sees. Those from clean to clean_end all rows see whole.
    begin = tl.maximum(first_row + first, 0)
    end = tl.cdiv(tl.maximum(tl.minimum(last_row + last + 1, Sk) - begin, 0), BLOCK_N)
    clean = tl.minimum(tl.cdiv(tl.maximum(last_row + first, 0) - begin, BLOCK_N), end)
    clean_end = tl.maximum((tl.minimum(first_row + last + 1, Sk) - begin) // BLOCK_N, clean)

    dq_sum = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for block in range(clean, clean_end):
        dq_sum = _add_keys(
            dq_sum, q_tile, dout_tile, row_delta, row_lse2, k_head, v_head, stride_kn, stride_vn,
            begin + block * BLOCK_N, row, first, last, Sk, factor, D, BLOCK_N, BLOCK_D, MASKED=False,
        )  # fmt: skip
    for edge in range(end - (clean_end - clean)):
        block = tl.where(edge < clean, edge, edge + clean_end - clean)
        dq_sum = _add_keys(
            dq_sum, q_tile, dout_tile, row_delta, row_lse2, k_head, v_head, stride_kn, stride_vn,
            begin + block * BLOCK_N, row, first, last, Sk, factor, D, BLOCK_N, BLOCK_D, MASKED=True,
        )  # fmt: skip

    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < Sq)[:, None] & (d < D)
    tl.store(dq + (head * Sq + row)[:, None] * D + d, (dq_sum * scale).to(dq.dtype.element_ty), mask=mask)


def attention_backward_v01_two_kernels(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor, Tensor],
    scale: float | None = None,
    band: tuple[int, int] | None = None,
) -> None:
    """The gradients of q, k and v through ``attention``, of whose outputs dout and dlse are the gradients.

    dout, q, result: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], contiguous rows, bf16 or fp16; lse, dlse: fp32 [B, H, Sq],
    contiguous, lse -inf where a row sees no key; out: dq, dk and dv, as q, k and v are, contiguous. Query i sees the
    keys from i + band[0] to i + band[1]. Without them, the scale is 1 / sqrt(D), and it sees all.
    """
    (B, H, Sq, D), (H_KV, Sk) = q.shape, k.shape[1:3]
    if B * H * Sq * Sk == 0:
        for gradient in out:
            gradient.zero_()
        return
    dq, dk, dv = out
    scale = D**-0.5 if scale is None else scale
    # Limits that lie beyond every key bind no more there, and have 32 bits.
    first, last = (max(-Sq, min(limit, Sk)) for limit in band or (-Sq, Sk))
    delta, lse2 = deltas(dout, result, lse, dlse)
    sizes = H, H // H_KV, Sq, Sk, delta.shape[2], scale * math.log2(math.e), scale, first, last
    strides = *dout.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    padded = max(16, triton.next_power_of_2(D))
    attention_backward_v01_two_kernels_kernel[(B * H_KV * triton.cdiv(Sk, KEYS_N),)](
        dout, q, k, v, delta, lse2, dk, dv, *sizes, *strides,
        D=D, BLOCK_M=KEYS_M, BLOCK_N=KEYS_N, BLOCK_D=padded, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    attention_backward_v01_two_kernels_dq_kernel[(B * H * triton.cdiv(Sq, QUERIES_M),)](
        dout, q, k, v, delta, lse2, dq, *sizes, *strides,
        D=D, BLOCK_M=QUERIES_M, BLOCK_N=QUERIES_N, BLOCK_D=padded, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip

"""attention_backward v02_tma: TMA brings whole tiles of queries and keys.

Change:   tiles of q, dout, k and v come through tensor descriptors (TMA), which every program makes on the GPU. A
          descriptor knows the ends of heads and fills with 0 what lies behind them, so that no load is masked, and one
          thread starts the copy of a tile, swizzled as wgmma reads it. delta and lse come through pointers as before.
Why:      cp.async takes an address of every thread for each 16 bytes, in registers that the sums need; the copy engine
          takes a tile's coordinates. It takes 16 bytes as well where strides are multiples of 8 alone.
Counter:  instructions and time fall.
Requires: compute capability 9.0; addresses of dout, q, k and v, and their strides between batches, heads and rows, that
          are multiples of 16 bytes; D of at most 128; fewer than 2^31 tiles, and sequences below 2^30. Nothing of
          result but rows of D contiguous elements.
Source:   Dao et al., "FlashAttention" (arXiv:2205.14135); Dao, "FlashAttention-2" (arXiv:2307.08691).
Twin:     cuda-kernels/attention/attention_backward/v02_tma.cu
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.attention.attention_backward.delta import deltas
from kernel_twins._triton.lib.device import scratch

KEYS_M, KEYS_N = 64, 128  # tiles of queries and keys where dk and dv are summed
QUERIES_M, QUERIES_N = 128, 64  # and where dq is
NUM_WARPS = 8
NUM_STAGES = 2


@triton.jit
def _load_tile(heads, batch, head, start, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a head from start on. Coordinates have 32 bits."""
    return heads.load([batch.to(tl.int32), head.to(tl.int32), start, 0]).reshape(ROWS, BLOCK_D)


@triton.jit
def _add_queries(
    dk_sum, dv_sum, k_tile, v_tile, q_desc, dout_desc, delta, lse2, batch, head, start, key, first, last, Sq,
    factor, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys with the queries from start on added. Tiles of scores are transposed."""
    i = tl.arange(0, BLOCK_M)
    row = start + i
    q_tile = _load_tile(q_desc, batch, head, start, BLOCK_M, BLOCK_D)
    dout_tile = _load_tile(dout_desc, batch, head, start, BLOCK_M, BLOCK_D)
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


@triton.jit(do_not_specialize=["B", "H", "group", "Sq", "Sk", "first", "last"])
def attention_backward_v02_tma_kernel(
    dout, q, k, v, delta, lse2, dk, dv, B, H, group, Sq, Sk, pitch, factor, scale, first, last,
    stride_ob, stride_oh, stride_om, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # dout, q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], delta, lse2: [B, H, pitch] and dk, dv: [B, H_KV, Sk, D]
    # contiguous. Query i sees the keys from i + first to i + last: key j is seen by the queries from j - last to
    # j - first.
    blocks = tl.cdiv(Sk, BLOCK_N)
    first_key = tl.program_id(0) % blocks * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, Sk) - 1
    key = first_key + tl.arange(0, BLOCK_N)
    kv_head = (tl.program_id(0) // blocks).to(tl.int64)  # of B * H_KV
    kv_heads = H // group
    batch = kv_head // kv_heads
    q_desc = tl.make_tensor_descriptor(q, [B, H, Sq, D], [stride_qb, stride_qh, stride_qm, 1], [1, 1, BLOCK_M, BLOCK_D])
    dout_desc = tl.make_tensor_descriptor(
        dout, [B, H, Sq, D], [stride_ob, stride_oh, stride_om, 1], [1, 1, BLOCK_M, BLOCK_D]
    )
    k_desc = tl.make_tensor_descriptor(
        k, [B, kv_heads, Sk, D], [stride_kb, stride_kh, stride_kn, 1], [1, 1, BLOCK_N, BLOCK_D]
    )
    v_desc = tl.make_tensor_descriptor(
        v, [B, kv_heads, Sk, D], [stride_vb, stride_vh, stride_vn, 1], [1, 1, BLOCK_N, BLOCK_D]
    )
    k_tile = _load_tile(k_desc, batch, kv_head % kv_heads, first_key, BLOCK_N, BLOCK_D)
    v_tile = _load_tile(v_desc, batch, kv_head % kv_heads, first_key, BLOCK_N, BLOCK_D)

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
        dk_sum, dv_sum = _add_queries(
            dk_sum, dv_sum, k_tile, v_tile, q_desc, dout_desc, delta + stats, lse2 + stats,
            batch, head + member, block * BLOCK_M, key, first, last, Sq, factor, BLOCK_M, BLOCK_D, MASKED=False,
        )  # fmt: skip
    # At the band's edges on both sides.
    edges = end - begin - inner
    for step in range(group * edges):
        member, edge = step // tl.maximum(edges, 1), begin + step % tl.maximum(edges, 1)
        block = tl.where(edge < clean, edge, edge + inner)
        stats = (kv_head * group + member) * pitch
        dk_sum, dv_sum = _add_queries(
            dk_sum, dv_sum, k_tile, v_tile, q_desc, dout_desc, delta + stats, lse2 + stats,
            batch, head + member, block * BLOCK_M, key, first, last, Sq, factor, BLOCK_M, BLOCK_D, MASKED=True,
        )  # fmt: skip

    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (key < Sk)[:, None] & (d < D)
    place = (kv_head * Sk + key)[:, None] * D + d
    tl.store(dk + place, (dk_sum * scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + place, dv_sum.to(dv.dtype.element_ty), mask=mask)


@triton.jit
def _add_keys(
    dq_sum, q_tile, dout_tile, row_delta, row_lse2, k_desc, v_desc, batch, head, start, row, first, last, Sk,
    factor, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries with the keys from start on added."""
    k_tile = _load_tile(k_desc, batch, head, start, BLOCK_N, BLOCK_D)
    v_tile = _load_tile(v_desc, batch, head, start, BLOCK_N, BLOCK_D)
    p = tl.exp2(tl.dot(q_tile, k_tile.T) * factor - row_lse2[:, None])
    ds = p * (tl.dot(dout_tile, v_tile.T) - row_delta[:, None])
    if MASKED:
        key = start + tl.arange(0, BLOCK_N)
        ahead = key[None, :] - row[:, None]
        visible = (ahead >= first) & (ahead <= last) & (key < Sk)[None, :]
        ds = tl.where(visible, ds, 0.0)
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq_sum)


@triton.jit(do_not_specialize=["B", "H", "group", "Sq", "Sk", "first", "last"])
def attention_backward_v02_tma_dq_kernel(
    dout, q, k, v, delta, lse2, dq, B, H, group, Sq, Sk, pitch, factor, scale, first, last,
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
    q_desc = tl.make_tensor_descriptor(q, [B, H, Sq, D], [stride_qb, stride_qh, stride_qm, 1], [1, 1, BLOCK_M, BLOCK_D])
    dout_desc = tl.make_tensor_descriptor(
        dout, [B, H, Sq, D], [stride_ob, stride_oh, stride_om, 1], [1, 1, BLOCK_M, BLOCK_D]
    )
    k_desc = tl.make_tensor_descriptor(
        k, [B, H // group, Sk, D], [stride_kb, stride_kh, stride_kn, 1], [1, 1, BLOCK_N, BLOCK_D]
    )
    v_desc = tl.make_tensor_descriptor(
        v, [B, H // group, Sk, D], [stride_vb, stride_vh, stride_vn, 1], [1, 1, BLOCK_N, BLOCK_D]
    )
    q_tile = _load_tile(q_desc, batch, head % H, first_row, BLOCK_M, BLOCK_D)
    dout_tile = _load_tile(dout_desc, batch, head % H, first_row, BLOCK_M, BLOCK_D)
    row_delta, row_lse2 = tl.load(delta + head * pitch + row), tl.load(lse2 + head * pitch + row)

    # Tiles are counted from the first key that any row sees. Those from clean to clean_end all rows see whole.
    begin = tl.maximum(first_row + first, 0)
    end = tl.cdiv(tl.maximum(tl.minimum(last_row + last + 1, Sk) - begin, 0), BLOCK_N)
    clean = tl.minimum(tl.cdiv(tl.maximum(last_row + first, 0) - begin, BLOCK_N), end)
    clean_end = tl.maximum((tl.minimum(first_row + last + 1, Sk) - begin) // BLOCK_N, clean)

    dq_sum = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for block in range(clean, clean_end):
        dq_sum = _add_keys(
            dq_sum, q_tile, dout_tile, row_delta, row_lse2, k_desc, v_desc, batch, kv_head, begin + block * BLOCK_N,
            row, first, last, Sk, factor, BLOCK_N, BLOCK_D, MASKED=False,
        )  # fmt: skip
    for edge in range(end - (clean_end - clean)):
        block = tl.where(edge < clean, edge, edge + clean_end - clean)
        dq_sum = _add_keys(
            dq_sum, q_tile, dout_tile, row_delta, row_lse2, k_desc, v_desc, batch, kv_head, begin + block * BLOCK_N,
            row, first, last, Sk, factor, BLOCK_N, BLOCK_D, MASKED=True,
        )  # fmt: skip

    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < Sq)[:, None] & (d < D)
    tl.store(dq + (head * Sq + row)[:, None] * D + d, (dq_sum * scale).to(dq.dtype.element_ty), mask=mask)


def attention_backward_v02_tma(
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
    strides = []
    for name, tensor in (("dout", dout), ("q", q), ("k", k), ("v", v)):
        # What a dimension of size 1 says of its stride is never used.
        pitches = [each if size > 1 else D for size, each in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
        if tensor.data_ptr() % 16 or any(pitch % 8 for pitch in pitches):
            raise ValueError(
                f"{name} has strides {tensor.stride()} and starts {tensor.data_ptr() % 16} bytes off a multiple of 16, "
                f"its rows must start at such multiples: call {name}.contiguous(), or take v01"
            )
        strides += pitches
    dq, dk, dv = out
    scale = D**-0.5 if scale is None else scale
    # Limits that lie beyond every key bind no more there, and have 32 bits.
    first, last = (max(-Sq, min(limit, Sk)) for limit in band or (-Sq, Sk))
    delta, lse2 = deltas(dout, result, lse, dlse)
    sizes = B, H, H // H_KV, Sq, Sk, delta.shape[2], scale * math.log2(math.e), scale, first, last
    padded = max(16, triton.next_power_of_2(D))
    triton.set_allocator(scratch)
    attention_backward_v02_tma_kernel[(B * H_KV * triton.cdiv(Sk, KEYS_N),)](
        dout, q, k, v, delta, lse2, dk, dv, *sizes, *strides,
        D=D, BLOCK_M=KEYS_M, BLOCK_N=KEYS_N, BLOCK_D=padded, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    attention_backward_v02_tma_dq_kernel[(B * H * triton.cdiv(Sq, QUERIES_M),)](
        dout, q, k, v, delta, lse2, dq, *sizes, *strides,
        D=D, BLOCK_M=QUERIES_M, BLOCK_N=QUERIES_N, BLOCK_D=padded, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip

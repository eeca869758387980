"""attention_backward v10_dispatch: heads up to 256, packed sequences, softcap, and only the gradients that are wanted.

Change:   a call that v06 can serve is sent to it, where Gluon runs, and to v07, which has the same arguments, if D is
          at most 64. All others take the kernels here, v02's with more to them. D above 128 has smaller tiles. Of
          packed sequences the grid has a slot for each tile that there may be, and a program searches its sequence, as
          in attention's v14; its descriptors begin and end with that sequence. Under a softcap the scores' gradients
          are multiplied by 1 - tanh^2. Gradients may have strides, and what no gradient needs is not computed. With a
          causal mask, the heaviest tile of a head's queries comes first, as the heaviest of its keys does anyway.
Why:      v06 computes scores once, and has roles, which ordinary Triton cannot say. Half as wide a head halves the
          products, but not the waits for a part of dq to leave: there v07's additions from registers are cheaper. Sums
          of 128 keys and 256 columns, twice, would take every register. A descriptor fills with 0 what lies behind its
          end, even where the tensor holds another sequence, or NaN, so that no row has to be cleared. dq has a kernel
          of its own here, whose sums are always added in the same order: deterministic calls stay. With the light tiles
          last, no SM computes a heavy one while the others are done.
Counter:  time stays v06's or v07's where that serves the call.
Requires: compute capability 9.0; addresses of dout, q, k and v, and their strides between batches, heads and rows, that
          are multiples of 16 bytes; rows of D contiguous elements, D a multiple of 8 up to 256; fewer than 2^31 tiles,
          and fewer than 2^30 queries and keys in a tensor. Gluon is that of Triton 3.6, as for attention's v14.
Source:   Dao et al., "FlashAttention" (arXiv:2205.14135); Dao, "FlashAttention-2" (arXiv:2307.08691); Gemma Team,
          "Gemma 2" (arXiv:2408.00118), for the softcap.
Twin:     cuda-kernels/attention/attention_backward/v10_dispatch.cu
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.attention.attention.mask import mask_of
from kernel_twins._triton.attention.attention.packed_sequences import sequence_of
from kernel_twins._triton.attention.attention.tanh import tanh
from kernel_twins._triton.attention.attention_backward import routes
from kernel_twins._triton.attention.attention_backward.delta import deltas
from kernel_twins._triton.lib.device import runs_gluon, scratch


class Tiles(NamedTuple):
    """Of queries and keys, where dk and dv are summed, and where dq is."""

    keys_m: int
    keys_n: int
    queries_m: int
    queries_n: int
    stages: int


TILES = {64: Tiles(64, 128, 128, 64, 2), 128: Tiles(64, 128, 128, 64, 2), 256: Tiles(32, 64, 128, 32, 2)}
NUM_WARPS = 8


@triton.jit
def _load_tile(heads, batch, head, start, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a head from start on. Coordinates have 32 bits."""
    return heads.load([batch.to(tl.int32), head.to(tl.int32), start, 0]).reshape(ROWS, BLOCK_D)


@triton.jit
def _bounds_of(starts, n):
    """Where a sequence begins, and its length."""
    start = tl.load(starts + n)
    return start.to(tl.int64), tl.load(starts + n + 1) - start


@triton.jit
def _add_queries(
    dk_sum, dv_sum, k_tile, v_tile, q_desc, dout_desc, delta, lse2, batch, head, start, key, first, last, queries,
    factor, inner, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys with the queries from start on added. Tiles of scores are transposed."""
    i = tl.arange(0, BLOCK_M)
    row = start + i
    q_tile = _load_tile(q_desc, batch, head, start, BLOCK_M, BLOCK_D)
    dout_tile = _load_tile(dout_desc, batch, head, start, BLOCK_M, BLOCK_D)
    scores = tl.dot(k_tile, q_tile.T)
    if CAPPED:
        scores = tanh(scores * inner)
    # A thread needs many rows' values: with start added to the pointer, they lie at known distances from one address.
    p = tl.exp2(scores * factor - tl.load(lse2 + start + i, mask=row < queries if MASKED else None)[None, :])
    if MASKED:
        ahead = key[:, None] - row[None, :]
        visible = (ahead >= first) & (ahead <= last) & (row < queries)[None, :]
        p = tl.where(visible, p, 0.0)
    if WANT_DV:
        dv_sum = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_sum)
    if WANT_DK:
        dp = tl.dot(v_tile, dout_tile.T)
        ds = p * (dp - tl.load(delta + start + i, mask=row < queries if MASKED else None)[None, :])
        if CAPPED:
            ds *= 1 - scores * scores
        if MASKED:
            ds = tl.where(visible, ds, 0.0)
        dk_sum = tl.dot(ds.to(q_tile.dtype), q_tile, dk_sum)
    return dk_sum, dv_sum


@triton.jit(do_not_specialize=["B", "H", "group", "N", "Sq", "Sk", "first", "last", "from_end"])
def attention_backward_v10_dispatch_kernel(
    dout, q, k, v, delta, lse2, dk, dv, cu_q, cu_k, B, H, group, N, Sq, Sk, pitch, factor, inner, scale,
    first, last, from_end,
    stride_ob, stride_oh, stride_om, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    PACKED: tl.constexpr, CAPPED: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # dout, q: [B, H, Sq, D], k, v, dk, dv: [B, H_KV, Sk, D], delta, lse2: [B, H, pitch] contiguous; cu_q, cu_k:
    # [N + 1]; dk or dv is None where it is not wanted. Query i sees the keys from i + first to i + last, with
    # from_end = 1 both limits plus keys less queries: key j is seen by the queries from j - last to j - first.
    WANT_DK: tl.constexpr = dk is not None
    WANT_DV: tl.constexpr = dv is not None
    blocks = Sk // BLOCK_N + N if PACKED else tl.cdiv(Sk, BLOCK_N)
    block = tl.program_id(0) % blocks
    kv_head = (tl.program_id(0) // blocks).to(tl.int64)  # of B * H_KV
    kv_heads = H // group
    batch = kv_head // kv_heads
    q_start, k_start, queries, keys = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), Sq, Sk
    if PACKED:
        n = sequence_of(block, cu_k, N, BLOCK_N)
        block -= tl.load(cu_k + n) // BLOCK_N + n
        q_start, queries = _bounds_of(cu_q, n)
        k_start, keys = _bounds_of(cu_k, n)
        if (block < 0) | (block * BLOCK_N >= keys):  # a slot before all sequences, or that its own does not need
            return
    first += (keys - queries) * from_end
    last += (keys - queries) * from_end
    first_key = block * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, keys) - 1
    key = first_key + tl.arange(0, BLOCK_N)
    # A descriptor has a row at least; without queries, none of theirs is loaded.
    of_queries, of_keys = [B, H, tl.maximum(queries, 1), D], [B, kv_heads, keys, D]
    q_desc = tl.make_tensor_descriptor(
        q + q_start * stride_qm, of_queries, [stride_qb, stride_qh, stride_qm, 1], [1, 1, BLOCK_M, BLOCK_D]
    )
    dout_desc = tl.make_tensor_descriptor(
        dout + q_start * stride_om, of_queries, [stride_ob, stride_oh, stride_om, 1], [1, 1, BLOCK_M, BLOCK_D]
    )
    k_desc = tl.make_tensor_descriptor(
        k + k_start * stride_kn, of_keys, [stride_kb, stride_kh, stride_kn, 1], [1, 1, BLOCK_N, BLOCK_D]
    )
    v_desc = tl.make_tensor_descriptor(
        v + k_start * stride_vn, of_keys, [stride_vb, stride_vh, stride_vn, 1], [1, 1, BLOCK_N, BLOCK_D]
    )
    k_tile = _load_tile(k_desc, batch, kv_head % kv_heads, first_key, BLOCK_N, BLOCK_D)
    v_tile = _load_tile(v_desc, batch, kv_head % kv_heads, first_key, BLOCK_N, BLOCK_D)

    # Tiles with a query that sees a key; in those from clean to clean_end every query sees all keys.
    begin = tl.maximum(first_key - last, 0) // BLOCK_M
    end = tl.maximum(tl.cdiv(tl.minimum(tl.maximum(last_key - first + 1, 0), queries), BLOCK_M), begin)
    clean = tl.minimum(tl.cdiv(tl.maximum(last_key - last, 0), BLOCK_M), end)
    clean_end = tl.maximum(tl.minimum(tl.maximum(first_key - first + 1, 0), queries) // BLOCK_M, clean)

    dk_sum = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv_sum = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    # One loop over the group's heads and a head's tiles: around two loops, another one would cost registers. No divisor
    # is 0, since the first step's tiles are fetched before it is known whether there is a step.
    head, inside = kv_head % kv_heads * group, clean_end - clean
    for step in range(group * inside):
        member, tile = step // tl.maximum(inside, 1), clean + step % tl.maximum(inside, 1)
        stats = (kv_head * group + member) * pitch + q_start
        dk_sum, dv_sum = _add_queries(
            dk_sum, dv_sum, k_tile, v_tile, q_desc, dout_desc, delta + stats, lse2 + stats,
            batch, head + member, tile * BLOCK_M, key, first, last, queries, factor, inner,
            WANT_DK, WANT_DV, CAPPED, BLOCK_M, BLOCK_D, MASKED=False,
        )  # fmt: skip
    # At the band's edges on both sides.
    edges = end - begin - inside
    for step in range(group * edges):
        member, edge = step // tl.maximum(edges, 1), begin + step % tl.maximum(edges, 1)
        tile = tl.where(edge < clean, edge, edge + inside)
        stats = (kv_head * group + member) * pitch + q_start
        dk_sum, dv_sum = _add_queries(
            dk_sum, dv_sum, k_tile, v_tile, q_desc, dout_desc, delta + stats, lse2 + stats,
            batch, head + member, tile * BLOCK_M, key, first, last, queries, factor, inner,
            WANT_DK, WANT_DV, CAPPED, BLOCK_M, BLOCK_D, MASKED=True,
        )  # fmt: skip

    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (key < keys)[:, None] & (d < D)
    place = (k_start + key)[:, None]
    if WANT_DK:
        dk_rows = dk + batch * stride_dkb + kv_head % kv_heads * stride_dkh + place * stride_dkn
        tl.store(dk_rows + d, (dk_sum * scale).to(dk.dtype.element_ty), mask=mask)
    if WANT_DV:
        dv_rows = dv + batch * stride_dvb + kv_head % kv_heads * stride_dvh + place * stride_dvn
        tl.store(dv_rows + d, dv_sum.to(dv.dtype.element_ty), mask=mask)


@triton.jit
def _add_keys(
    dq_sum, q_tile, dout_tile, row_delta, row_lse2, k_desc, v_desc, batch, head, start, row, first, last, keys,
    factor, inner, CAPPED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq of a tile of queries with the keys from start on added."""
    k_tile = _load_tile(k_desc, batch, head, start, BLOCK_N, BLOCK_D)
    v_tile = _load_tile(v_desc, batch, head, start, BLOCK_N, BLOCK_D)
    scores = tl.dot(q_tile, k_tile.T)
    if CAPPED:
        scores = tanh(scores * inner)
    p = tl.exp2(scores * factor - row_lse2[:, None])
    ds = p * (tl.dot(dout_tile, v_tile.T) - row_delta[:, None])
    if CAPPED:
        ds *= 1 - scores * scores
    if MASKED:
        key = start + tl.arange(0, BLOCK_N)
        ahead = key[None, :] - row[:, None]
        visible = (ahead >= first) & (ahead <= last) & (key < keys)[None, :]
        ds = tl.where(visible, ds, 0.0)
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq_sum)


@triton.jit(do_not_specialize=["B", "H", "group", "N", "Sq", "Sk", "first", "last", "from_end"])
def attention_backward_v10_dispatch_dq_kernel(
    dout, q, k, v, delta, lse2, dq, cu_q, cu_k, B, H, group, N, Sq, Sk, pitch, factor, inner, scale,
    first, last, from_end,
    stride_ob, stride_oh, stride_om, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dqb, stride_dqh, stride_dqm, PACKED: tl.constexpr, CAPPED: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # As above, and dq: [B, H, Sq, D].
    blocks = Sq // BLOCK_M + N if PACKED else tl.cdiv(Sq, BLOCK_M)
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks).to(tl.int64)  # of B * H
    batch, kv_head = head // H, head % H // group
    q_start, k_start, queries, keys = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), Sq, Sk
    if PACKED:
        n = sequence_of(block, cu_q, N, BLOCK_M)
        block -= tl.load(cu_q + n) // BLOCK_M + n
        q_start, queries = _bounds_of(cu_q, n)
        k_start, keys = _bounds_of(cu_k, n)
        if (block < 0) | (block * BLOCK_M >= queries):
            return
    if CAUSAL:  # the last tile sees most keys, and programs start in their order
        block = tl.cdiv(queries, BLOCK_M) - 1 - block
    first += (keys - queries) * from_end
    last += (keys - queries) * from_end
    first_row = block * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, queries) - 1
    row = first_row + tl.arange(0, BLOCK_M)
    of_queries, of_keys = [B, H, queries, D], [B, H // group, tl.maximum(keys, 1), D]
    q_desc = tl.make_tensor_descriptor(
        q + q_start * stride_qm, of_queries, [stride_qb, stride_qh, stride_qm, 1], [1, 1, BLOCK_M, BLOCK_D]
    )
    dout_desc = tl.make_tensor_descriptor(
        dout + q_start * stride_om, of_queries, [stride_ob, stride_oh, stride_om, 1], [1, 1, BLOCK_M, BLOCK_D]
    )
    k_desc = tl.make_tensor_descriptor(
        k + k_start * stride_kn, of_keys, [stride_kb, stride_kh, stride_kn, 1], [1, 1, BLOCK_N, BLOCK_D]
    )
    v_desc = tl.make_tensor_descriptor(
        v + k_start * stride_vn, of_keys, [stride_vb, stride_vh, stride_vn, 1], [1, 1, BLOCK_N, BLOCK_D]
    )
    q_tile = _load_tile(q_desc, batch, head % H, first_row, BLOCK_M, BLOCK_D)
    dout_tile = _load_tile(dout_desc, batch, head % H, first_row, BLOCK_M, BLOCK_D)
    stats = head * pitch + q_start + row
    row_delta = tl.load(delta + stats, mask=row < queries)
    row_lse2 = tl.load(lse2 + stats, mask=row < queries)

    # Tiles are counted from the first key that any row sees. Those from clean to clean_end all rows see whole.
    begin = tl.maximum(first_row + first, 0)
    end = tl.cdiv(tl.maximum(tl.minimum(last_row + last + 1, keys) - begin, 0), BLOCK_N)
    clean = tl.minimum(tl.cdiv(tl.maximum(last_row + first, 0) - begin, BLOCK_N), end)
    clean_end = tl.maximum((tl.minimum(first_row + last + 1, keys) - begin) // BLOCK_N, clean)

    dq_sum = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for tile in range(clean, clean_end):
        dq_sum = _add_keys(
            dq_sum, q_tile, dout_tile, row_delta, row_lse2, k_desc, v_desc, batch, kv_head, begin + tile * BLOCK_N,
            row, first, last, keys, factor, inner, CAPPED, BLOCK_N, BLOCK_D, MASKED=False,
        )  # fmt: skip
    for edge in range(end - (clean_end - clean)):
        tile = tl.where(edge < clean, edge, edge + clean_end - clean)
        dq_sum = _add_keys(
            dq_sum, q_tile, dout_tile, row_delta, row_lse2, k_desc, v_desc, batch, kv_head, begin + tile * BLOCK_N,
            row, first, last, keys, factor, inner, CAPPED, BLOCK_N, BLOCK_D, MASKED=True,
        )  # fmt: skip

    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < queries)[:, None] & (d < D)
    dq_rows = dq + batch * stride_dqb + head % H * stride_dqh + (q_start + row)[:, None] * stride_dqm
    tl.store(dq_rows + d, (dq_sum * scale).to(dq.dtype.element_ty), mask=mask)


def attention_backward_v10_dispatch(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    out: tuple[Tensor | None, Tensor | None, Tensor | None],
    scale: float | None = None,
    band: tuple[int, int] | None = None,
    softcap: float | None = None,
    from_end: bool = False,
    deterministic: bool = False,
) -> None:
    """The gradients of q, k and v through ``attention``, of whose outputs dout and dlse are the gradients.

    dout, q, result: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], contiguous rows, bf16 or fp16, D a multiple of 8 up to 256;
    lse, dlse: fp32 [B, H, Sq], contiguous, lse -inf where a row sees no key; out: dq, dk and dv, as q, k and v are,
    contiguous rows, or None where a gradient is not wanted. dk and dv are deterministic, dq is if that is asked for.

    scale, band, softcap, from_end, cu_seqlens_q and cu_seqlens_k are those of ``attention``. Tokens before the first
    sequence and behind the last are not read, and their gradients are 0.
    """
    (B, H, Sq, D), (H_KV, Sk) = q.shape, k.shape[1:3]
    dq, dk, dv = out
    packed = cu_seqlens_q is not None
    empty = B * H * Sq * Sk == 0
    for gradient in out:
        if gradient is not None and (empty or packed):
            gradient.zero_()
    if empty or (dq is None and dk is None and dv is None):
        return
    strides = []
    for name, tensor in (("dout", dout), ("q", q), ("k", k), ("v", v)):
        # What a dimension of size 1 says of its stride is never used.
        pitches = [each if size > 1 else D for size, each in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
        if tensor.data_ptr() % 16 or any(pitch % 8 for pitch in pitches):
            raise ValueError(
                f"{name} has strides {tensor.stride()} and starts {tensor.data_ptr() % 16} bytes off a multiple of 16, "
                f"its rows must start at such multiples: call {name}.contiguous()"
            )
        strides += pitches
    if runs_gluon() and routes.is_for_gluon(q, out, cu_seqlens_q, softcap, deterministic):
        shift = Sk - Sq if from_end else 0
        limits = None if band is None else (band[0] + shift, band[1] + shift)
        routes.gluon_step(D)(dout, q, k, v, result, lse, dlse, out=out, scale=scale, band=limits)
        return
    N = len(cu_seqlens_q) - 1 if cu_seqlens_q is not None else B
    scale = D**-0.5 if scale is None else scale
    factor, inner = (scale, 0.0) if softcap is None else (softcap, scale / softcap)
    # Limits that lie beyond every key bind no more there, and have 32 bits.
    before, behind = (-Sk, Sq) if from_end else (-Sq, Sk)
    first, last = (max(before, min(limit, behind)) for limit in band or (before, behind))
    delta, lse2 = deltas(dout, result, lse, dlse)
    sizes = (
        cu_seqlens_q, cu_seqlens_k, B, H, H // H_KV, N, Sq, Sk, delta.shape[2], factor * math.log2(math.e), inner,
        scale, first, last, int(from_end), *strides,
    )  # fmt: skip
    padded = max(16, triton.next_power_of_2(D))
    tiles = TILES[max(64, padded)]
    constants = {
        "PACKED": packed, "CAPPED": softcap is not None, "D": D, "BLOCK_D": padded, "num_warps": NUM_WARPS,
        "num_stages": tiles.stages,
    }  # fmt: skip
    triton.set_allocator(scratch)
    if dk is not None or dv is not None:
        blocks = Sk // tiles.keys_n + N if packed else B * triton.cdiv(Sk, tiles.keys_n)
        attention_backward_v10_dispatch_kernel[(H_KV * blocks,)](
            dout, q, k, v, delta, lse2, dk, dv, *sizes, *_strides(dk), *_strides(dv),
            BLOCK_M=tiles.keys_m, BLOCK_N=tiles.keys_n, **constants,
        )  # fmt: skip
    if dq is not None:
        blocks = Sq // tiles.queries_m + N if packed else B * triton.cdiv(Sq, tiles.queries_m)
        attention_backward_v10_dispatch_dq_kernel[(H * blocks,)](
            dout, q, k, v, delta, lse2, dq, *sizes, *_strides(dq),
            CAUSAL=mask_of(first, last, before, behind) == "causal",
            BLOCK_M=tiles.queries_m, BLOCK_N=tiles.queries_n, **constants,
        )  # fmt: skip


def _strides(gradient: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if gradient is None else gradient.stride()[:3]

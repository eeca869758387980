"""attention_backward v03_one_pass: dq is added up in memory, so that every pair of tiles is computed once.

Change:   the program of a tile of keys also multiplies its ds by k, and adds the product by atomics to a workspace of
          fp32, which another kernel scales and rounds to dq. dk and dv stay in registers, and have the same bits in
          every run; those of dq depend on the order in which programs add.
Why:      v02 computes the scores and dout @ v^T twice, once for each kernel: seven products of tiles, where five are
          needed. The workspace takes four bytes of memory for each element of dq.
Counter:  instructions and time fall; dram_share rises.
Requires: compute capability 9.0; addresses of dout, q, k and v, and their strides between batches, heads and rows, that
          are multiples of 16 bytes; D of at most 128; fewer than 2^31 tiles, and sequences below 2^30. Nothing of
          result but rows of D contiguous elements.
Source:   Dao, "FlashAttention-2" (arXiv:2307.08691).
Twin:     cuda-kernels/attention/attention_backward/v03_one_pass.cu
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.attention.attention.mask import mask_of
from kernel_twins._triton.attention.attention_backward.delta import deltas
from kernel_twins._triton.attention.attention_backward.rounding import round_sums
from kernel_twins._triton.lib import tuning
from kernel_twins._triton.lib.device import scratch

CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in ((64, 64, 8, 2), (64, 64, 8, 3), (64, 128, 8, 2), (32, 128, 8, 2))
]


@triton.jit
def _load_tile(heads, batch, head, start, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a head from start on. Coordinates have 32 bits."""
    return heads.load([batch.to(tl.int32), head.to(tl.int32), start, 0]).reshape(ROWS, BLOCK_D)


@triton.jit
def _add_queries(
    dk_sum, dv_sum, k_tile, v_tile, q_desc, dout_desc, delta, lse2, dq_sums, batch, head, start, key, first, last,
    Sq, Sk, factor, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys with the queries from start on added, whose dq_sums grow. Scores are transposed."""
    i = tl.arange(0, BLOCK_M)
    row = start + i
    q_tile = _load_tile(q_desc, batch, head, start, BLOCK_M, BLOCK_D)
    dout_tile = _load_tile(dout_desc, batch, head, start, BLOCK_M, BLOCK_D)
    scores = tl.dot(k_tile, q_tile.T)
    # A thread needs many rows' values: with start added to the pointer, they lie at known distances from one address.
    p = tl.exp2(scores * factor - tl.load(lse2 + start + i)[None, :])
    if MASKED:
        ahead = key[:, None] - row[None, :]
        visible = (ahead >= first) & (ahead <= last) & (row < Sq)[None, :] & (key < Sk)[:, None]
        p = tl.where(visible, p, 0.0)
    dv_sum = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_sum)
    dp = tl.dot(v_tile, dout_tile.T)
    ds = p * (dp - tl.load(delta + start + i)[None, :])
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    dk_sum = tl.dot(ds.to(q_tile.dtype), q_tile, dk_sum)
    d = tl.arange(0, BLOCK_D)[None, :]
    dq = tl.dot(ds.to(k_tile.dtype).T, k_tile)
    # The workspace has room for whole tiles: to rows behind the last query, 0 is added.
    tl.atomic_add(dq_sums + row.to(tl.int64)[:, None] * D + d, dq, mask=d < D, sem="relaxed")
    return dk_sum, dv_sum


@triton.autotune(
    CONFIGS, key=["D", "MASK", "length"], reset_to_zero=["dq_sums"], cache_results=True, do_bench=tuning.bench
)
@triton.jit(do_not_specialize=["B", "H", "group", "Sq", "Sk", "first", "last", "length"])
def attention_backward_v03_one_pass_kernel(
    dout, q, k, v, delta, lse2, dq_sums, dk, dv, B, H, group, Sq, Sk, pitch, factor, scale, first, last, length,
    stride_ob, stride_oh, stride_om, stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    MASK: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # MASK and length tell problems apart in the search.
    # dout, q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], delta, lse2: [B, H, pitch], dq_sums: [B, H, pitch, D], zeros at
    # first, and dk, dv: [B, H_KV, Sk, D] contiguous. Query i sees the keys from i + first to i + last: key j is seen by
    # the queries from j - last to j - first.
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
    # For dq, keys behind the last one are masked: their p may be inf, and inf times 0 is NaN.
    clean_end = tl.where(first_key + BLOCK_N > Sk, clean, clean_end)

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
            dq_sums + stats * D, batch, head + member, block * BLOCK_M, key, first, last, Sq, Sk,
            factor, D, BLOCK_M, BLOCK_D, MASKED=False,
        )  # fmt: skip
    # At the band's edges on both sides.
    edges = end - begin - inner
    for step in range(group * edges):
        member, edge = step // tl.maximum(edges, 1), begin + step % tl.maximum(edges, 1)
        block = tl.where(edge < clean, edge, edge + inner)
        stats = (kv_head * group + member) * pitch
        dk_sum, dv_sum = _add_queries(
            dk_sum, dv_sum, k_tile, v_tile, q_desc, dout_desc, delta + stats, lse2 + stats,
            dq_sums + stats * D, batch, head + member, block * BLOCK_M, key, first, last, Sq, Sk,
            factor, D, BLOCK_M, BLOCK_D, MASKED=True,
        )  # fmt: skip

    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (key < Sk)[:, None] & (d < D)
    place = (kv_head * Sk + key)[:, None] * D + d
    tl.store(dk + place, (dk_sum * scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + place, dv_sum.to(dv.dtype.element_ty), mask=mask)


def attention_backward_v03_one_pass(
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
    pitch = delta.shape[2]
    dq_sums = torch.zeros((B, H, pitch, D), dtype=torch.float32, device=q.device)

    def grid(args: dict[str, int]) -> tuple[int]:
        return (B * H_KV * triton.cdiv(Sk, args["BLOCK_N"]),)

    mask = mask_of(first, last, -Sq, Sk)
    variant = {} if mask == "full" else {"mask": mask}
    problem = tuning.problem_of(B, H, Sq, D, dtype=q.dtype, **variant)
    step = "attention_backward/v03_one_pass"
    kernel, config = tuning.choose(attention_backward_v03_one_pass_kernel, step, problem, q.device)
    triton.set_allocator(scratch)
    kernel[grid](
        dout, q, k, v, delta, lse2, dq_sums, dk, dv, B, H, H // H_KV, Sq, Sk, pitch, scale * math.log2(math.e), scale,
        first, last, triton.next_power_of_2(Sq), *strides,
        MASK=mask, D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), **config,
    )  # fmt: skip
    round_sums(dq_sums, dq, scale)

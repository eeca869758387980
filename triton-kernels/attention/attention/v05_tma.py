"""attention v05_tma: TMA brings whole blocks of K and V.

Change:   blocks of K and V come through tensor descriptors (TMA), which every program makes on the GPU for its head. A
          descriptor knows the head's borders and fills with 0 what lies behind them, so that no load is masked, and one
          thread starts the copy of a block, swizzled as wgmma reads it. Q is loaded once, through pointers as before.
Why:      cp.async takes an address of every thread for each 16 bytes, in registers that the accumulators need; the copy
          engine takes a block's coordinates. It takes 16 bytes as well where strides are multiples of 8 alone.
Counter:  instructions and time fall.
Requires: compute capability 9.0; addresses of K and V, and their strides between batches, heads and rows, that are
          multiples of 16 bytes, and rows that do not overlap; D of at most 128; fewer than 2^31 blocks of queries, and
          sequences below 2^30. Nothing of Q but rows of D contiguous elements.
Source:   Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867); Dao,
          "FlashAttention-2" (arXiv:2307.08691).
Twin:     cuda-kernels/attention/attention/v05_tma.cu
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.attention.attention.mask import mask_of
from kernel_twins._triton.lib import tuning
from kernel_twins._triton.lib.device import scratch

CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in (
        # 128 queries of 4 warps would spill registers where D is 128.
        (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3),
        (64, 128, 4, 2), (64, 128, 4, 3),
    )
]  # fmt: skip

LN_2 = tl.constexpr(0.6931471805599453)
SMALLEST_FACTOR = 2.0**-126  # a scale of 0 becomes this: -inf * 0 would be NaN


@triton.jit
def _add_block(
    total, row_max, row_sum, q_tile, k_desc, v_desc, start, lowest, highest, factor,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Output, maximum and sum of a block of queries with the keys from start on."""
    # V is waited for together with K. Where q is in registers, a wait between the products has ptxas serialise them.
    k_tile = k_desc.load([start, 0])
    v_tile = v_desc.load([start, 0])
    scores = tl.dot(q_tile, k_tile.T)
    if MASKED:
        key = start + tl.arange(0, BLOCK_N)
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
    total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None])
    return total, new_max, row_sum


@triton.autotune(CONFIGS, key=["D", "MASK", "length"], cache_results=True, do_bench=tuning.bench)
@triton.jit(do_not_specialize=["H", "group", "Sq", "Sk", "first", "last", "length"])
def attention_v05_tma_kernel(
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
    k_desc = tl.make_tensor_descriptor(k_head, [Sk, D], [stride_kn, 1], [BLOCK_N, BLOCK_D])
    v_desc = tl.make_tensor_descriptor(v_head, [Sk, D], [stride_vn, 1], [BLOCK_N, BLOCK_D])
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
            total, row_max, row_sum, q_tile, k_desc, v_desc, begin + block * BLOCK_N, lowest, highest, factor,
            BLOCK_N, MASKED=False,
        )  # fmt: skip
    # At the band's edges on both sides.
    for edge in range(end - (clean_end - clean)):
        block = tl.where(edge < clean, edge, edge + clean_end - clean)
        total, row_max, row_sum = _add_block(
            total, row_max, row_sum, q_tile, k_desc, v_desc, begin + block * BLOCK_N, lowest, highest, factor,
            BLOCK_N, MASKED=True,
        )  # fmt: skip

    # A row that sees no key: 0 / 1, and -inf + log(0).
    total = total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_rows = out + (head * Sq + row)[:, None] * D
    tl.store(out_rows + d[None, :], total.to(out.dtype.element_ty), mask=q_mask)
    tl.store(lse + head * Sq + row, row_max * LN_2 + tl.log(row_sum), mask=row < Sq)


def attention_v05_tma(
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
    for name, tensor in (("k", k), ("v", v)):
        pitches = [stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True) if size > 1]
        if tensor.data_ptr() % 16 or any(pitch % 8 for pitch in pitches):
            raise ValueError(
                f"{name} has strides {tensor.stride()} and starts {tensor.data_ptr() % 16} bytes off a multiple of 16, "
                f"its rows must start at such multiples: call {name}.contiguous(), or take an earlier step"
            )
    if Sk == 0:  # nothing that a descriptor could describe
        out[0].zero_()
        out[1].fill_(-math.inf)
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
    kernel, config = tuning.choose(attention_v05_tma_kernel, "attention/v05_tma", problem, q.device)
    triton.set_allocator(scratch)
    kernel[grid](
        q, k, v, *out, H, H // H_KV, Sq, Sk, factor, first, last,
        triton.next_power_of_2(Sq), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        MASK=mask, NEGATIVE=scale < 0, D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), **config,
    )  # fmt: skip

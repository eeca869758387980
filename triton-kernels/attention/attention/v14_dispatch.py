"""attention v14_dispatch: head dimensions up to 256, sequences of various lengths, softcap, and tensors of any strides.

Change:   a call that v13 can serve is sent to it, where Gluon runs, and to v11, which has the same arguments, if D is
          at most 64. All others take the kernel here, v05's in ordinary Triton with more to it: a list of smaller tiles
          for D above 128. Sequences that lie one behind another in a tensor share a launch: the grid has a slot for
          each block of queries that there may be, and a program searches its sequence in cu_seqlens_q, on the GPU. A
          softcap bounds scores by a tanh made of exp2. K and V come through descriptors if all rows start at multiples
          of 16 bytes, else through pointers, and the result may have strides, too. With a causal mask, the heaviest
          block of a head comes first.
Why:      v13 has a producer and turns, which ordinary Triton cannot say. Half as wide a head halves the products, but
          not what a vote takes: there v11's comparisons are cheaper. A block of 128 queries and 256 columns leaves
          registers for few keys. The host does not know the sequences' lengths, and reading them would wait for the
          GPU. With the light blocks last, no SM computes a heavy one while the others are done.
Counter:  time stays where v13 or v11 serves the call.
Requires: rows of D contiguous elements, D a multiple of 8 up to 256; fewer than 2^31 blocks of queries, and fewer than
          2^30 queries and keys in a tensor. v13 serves calls on compute capability 9.0 alone, and by Triton 3.6 alone,
          since Gluon's interface changes with each minor version.
Source:   Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867); Dao,
          "FlashAttention-2" (arXiv:2307.08691); Gemma Team, "Gemma 2" (arXiv:2408.00118), for the softcap.
Twin:     cuda-kernels/attention/attention/v14_dispatch.cu
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.attention.attention.mask import mask_of
from kernel_twins._triton.attention.attention.packed_sequences import sequence_of
from kernel_twins._triton.attention.attention.tanh import tanh
from kernel_twins._triton.lib import plans, tuning
from kernel_twins._triton.lib.device import has_tma, runs_gluon, scratch

if TYPE_CHECKING:
    from kernel_twins._triton.attention.attention import described


def _configs(*tiles: tuple[int, int, int, int]) -> list[triton.Config]:
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages) for m, n, warps, stages in tiles
    ]


CONFIGS = _configs(
    # 128 queries of 4 warps would spill registers where D is 128.
    (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3),
    (64, 128, 4, 2), (64, 128, 4, 3),
)  # fmt: skip
# For D above 128. The last one is for pointers whose alignment is unknown, where K and V pass through registers.
WIDE_CONFIGS = _configs((128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (128, 16, 8, 2))

LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(0.6931471805599453)
SMALLEST_FACTOR = 2.0**-126  # a scale of 0 becomes this: -inf * 0 would be NaN
VECTOR = 8  # elements of 16 bytes
MOST_TILES = 2**30  # of queries; behind the last one, v13 counts on by as many as there are programs


@triton.jit
def _load_block(
    head, desc, stride, start, rows, UNIT: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_D], a head's rows of K or V from start on."""
    # What lies behind the last row is read as 0, since even a probability of 0 times NaN is NaN.
    if desc is not None:
        block = desc.load([start, 0])
    else:
        row = (start + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
        d = tl.arange(0, BLOCK_D)[None, :]
        places = head + row * stride * UNIT + d
        if MASKED:
            block = tl.load(places, mask=(row < rows) & (d < D), other=0.0)
        elif D < BLOCK_D:
            block = tl.load(places, mask=d < D, other=0.0)
        else:
            block = tl.load(places)
    return block


@triton.jit
def _add_block(
    total, row_max, row_sum, q_tile, k_head, v_head, k_desc, v_desc, stride_kn, stride_vn, start, lowest, highest,
    keys, factor, inner, NEGATIVE: tl.constexpr, SOFTCAP: tl.constexpr, UNIT: tl.constexpr,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Output, maximum and sum of a block of queries with the keys from start on."""
    k_tile = _load_block(k_head, k_desc, stride_kn, start, keys, UNIT, D, BLOCK_N, BLOCK_D, MASKED)
    v_tile = _load_block(v_head, v_desc, stride_vn, start, keys, UNIT, D, BLOCK_N, BLOCK_D, MASKED)
    scores = tl.dot(q_tile, k_tile.T)
    if SOFTCAP:
        scores = tanh(scores * inner)
    if MASKED:
        key = start + tl.arange(0, BLOCK_N)
        visible = (key[None, :] >= lowest[:, None]) & (key[None, :] <= highest[:, None])
        scores = tl.where(visible, scores, float("inf") if NEGATIVE else -float("inf"))
    # With a negative factor, the smallest product is the largest score. Were q negated instead, it would lie in
    # registers, which the accumulators need.
    largest = tl.min(scores, axis=1) if NEGATIVE else tl.max(scores, axis=1)
    # Maxima are kept as they were rounded: a factor for no growth is then 1, however many blocks follow.
    new_max = tl.maximum(row_max, largest * factor)
    # While a row has seen no key, or scores of -inf alone, its sum must stay 0: -inf - -inf would make it NaN.
    base = tl.where(new_max == -float("inf"), 0.0, new_max)
    p = tl.exp2(scores * factor - base[:, None])
    shrink = tl.exp2(row_max - base)
    row_sum = row_sum * shrink + tl.sum(p, axis=1)
    total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None])
    return total, new_max, row_sum


SEARCH = {
    "key": ["D", "MASK", "length", "SOFTCAP", "VARLEN", "TMA"],
    "cache_results": True,
    "do_bench": tuning.bench,
}


@triton.autotune(CONFIGS, **SEARCH)
@triton.jit(do_not_specialize=["H", "group", "N", "Sq", "Sk", "first", "last", "from_end", "length"])
def attention_v14_dispatch_kernel(
    q, k, v, out, lse, cu_q, cu_k, H, group, N, Sq, Sk, factor, inner, first, last, from_end, length,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, MASK: tl.constexpr, NEGATIVE: tl.constexpr, SOFTCAP: tl.constexpr,
    VARLEN: tl.constexpr, TMA: tl.constexpr, UNIT: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # MASK and length tell problems apart in the search.
    # q, out: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], lse: [B, H, Sq] contiguous; cu_q, cu_k: [N + 1]. Query i sees the
    # keys from i + first to i + last, with from_end = 1 both limits plus keys less queries. Strides are in units of
    # UNIT elements, since the compiler makes accesses of 16 bytes only where it knows them to be multiples of 8.
    # Offsets have 64 bits: row * stride may pass 2^31.
    slots = Sq // BLOCK_M + N if VARLEN else tl.cdiv(Sq, BLOCK_M)
    block = tl.program_id(0) % slots
    head = (tl.program_id(0) // slots).to(tl.int64)  # of B * H
    batch, kv_head = head // H, head % H // group
    q_start, k_start, queries, keys = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), Sq, Sk
    if VARLEN:
        n = sequence_of(block, cu_q, N, BLOCK_M)
        block -= tl.load(cu_q + n) // BLOCK_M + n
        q_start, k_start = tl.load(cu_q + n).to(tl.int64), tl.load(cu_k + n).to(tl.int64)
        queries, keys = (tl.load(cu_q + n + 1) - q_start).to(tl.int32), (tl.load(cu_k + n + 1) - k_start).to(tl.int32)
        if (block < 0) | (block * BLOCK_M >= queries):  # a slot before all sequences, or that its own does not need
            return
    if MASK == "causal":  # the last block sees most keys, and programs start in their order
        block = tl.cdiv(queries, BLOCK_M) - 1 - block
    first += (keys - queries) * from_end
    last += (keys - queries) * from_end

    first_row = block * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, queries) - 1
    row = first_row + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q_head = q + (batch * stride_qb + head % H * stride_qh + q_start * stride_qm) * UNIT
    q_rows = q_head + row.to(tl.int64)[:, None] * stride_qm * UNIT
    k_head = k + (batch * stride_kb + kv_head * stride_kh + k_start * stride_kn) * UNIT
    v_head = v + (batch * stride_vb + kv_head * stride_vh + k_start * stride_vn) * UNIT
    k_desc, v_desc = None, None
    if TMA:
        # A descriptor ends with the sequence: it fills with 0 what lies behind, whatever the tensor holds there. It has
        # a row at least; without keys, nothing is loaded.
        shape = [tl.maximum(keys, 1), D]
        k_desc = tl.make_tensor_descriptor(k_head, shape, [stride_kn * UNIT, 1], [BLOCK_N, BLOCK_D])
        v_desc = tl.make_tensor_descriptor(v_head, shape, [stride_vn * UNIT, 1], [BLOCK_N, BLOCK_D])
    q_mask = (row < queries)[:, None] & (d < D)[None, :]
    q_tile = tl.load(q_rows + d[None, :], mask=q_mask, other=0.0)

    # Blocks are counted from the first key that any row sees. Those from clean to clean_end all rows see whole.
    lowest, highest = row + first, tl.minimum(row + last, keys - 1)
    begin = tl.maximum(first_row + first, 0)
    end = tl.cdiv(tl.maximum(tl.minimum(last_row + last + 1, keys) - begin, 0), BLOCK_N)
    clean = tl.minimum(tl.cdiv(tl.maximum(last_row + first, 0) - begin, BLOCK_N), end)
    clean_end = tl.maximum((tl.minimum(first_row + last + 1, keys) - begin) // BLOCK_N, clean)

    total = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for tile in range(clean, clean_end):
        total, row_max, row_sum = _add_block(
            total, row_max, row_sum, q_tile, k_head, v_head, k_desc, v_desc, stride_kn, stride_vn,
            begin + tile * BLOCK_N, lowest, highest, keys, factor, inner,
            NEGATIVE, SOFTCAP, UNIT, D, BLOCK_N, BLOCK_D, MASKED=False,
        )  # fmt: skip
    # At the band's edges on both sides.
    for edge in range(end - (clean_end - clean)):
        tile = tl.where(edge < clean, edge, edge + clean_end - clean)
        total, row_max, row_sum = _add_block(
            total, row_max, row_sum, q_tile, k_head, v_head, k_desc, v_desc, stride_kn, stride_vn,
            begin + tile * BLOCK_N, lowest, highest, keys, factor, inner,
            NEGATIVE, SOFTCAP, UNIT, D, BLOCK_N, BLOCK_D, MASKED=True,
        )  # fmt: skip

    # A row that sees no key: 0 / 1, and -inf + log(0).
    total = total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_head = out + (batch * stride_ob + head % H * stride_oh + q_start * stride_om) * UNIT
    out_rows = out_head + row.to(tl.int64)[:, None] * stride_om * UNIT
    tl.store(out_rows + d[None, :], total.to(out.dtype.element_ty), mask=q_mask)
    tl.store(lse + head * Sq + q_start + row, row_max * LN_2 + tl.log(row_sum), mask=row < queries)


# The same kernel, searched among other tiles.
_wide_kernel = triton.autotune(WIDE_CONFIGS, **SEARCH)(attention_v14_dispatch_kernel.fn)

_plans: dict[tuple[Any, ...], plans.Plan | described.Plan] = {}  # the launch cache


def attention_v14_dispatch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor],
    scale: float | None = None,
    band: tuple[int, int] | None = None,
    softcap: float | None = None,
    from_end: bool = False,
) -> None:
    """out = softmax(scores + mask) @ v, and the logarithm of each row's sum; scores are scale * q @ k^T.

    q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], bf16 or fp16, D a multiple of 8 up to 256; out: [B, H, Sq, D], and fp32
    [B, H, Sq] contiguous. Rows of D are contiguous, other strides are free. The scale is 1 / sqrt(D) if there is none.

    - band: query i sees the keys from i + band[0] to i + band[1], without one all. With from_end, the number of keys
      less that of queries is added to both limits. A row that sees no key is 0, and its logarithm -inf.
    - softcap: scores become softcap * tanh(scores / softcap).
    - cu_seqlens_q, cu_seqlens_k: int32 [N + 1], contiguous. B is 1, and sequence n has the queries from
      cu_seqlens_q[n] to cu_seqlens_q[n + 1] and the keys of cu_seqlens_k likewise. Before the first
      sequence and behind the last nothing is read, and out stays as it was.
    """
    tensors = q, k, v, *out, cu_seqlens_q, cu_seqlens_k
    starts = None if cu_seqlens_q is None else cu_seqlens_q.shape
    key = (
        q.shape, k.shape, starts, q.stride(), k.stride(), v.stride(), out[0].stride(), q.dtype, scale, band, softcap,
        from_end, plans.alignment(*tensors), q.get_device(),
    )  # fmt: skip
    triton.set_allocator(scratch)
    plan = _plans.get(key)
    if plan is not None and not tuning.is_recording():
        plan(*tensors)
        return
    plan = _first_time(tensors, scale, band, softcap, from_end)
    if plan is not None:
        plans.keep(_plans, key, plan)


def _first_time(
    tensors: tuple[Any, ...], scale: float | None, band: tuple[int, int] | None, softcap: float | None, from_end: bool
) -> plans.Plan | described.Plan | None:
    """Run a problem that is not in the launch cache, and make its plan, unless it is empty, interpreted or captured."""
    q, k, v, out, lse, cu_seqlens_q, _ = tensors
    if runs_gluon() and is_for_gluon(q, k, v, out, cu_seqlens_q, softcap):
        # Only here, since another version of Gluon may not even have the modules.
        if q.shape[3] > 64:
            from kernel_twins._triton.attention.attention.v13_late_search import first_launch
        else:
            from kernel_twins._triton.attention.attention.v11_skip_rescale import first_launch
        shift = k.shape[2] - q.shape[2] if from_end else 0
        limits = None if band is None else (band[0] + shift, band[1] + shift)
        return first_launch(q, k, v, out, lse, scale, limits)
    (B, H, Sq, D), (H_KV, Sk) = q.shape, k.shape[1:3]
    N = B if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if N * H * Sq == 0:
        return None
    scale = D**-0.5 if scale is None else scale
    factor, inner = scale * LOG2_E, 0.0
    if softcap is not None:
        factor, inner = softcap * LOG2_E, scale / softcap
    factor = math.copysign(max(abs(factor), SMALLEST_FACTOR), factor)
    # Limits that lie beyond every key bind no more there, and have 32 bits.
    before, behind = (-Sk, Sq) if from_end else (-Sq, Sk)
    first, last = (max(before, min(limit, behind)) for limit in band or (before, behind))
    mask = mask_of(first, last, before, behind)

    strides = [_strides(each) for each in (q, k, v, out)]
    aligned = all(plans.alignment(q, k, v, out))
    unit = VECTOR if aligned and not any(stride % VECTOR for each in strides for stride in each) else 1
    # Descriptors take rows that do not overlap, at distances of 31 bits.
    tma = unit == VECTOR and has_tma() and all(D <= rows < 2**31 for _, _, rows in strides[1:3])
    varlen = cu_seqlens_q is not None

    def grid(args: dict[str, int]) -> tuple[int]:
        return (H * (Sq // args["BLOCK_M"] + N if varlen else B * triton.cdiv(Sq, args["BLOCK_M"])),)

    length = triton.cdiv(Sq, N) if varlen else Sq
    kinds = {
        "mask": mask if mask != "full" else "",
        "softcap": "yes" if softcap is not None else "",
        "varlen": "yes" if varlen else "",
        "kv": "" if tma else "pointers",
        "tiles": "wide" if D > 128 else "",
    }
    problem = tuning.problem_of(N, H, length, D, dtype=q.dtype).but(**kinds)
    searched = _wide_kernel if D > 128 else attention_v14_dispatch_kernel
    kernel, config = tuning.choose(searched, "attention/v14_dispatch", problem, q.device)
    behind = (
        H, H // H_KV, N, Sq, Sk, factor, inner, first, last, int(from_end), triton.next_power_of_2(length),
        *(stride // unit for each in strides for stride in each),
    )  # fmt: skip
    constants = {
        "MASK": mask, "NEGATIVE": factor < 0, "SOFTCAP": softcap is not None, "VARLEN": varlen, "TMA": tma,
        "UNIT": unit, "D": D, "BLOCK_D": max(16, triton.next_power_of_2(D)),
    }  # fmt: skip
    if not config:
        kernel[grid](*tensors, *behind, **constants)
        kernel, config = kernel.fn, kernel.best_config.all_kwargs()
    return plans.launch(kernel, grid, tensors, behind, constants | config)


def is_for_gluon(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor | None = None, softcap: float | None = None
) -> bool:
    """Whether v13 and v11 serve a call, where Gluon runs: D up to 128, sequences of one length, no softcap.

    All tensors must be such as their descriptors take, and tiles of queries no more than they count in 32 bits.
    """
    B, H, Sq, D = q.shape
    if cu_seqlens_q is not None or softcap is not None or D > 128 or B * H * triton.cdiv(Sq, 128) >= MOST_TILES:
        return False
    return all(_is_described(each) for each in (q, k, v, out))


def _is_described(heads: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes, fewer than 2^40 bytes apart, and none lies in another.

    So a tensor that was expanded over batches or heads is none of these.
    """
    apart = [stride for size, stride in zip(heads.shape[:3], heads.stride()[:3], strict=True) if size > 1]
    return heads.data_ptr() % 16 == 0 and all(
        stride % VECTOR == 0 and heads.shape[3] <= stride < 2**39 for stride in apart
    )


def _strides(tensor: Tensor) -> list[int]:
    """Of batches, heads and rows; 0 where there is one alone, which may have any."""
    return [stride if size > 1 else 0 for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]

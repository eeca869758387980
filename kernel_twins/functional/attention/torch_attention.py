"""Attention in PyTorch's operations, for what scaled_dot_product_attention cannot say: right, but not fast.

Scores are computed in fp32, in float64 of float64 operands, for some queries at a time. All is differentiable, and a
gradient keeps the probabilities of every pair that was computed.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from kernel_twins.functional.attention.shared import Options
from kernel_twins.functional.backends import is_plain

_CHUNK = 2**26  # scores at a time


def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """The result and its lse, of the operators' arguments; any one floating dtype, any head dimension."""
    seen = keys_seen(q, k, cu_seqlens_q, cu_seqlens_k, options)
    cuts = [0, q.shape[2]]
    whole = (
        torch.compiler.is_compiling() or not is_plain(*seen) or (q.is_cuda and torch.cuda.is_current_stream_capturing())
    )
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        k, v = cleared(k, cu_seqlens_k), cleared(v, cu_seqlens_k)
        if not whole:  # queries of one sequence at a time: its keys are all that is read
            cuts = sorted({*cuts, *cu_seqlens_q.clamp(0, q.shape[2]).tolist()})
    with torch.autocast(q.device.type, enabled=False):
        return _attention(q, k, v, seen, options, None if whole else cuts)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor | None:
    """The result by scaled_dot_product_attention; None if it cannot say what is asked for."""
    queries, keys = q.shape[2], k.shape[2]
    causal = options.is_causal(queries, keys)
    if options.softcap or not (causal or options.is_full(queries, keys)):
        return None
    return sdpa(q, k, v, is_causal=causal, scale=options.scale, enable_gqa=q.shape[1] != k.shape[1])


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's. Its fused kernels make NaN of a scale that is not positive, so the query takes the sign or the 0."""
    if scale is not None and scale <= 0:
        query, scale = (-query, -scale) if scale < 0 else (query * 0.0, 1.0)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def keys_seen(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """The first and the last key that each query sees, int64 [Sq]; the last is before the first if it sees none."""
    queries, keys = q.shape[2], k.shape[2]
    places = torch.arange(queries, device=q.device)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        own = places + (keys - queries if options.from_end else 0)
        return (own + options.first).clamp(min=0), (own + options.last).clamp(max=keys - 1)
    starts, ends = (each.long() for each in (cu_seqlens_q, cu_seqlens_k))
    sequence = torch.bucketize(places, starts[1:], right=True).clamp(max=len(starts) - 2)
    start, end = ends[sequence], ends[sequence + 1]
    own = start + places - starts[sequence]
    if options.from_end:
        own = own + (end - start) - (starts[sequence + 1] - starts[sequence])
    first, last = torch.maximum(own + options.first, start), torch.minimum(own + options.last, end - 1)
    inside = (places >= starts[0]) & (places < starts[-1])
    return first, last.where(inside, first - 1)


def cleared(heads: Tensor, starts: Tensor) -> Tensor:
    """The tensor with 0 where a token is in no sequence, so that nothing there spreads by 0 * NaN."""
    places = torch.arange(heads.shape[2], device=heads.device)
    return heads.masked_fill(((places < starts[0]) | (places >= starts[-1]))[:, None], 0.0)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, seen: tuple[Tensor, Tensor], options: Options, cuts: list[int] | None
) -> tuple[Tensor, Tensor]:
    """``cuts`` part the queries; without them all are computed at once, and no number is asked for."""
    b, heads, queries, d = q.shape
    group, keys = heads // k.shape[1], k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    scaled, places = q.to(wide) * options.scale_of(d), torch.arange(keys, device=q.device)
    rows, parts = [slice(None)], [slice(None)]
    if cuts is not None and queries:
        step = max(1, _CHUNK // max(1, b * heads * keys))
        rows = [slice(i, min(i + step, end)) for begin, end in pairwise(cuts) for i in range(begin, end, step)]
        parts = [_part(*(each[some] for each in seen)) for some in rows]
    outs, sums = [], []
    for some, part in zip(rows, parts, strict=True):
        first, last = (each[some] for each in seen)
        hidden = (places[part] < first[:, None]) | (places[part] > last[:, None])
        read, values = (each[:, :, part].to(wide).repeat_interleave(group, 1) for each in (k, v))
        out, lse = _rows(scaled[:, :, some], read, values, hidden, options.softcap)
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs, 2).to(q.dtype), torch.cat(sums, 2)


def _part(first: Tensor, last: Tensor) -> slice:
    """The keys that some queries see."""
    begin = int(first.min())
    return slice(begin, max(begin, int(last.max()) + 1))


def _rows(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """Some queries' results and lse, of queries times scale."""
    scores = q @ k.mT
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, -math.inf)
    known = scores.detach()
    largest = known.amax(3, keepdim=True) if known.shape[3] else known.sum(3, keepdim=True)
    powers = torch.exp(scores - largest.masked_fill(largest == -math.inf, 0.0))
    empty = hidden.all(1)
    total = powers.sum(3).masked_fill(empty, 1.0)
    lse = (largest.squeeze(3).masked_fill(empty, 0.0) + total.log()).masked_fill(empty, -math.inf)
    return (powers @ v) / total[..., None], lse

"""The gradient of attention: a step of the ladder, and on a CPU scores that are recomputed.

cuda-kernels/attention/torch_gradient.cpp has the same for the CUDA side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernel_twins.functional.attention.shared import Options, aligned, empty_heads
from kernel_twins.functional.attention.torch_attention import cleared, keys_seen
from kernel_twins.functional.backends import triton_launcher

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v
Starts = Tensor | None

_CHUNK = 2**26  # scores at a time


class Wanted(NamedTuple):
    """Which gradients are computed; another one has no elements."""

    q: bool = True
    k: bool = True
    v: bool = True


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Starts,
    cu_seqlens_k: Starts,
    options: Options,
    wanted: Wanted,
) -> Gradients:
    """The gradients of the operators' q, k and v, [B, heads, S, D] as these are."""
    if not any(wanted):
        return _empty(q, k, v, wanted)
    if _has_step(q):
        return _by_step(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, options, wanted)
    gradients = _empty(q, k, v, wanted)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        dout, q = cleared(dout, cu_seqlens_q), cleared(q, cu_seqlens_q)
        k, v = cleared(k, cu_seqlens_k), cleared(v, cu_seqlens_k)
        dlse = None if dlse is None else cleared(dlse[..., None], cu_seqlens_q)[..., 0]
    seen = keys_seen(q, k, cu_seqlens_q, cu_seqlens_k, options)
    with torch.autocast(q.device.type, enabled=False):
        _recompute(gradients, dout, dlse, q, k, v, lse, seen, options, wanted)
    return gradients


def empty_or_none(like: Tensor, wanted: bool) -> Tensor:
    """An empty gradient; without elements if it is not wanted, since an operator must return a tensor."""
    return empty_heads(like) if wanted else like.new_empty(0)


def _empty(q: Tensor, k: Tensor, v: Tensor, wanted: Wanted) -> Gradients:
    return empty_or_none(q, wanted.q), empty_or_none(k, wanted.k), empty_or_none(v, wanted.v)


def _has_step(q: Tensor) -> bool:
    return q.is_cuda


def _by_step(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Starts,
    cu_seqlens_k: Starts,
    options: Options,
    wanted: Wanted,
) -> Gradients:
    gradients = _empty(q, k, v, wanted)
    triton_launcher("attention_backward", q.device.index)(
        *(aligned(each) for each in (dout, q, k, v, out)),
        lse.contiguous(),
        None if dlse is None else dlse.contiguous(),
        None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
        None if cu_seqlens_k is None else cu_seqlens_k.contiguous(),
        out=tuple(each if is_wanted else None for each, is_wanted in zip(gradients, wanted, strict=True)),
        scale=options.scale,
        band=(options.first, options.last),
        softcap=options.softcap or None,
        from_end=options.from_end,
        deterministic=options.deterministic,
    )
    return gradients


def _recompute(
    gradients: Gradients,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    seen: tuple[Tensor, Tensor],
    options: Options,
    wanted: Wanted,
) -> None:
    """From scores in fp32, a head of k and v at a time, and some of the queries that read it."""
    group, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    dq, dk, dv = gradients
    dq.zero_()
    scale = options.scale_of(q.shape[3])
    step = max(1, _CHUNK // max(1, group * keys))
    places = torch.arange(keys, device=q.device)
    for b in range(q.shape[0]):
        for head in range(k.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            kh, vh = k[b, head].float(), v[b, head].float()
            dkh, dvh = torch.zeros_like(kh), torch.zeros_like(vh)
            for start in range(0, queries, step):
                rows = slice(start, start + step)
                first, last = (each[rows] for each in seen)
                hidden = (places < first[:, None]) | (places > last[:, None])
                qh, dh = q[b, heads, rows].float() * scale, dout[b, heads, rows].float()
                scores = qh @ kh.mT
                slope = None
                if options.softcap:
                    scores = torch.tanh(scores / options.softcap)
                    slope = 1 - scores.square()
                    scores = options.softcap * scores
                p = torch.exp(scores - lse[b, heads, rows, None]).masked_fill(hidden, 0.0)
                if wanted.v:
                    dvh += (p.mT @ dh).sum(0)
                if not (wanted.q or wanted.k):
                    continue
                dp = dh @ vh.mT
                ds = p * (dp - (p * dp).sum(2, keepdim=True))
                if dlse is not None:
                    ds = ds + p * dlse[b, heads, rows, None]
                if slope is not None:
                    ds = ds * slope
                if wanted.q:
                    dq[b, heads, rows] = (ds @ kh * scale).to(q.dtype)
                if wanted.k:
                    dkh += (ds.mT @ qh).sum(0)
            if wanted.k:
                dk[b, head] = dkh.to(k.dtype)
            if wanted.v:
                dv[b, head] = dvh.to(v.dtype)

"""The gradient of attention: a step of the ladder, and where the GPU runs none PyTorch's kernel, or recomputed scores.

cuda-kernels/attention/torch_gradient.cpp has the same for the CUDA side.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_twins.functional.attention.shared import Options, aligned, empty_heads, is_deterministic
from kernel_twins.functional.attention.torch_attention import cleared, keys_seen
from kernel_twins.functional.backends import runs, triton_launcher

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
    window = _flash_window(q, k, dlse, cu_seqlens_q is not None, options)
    if window is not None:
        scale = options.scale_of(q.shape[3])
        found = _by_flash(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, window, scale)
        dq, dk, dv = (_like(*each) for each in zip(found, (q, k, v), wanted, strict=True))
        return dq, dk, dv
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
    return q.is_cuda and runs("triton", ("attention_backward",), q.device.index)


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


def _flash_window(q: Tensor, k: Tensor, dlse: Tensor | None, varlen: bool, options: Options) -> tuple[int, int] | None:
    """The band as FlashAttention's window, counted from the ends, -1 for all; None if its kernel cannot be asked."""
    queries, keys = q.shape[2], k.shape[2]
    scale = options.scale_of(q.shape[3])
    if not q.is_cuda or q.numel() == 0 or k.numel() == 0 or dlse is not None or options.softcap or scale == 0:
        return None
    if options.deterministic and not is_deterministic():
        return None
    # PyTorch's kernel has no room for larger heads in the shared memory of consumer GPUs.
    if q.shape[3] > 192 and torch.cuda.get_device_capability(q.device) not in ((8, 0), (9, 0), (10, 0)):
        return None
    if options.is_full(queries, keys):
        return -1, -1
    if varlen and not options.from_end:
        return None  # how far the ends are apart is known on the GPU alone
    ahead = 0 if options.from_end else keys - queries
    left, right = ahead - options.first, options.last - ahead
    # The kernel takes a negative limit, and a right one from the number of keys on, for none.
    if left < 0 or right < 0 or (right >= keys and queries > keys + 1):
        return None
    return (-1 if left >= keys else left), (-1 if right >= queries else right)


def _by_flash(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Starts,
    cu_seqlens_k: Starts,
    window: tuple[int, int],
    scale: float,
) -> Gradients:
    """PyTorch's kernel, which takes [B, S, H, D], or [tokens, H, D]; lse is +inf there where no key is seen."""

    def moved(heads: Tensor) -> Tensor:
        return heads.transpose(1, 2) if cu_seqlens_q is None else heads.squeeze(0).transpose(0, 1)

    def back(rows: Tensor) -> Tensor:
        return rows.transpose(1, 2) if cu_seqlens_q is None else rows.transpose(0, 1).unsqueeze(0)

    sums = lse.masked_fill(lse == -math.inf, math.inf)
    left, right = window
    none = q.new_empty(0, dtype=torch.int64)  # the state of its dropout
    query = -q if scale < 0 else q  # hidden scores are -inf before they are scaled
    found = torch.ops.aten._flash_attention_backward(
        *(moved(aligned(each)) for each in (dout, query, k, v, out)),
        sums if cu_seqlens_q is None else sums.squeeze(0),
        None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
        None if cu_seqlens_k is None else cu_seqlens_k.contiguous(),
        q.shape[2],
        k.shape[2],
        0.0,
        left == -1 and right == 0,
        none,
        none,
        scale=abs(scale),
        window_size_left=left,
        window_size_right=right,
    )
    dq, dk, dv = (back(each) for each in found)
    if scale < 0:
        dq = -dq
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        dq, dk, dv = cleared(dq, cu_seqlens_q), cleared(dk, cu_seqlens_k), cleared(dv, cu_seqlens_k)
    return dq, dk, dv


def _like(gradient: Tensor, heads: Tensor, wanted: bool) -> Tensor:
    """The gradient as ``empty_heads`` has it lie, in which order the kernel mostly leaves it."""
    laid = empty_or_none(heads, wanted)
    return gradient if gradient.stride() == laid.stride() else laid.copy_(gradient) if wanted else laid


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

"""What attention's result is, in float64, and how far roundings may carry it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kernel_twins.ops.attention.shared import Band, band_in, cap_of, kv_heads_of, lengths_of, options
from kernel_twins.spec import Case

if TYPE_CHECKING:
    from torch import Tensor, device

_CHUNK = 2**26  # scores held in float64 at a time
TANH = 8  # roundings in a tanh


def visible(band: Band, queries: int, keys: int, on: device) -> Tensor:
    """[Sq, Sk], true where a query sees a key."""
    import torch

    distance = torch.arange(keys, device=on) - torch.arange(queries, device=on)[:, None]
    within: Tensor = (distance >= band[0]) & (distance <= band[1])
    return within


def spans(case: Case) -> Iterator[tuple[slice, slice, Band]]:
    """Queries, keys and band of each sequence of a batch that was packed, or of the one there is in others."""
    if not case.get("packed"):
        yield slice(None), slice(None), options(case)["band"]
        return
    first_q = first_k = 0
    for queries, keys in lengths_of(case):
        yield slice(first_q, first_q + queries), slice(first_k, first_k + keys), band_in(case, queries, keys)
        first_q, first_k = first_q + queries, first_k + keys


def spans_of(
    q: Tensor, k: Tensor, starts: tuple[Tensor, ...], band: Band, from_end: bool
) -> Iterator[tuple[slice, slice, Band]]:
    """The same as a call's arguments tell them."""
    ends = zip(*(each.tolist() for each in starts), strict=True) if starts else iter([(0, 0), (q.shape[2], k.shape[2])])
    for (first_q, first_k), (end_q, end_k) in itertools.pairwise(ends):
        shift = (end_k - first_k) - (end_q - first_q) if from_end else 0
        yield slice(first_q, end_q), slice(first_k, end_k), (band[0] + shift, band[1] + shift)


def _over_heads(
    case: Case, inputs: tuple[Tensor, ...], part: slice, of: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What ``of(scores, p, size, v)`` returns of all queries of some batches, in float64, as [batches, H, Sq, ...].

    scores are masked with -inf, p are their softmax, size is the sum of the absolute terms of each score.
    """
    import torch

    q, k, v = inputs[:3]
    scale, cap, group = options(case)["scale"], cap_of(case), case.shape[1] // kv_heads_of(case)
    sequences = tuple(spans(case))
    seen_by = functools.cache(lambda band, queries, keys: visible(band, queries, keys, q.device))
    batches = range(q.shape[0])[part]
    pieces = []
    for b in batches:
        for h in range(q.shape[1]):
            for queries, keys, band in sequences:
                rows, kh, vh = (
                    each.double() for each in (q[b, h, queries], k[b, h // group, keys], v[b, h // group, keys])
                )
                step = max(1, _CHUNK // max(1, len(kh)))
                for wide, sees in zip(rows.split(step), seen_by(band, len(rows), len(kh)).split(step), strict=True):
                    scores = wide @ kh.t() * scale
                    size = wide.abs() @ kh.abs().t() * abs(scale)
                    if cap is not None:
                        scores = cap * torch.tanh(scores / cap)
                        size += TANH * scores.abs()
                    scores = scores.masked_fill_(~sees, -math.inf)
                    p = torch.softmax(scores, 1) if len(kh) else scores
                    p = p.masked_fill(~sees.any(1, keepdim=True), 0.0)  # a row without keys is 0
                    pieces.append(of(scores, p, size, vh))
    return tuple(
        torch.cat(each).unflatten(0, (len(batches), q.shape[1], q.shape[2])) for each in zip(*pieces, strict=True)
    )


def reference(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    """A score's rounding error is a relative error of its exponential, so the score's terms count among the result's.

    So does the distance from the row's maximum, which a kernel computes from rounded products.
    """
    from kernel_twins.ops.tensors import chain

    def of(scores: Tensor, p: Tensor, size: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        largest = size.amax(1, keepdim=True) if size.shape[1] else size.sum(1, keepdim=True)
        result = p @ v
        return result, (p * (4 + 2 * size + largest)) @ v.abs() + chain(v.shape[0]) * result.abs()

    result, terms = _over_heads(case, inputs, part, of)
    return result, terms


def deviation(case: Case, inputs: tuple[Tensor, ...], part: slice) -> Tensor:
    """The standard deviation of a result whose exponentials were rounded to v's dtype before they met v."""
    import torch

    from kernel_twins.ops.tensors import DTYPE

    numbers = torch.finfo(DTYPE[case.dtype])

    def of(scores: Tensor, p: Tensor, size: Tensor, v: Tensor) -> tuple[Tensor]:
        # The step between numbers over sqrt(12) is a rounding's standard deviation. It is at most eps times the number,
        # but no less than that between the smallest numbers; a row's largest exponential is 1.
        largest = p.amax(1, keepdim=True) if p.shape[1] else p.sum(1, keepdim=True)
        steps = numbers.eps * torch.maximum(p, numbers.tiny * largest).masked_fill(p == 0, 0.0)
        return (((steps.square() / 12) @ v.square()).sqrt(),)

    (deviation,) = _over_heads(case, inputs, part, of)
    return deviation


def lse_reference(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
    """The logarithm of each row's sum, -inf where it sees no key, with the terms of its largest score."""
    import torch

    from kernel_twins.ops.tensors import chain

    def of(scores: Tensor, p: Tensor, size: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not scores.shape[1]:
            return scores.new_full((len(scores),), -math.inf), scores.sum(1)
        lse = torch.logsumexp(scores, 1)
        terms = 4 + chain(scores.shape[1]) + size.amax(1) + lse.abs()
        return lse, terms.masked_fill(lse.isinf(), 0.0)

    lse, terms = _over_heads(case, inputs, part, of)
    return lse, terms

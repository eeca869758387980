"""What attention's gradients are, in float64, and how far roundings may carry them.

They follow from what the forward pass saved: its rounded result and its logarithms in fp32, not from exact ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel_twins.ops.attention.reference import TANH, spans, spans_of, visible
from kernel_twins.ops.attention.shared import Band, cap_of, keys_of, kv_heads_of, options
from kernel_twins.spec import Case, Description, Deviation

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 2**25  # pairs of a query and a key held in float64 at a time
_SHORT = 128  # products of a sum; tensor cores truncate sums, so that a longer one's error grows with its length
_SUBNORMAL = 2.0**-105  # the terms of an exponential that is taken for 0 as it is below fp32's smallest normal number

Place = tuple[int, int, slice]  # of a head's rows


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some queries of a sequence's head, and all its keys; p and ds are [queries, keys], with their errors' terms."""

    rows: slice
    keys: slice
    q: Tensor
    k: Tensor
    dout: Tensor
    p: Tensor
    p_terms: Tensor
    ds: Tensor
    ds_terms: Tensor
    scale: float


def _tiles_of(case: Case, inputs: tuple[Tensor, ...], b: int, h: int) -> Iterator[_Tile]:
    """The tiles of a head of queries, one behind the other."""
    import torch

    dout, q, k, v, result, lse, *rest = inputs
    scale, cap = float(options(case)["scale"]), cap_of(case)
    kv_head = h // (case.shape[1] // kv_heads_of(case))
    for queries, keys, band in spans(case):
        kh, vh = k[b, kv_head, keys].double(), v[b, kv_head, keys].double()
        first, end, _ = queries.indices(q.shape[2])
        step = max(1, _CHUNK // max(1, len(kh)))
        for start in range(first, end, step):
            rows = slice(start, min(start + step, end))
            qh, dh, rh, sums = (each[b, h, rows].double() for each in (q, dout, result, lse))
            sums = sums.masked_fill(sums.isinf(), 0.0)[:, None]  # of a row that sees no key
            dlse = rest[0][b, h, rows].double() if rest else torch.zeros_like(sums[:, 0])
            below = start - first
            hidden = ~visible((band[0] + below, band[1] + below), len(qh), len(kh), q.device)
            scores, terms, slope, slope_terms = _scores_of(qh @ kh.t() * scale, qh.abs() @ kh.abs().t(), scale, cap)
            roundings = 4 + 2 * terms + 2 * sums.abs()
            p = torch.exp(scores - sums).masked_fill(hidden, 0.0)
            delta = (dh * rh).sum(1, keepdim=True) - dlse[:, None]
            flat = (p * (dh @ vh.t() - delta)).masked_fill(hidden, 0.0)  # ds without the softcap's slope
            ds = flat * slope
            size = dh.abs() @ vh.abs().t() * max(1.0, q.shape[3] / _SHORT)
            size += (dh * rh).abs().sum(1, keepdim=True) + dlse.abs()[:, None]
            flushed = _SUBNORMAL * (~hidden).double()
            p_terms = p * roundings + flushed
            ds_terms = (p + flushed) * size * slope + ds.abs() * roundings + flat.abs() * slope_terms
            yield _Tile(rows, keys, qh, kh, dh, p, p_terms, ds, ds_terms, scale)


def _scores_of(
    products: Tensor, sizes: Tensor, scale: float, cap: float | None
) -> tuple[Tensor, Tensor, Tensor | float, Tensor | float]:
    """Scores and their slope, each with the terms of its error. products are scaled, sizes are sums of |q| |k|.

    A product's error reaches a capped score only as far as the slope lets it. That of 1 - tanh^2 does not shrink with
    the slope, since fp32 rounds the square near 1.
    """
    import torch

    terms = abs(scale) * sizes
    if cap is None:
        return products, terms, 1.0, 0.0
    tanh = torch.tanh(products / cap)
    slope = 1 - tanh.square()
    terms = slope * terms + TANH * cap * tanh.abs()
    return cap * tanh, terms, slope, 2 * tanh.abs() * terms / cap + tanh.square() + slope


@dataclass(frozen=True, slots=True)
class _Gradient:
    """Of one operand: the exact one, the terms of its error, and the variance of a result of rounded p and ds."""

    exact: Tensor
    terms: Tensor
    variance: Tensor

    @classmethod
    def zeros(cls, like: Tensor) -> _Gradient:
        import torch

        return cls(*(torch.zeros(like.shape, dtype=torch.float64, device=like.device) for _ in range(3)))

    def add(self, place: Place, left: Tensor, left_terms: Tensor, steps: Tensor, right: Tensor) -> None:
        """Adds left @ right. ``steps`` lie between the numbers to which left is rounded."""
        self.exact[place] += left @ right
        self.terms[place] += left_terms @ right.abs()
        self.variance[place] += (steps.square() / 12) @ right.square()


@functools.cache
def _kept() -> MutableMapping[Tensor, tuple[Case, tuple[_Gradient, ...]]]:
    """By q, as long as it lives: each gradient is an output of its own, and all come from the same tiles."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def _gradients(case: Case, inputs: tuple[Tensor, ...]) -> tuple[_Gradient, ...]:
    """Those of q, k and v."""
    q = inputs[1]
    kept = _kept().get(q)
    if kept is None or kept[0] != case:
        kept = _kept()[q] = case, _computed(case, inputs)
    return kept[1]


def _computed(case: Case, inputs: tuple[Tensor, ...]) -> tuple[_Gradient, ...]:
    import torch

    from kernel_twins.ops.tensors import DTYPE, chain

    _, q, k, v, *_ = inputs
    numbers = torch.finfo(DTYPE[case.dtype])
    group = case.shape[1] // kv_heads_of(case)

    def steps(rounded: Tensor) -> Tensor:
        """At most eps times the number, and no less than eps tiny."""
        return numbers.eps * rounded.abs().clamp_min(numbers.tiny).masked_fill(rounded == 0, 0.0)

    dq, dk, dv = map(_Gradient.zeros, (q, k, v))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for tile in _tiles_of(case, inputs, b, h):
                keys, size = (b, h // group, tile.keys), abs(tile.scale)
                ds, ds_terms, ds_steps = tile.scale * tile.ds, size * tile.ds_terms, size * steps(tile.ds)
                dq.add((b, h, tile.rows), ds, ds_terms, ds_steps, tile.k)
                dk.add(keys, ds.t(), ds_terms.t(), ds_steps.t(), tile.q)
                dv.add(keys, tile.p.t(), tile.p_terms.t(), steps(tile.p).t(), tile.dout)
    longest = case.shape[2] * group  # sequence
    for each, length in ((dq, keys_of(case)), (dk, longest), (dv, longest)):
        each.terms.add_(chain(length) * each.exact.abs())
    return dq, dk, dv


def description(operand: int) -> Description:
    """The gradient of q, k or v, by its number, and the terms of its error."""

    def describe(case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
        gradient = _gradients(case, inputs)[operand]
        return gradient.exact[part], gradient.terms[part]

    return describe


def deviation(operand: int) -> Deviation:
    """The standard deviation of the gradient of q, k or v, by its number, if p and ds are rounded."""

    def deviate(case: Case, inputs: tuple[Tensor, ...], part: slice) -> Tensor:
        return _gradients(case, inputs)[operand].variance[part].sqrt()

    return deviate


def exemplar(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *starts: Tensor,
    out: object,
    scale: float,
    band: Band,
    softcap: float | None = None,
    from_end: bool = False,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in PyTorch's operations, head by head: fp32 products of operands, p and ds that have the dtype."""
    import torch

    grads = tuple(torch.zeros(each.shape, dtype=torch.float32, device=q.device) for each in (q, k, v))
    deltas = (dout.float() * result.float()).sum(3) - (0.0 if dlse is None else dlse)
    group = q.shape[1] // max(1, k.shape[1])
    for rows, keys, limits in spans_of(q, k, starts, band, from_end):
        hidden = ~visible(limits, rows.stop - rows.start, keys.stop - keys.start, q.device)
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                of_query, of_key = (b, h, rows), (b, h // group, keys)
                qh, dh, kh, vh = (each.float() for each in (q[of_query], dout[of_query], k[of_key], v[of_key]))
                scores = qh @ kh.t() * scale
                slope: Tensor | float = 1.0
                if softcap is not None:
                    tanh = torch.tanh(scores / softcap)
                    scores, slope = softcap * tanh, 1 - tanh.square()
                p = torch.exp(scores - lse[of_query][:, None]).masked_fill_(hidden, 0.0)
                ds = p * (dh @ vh.t() - deltas[of_query][:, None]) * slope
                ds = ds.masked_fill_(hidden, 0.0).to(q.dtype).float()
                grads[0][of_query] = ds @ kh * scale
                grads[1][of_key] += ds.t() @ qh * scale
                grads[2][of_key] += p.to(q.dtype).float().t() @ dh
    dq, dk, dv = (each.to(q.dtype) for each in grads)
    return dq, dk, dv

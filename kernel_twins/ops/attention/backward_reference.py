"""What attention's gradients are, in float64, and how far roundings may carry them.

They follow from what the forward pass saved: its rounded result and its logarithms in fp32, not from exact ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel_twins.ops.attention.reference import visible
from kernel_twins.ops.attention.shared import Band, kv_heads_of, options
from kernel_twins.spec import Case, Description, Deviation

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 2**25  # pairs of a query and a key held in float64 at a time
_SUBNORMAL = 2.0**-105  # the terms of an exponential that is taken for 0 as it is below fp32's smallest normal number

Place = tuple[int, int, slice]  # of a head's rows


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some queries of a head, and all its keys; p and ds are [queries, keys], with the terms of their errors."""

    q: Tensor
    k: Tensor
    dout: Tensor
    p: Tensor
    p_terms: Tensor
    ds: Tensor
    ds_terms: Tensor
    scale: float


def _tiles_of(case: Case, inputs: tuple[Tensor, ...], b: int, h: int) -> Iterator[tuple[slice, _Tile]]:
    """The rows and tiles of a head of queries, one behind the other."""
    import torch

    dout, q, k, v, result, lse, *rest = inputs
    given = options(case)
    scale, band = float(given["scale"]), given["band"]
    kv_head = h // (case.shape[1] // kv_heads_of(case))
    kh, vh = k[b, kv_head].double(), v[b, kv_head].double()
    step = max(1, _CHUNK // max(1, len(kh)))
    for start in range(0, q.shape[2], step):
        rows = slice(start, start + step)
        qh, dh, rh, sums = (each[b, h, rows].double() for each in (q, dout, result, lse))
        sums = sums.masked_fill(sums.isinf(), 0.0)[:, None]  # of a row that sees no key
        dlse = rest[0][b, h, rows].double() if rest else torch.zeros_like(sums[:, 0])
        hidden = ~visible((band[0] + start, band[1] + start), len(qh), len(kh), q.device)
        roundings = 4 + 2 * abs(scale) * (qh.abs() @ kh.abs().t()) + 2 * sums.abs()
        p = torch.exp(qh @ kh.t() * scale - sums).masked_fill(hidden, 0.0)
        delta = (dh * rh).sum(1, keepdim=True) - dlse[:, None]
        ds = (p * (dh @ vh.t() - delta)).masked_fill(hidden, 0.0)
        size = dh.abs() @ vh.abs().t() + (dh * rh).abs().sum(1, keepdim=True) + dlse.abs()[:, None]
        flushed = _SUBNORMAL * (~hidden).double()
        p_terms, ds_terms = p * roundings + flushed, (p + flushed) * size + ds.abs() * roundings
        yield rows, _Tile(qh, kh, dh, p, p_terms, ds, ds_terms, scale)


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
            keys = b, h // group, slice(None)
            for rows, tile in _tiles_of(case, inputs, b, h):
                size = abs(tile.scale)
                ds, ds_terms, ds_steps = tile.scale * tile.ds, size * tile.ds_terms, size * steps(tile.ds)
                dq.add((b, h, rows), ds, ds_terms, ds_steps, tile.k)
                dk.add(keys, ds.t(), ds_terms.t(), ds_steps.t(), tile.q)
                dv.add(keys, tile.p.t(), tile.p_terms.t(), steps(tile.p).t(), tile.dout)
    for each, length in ((dq, k.shape[2]), (dk, q.shape[2] * group), (dv, q.shape[2] * group)):
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
    *,
    out: object,
    scale: float,
    band: Band,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in PyTorch's operations, head by head: fp32 products of operands, p and ds that have the dtype."""
    import torch

    grads = tuple(torch.zeros(each.shape, dtype=torch.float32, device=q.device) for each in (q, k, v))
    hidden = ~visible(band, q.shape[2], k.shape[2], q.device)
    delta = (dout.float() * result.float()).sum(3) - (0.0 if dlse is None else dlse)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv_head = h // (q.shape[1] // k.shape[1])
            qh, dh, kh, vh = q[b, h].float(), dout[b, h].float(), k[b, kv_head].float(), v[b, kv_head].float()
            p = torch.exp(qh @ kh.t() * scale - lse[b, h, :, None]).masked_fill_(hidden, 0.0)
            ds = (p * (dh @ vh.t() - delta[b, h, :, None])).masked_fill_(hidden, 0.0).to(q.dtype).float()
            grads[0][b, h] = ds @ kh * scale
            grads[1][b, kv_head] += ds.t() @ qh * scale
            grads[2][b, kv_head] += p.to(q.dtype).float().t() @ dh
    dq, dk, dv = (each.to(q.dtype) for each in grads)
    return dq, dk, dv

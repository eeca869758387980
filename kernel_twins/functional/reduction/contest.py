"""``sum``, ``mean``, ``amax`` and ``argmax`` as they are timed beside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kernel_twins
from kernel_twins import OPS
from kernel_twins.functional import contests
from kernel_twins.functional.reduction.reduction import _choose
from kernel_twins.functional.sampled import Calls, Fault, Forward, Given, Operands, parts
from kernel_twins.spec import Case

_NAMES = ("sum", "mean", "amax", "argmax")


def _contests(name: str) -> Iterator[contests.Contest]:
    case = Case.of(64, 256, dtype="bf16")
    eager, ours = (getattr(module, name) for module in (torch, kernel_twins))
    ours = contests.by_backend(ours, dim=-1)
    yield contests.host(name, case, partial(eager, dim=-1), ours, (contests.matrix(case),))


def _calls(name: str, case: Case) -> Calls:
    kind, axes = case.get("kind"), _axes(case)
    dim: Any = (axes[0] if len(axes) == 1 else None) if kind == "argmax" else axes
    return Calls(
        eager=partial(getattr(torch, name), dim=dim),
        ours=partial(getattr(kernel_twins, name), dim=dim),
        chosen=partial(_choose, kind=kind, dim=dim),
        forward=partial(Forward, OPS["reduction_nd"], case),
        leaves=() if kind == "argmax" else (0,),
        gradients=partial(_gradients, case),
    )


def _axes(case: Case) -> tuple[int, ...]:
    return tuple(map(int, case.get("axes")))


def _gradients(case: Case, operands: Operands, douts: Operands, _: Given) -> Fault:
    return lambda out, gradients: _fault(case, operands[0], douts[0], gradients[0])


def _fault(case: Case, x: Tensor, dout: Tensor, dx: Tensor) -> str:
    """The judge of the gradient of a mean or a maximum, whose elements are rounded at most twice."""
    axes = _axes(case)
    for axis in axes:
        dout = dout.unsqueeze(axis)
    count: Tensor | float = 1.0
    largest = None
    if case.get("kind") == "max":
        largest = x.amax(axes, keepdim=True)
        count = (x == largest).sum(axes, keepdim=True)
        largest = largest.expand(x.shape)
    else:
        for axis in axes:
            count *= x.shape[axis]
    share = (dout.double() / count).expand(x.shape)
    numbers = torch.finfo(dx.dtype)
    for part in parts(len(x), x[0].numel()):
        exact = share[part]
        if largest is not None:
            exact = exact.where(x[part] == largest[part], 0.0)
        bound = 2 * numbers.eps * (exact.abs() + numbers.tiny)
        if not bool(((dx[part].double() - exact).abs() <= bound).all()):
            return "x's gradient has an element that is off by more than two roundings"
    return ""


CONTESTS = {name: partial(_contests, name) for name in _NAMES}
CALLS = {name: partial(_calls, name) for name in _NAMES}

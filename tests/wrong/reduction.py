"""Reductions, computed wrongly."""

from __future__ import annotations

from torch import Tensor

from tests.wrong.faults import SUMS, Fault, Formula, Outputs


def reduction(fault: Fault, x: Tensor) -> Outputs:
    return (fault.at("sum", x[None]).sum(),)


def reduction_nd(fault: Fault, x: Tensor, *, dims: tuple[int, ...], kind: str) -> Outputs:
    axes = [axis % x.dim() for axis in dims]
    whole = [axis for axis in range(x.dim()) if axis not in axes]
    terms = fault.at("sum", x.permute(*whole, *axes).flatten(len(whole)))
    if kind == "argmax":
        return (terms.argmax(-1),)
    return (terms.amax(-1) if kind == "max" else terms.sum(-1) if kind == "sum" else terms.mean(-1),)


FORMULAS = {
    "reduction": Formula(reduction, {"sum": SUMS}, results=False),
    "reduction_nd": Formula(reduction_nd, {"sum": SUMS}),
}

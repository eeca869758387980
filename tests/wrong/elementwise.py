"""Vector add, computed wrongly."""

from __future__ import annotations

from torch import Tensor

from tests.wrong.faults import OTHERS, Fault, Formula, Outputs


def vector_add(fault: Fault, a: Tensor, b: Tensor) -> Outputs:
    return (fault.at("a", a[None])[0] + b,)


FORMULAS = {"vector_add": Formula(vector_add, {"a": OTHERS})}

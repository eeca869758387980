"""Kernels with one typical fault each: they compute in float64 otherwise, and round their results once.

A family's module has the FORMULAS of its operations, by name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kernel_twins.spec import Case
from tests.wrong.faults import RESULTS, RIGHT, Fault, Formula

__all__ = ["FORMULAS", "RIGHT", "Fault", "call_of", "faults", "knows"]

FORMULAS: dict[str, Formula] = {
    op: formula
    for each in pkgutil.iter_modules(__path__, f"{__name__}.")
    for op, formula in getattr(importlib.import_module(each.name), "FORMULAS", {}).items()
}


def knows(op: str, case: Case) -> bool:
    """True if the operation's formula covers the case."""
    return FORMULAS[op].knows(case)


def faults(op: str) -> Iterator[Fault]:
    for place, changes in FORMULAS[op].places.items():
        for name, change in changes.items():
            yield Fault(place, name, change)
    if FORMULAS[op].results:
        for name, change in RESULTS.items():
            yield Fault("out", name, change)


def call_of(op: str, fault: Fault) -> Callable[..., None]:
    """A kernel with that fault."""
    formula = FORMULAS[op]

    def call(*inputs: Tensor, out: Any, **options: Any) -> None:
        wide = (each.double() if each.is_floating_point() else each for each in inputs)
        if formula.rounds:
            options["dtype"] = inputs[0].dtype
        results = tuple(each.double() for each in formula.compute(fault, *wide, **options))
        outs = out if isinstance(out, tuple) else (out,)
        for index, (each, values) in enumerate(zip(outs, results[: len(outs)], strict=True)):
            each.copy_(fault.at("out", torch.atleast_1d(values)).reshape(each.shape) if index == 0 else values)

    return call

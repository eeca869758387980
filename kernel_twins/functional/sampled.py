"""Types with which a family declares its functions at sampled cases: the calls, and the judges of their results.

The rule of accuracy is check.py's. A judge belongs to one set of operands. It returns what is wrong, or an empty
string. The float64 reference is computed at its first verdict and kept for the others, if check.py keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_twins.harness import check
from kernel_twins.spec import Case, Op

Operands = tuple[Tensor, ...]  # the inputs of the operation, in its order
Call = Callable[..., Any]  # from operands to one result or several
Given = Callable[[Operands], Operands]  # from results to the inputs of the gradient's operation
Fault = Callable[[Operands, Operands], str]  # from a caller's results and gradients to what is wrong with the gradients

FP32_LOOP = 4 * torch.finfo(torch.float32).eps  # relative to the sum of |terms|, as in check.py
_CHUNK = 2**26  # elements held in float64 at a time, in each of a few tensors


@dataclass(frozen=True, slots=True)
class Gradient:
    """The operation of a gradient and its case; ``inputs`` makes its inputs from operands, dout and the results."""

    op: Op
    case: Case
    inputs: Callable[[Operands, Operands, Operands], Operands]

    def judged(self, operands: Operands, douts: Operands, given: Given) -> Fault:
        """``Calls.gradients`` for gradients that are the operation's results."""
        return Backward(self.op, self.case, given).fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A public function at a case, called with the operands of the operation.

    ``eager`` is PyTorch's call. ``compiled`` makes the torch.compile baseline, if it is not just ``eager`` compiled.
    ``ours`` is our call, which takes ``backend``, too; ``chosen`` names the backend that "auto" takes. ``forward``
    makes the judge of the results. ``leaves`` are the operands with gradients; ``gradients`` makes their judge from
    operands, the results' gradients, and a function that gives the inputs of the gradient's operation. ``backward`` is
    that operation, if there is one.

    If the result is a mean of the operation's outputs, ``rows`` is our call that returns these outputs. They are
    judged, too, because a mean hides errors. An ``in_place`` function overwrites its operands; no library's does.
    """

    eager: Call
    ours: Call
    chosen: Callable[..., str]
    forward: Callable[[Operands], Forward]
    leaves: tuple[int, ...] = ()
    gradients: Callable[[Operands, Operands, Given], Fault] | None = None
    backward: Gradient | None = None
    compiled: Callable[[Callable[[Call], Call]], Call] | None = None
    rows: Call | None = None
    in_place: bool = False


class Forward:
    """The judge of results that are an operation's outputs."""

    def __init__(self, op: Op, case: Case, operands: Operands) -> None:
        self.op, self.case, self.operands = op, case, operands
        self._problem = check.Problem(op, case, operands)

    def fault(self, results: Operands, *, is_baseline: bool = False) -> str:
        return self._problem.compare(results, is_baseline=is_baseline).reason


class Backward:
    """The judge of gradients that are an operation's outputs."""

    def __init__(self, op: Op, case: Case, given: Given) -> None:
        self._op, self._case, self._given = op, case, given
        self._known: check.Problem | None = None

    def fault(self, out: Operands, gradients: Operands) -> str:
        if self._known is None:
            self._known = check.Problem(self._op, self._case, self._given(out))
        return self._known.compare(gradients).reason


def fault_of(problems: Mapping[str, check.Problem], gradients: Operands) -> str:
    """What is wrong with gradients, each judged by name as the output of an operation of its own."""
    for (name, problem), gradient in zip(problems.items(), gradients, strict=True):
        if reason := problem.compare((gradient,)).reason:
            return f"{name}'s gradient: {reason}"
    return ""


def parts(count: int, length: int) -> Iterator[slice]:
    """Slices of ``count`` rows of a length, each small enough to be held in float64."""
    step = max(1, _CHUNK // max(1, length))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def narrowed(case: Case, *options: str) -> Case:
    """The case with only these options of its variant."""
    return Case.of(*case.shape, dtype=case.dtype, **{name: case.get(name) for name in options if case.get(name)})

"""What a family tells of its functions at sampled cases with: calls, and whether their results are right.

The rule of accuracy is check.py's. A judge is of one set of operands, and answers with what is wrong, empty where
nothing is. What float64 makes of the operands is computed at its first answer, and serves the others where check.py
keeps it.
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
Call = Callable[..., Any]  # of operands: a result, or several
Given = Callable[[Operands], Operands]  # from results, the inputs of the gradient's operation
Fault = Callable[[Operands, Operands], str]  # of a caller's results, and of the gradients that the same caller gave

FP32_LOOP = 4 * torch.finfo(torch.float32).eps  # of the terms of a sum, as in check.py
_CHUNK = 2**26  # elements held in float64 at a time, in each of a few tensors


@dataclass(frozen=True, slots=True)
class Gradient:
    """The operation of a gradient and its case; its inputs, of operands, the results' gradients, and the results."""

    op: Op
    case: Case
    inputs: Callable[[Operands, Operands, Operands], Operands]

    def judged(self, operands: Operands, douts: Operands, given: Given) -> Fault:
        """As ``Calls.gradients``, where these are the operation's results."""
        return Backward(self.op, self.case, given).fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A public function at a case, called with the operands of the operation.

    ``eager`` is PyTorch's; ``compiled`` makes of torch.compile what it gives, where that is not ``eager``, compiled.
    ``ours`` takes ``backend`` besides; ``chosen`` is the backend that "auto" takes. ``forward`` judges results by
    operands. ``leaves`` are the operands that have gradients, which ``gradients`` judges, by operands, the results'
    gradients, and what gives the inputs of the gradient's operation. ``backward`` tells of that, where there is one.

    Where the result is the mean of the operation's, ``rows`` gives these, as ``ours``: a mean tells little, so they are
    judged with it. One that is ``in_place`` writes to its operands, as no library's does.
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
    """Of results, which are those of an operation."""

    def __init__(self, op: Op, case: Case, operands: Operands) -> None:
        self.op, self.case, self.operands = op, case, operands
        self._problem = check.Problem(op, case, operands)

    def fault(self, results: Operands, *, is_baseline: bool = False) -> str:
        return self._problem.compare(results, is_baseline=is_baseline).reason


class Backward:
    """Of gradients, which are the results of an operation."""

    def __init__(self, op: Op, case: Case, given: Given) -> None:
        self._op, self._case, self._given = op, case, given
        self._known: check.Problem | None = None

    def fault(self, out: Operands, gradients: Operands) -> str:
        if self._known is None:
            self._known = check.Problem(self._op, self._case, self._given(out))
        return self._known.compare(gradients).reason


def fault_of(problems: Mapping[str, check.Problem], gradients: Operands) -> str:
    """Of gradients by name, each of which is the result of an operation."""
    for (name, problem), gradient in zip(problems.items(), gradients, strict=True):
        if reason := problem.compare((gradient,)).reason:
            return f"{name}'s gradient: {reason}"
    return ""


def parts(count: int, length: int) -> Iterator[slice]:
    """Of so many rows of a length, as many at a time as are held in float64."""
    step = max(1, _CHUNK // max(1, length))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def narrowed(case: Case, *options: str) -> Case:
    """The case with no options but these, as far as it has them."""
    return Case.of(*case.shape, dtype=case.dtype, **{name: case.get(name) for name in options if case.get(name)})

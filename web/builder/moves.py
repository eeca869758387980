"""Which step moved a number most: the rule by which the glossary chooses its examples.

As in the log, shares and waits are compared by their difference, all else by its factor: a share that rises from almost
nothing has a large factor and says little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import BACKENDS, Backend, Case, Name

WAIT = "cycles an issue"
_DIFFER = ("%", WAIT)

Value = Callable[[Results, Name, Case], float | None]


@dataclass(frozen=True, slots=True)
class Move:
    """A number at the step before and at a step, at the case where the step is told of."""

    results: Results
    backend: Backend
    case: Case
    before: Name
    after: Name
    values: tuple[float, float]

    def size(self, unit: str) -> float:
        """The difference where the unit is one of a share or a wait, else the logarithm of the factor.

        A factor is 0 where either number is not positive.
        """
        was, now = self.values
        if unit in _DIFFER:
            return abs(now - was)
        return abs(math.log(now / was)) if was > 0 and now > 0 else 0.0


def largest(measured: Iterable[Results], unit: str, value: Value) -> Move | None:
    """The first of the largest, in the specs' order; None where nothing moved."""
    found = max(_moves(measured, value), key=lambda move: move.size(unit), default=None)
    return found if found and found.size(unit) > 0 else None


def _moves(measured: Iterable[Results], value: Value) -> Iterator[Move]:
    """Of every step that has one before it in its language, where both were measured."""
    for results in measured:
        for step in results.op.steps:
            for backend in (each for each in BACKENDS if each in step.backends):
                case = results.case_of(step, backend)
                previous = results.previous(step, backend, case) if case else None
                if case is None or previous is None:
                    continue
                names = Name(backend, previous.name), Name(backend, step.name)
                was, now = (value(results, name, case) for name in names)
                if was is not None and now is not None:
                    yield Move(results, backend, case, *names, (was, now))

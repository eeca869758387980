"""Every prediction that counts, beside what came of it: those of the specs, and those of rungs that were folded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernel_twins.report.meaning import retired, write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.judgement import Judgement, Outcome
from kernel_twins.report.meaning.predictions import Mark
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.spec import Backend, Op, Step

MISSED: tuple[Outcome, ...] = ("miss", "wrong direction")

_SIGNS = {"<=": "≤", ">=": "≥", "==": "="}
_LEAST = {True: 0.01, False: 1.0}  # of a multiple, and of percents: less than that counts as that much
_DIGITS = range(3, 7)


@dataclass(frozen=True, slots=True)
class Judged:
    """A prediction of a step in one language, and what came of it.

    ``beside`` are the counters that stand beside a miss. A retired prediction names the ``rung`` that was folded, and
    why.
    """

    op: Op
    step: str
    backend: Backend
    judgement: Judgement
    mark: Mark
    beside: str
    rung: str = ""
    why: str = ""

    @property
    def retired(self) -> bool:
        return bool(self.rung)

    @property
    def missed(self) -> bool:
        return self.judgement.verdict in MISSED

    @property
    def claim(self) -> str:
        """What was predicted, such as ``time ≤ 0.9 ×``."""
        p = self.judgement.prediction
        tolerance = f" ± {100 * p.tolerance:.0f} %" if p.compare == "==" else ""
        place = f" at {p.case.slug}" if p.case else ""
        told = f"{_SIGNS[p.compare]} {write.number(p.value)}{self._unit}{tolerance}"
        return f"{QUANTITIES[p.quantity].title} {told}{place}"

    @property
    def came(self) -> str:
        """What was measured, empty where nothing was; a miss has as many digits as tell it from what was predicted."""
        actual, value = self.judgement.actual, self.judgement.prediction.value
        if actual is None:
            return ""
        apart = (n for n in _DIGITS if not self.missed or write.number(actual, n) != write.number(value, n))
        return f"{write.number(actual, next(apart, _DIGITS[-1]))}{self._unit}"

    @property
    def _unit(self) -> str:
        p = self.judgement.prediction
        return " ×" if p.relative else f" {QUANTITIES[p.quantity].unit}".rstrip()

    @property
    def note(self) -> str:
        """The mark, where it is not the usual one."""
        return "" if self.mark == "pre-registered" else f", {self.mark}"

    def told(self) -> str:
        came = f" ({self.came})" if self.came else ""
        return f"{self.claim}: **{self.judgement.verdict}**{came}{self.note}"

    @property
    def size(self) -> float:
        """How far what came is from the nearest value that would have been a hit: the logarithm of their ratio."""
        p, actual = self.judgement.prediction, self.judgement.actual
        if actual is None:
            return 0.0
        reach = p.tolerance * p.value if p.compare == "==" else 0.0
        nearest = p.value + (reach if actual > p.value else -reach)
        least = _LEAST[p.relative] if p.relative or QUANTITIES[p.quantity].unit == "%" else 1e-3
        return abs(math.log(max(actual, least) / max(nearest, least)))


def of_step(results: Results, step: Step, backend: Backend) -> list[Judged]:
    """A step's predictions in one language, in the spec's order."""
    found = []
    for each in results.judge(step, backend):
        counters = beside(results, step, backend, [each])
        found.append(Judged(results.op, step.name, backend, each, results.mark(step, backend, each), counters))
    return found


def of_folded(results: Results) -> list[Judged]:
    """The operation's retired predictions, with the verdicts that they had when their rungs were folded."""
    return [
        Judged(results.op, each.step, each.backend, each.judgement, each.mark, each.beside, each.rung, each.why)
        for each in retired.of(results.recorded.folder, results.op)
    ]


def of_all(results: Iterable[Results]) -> list[Judged]:
    """By ladder: its steps' predictions, then its retired ones."""
    found: list[Judged] = []
    for each in results:
        for step in each.op.steps:
            for backend in step.backends:
                found += of_step(each, step, backend)
        found += of_folded(each)
    return found


def beside(results: Results, step: Step, backend: Backend, judgements: Sequence[Judgement]) -> str:
    """The counters that stand beside the misses among a step's judgements; empty where none tell of them.

    They are those of the step's profile case, and explain no miss at another one.
    """
    case = results.op.profile_case_of(step, backend)
    missed = [each for each in judgements if each.verdict in MISSED and each.prediction.case in (None, case)]
    if case is None or not missed:
        return ""
    return results.explained(step, backend, case, [each.prediction.quantity for each in missed])

"""What came of the predictions: each as it is told, the score of all, and the misses by their size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from kernel_twins.report.meaning import predictions, write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.judgement import Judgement, Outcome, score
from kernel_twins.report.meaning.predictions import Mark
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.spec import Backend, Case, Step

MISSED: tuple[Outcome, ...] = ("miss", "wrong direction")
_MEANING = (
    "A prediction is pre-registered where it was frozen before the first measurement of its cell, trials and tuning "
    "included; everything else is post hoc. To measure again changes nothing. It is void, and neither hit nor miss, "
    "where it is of a case that the step leaves to another step's kernel."
)
_SIGNS = {"<=": "≤", ">=": "≥", "==": "="}
_LEAST = {True: 0.01, False: 1.0}  # of a multiple, and of percents: less than that counts as that much
_DIGITS = range(3, 7)


@dataclass(frozen=True, slots=True)
class Judged:
    """A prediction of a step in one language, and what came of it."""

    results: Results
    step: Step
    backend: Backend
    judgement: Judgement
    mark: Mark

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

    def told(self) -> str:
        came = f" ({self.came})" if self.came else ""
        note = "" if self.mark == "pre-registered" else f", {self.mark}"
        return f"{self.claim}: **{self.judgement.verdict}**{came}{note}"

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
    return [
        Judged(results, step, backend, each, results.mark(step, backend, each)) for each in results.judge(step, backend)
    ]


def of_all(results: Iterable[Results]) -> list[Judged]:
    return [
        judged
        for each in results
        for step in each.op.steps
        for backend in step.backends
        for judged in of_step(each, step, backend)
    ]


def beside(missed: Iterable[Judged]) -> str:
    """The counters that stand beside misses of one step in one language; empty where none tell of them.

    They are those of the step's profile case, and explain no miss at another one.
    """
    told = [each for each in missed if each.judgement.prediction.case in (None, _profiled(each))]
    if not told or not (case := _profiled(told[0])):
        return ""
    quantities = [each.judgement.prediction.quantity for each in told]
    return told[0].results.explained(told[0].step, told[0].backend, case, quantities)


def _profiled(judged: Judged) -> Case | None:
    return judged.results.op.profile_case_of(judged.step, judged.backend)


def total(judged: Iterable[Judged]) -> str:
    """The score of what was predicted before it was measured, in a sentence."""
    counts = Counter(each.judgement.verdict for each in judged if each.mark == "pre-registered")
    missed = sum(counts[outcome] for outcome in MISSED)
    rest = ", ".join(f"{counts[each]} {each}" for each in ("not judged", "void") if counts[each])
    wrong = f", {counts['wrong direction']} of them in the wrong direction" if counts["wrong direction"] else ""
    return (
        f"**{counts.total()} pre-registered predictions: {counts['hit']} hits, {missed} misses**{wrong}"
        f"{f'; {rest}' if rest else ''}."
    )


def in_short(judged: list[Judged]) -> list[str]:
    """A table of hits and misses, a row a ladder."""
    counts: dict[str, Counter[tuple[bool, str]]] = {}
    for each in judged:
        outcome = "miss" if each.missed else each.judgement.verdict
        counts.setdefault(each.results.op.name, Counter())[each.mark == "pre-registered", outcome] += 1
    columns = [(before, outcome) for before in (True, False) for outcome in ("hit", "miss")]
    rows = [[name, *(str(found[column]) for column in columns)] for name, found in counts.items()]
    return write.table(["ladder", "hits", "misses", "post hoc: hits", "misses"], rows)


def section(results: list[Results], judged: list[Judged]) -> list[str]:
    """How often each ladder's predictions came true, and how many of them were made before measuring."""
    scores = score((each.results.op.name, each.mark, each.judgement) for each in judged)
    gone = Counter(
        (each.op.name, mark) for each in results for mark in predictions.withdrawn(each.recorded.folder, each.op)
    )
    outcomes = get_args(Outcome)
    rows = []
    for key in dict.fromkeys([*scores, *gone]):
        found = scores.get(key, Counter())
        rows.append([*key, *(str(found[outcome]) for outcome in outcomes), str(gone[key])])
    table = write.table(["ladder", "made", *outcomes, "withdrawn"], rows, right=2)
    return [f"{total(judged)} {_MEANING}", "", *table]


def worst(judged: Iterable[Judged], most: int) -> list[Judged]:
    """The pre-registered predictions that missed by most, the largest first."""
    missed = [each for each in judged if each.missed and each.mark == "pre-registered"]
    return sorted(missed, key=lambda each: -each.size)[:most]


def standing(results: Results, step: Step, backend: Backend) -> str:
    """How many of a step's predictions came true and how many did not, as ``2 / 1``; a dash where none was judged."""
    verdicts = [each.judgement.verdict for each in of_step(results, step, backend)]
    hits, misses = verdicts.count("hit"), sum(verdict in MISSED for verdict in verdicts)
    return f"{hits} / {misses}" if hits + misses else "–"

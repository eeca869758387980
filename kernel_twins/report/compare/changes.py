"""The change from one measured cell to another: a row for every case timed in both, and for every counter.

A change is kept as the logarithm of a ratio, so that the change back is its negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kernel_twins.report.compare.operands import Cell
from kernel_twins.report.meaning import write
from kernel_twins.report.rows.metrics import METRICS, KernelClass
from kernel_twins.spec import Case

_UNPAIRED = math.log(1.05)  # differences of medians from different runs that are smaller say nothing
_CLASSES: tuple[KernelClass, ...] = ("memory", "arithmetic")

Effect = Literal["better", "worse", ""]


@dataclass(frozen=True, slots=True)
class TimeChange:
    """``ratio`` says how many times faster the second is; ``low`` and ``high`` where rounds were paired."""

    where: str
    before_us: float
    after_us: float
    ratio: float
    low: float | None
    high: float | None
    verdict: str

    @property
    def log_ratio(self) -> float:
        return math.log(self.ratio)


@dataclass(frozen=True, slots=True)
class CounterChange:
    """One metric of one call; ``effect`` says whether the change is for the better for this class of kernel."""

    where: str
    metric: str
    unit: str
    before: float
    after: float
    effect: Effect

    @property
    def log_ratio(self) -> float:
        """Infinite from and to zero, where there is no ratio."""
        if self.before == self.after:
            return 0.0
        if self.before > 0 and self.after > 0:
            return math.log(self.after) - math.log(self.before)
        return math.copysign(math.inf, self.after - self.before)

    @property
    def told(self) -> str:
        """As the log has it, and from zero and to it both values."""
        if math.isfinite(self.log_ratio):
            return write.change(self.before, self.after)
        return f"{write.number(self.before)} → {write.number(self.after)}"


def time_changes(where: str, before: Cell, after: Cell) -> list[TimeChange]:
    """A row a case, of sustained times: of one data set paired where they are of one contest, else medians."""
    changes = []
    for slug in [slug for slug, name in before.results.recorded.rows if name == before.name]:
        case = Case.parse(slug)
        was, now = before.results.time_us(case, before.name), after.results.time_us(case, after.name)
        if was is None or now is None:
            continue
        ratio = after.results.ratio(case, after.name, before.name) if before.results is after.results else None
        if ratio:
            verdict = after.results.standing(case, after.name, before.name) or ""
            changes.append(TimeChange(where + slug, was, now, ratio.value, ratio.low, ratio.high, verdict))
        else:
            verdict = "AMBIGUOUS" if abs(math.log(was / now)) <= _UNPAIRED else ""
            changes.append(TimeChange(where + slug, was, now, was / now, None, None, verdict))
    return changes


def counter_changes(where: str, before: Cell, after: Cell) -> list[CounterChange]:
    """A row for every metric of every case that both were profiled at."""
    kernel_class: KernelClass = "memory" if after.results.op.ceiling.startswith("dram") else "arithmetic"
    calls = after.results.recorded.calls
    return [
        counter_change(where + slug, metric, METRICS[metric].unit, was[metric], now, kernel_class)
        for (slug, name), was in before.results.recorded.calls.items()
        if name == before.name
        for metric, now in calls.get((slug, after.name), {}).items()
        if metric in was
    ]


def counter_change(
    where: str, metric: str, unit: str, before: float, after: float, kernel_class: KernelClass | None = None
) -> CounterChange:
    """``kernel_class`` is None for a kernel of which nothing is known."""
    effect: Effect = ""
    if metric in METRICS and before != after:
        classes = (kernel_class,) if kernel_class else _CLASSES  # of a foreign kernel, only what holds for every class
        directions = {METRICS[metric].better_for(each) for each in classes}
        if directions in ({"lower"}, {"higher"}):
            effect = "better" if (after < before) == (directions == {"lower"}) else "worse"
    return CounterChange(where, metric, unit, before, after, effect)

"""What changed between two calls: times, counters, and what limits them.

A change is kept as the logarithm of a ratio, so that the change back is its negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kernel_twins.report.meaning import write
from kernel_twins.report.rows import metrics
from kernel_twins.report.rows.metrics import METRICS, KernelClass

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
    def meaning(self) -> str:
        """The registry's, empty where it does not know the metric."""
        return metrics.meaning(self.metric)

    @property
    def told(self) -> str:
        """As the log has it, and from zero and to it both values."""
        if math.isfinite(self.log_ratio):
            return write.change(self.before, self.after)
        return f"{write.number(self.before)} → {write.number(self.after)}"


@dataclass(frozen=True, slots=True)
class LimitChange:
    """What limits one call, in a sentence each."""

    where: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Difference:
    """All that two operands have in common, the largest changes first; ``notes`` on what was left out.

    ``limits`` are in the order of the launches or cells.
    """

    a: str
    b: str
    times: list[TimeChange]
    counters: list[CounterChange]
    limits: list[LimitChange]
    notes: list[str]


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

"""The change from one measured cell to another: a row for every case timed in both, and for every counter.

A change is kept as the logarithm of a ratio, so that the change back is its negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kernel_twins import OPS
from kernel_twins.report.compare.operands import Measured
from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.verdict import Floats, confirmed, cycle_ratio, paired_ratio
from kernel_twins.report.rows.metrics import METRICS, KernelClass
from kernel_twins.report.rows.recorded import CONDITIONS

_UNPAIRED = math.log(1.05)  # differences of medians from different runs that are smaller say nothing
_CONTESTS = CONDITIONS["sustained"]
_CLASSES: tuple[KernelClass, ...] = ("memory", "arithmetic")

Effect = Literal["better", "worse", ""]


@dataclass(frozen=True, slots=True)
class TimeChange:
    """``ratio`` says how many times faster the second is; ``low`` and ``high`` where rounds could be paired."""

    where: str
    before_us: float
    after_us: float
    ratio: float
    low: float | None
    high: float | None
    paired: bool
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


def time_changes(where: str, before: Measured, after: Measured, same_data: bool) -> list[TimeChange]:
    """A row a case. Sustained times of one contest of one operation in one data set are paired; others are not."""
    changes = []
    for case in dict.fromkeys(case for case, _ in before.times):
        was, now = ({c: side.times[case, c] for c in _CONTESTS if (case, c) in side.times} for side in (before, after))
        if not (was and now):
            continue
        both = [contest for contest in was if contest in now]
        paired = [contest for contest in both if same_data and _same_rounds(was[contest], now[contest])]
        (_, first), (_, second) = (side[(paired or both or list(side))[0]] for side in (was, now))
        medians = float(np.median(first)), float(np.median(second))
        if paired:
            ratio = paired_ratio(first, second)
            cycles = [side.cycles[case] for side in (before, after) if case in side.cycles]
            verdict = confirmed(ratio, cycle_ratio(*cycles) if len(cycles) == 2 else None)
            change = TimeChange(where + case, *medians, ratio.value, ratio.low, ratio.high, True, verdict)
        else:
            value = medians[0] / medians[1]
            told = "AMBIGUOUS" if abs(math.log(value)) <= _UNPAIRED else ""
            change = TimeChange(where + case, *medians, value, None, None, False, told)
        changes.append(change)
    return changes


def _same_rounds(before: tuple[str, Floats], after: tuple[str, Floats]) -> bool:
    return before[0] == after[0] and len(before[1]) == len(after[1])


def counter_changes(where: str, op: str, before: Measured, after: Measured) -> list[CounterChange]:
    """A row for every metric of every case that both were profiled at; ``op`` tells which direction is better."""
    kernel_class: KernelClass | None = None
    if op in OPS:
        kernel_class = "memory" if OPS[op].ceiling.startswith("dram") else "arithmetic"
    return [
        counter_change(where + case, metric, METRICS[metric].unit, before.counters[case][metric], value, kernel_class)
        for case in before.counters
        for metric, value in after.counters.get(case, {}).items()
        if metric in before.counters[case]
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

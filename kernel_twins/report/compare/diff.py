"""``diff A B``: what changed between any two: steps, languages, commits, or reports that others recorded.

Times of one run and contest are compared round by round, with an interval and a verdict. Times of different runs are
compared by their medians: the chip may have been warmer, so nothing is claimed of them, and within 5 % they are called
AMBIGUOUS. A change is kept as the logarithm of a ratio, so that the change back is its negative.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kernel_twins import OPS
from kernel_twins.report.compare.operands import FORMS, Cell, Operand, OperandError, cell, cells, data
from kernel_twins.report.meaning import write
from kernel_twins.report.rows.base import OK
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


@dataclass(frozen=True, slots=True)
class Difference:
    """All that two operands have in common, the largest changes first; ``notes`` on what was left out."""

    a: str
    b: str
    times: list[TimeChange]
    counters: list[CounterChange]
    notes: list[str]


def run(a: str, b: str, as_json: bool) -> int:
    """Print the difference to stdout; errors as ``difference`` raises them."""
    found = difference(a, b)
    if as_json:
        print(json.dumps(_plain(found), indent=2, ensure_ascii=False))
    else:
        _show(found)
    return OK


def difference(a: str, b: str) -> Difference:
    """OperandError where an operand names nothing or both have nothing in common; InvalidDataError."""
    reports = [text.endswith(".ncu-rep") for text in (a, b)]
    if any(reports) and not all(reports):
        raise OperandError(f"{a!r} and {b!r}: a report can only be compared with a report")
    times: list[TimeChange] = []
    notes: list[str] = []
    if all(reports):
        counters, notes = _of_reports(Path(a), Path(b))
    else:
        times, counters = _of_names(Operand.parse(a), Operand.parse(b))
    if not times and not counters:
        raise OperandError(f"{a!r} and {b!r} have neither a timed case nor a profiled call in common")
    times.sort(key=lambda each: (-abs(each.log_ratio), each.where))
    counters.sort(key=lambda each: (-abs(each.log_ratio), each.where, each.metric))
    return Difference(a, b, times, counters, notes)


def _of_names(a: Operand, b: Operand) -> tuple[list[TimeChange], list[CounterChange]]:
    if bool(a.op) != bool(b.op):
        raise OperandError(f"{a.text!r} and {b.text!r}: one names a cell, the other a whole data set; {FORMS}")
    with data(a.ref) as before, data(b.ref) if b.ref != a.ref else nullcontext(before) as after:
        if a.op:
            was, now = cell(before, a.filled_from(b)), cell(after, b.filled_from(a))
            if before == after and a.op == b.op:
                now = Cell(was.results, now.name)  # of one data set: rounds pair
            return time_changes("", was, now), counter_changes("", was, now)
        times, counters = [], []
        for op in OPS:
            ours = cells(before, op)
            theirs = ours if before == after else cells(after, op)
            for name, was in ours.items():
                if name in theirs:
                    times += time_changes(f"{was.told} ", was, theirs[name])
                    counters += counter_changes(f"{was.told} ", was, theirs[name])
        return times, counters


def _of_reports(a: Path, b: Path) -> tuple[list[CounterChange], list[str]]:
    """Launches paired by kernel and ordinal; where no kernel is in both, by order, if they are equally many."""
    before, after = _launches(a), _launches(b)
    pairs = [(f"{kernel} #{n}", before[kernel, n], after[kernel, n]) for kernel, n in before if (kernel, n) in after]
    notes = []
    if pairs:
        lone = sorted(f"{kernel} #{n}" for kernel, n in before.keys() ^ after.keys())
        notes += [f"in one report only: {', '.join(lone)}"] if lone else []
    elif len(before) == len(after):
        pairs = [
            (f"{first.kernel} → {second.kernel}", first, second)
            for first, second in zip(before.values(), after.values(), strict=True)
        ]
    else:
        kernels = [", ".join(sorted({kernel for kernel, _ in side})) for side in (before, after)]
        raise OperandError(f"no kernel is in both reports: {a.name} has {kernels[0]}, {b.name} has {kernels[1]}")
    counters, other_units, no_numbers = [], set(), set()
    for where, first, second in pairs:
        for metric in [metric for metric in first.metrics if metric in second.metrics]:
            unit = second.units.get(metric, "")
            if not (math.isfinite(first.metrics[metric]) and math.isfinite(second.metrics[metric])):
                no_numbers.add(metric)
            elif first.units.get(metric, "") == unit:
                counters.append(counter_change(where, metric, unit, first.metrics[metric], second.metrics[metric]))
            else:
                other_units.add(metric)
    notes += [f"{metric} is left out: its units differ" for metric in sorted(other_units)]
    return counters, notes + [f"{metric} is left out: it is no number" for metric in sorted(no_numbers)]


def _launches(path: Path) -> dict[tuple[str, int], Any]:
    """A report's launches by kernel and ordinal, which counts the launches of that kernel from 1 on."""
    from kernel_twins.report.ncu.extract import launches_of

    if not path.is_file():
        raise OperandError(f"there is no file {str(path)!r}; {FORMS}")
    seen: Counter[str] = Counter()
    launches = {}
    for launch in launches_of(path, everything=True):
        seen[launch.kernel] += 1
        launches[launch.kernel, seen[launch.kernel]] = launch
    return launches


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


def _plain(found: Difference) -> dict[str, Any]:
    """For JSON, which has no infinity: a logarithm from or to zero is null."""

    def row(change: TimeChange | CounterChange) -> dict[str, Any]:
        log_ratio = change.log_ratio
        return dataclasses.asdict(change) | {"log_ratio": log_ratio if math.isfinite(log_ratio) else None}

    return dataclasses.asdict(found) | {
        "times": [row(each) for each in found.times],
        "counters": [row(each) | {"change": each.told} for each in found.counters],
    }


def _show(found: Difference) -> None:
    print(f"A = {found.a}, B = {found.b}\n")
    if found.times:
        header = ["case", "A, µs", "B, µs", "B is × faster", "99 % interval", "verdict"]
        _table(header, [_time_cells(each) for each in found.times])
    if any(each.verdict == "AMBIGUOUS" for each in found.times):
        print("AMBIGUOUS: ncu's cycles do not say what the times say, or times of different runs are within 5 %\n")
    changed = [each for each in found.counters if each.told != "="]
    if changed:
        places = {each.where for each in found.counters}
        alone = len(places) == 1
        header = [f"counter at {min(places)}" if alone else "counter", "unit", "A", "B", "change", ""]
        _table(header, [_counter_cells(each, "" if alone else f"{each.where} ") for each in changed])
    if same := len(found.counters) - len(changed):
        print(f"{same} counters did not change")
    for note in found.notes:
        print(note)


def _time_cells(change: TimeChange) -> list[str]:
    interval = "unpaired" if change.low is None else f"[{change.low:.3f}, {change.high:.3f}]"
    times = [write.number(change.before_us, 4), write.number(change.after_us, 4)]
    return [change.where, *times, f"{change.ratio:.3f}", interval, change.verdict]


def _counter_cells(change: CounterChange, where: str) -> list[str]:
    values = [write.number(change.before, 4), write.number(change.after, 4)]
    return [where + change.metric, change.unit, *values, change.told, change.effect]


def _table(header: Iterable[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in [list(header), *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()

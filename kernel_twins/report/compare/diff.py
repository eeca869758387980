"""``diff A B``: what changed between any two: steps, languages, commits, or reports that others recorded.

Times of one run and contest are compared round by round, with an interval and a verdict. Times of different runs are
compared by their medians: the chip may have been warmer, so nothing is claimed of them, and within 5 % they are called
AMBIGUOUS.
"""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kernel_twins import OPS
from kernel_twins.report.compare import diff_text, pairs
from kernel_twins.report.compare.changes import CounterChange, Difference, LimitChange, TimeChange, counter_change
from kernel_twins.report.compare.operands import FORMS, Cell, Operand, OperandError, cell, cells, data, is_report
from kernel_twins.report.rows.base import OK
from kernel_twins.report.rows.metrics import METRICS, KernelClass
from kernel_twins.spec import Case

_UNPAIRED = math.log(1.05)  # differences of medians from different runs that are smaller say nothing


def run(a: str, b: str, as_json: bool, everything: bool = False) -> int:
    """Print the difference to stdout; errors as ``difference`` raises them.

    ``everything``: of reports, metrics that the registry does not know, too. JSON always has them.
    """
    found = difference(a, b)
    if as_json:
        print(json.dumps(_plain(found), indent=2, ensure_ascii=False))
    else:
        diff_text.show(found, everything)
    return OK


def difference(a: str, b: str) -> Difference:
    """OperandError where an operand names nothing or both have nothing in common; InvalidDataError."""
    reports = [is_report(text) for text in (a, b)]
    if any(reports) and not all(reports):
        raise OperandError(f"{a!r} and {b!r}: a report can only be compared with a report; {FORMS}")
    found = pairs.of_reports(Path(a), Path(b)) if all(reports) else _of_names(Operand.parse(a), Operand.parse(b))
    if not found.times and not found.counters:
        raise OperandError(f"{a!r} and {b!r} have neither a timed case nor a profiled call in common")
    found.times.sort(key=lambda each: (-abs(each.log_ratio), each.where))
    found.counters.sort(key=lambda each: (-abs(each.log_ratio), each.where, each.metric))
    return found


def _of_names(a: Operand, b: Operand) -> Difference:
    if bool(a.op) != bool(b.op):
        raise OperandError(f"{a.text!r} and {b.text!r}: one names a cell, the other a whole data set; {FORMS}")
    found = Difference(a.text, b.text, [], [], [], [])
    with data(a.ref) as before, data(b.ref) if b.ref != a.ref else nullcontext(before) as after:
        if a.op:
            was, now = cell(before, a.filled_from(b)), cell(after, b.filled_from(a))
            if before == after and a.op == b.op:
                now = Cell(was.results, now.name)  # of one data set: rounds pair
            _add(found, "", was, now)
            return found
        for op in OPS:
            ours = cells(before, op)
            theirs = ours if before == after else cells(after, op)
            for name, was in ours.items():
                if name in theirs:
                    _add(found, f"{was.told} ", was, theirs[name])
        return found


def _add(found: Difference, where: str, before: Cell, after: Cell) -> None:
    found.times.extend(time_changes(where, before, after))
    found.counters.extend(counter_changes(where, before, after))
    found.limits.extend(limit_changes(where, before, after))


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


def limit_changes(where: str, before: Cell, after: Cell) -> list[LimitChange]:
    """A row for every case that both were profiled at, where the limiter says something of both."""
    changes = []
    for slug in [slug for slug, name in before.results.recorded.calls if name == before.name]:
        was, now = (each.results.limiter(each.name, Case.parse(slug)) for each in (before, after))
        if was and now:
            changes.append(LimitChange(where + slug, f"Limited by {was.told()}", f"Limited by {now.told()}"))
    return changes


def _plain(found: Difference) -> dict[str, Any]:
    """For JSON, which has no infinity: a logarithm from or to zero is null."""

    def row(change: TimeChange | CounterChange) -> dict[str, Any]:
        log_ratio = change.log_ratio
        return dataclasses.asdict(change) | {"log_ratio": log_ratio if math.isfinite(log_ratio) else None}

    return dataclasses.asdict(found) | {
        "times": [row(each) for each in found.times],
        "counters": [row(each) | {"change": each.told, "meaning": each.meaning} for each in found.counters],
    }

"""A difference as a person reads it: times, then for each call its counters with their meaning, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kernel_twins.report.compare import counters, tables
from kernel_twins.report.compare.changes import CounterChange, Difference, TimeChange
from kernel_twins.report.meaning import write
from kernel_twins.report.rows.metrics import METRICS

_CASE, _MEANING = 18, 24  # characters that a case and the meaning of a counter need at least
_COLOURS = {"better": "green", "worse": "red", "": ""}
_UNPAIRED = (
    "unpaired: A and B were timed in different runs, or in different contests of one, so that no round of A has its "
    "like in B. The ratio is that of the medians, and the chip may have been warmer in one of them: nothing is claimed."
)
_AMBIGUOUS = "AMBIGUOUS: ncu's cycles do not say what the times say, or times of different runs are within 5 %."


def show(found: Difference, everything: bool) -> None:
    """Print it to stdout; with ``everything`` also metrics that the registry does not know."""
    on = tables.console()
    tables.show(on, f"A = {found.a}, B = {found.b}\n")
    if found.times:
        tables.show(on, _times(on, found.times), "")
    if any(each.low is None for each in found.times):
        tables.show(on, f"{_UNPAIRED}\n")
    if any(each.verdict == "AMBIGUOUS" for each in found.times):
        tables.show(on, f"{_AMBIGUOUS}\n")
    shown = [each for each in found.counters if everything or each.metric in METRICS]
    changed = [each for each in shown if each.told != "="]
    limits = {each.where: each for each in found.limits}
    for where in dict.fromkeys([*limits, *(each.where for each in changed)]):
        here = [each for each in changed if each.where == where]
        if here:
            tables.show(on, _counters(on, where, here), "")
        if where in limits and (here or len(limits) == 1):
            tables.show(on, f"A: {limits[where].before}", f"B: {limits[where].after}\n")
    if same := len(shown) - len(changed):
        tables.show(on, f"{same} counters did not change")
    if others := sum(each.told != "=" for each in found.counters) - len(changed):
        tables.show(on, f"metrics that changed and that the registry does not know: {others}, --all shows them")
    tables.notes(on, found.notes)


def _times(on: Console, changes: Sequence[TimeChange]) -> Table:
    made = tables.table("case", "A, µs", "B, µs", "B is × faster", "99 % interval", "verdict", right=range(1, 4))
    for each in changes:
        interval = "unpaired" if each.low is None else f"[{each.low:.3f}, {each.high:.3f}]"
        times = [write.number(each.before_us, 4), write.number(each.after_us, 4)]
        made.add_row(each.where, *times, f"{each.ratio:.3f}", interval, each.verdict)
    tables.fits(made, on, _CASE)
    return made


def _counters(on: Console, where: str, changes: Sequence[CounterChange]) -> Table:
    """With ncu's names where a console has room for them; a metric without a meaning is always told by its name."""
    for named in (True, False):
        columns = [f"counter at {where}", "unit", "A", "B", "change", "", *(["name in ncu"] if named else [])]
        made = tables.table(*columns, right=range(2, 5))
        for each in changes:
            meaning, unit, values = counters.told(each.metric, each.unit, [each.before, each.after])
            effect = Text(each.effect, style=_COLOURS[each.effect])
            names = [each.metric] if named else []
            made.add_row(meaning, unit, *values, _change(each), effect, *names)
        if tables.fits(made, on, _MEANING):
            break
    return made


def _change(each: CounterChange) -> str:
    """From nothing or to it there is no ratio, and the values stand beside it."""
    if math.isfinite(each.log_ratio):
        return each.told
    return "new" if each.before == 0 else "gone"

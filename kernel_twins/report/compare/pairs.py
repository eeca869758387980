"""Two reports that anybody recorded: which launch of one is compared with which of the other, and what changed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from kernel_twins.report.compare.changes import Difference, LimitChange, counter_change
from kernel_twins.report.compare.foreign import judge
from kernel_twins.report.compare.operands import FORMS, OperandError
from kernel_twins.report.ncu import extract, kernel_names
from kernel_twins.report.ncu.reader import Launch

Pair = tuple[int, int]  # the places of two launches in their reports


def of_reports(a: Path, b: Path) -> Difference:
    """OperandError where there is no such file, or no launch has its like; InvalidDataError."""
    before, after = _launches(a), _launches(b)
    first, second = (kernel_names.numbered([launch.kernel for launch in side]) for side in (before, after))
    paired = _paired(before, after)
    if not paired:
        raise OperandError(
            f"no kernel is in both reports: {a.name} has {_listed(before)}, {b.name} has {_listed(after)}"
        )
    judged = judge(before, a), judge(after, b)
    found = Difference(str(a), str(b), [], [], [], [])
    other_units, no_numbers = set[str](), set[str]()
    for i, j in paired:
        where = first[i] if first[i] == second[j] else f"{first[i]} → {second[j]}"
        found.limits.append(LimitChange(where, judged[0].verdicts[i].told, judged[1].verdicts[j].told))
        was, now = before[i], after[j]
        for metric in [metric for metric in was.metrics if metric in now.metrics]:
            if not (math.isfinite(was.metrics[metric]) and math.isfinite(now.metrics[metric])):
                no_numbers.add(metric)
            elif was.units[metric] != now.units[metric]:
                other_units.add(metric)
            else:
                unit = now.units[metric]
                found.counters.append(counter_change(where, metric, unit, was.metrics[metric], now.metrics[metric]))
    alone = [first[i] for i in _others(before, [i for i, _ in paired])]
    alone += [second[j] for j in _others(after, [j for _, j in paired])]
    for told, names in (
        ("in one report only", sorted(alone)),
        ("left out, since their units differ", sorted(other_units)),
        ("left out, since they are no numbers", sorted(no_numbers)),
    ):
        found.notes.extend([f"{told}: {', '.join(names)}"] if names else [])
    found.notes.extend(dict.fromkeys(note for side in judged for note in side.notes))
    return found


def _launches(path: Path) -> list[Launch]:
    if not path.is_file():
        raise OperandError(f"there is no file {str(path)!r}; {FORMS}")
    return extract.foreign_launches(path)


def _paired(before: Sequence[Launch], after: Sequence[Launch]) -> list[Pair]:
    """Launches of one kernel, in their order; those left by short names; if no name is in both, by order alone.

    By order alone only where both have equally many.
    """
    whole = _matched([launch.kernel for launch in before], [launch.kernel for launch in after])
    left, right = _others(before, [i for i, _ in whole]), _others(after, [j for _, j in whole])
    short = _matched(
        [kernel_names.short_name(before[i].kernel) for i in left],
        [kernel_names.short_name(after[j].kernel) for j in right],
    )
    pairs = sorted([*whole, *((left[i], right[j]) for i, j in short)])
    if not pairs and len(before) == len(after):
        return [(k, k) for k in range(len(before))]
    return pairs


def _others(launches: Sequence[Launch], places: Iterable[int]) -> list[int]:
    """The places of the launches that are not at these."""
    return sorted({*range(len(launches))} - {*places})


def _matched(before: Sequence[Hashable], after: Sequence[Hashable]) -> list[Pair]:
    """The first of a name with the first of it, the second with the second."""
    places: dict[Hashable, list[int]] = {}
    for j, name in enumerate(after):
        places.setdefault(name, []).append(j)
    return [(i, places[name].pop(0)) for i, name in enumerate(before) if places.get(name)]


def _listed(launches: Sequence[Launch]) -> str:
    return ", ".join(dict.fromkeys(kernel_names.short_name(launch.kernel) for launch in launches))

"""Which counters a step moved most, in few words."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import Backend, Case, Name, Step

# Causes before outcomes: how busy something was follows from the time, and says less about why.
_CAUSES = {
    "bank_conflicts": ("bank conflicts", " %"),
    "dram_bytes": ("DRAM", " MB"),
    "l2_bytes": ("L2 traffic", " MB"),
    "l2_hit": ("L2 hits", " %"),
    "instructions": ("instructions", " M"),
    "load_requests": ("load requests", " M"),
    "sectors_per_load": ("sectors per load", ""),
    "sectors_per_store": ("sectors per store", ""),
    "instruction_stalls": ("fetch stalls", " cycles"),
}
_OUTCOMES = {
    "tensor_pipe": ("tensor pipe", " %"),
    "fma_pipe": ("FMA pipe", " %"),
    "issue_active": ("issue slots", " %"),
    "dram_share": ("DRAM busy", " %"),
    "occupancy": ("occupancy", " %"),
}
_LEAST = 0.05
_ENOUGH = {" %": 40.0, " cycles": 2.0}
"""Differences that weigh as much as a factor of e, by unit; of other units factors are compared."""
_PREDICTED = 2.0  # what the author named weighs that much more


def of_step(results: Results, step: Step, backend: Backend, case: Case) -> list[str]:
    """What a step moved at a case, against the step before that was measured there; none where there is no such."""
    if (previous := results.previous(step, backend, case)) is None:
        return []
    before, after = (results.quantities(Name(backend, each.name), case) for each in (previous, step))
    return moved(before, after, {each.quantity for each in step.predictions if backend in each.backends})


def moved(
    before: Mapping[str, float | None], after: Mapping[str, float | None], predicted: Collection[str] = ()
) -> list[str]:
    """The counters that moved between two calls, such as ``bank conflicts 78 → 3 %``: causes first, each most first.

    From quantities by name; ``predicted`` are the names of those that the step's predictions speak of.
    """
    return [
        f"{text} {_short(was)} → {_short(now)}{unit}"
        for words in (_CAUSES, _OUTCOMES)
        for _, text, was, now, unit in sorted(_weighed(words, before, after, predicted), reverse=True)
    ]


def _weighed(
    words: Mapping[str, tuple[str, str]],
    before: Mapping[str, float | None],
    after: Mapping[str, float | None],
    predicted: Collection[str],
) -> list[tuple[float, str, float, float, str]]:
    found = []
    for key, (text, unit) in words.items():
        was, now = before.get(key), after.get(key)
        if was is not None and now is not None:
            weight = _weight(was, now, unit) * (_PREDICTED if key in predicted else 1)
            found.append((weight, text, was, now, unit))
    return [each for each in found if each[0] >= _LEAST]


def _weight(was: float, now: float, unit: str) -> float:
    if unit in _ENOUGH:
        return abs(now - was) / _ENOUGH[unit]
    return abs(math.log(now / was)) if was > 0 and now > 0 else 0.0


def _short(value: float) -> str:
    return write.number(value, 3 if value < 100 else 2) if value >= 0.1 else "0"

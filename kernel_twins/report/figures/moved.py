"""The counter that a step moved most, in few words."""

from __future__ import annotations

import math

from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import Backend, Name, Step

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
}
_LEAST = 0.05
_ENOUGH = {" %": 40.0, " cycles": 2.0}
"""Differences that weigh as much as a factor of e, by unit; of other units factors are compared."""
_PREDICTED = 2.0  # what the author named weighs that much more


def moved(results: Results, step: Step, backend: Backend) -> str:
    """Such as ``bank conflicts 78 → 3 %``; empty where the step before was not profiled, or nothing moved."""
    case, before = results.op.profile_case_of(step, backend), results.op.before(step, backend)
    if case is None or before is None:
        return ""
    was, now = (results.quantities(Name(backend, each.name), case) for each in (before, step))
    predicted = {each.quantity for each in step.predictions if backend in each.backends}
    for words in (_CAUSES, _OUTCOMES):
        weighed = []
        for key, (_, unit) in words.items():
            a, b = was[key], now[key]
            if a is not None and b is not None:
                weighed.append((_weight(a, b, unit) * (_PREDICTED if key in predicted else 1), key, a, b))
        if weighed and max(weighed)[0] >= _LEAST:
            _, key, a, b = max(weighed)
            text, unit = words[key]
            return f"{text} {_short(a)} → {_short(b)}{unit}"
    return ""


def _weight(was: float, now: float, unit: str) -> float:
    if unit in _ENOUGH:
        return abs(now - was) / _ENOUGH[unit]
    return abs(math.log(now / was)) if was > 0 and now > 0 else 0.0


def _short(value: float) -> str:
    return write.number(value, 3 if value < 100 else 2) if value >= 0.1 else "0"

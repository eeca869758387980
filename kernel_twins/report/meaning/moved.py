"""Which counters moved most between two calls, for a line that has room for two of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.quantities import QUANTITIES

_MOST = 2
_LEAST = math.log(1.1)  # a counter that moved by less has not
# How a line calls a quantity, and how much of it is too little to matter: it is added before two are compared.
_COUNTERS = {
    "dram_share": ("DRAM busy", 10.0),
    "bytes_over_minimum": ("DRAM bytes / minimum", 0.1),
    "l2_hit": ("L2 hit", 10.0),
    "tensor_pipe": ("tensor pipe", 10.0),
    "fma_pipe": ("FMA pipe", 10.0),
    "issue_active": ("issue slots", 10.0),
    "instructions": ("instructions", 1.0),
    "load_requests": ("load requests", 0.5),
    "sectors_per_load": ("sectors/load", 0.5),
    "sectors_per_store": ("sectors/store", 0.5),
    "bank_conflicts": ("bank conflicts", 10.0),
    "occupancy": ("occupancy", 10.0),
    "spills": ("spills", 1e6),
}


def moved(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> list[str]:
    """The counters of two calls that moved by the largest factors, such as ``bank conflicts 78.1→3 %``; at most two.

    From quantities by name. The factor is of values that the least that matters was added to: a share that goes from
    0.1 to 0.4 % has not moved.
    """
    found = []
    for key, (title, least) in _COUNTERS.items():
        was, now = before.get(key), after.get(key)
        if was is not None and now is not None:
            unit = f" {QUANTITIES[key].unit}".rstrip()
            factor = abs(math.log((now + least) / (was + least)))
            found.append((factor, f"{title} {write.number(was)}→{write.number(now)}{unit}"))
    ordered = sorted(found, key=lambda each: -each[0])
    return [told for factor, told in ordered[:_MOST] if factor >= _LEAST]

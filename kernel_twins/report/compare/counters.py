"""How tables tell a counter: by what it means, in a unit that keeps its values short."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_twins.report.meaning import write
from kernel_twins.report.rows import metrics
from kernel_twins.report.rows.metrics import STALLS, stall_metric

_STALLS = {stall_metric(stall) for stall in STALLS}
_AN_ISSUE = ", an issue"  # what the unit of a stall says


def told(metric: str, unit: str, values: Sequence[float]) -> tuple[str, str, list[str]]:
    """What a metric means (its name where the registry does not know it), the unit, and the values in it."""
    shown, texts = write.in_unit(unit, values)
    return meaning(metric), "cycles/issue" if metric in _STALLS else shown, texts


def meaning(metric: str) -> str:
    return metrics.meaning(metric).removesuffix(_AN_ISSUE) or metric

"""Which backend ``backend="auto"`` takes for products: the fastest in the committed timings, at the nearest problem.

The time of a call is the GPU's or the host's, whichever is longer. ``fastest.json`` names the fastest backend by GPU,
function and measured case. ``python -m kernel_twins.report.calls.fastest`` derives it from ``profiling/data``, and a
test compares the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

from kernel_twins.spec import ITEMSIZE, Case

FILE = Path(__file__).parent / "fastest.json"


@cache
def table(gpu: str, function: str) -> dict[Case, str]:
    """The fastest backend of every measured case, empty for a GPU without measurements."""
    content = json.loads(FILE.read_text())
    return {Case.parse(slug): backend for slug, backend in content.get(gpu, {}).get(function, {}).items()}


def nearest(
    gpu: str, function: str, problem: Case, comparable: Callable[[Case], bool] = lambda case: True
) -> str | None:
    """The fastest backend at the measured case closest in the logarithms of its sizes; None if there is no such case.

    Only cases with elements of the same width count, and, if any was measured, only those of the same variant (b's
    layout, the activation). ``comparable`` adds further conditions.
    """
    known = [
        case for case in table(gpu, function) if ITEMSIZE[case.dtype] == ITEMSIZE[problem.dtype] and comparable(case)
    ]
    alike = [case for case in known if case.variant == problem.variant] or known
    if not alike:
        return None
    return table(gpu, function)[min(alike, key=lambda case: (_distance(case, problem), case.slug))]


def _distance(one: Case, other: Case) -> float:
    return math.dist(*([math.log(max(1, size)) for size in case.shape] for case in (one, other)))

"""Which backend ``backend="auto"`` takes: the fastest in the committed measurements, at the nearest problem.

A call takes as long as the GPU works or, where that is longer, as the host needs to ask for it.
``fastest.json`` holds it by GPU, function and measured case. It is derived from ``profiling/data`` by
``python -m kernel_twins.report.calls.fastest``, and a test compares the two.
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
    """The fastest backend at the measured case closest in the logarithms of its sizes; None where there is none.

    A case is near only where its elements are as wide and its variant (b's layout, the activation) is the same if any
    such was measured; ``comparable`` may ask for more.
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

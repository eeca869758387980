"""What the ratios of sampled cases come to."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import geometric_mean

import pandas as pd

LEAST = 0.95
"""The ratio that is aimed at everywhere."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a backend's cells come to.

    Cells without a time count as worst, ``low`` (the 10th percentile) among them, and for nothing in the mean, which is
    None where no cell has a time. ``below`` is the share below the least that is aimed at.
    """

    mean: float | None
    low: float
    worst: float
    below: float
    wrong: int


def figures(cells: pd.DataFrame, backend: str) -> Figures:
    """Of those of ``compared``'s cells that are the backend's."""
    own = cells[cells["backend"] == backend]
    ratios = own["ratio"]
    timed = ratios[ratios > 0]
    return Figures(
        geometric_mean(timed) if len(timed) else None,
        float(ratios.quantile(0.1)),
        float(ratios.min()),
        float((ratios < LEAST).mean()),
        int(own["status"].str.startswith("wrong").sum()),
    )

"""Which way a quantity went from the step before."""

from __future__ import annotations

import math

import pytest

from kernel_twins.report.meaning.judgement import direction
from kernel_twins.report.meaning.verdict import Ratio


@pytest.mark.parametrize(
    ("quantity", "before", "after", "ratio", "went"),
    [
        ("registers", 100.0, 100.9, None, "same"),
        ("registers", 100.0, 101.1, None, "up"),
        ("rate", 100.0, 99.4, None, "down"),
        ("bank_conflicts", 0.0, 0.0, None, "same"),
        ("bank_conflicts", 0.0, 3.0, None, "up"),
        ("time", 100.0, 90.0, Ratio(1.1, 1.09, 1.12), "down"),
        ("time", 100.0, 90.0, Ratio(1.1, 0.9, 1.2), "same"),
        ("time", 100.0, 110.0, Ratio(0.9, 0.89, 0.92), "up"),
        ("time", None, 110.0, None, None),
        ("time", 100.0, math.nan, None, None),
    ],
)
def test_a_direction_is_a_change_beyond_the_noise(
    quantity: str, before: float | None, after: float | None, ratio: Ratio | None, went: str | None
) -> None:
    assert direction(quantity, before, after, ratio) == went

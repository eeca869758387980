"""Test cases as large as a test without a GPU needs them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from kernel_twins.spec import Case

FEWEST_ROWS = 2  # the second shows a wrong stride
FEW_SEQUENCES = 8  # packed, they have every length there is


def with_fewer_rows(case: Case, elements: int) -> Case:
    """A matrix with as many of its rows as that many elements make, but FEWEST_ROWS; anything else as it is."""
    if len(case.shape) != 2 or 0 in case.shape:
        return case
    m, n = case.shape
    return dataclasses.replace(case, shape=(min(m, max(FEWEST_ROWS, elements // n)), n))


def with_shorter_rows(case: Case, longest: int) -> Case:
    """A matrix whose rows are little longer than that, by as much as they were past a multiple of 1024."""
    if len(case.shape) != 2 or case.shape[1] <= longest:
        return case
    m, n = case.shape
    return dataclasses.replace(case, shape=(m, min(n, longest + n % 1024)))


def with_axes_halved(case: Case, axes: Collection[int], elements: int) -> Case:
    """With the longest of these axes halved, again and again, until they hold no more than that many elements."""
    shape = list(case.shape)
    while math.prod(shape[axis] for axis in axes) > elements:
        longest = max(axes, key=lambda axis: shape[axis])
        shape[longest] = (shape[longest] + 1) // 2
    return dataclasses.replace(case, shape=tuple(shape))


def with_few_heads(case: Case, most: int = 6) -> Case:
    """Attention with few query heads and packed sequences; anything else, and grouped heads, as it is."""
    if len(case.shape) != 4 or case.get("axes") or case.get("kv"):
        return case
    b, h, s, d = case.shape
    return dataclasses.replace(case, shape=(min(b, FEW_SEQUENCES), min(h, most), s, d))

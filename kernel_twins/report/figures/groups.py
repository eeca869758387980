"""The cases that are drawn against a size, in groups that are alike but for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kernel_twins.report.figures import words
from kernel_twins.spec import ITEMSIZE, Case, Op, SizeAxis

ALIGNED = 16
"""Bytes at whose multiples the rows of regular sizes begin."""

JOINED = 3
"""Points of a line, at least."""


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that differ in size alone, smallest first; ``facts`` are what tells them from the first group's.

    Odd sizes are those whose rows are not aligned: it is not the size that makes these slow, so they are never joined.
    """

    facts: tuple[str, ...]
    cases: tuple[Case, ...]
    is_odd: bool

    @property
    def is_joined(self) -> bool:
        """Whether a line goes through its points."""
        return not self.is_odd and len(self.cases) >= JOINED


class _Kind(NamedTuple):
    dtype: str
    variant: tuple[tuple[str, str], ...]
    panel: str
    is_odd: bool


def groups(op: Op, axis: SizeAxis) -> list[Group]:
    """The largest one first, then those of its dtype and variant, and odd sizes last.

    Cases that have no place on the axis are in none.
    """
    found: dict[_Kind, list[Case]] = {}
    for case in sorted(op.timed_cases):
        if (panel := axis.panel(case)) is not None:
            is_odd = axis.size(case) * ITEMSIZE[case.dtype] % ALIGNED > 0
            found.setdefault(_Kind(case.dtype, case.variant, panel, is_odd), []).append(case)
    if not found:
        return []
    main = max(found, key=lambda kind: (not kind.is_odd, len(found[kind])))
    order = sorted(found, key=lambda kind: (kind.is_odd, kind[:2] != main[:2], -len(found[kind])))
    return [Group(_facts(kind, main), tuple(sorted(found[kind], key=axis.size)), kind.is_odd) for kind in order]


def _facts(kind: _Kind, main: _Kind) -> tuple[str, ...]:
    """What a group is, if it is the main one, else what tells it from that."""
    if kind == main:
        return (kind.dtype, *words.facts(kind.variant), *filter(None, [kind.panel]))
    kept, known = dict(kind.variant), {*main.variant}
    return (
        *[kind.dtype] * (kind.dtype != main.dtype),
        *words.facts(each for each in kind.variant if each not in known),
        *(f"no {key}" for key in dict(main.variant) if key not in kept),
        # Of another dtype it differs, since it is bytes that are the same.
        *[kind.panel] * (kind.dtype == main.dtype and kind.panel != main.panel),
        *["unaligned"] * kind.is_odd,
    )

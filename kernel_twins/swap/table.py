"""What ``replace_`` and ``restore_`` tell: one row a module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload


@dataclass(frozen=True, slots=True)
class Row:
    """A module by its name in the model, and what stood and stands there; ``reason`` says why it was left.

    ``kind`` is "norm", "linear", "activation", "attention" or "loss". The model itself has the name "". ``reason`` is
    empty where something was swapped, ``after`` where nothing was.
    """

    name: str
    kind: str
    before: str
    after: str = ""
    reason: str = ""


class Table(Sequence[Row]):
    """Rows in the model's order. ``str`` joins those that differ by numbers in their names alone."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = tuple(rows)

    @property
    def swapped(self) -> tuple[Row, ...]:
        return tuple(row for row in self if not row.reason)

    @property
    def left(self) -> tuple[Row, ...]:
        return tuple(row for row in self if row.reason)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Table({len(self.swapped)} swapped, {len(self.left)} left)"

    def __str__(self) -> str:
        alike = Counter(replace(row, name=re.sub(r"(?<![^.])\d+(?![^.])", "*", row.name)) for row in self)
        lines = [("name", "count", "kind", "from", "to")]
        for row, count in alike.items():
            to = f"left: {row.reason}" if row.reason else row.after
            lines.append((row.name or "(the model)", str(count), row.kind, row.before, to))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        told = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        return "\n".join((*told, f"{len(self.swapped)} swapped, {len(self.left)} left"))

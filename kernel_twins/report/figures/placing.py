"""Where labels find room beside points: the first place near by that nothing else takes."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from typing import NamedTuple

_PIECE = 4.0  # pixels of a line


class Box(NamedTuple):
    """Pixels, from the upper left corner."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether two boxes have more than a border in common."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def holds(self, other: Box) -> bool:
        """Whether the other one lies within this one."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )


class Room:
    """A rectangle, what is taken of it, and where lines run, which labels avoid if they can."""

    def __init__(self, bounds: Box) -> None:
        self.bounds = bounds
        self._taken: list[Box] = []
        self._lines: list[Box] = []

    def take(self, box: Box) -> None:
        """Keep a place from labels."""
        self._taken.append(box)

    def cross(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Tell where a line runs."""
        pieces = max(1, round(hypot(end[0] - start[0], end[1] - start[1]) / _PIECE))
        for index in range(pieces + 1):
            x, y = (a + (b - a) * index / pieces for a, b in zip(start, end, strict=True))
            self._lines.append(Box(x - 1, y - 1, x + 1, y + 1))

    def first_free(self, boxes: Sequence[Box]) -> Box | None:
        """The first one that lies within the rectangle and meets nothing, else one that meets lines alone.

        It is taken then.
        """
        for obstacles in ((*self._taken, *self._lines), self._taken):
            for box in boxes:
                if self.bounds.holds(box) and not any(box.meets(other) for other in obstacles):
                    self.take(box)
                    return box
        return None

"""What the drawings are made of: boxes, rows of cells, arrows and labels, in one colour for each level of memory.

Plain SVG text, the same for the same calls. A label that would run out of its box or of the drawing is refused, so
that drawings stay legible whatever sans-serif font the reader has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Literal, TypeVar
from xml.sax.saxutils import escape

Level = Literal["device", "l2", "shared", "registers", "tensor", "idle", "plain"]
Anchor = Literal["start", "middle", "end"]
Place = TypeVar("Place", int, tuple[int, int])
Part = tuple[float, Level, str]  # a box's width, level and label

# Fill and outline. The same colour is the same place in every drawing.
COLOURS: dict[Level, tuple[str, str]] = {
    "device": ("#cfe2f3", "#3d6fa5"),
    "l2": ("#cdeae2", "#2b7d6c"),
    "shared": ("#fde0bd", "#b96a0f"),
    "registers": ("#d9efcb", "#4c8c00"),
    "tensor": ("#e3d7f6", "#7a4fbf"),
    "idle": ("#f0f0f0", "#9a9a9a"),
    "plain": ("#ffffff", "#555555"),
}
TEXT, SOFT, ALARM = "#1a1a1a", "#555555", "#b3261e"

_NONE: Mapping[Level, Any] = {}
_DASHES = {False: "", True: ' stroke-dasharray="4 3"'}
_WIDTH = 640
_EM = 0.6  # a letter's width over its height; no usual sans-serif font has wider ones on average
_LEAST = 11  # text smaller than this is not read

DRAWINGS: dict[str, Callable[[], Drawing]] = {}
"""How each drawing is made, by its file's name."""


def patch(rows: Iterable[int], columns: Iterable[int]) -> set[tuple[int, int]]:
    """The places in a grid where these rows and columns meet."""
    return set(product(rows, columns))


class Drawing:
    """An SVG under construction: ``x`` goes right and ``y`` down, in pixels.

    ``texts`` holds the rectangle of every label, for the test that none covers another.
    """

    def __init__(self, title: str, height: int) -> None:
        self._height = height
        self._title = title
        self._parts: list[str] = []
        self.texts: list[tuple[str, float, float, float, float]] = []

    def box(
        self, x: float, y: float, width: float, height: float, level: Level, text: str = "", size: int = _LEAST
    ) -> None:
        """A rectangle with its label in the middle; a label of several lines is centred as a whole."""
        fill, line = COLOURS[level]
        self._rectangle(x, y, width, height, f'fill="{fill}" stroke="{line}"')
        lines = text.split("\n") if text else []
        for index, each in enumerate(lines):
            if _EM * size * len(each) > width:
                raise ValueError(f"{each!r} is wider than its box of {width}")
            middle = y + height / 2 + (index - (len(lines) - 1) / 2) * 1.25 * size
            self._text(x + width / 2, middle, each, size, "middle", TEXT)

    def boxes(self, x: float, y: float, height: float, parts: Iterable[Part], gap: float = 0) -> None:
        """Boxes side by side from ``x`` on, each with its width, its level and its label."""
        for width, level, text in parts:
            self.box(x, y, width, height, level, text)
            x += width + gap

    def cells(
        self,
        x: float,
        y: float,
        count: int,
        width: float,
        height: float,
        level: Level,
        labels: Sequence[object] = (),
        marked: Mapping[Level, Collection[int]] = _NONE,
    ) -> None:
        """A row of cells; ``marked`` has the indices of those on other levels, of which the last one counts."""
        self._mesh([(x + i * width, y, _level(i, level, marked)) for i in range(count)], width, height)
        for index, label in enumerate(map(str, labels)):
            if _EM * _LEAST * len(label) > width:
                raise ValueError(f"{label!r} is wider than its cell of {width}")
            self.text(x + (index + 0.5) * width, y + height / 2, label, "middle")

    def grid(
        self,
        x: float,
        y: float,
        rows: int,
        columns: int,
        side: float,
        level: Level,
        marked: Mapping[Level, Collection[tuple[int, int]]] = _NONE,
    ) -> None:
        """A matrix of square cells; ``marked`` has the places of those on other levels, and the last one counts."""
        places = product(range(rows), range(columns))
        self._mesh([(x + c * side, y + r * side, _level((r, c), level, marked)) for r, c in places], side, side)

    def frame(self, x: float, y: float, width: float, height: float, colour: str = SOFT, dashed: bool = False) -> None:
        """An outline around things already drawn."""
        self._rectangle(x, y, width, height, f'fill="none" stroke="{colour}" stroke-width="1.6"{_DASHES[dashed]}')

    def line(self, *points: tuple[float, float], colour: str = SOFT, dashed: bool = False) -> None:
        path = " ".join(f"{_px(x)},{_px(y)}" for x, y in points)
        style = f'fill="none" stroke="{colour}" stroke-width="1.4"{_DASHES[dashed]}'
        self._parts.append(f'<polyline points="{path}" {style}/>')

    def arrow(self, *points: tuple[float, float], colour: str = SOFT, dashed: bool = False) -> None:
        """A line through the points with a head at the last one."""
        (from_x, from_y), (x, y) = points[-2:]
        angle = math.atan2(y - from_y, x - from_x)
        base = (x - 6 * math.cos(angle), y - 6 * math.sin(angle))
        self.line(*points[:-1], base, colour=colour, dashed=dashed)
        side = (3.2 * math.sin(angle), -3.2 * math.cos(angle))
        head = [(x, y), (base[0] + side[0], base[1] + side[1]), (base[0] - side[0], base[1] - side[1])]
        path = " ".join(f"{_px(a)},{_px(b)}" for a, b in head)
        self._parts.append(f'<polygon points="{path}" fill="{colour}"/>')

    def across(self, x: float, to: float, *heights: float, colour: str = SOFT, dashed: bool = False) -> None:
        """An arrow from ``x`` to ``to`` at each of the heights."""
        for y in heights:
            self.arrow((x, y), (to, y), colour=colour, dashed=dashed)

    def down(self, y: float, to: float, *places: float, colour: str = SOFT, dashed: bool = False) -> None:
        """An arrow from the height ``y`` to ``to``, which may lie above it, at each of the places."""
        for x in places:
            self.arrow((x, y), (x, to), colour=colour, dashed=dashed)

    def time_axis(self, x: float, y: float) -> None:
        """An arrow from ``x`` to the right edge, along which time passes."""
        self.across(x, 604, y)
        self.text(612, y, "t")

    def bracket(self, x: float, y: float, width: float, text: str, below: bool = True) -> None:
        """A stretch marked from ``x`` on, with its name under it or over it."""
        tick = -4 if below else 4
        self.line((x, y + tick), (x, y), (x + width, y), (x + width, y + tick))
        self.note(x + width / 2, y + (10 if below else -10), text, "middle")

    def heading(self, x: float, y: float, text: str, anchor: Anchor = "start") -> None:
        """A line in larger letters, which says what is drawn under it."""
        self._text(x, y, text, 12, anchor, TEXT)

    def text(
        self, x: float, y: float, text: str, anchor: Anchor = "start", colour: str = TEXT, spacing: float = 16
    ) -> None:
        """Lines of small letters; ``y`` is the middle of the first one's height."""
        for index, line in enumerate(text.split("\n")):
            self._text(x, y + spacing * index, line, _LEAST, anchor, colour)

    def note(self, x: float, y: float, text: str, anchor: Anchor = "start") -> None:
        """``text`` that only names something."""
        self.text(x, y, text, anchor, SOFT)

    def _text(self, x: float, y: float, text: str, size: int, anchor: Anchor, colour: str) -> None:
        width = _EM * size * len(text)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        if left < 6 or left + width > _WIDTH - 6 or not 6 <= y <= self._height - 6 or size < _LEAST:
            raise ValueError(f"{text!r} does not fit the drawing {self._title!r}, or is too small")
        self.texts.append((text, left, y - size / 2, left + width, y + size / 2))
        self._parts.append(
            f'<text x="{_px(x)}" y="{_px(y + 0.36 * size)}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{colour}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{self._height}" '
                f'viewBox="0 0 {_WIDTH} {self._height}" font-family="Helvetica, Arial, sans-serif">',
                f"<title>{escape(self._title)}</title>",
                # Its own ground, so that it reads on a light page and on a dark one.
                f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{self._height - 1}" rx="8" fill="#ffffff" '
                'stroke="#d0d0d0"/>',
                *self._parts,
                "</svg>\n",
            ]
        )

    def _rectangle(self, x: float, y: float, width: float, height: float, style: str) -> None:
        place = f'x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}"'
        self._parts.append(f'<rect {place} rx="3" {style}/>')

    def _mesh(self, cells: Sequence[tuple[float, float, Level]], width: float, height: float) -> None:
        """Cells of one size, a path for each level; where two touch, the nearer level's outline is seen."""
        for level in ("plain", "idle", "device", "l2", "shared", "tensor", "registers"):
            path = "".join(
                f"M{_px(x)} {_px(y)}h{_px(width)}v{_px(height)}h-{_px(width)}z" for x, y, each in cells if each == level
            )
            if path:
                fill, line = COLOURS[level]
                self._parts.append(f'<path d="{path}" fill="{fill}" stroke="{line}"/>')


def _level(place: Place, usual: Level, marked: Mapping[Level, Collection[Place]]) -> Level:
    return [usual, *(level for level, places in marked.items() if place in places)][-1]


def _px(value: float) -> str:
    return f"{round(value, 1):g}"


def drawn(title: str, height: int) -> Callable[[Callable[[Drawing], None]], Callable[[Drawing], None]]:
    """Declare what a function draws, under its own name with hyphens; ValueError where two have the same."""

    def declare(draw: Callable[[Drawing], None]) -> Callable[[Drawing], None]:
        name = draw.__name__.replace("_", "-")
        if name in DRAWINGS:
            raise ValueError(f"{name} is drawn in {draw.__module__} and in another module")

        def complete() -> Drawing:
            drawing = Drawing(title, height)
            draw(drawing)
            return drawing

        DRAWINGS[name] = complete
        return draw

    return declare

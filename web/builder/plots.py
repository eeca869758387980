"""Plots as SVG, drawn while the site is built: they need no script, print, and take their colours from the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

Points = Sequence[tuple[float, float]]

_SPAN = 10.0  # of an axis at least, as a factor
_ROOM = 1.6  # around the values, as a factor
_LEADS = (1, 2, 5, 3, 1.5, 7, 8, 9, 1.2, 1.1, 6, 4)  # the roundest first


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values on a range of pixels, linear or logarithmic; ``end`` may lie before ``start``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; outside of the range, that of the nearer end."""
        kept = min(max(value, self.low), self.high)
        share = (
            math.log(kept / self.low) / math.log(self.high / self.low)
            if self.log
            else (kept - self.low) / (self.high - self.low)
        )
        return self.start + share * (self.end - self.start)

    def ticks(self, apart: float) -> list[float]:
        """Round values inside of the range, at least so many pixels apart: the roundest first."""
        if not self.log:
            return self._even(apart)
        found: list[float] = []
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for value in sorted((lead * 10.0**power for lead in _LEADS for power in powers), key=_roundness):
            if self.low <= value <= self.high and all(abs(self.at(value) - self.at(each)) >= apart for each in found):
                found.append(value)
        return sorted(found)

    def _even(self, apart: float) -> list[float]:
        """Multiples of the smallest round step that is as long as that."""
        least = apart * (self.high - self.low) / abs(self.end - self.start)
        power = 10.0 ** math.floor(math.log10(least))
        step = next(lead * power for lead in (1, 2, 5, 10) if lead * power >= least)
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def around(values: Sequence[float], start: float, end: float) -> Axis:
    """A logarithmic axis with room on both sides of the values, of ten times at least."""
    low, high = min(values) / _ROOM, max(values) * _ROOM
    spare = max(1.0, (_SPAN / (high / low)) ** 0.5)
    return Axis(low / spare, high * spare, start, end, log=True)


def _roundness(value: float) -> tuple[int, float]:
    """One before its powers of ten, these before their doubles and halves, and so on."""
    lead = round(value / 10.0 ** math.floor(math.log10(value) + 1e-9), 3)
    return _LEADS.index(lead), abs(math.log(value))


class Plot:
    """A drawing of so many pixels. ``css`` are classes, which give the colours; data become attributes."""

    def __init__(self, width: float, height: float) -> None:
        self._size = width, height
        self._parts: list[Markup] = []

    def line(self, points: Points, css: str) -> None:
        path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self._parts.append(Markup('<path class="{}" d="{}"/>').format(css, path))

    def rect(self, x: float, y: float, width: float, height: float, css: str) -> None:
        self._parts.append(
            Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
                css, _n(x), _n(y), _n(width), _n(height)
            )
        )

    def text(self, x: float, y: float, told: str, css: str = "") -> None:
        """``start``, ``middle`` or ``end`` among the classes say which part of it is at x."""
        self._parts.append(Markup('<text class="{}" x="{}" y="{}">{}</text>').format(css, _n(x), _n(y), told))

    def mark(
        self, x: float, y: float, css: str, *, diamond: bool = False, data: Mapping[str, str] | None = None
    ) -> None:
        """A point: a circle, or a diamond of the same width."""
        attributes = _attributes(data or {})
        self._parts.append(
            Markup('<path class="{}" d="M{} {}l4.5 4.5l-4.5 4.5l-4.5 -4.5z"{}/>').format(
                css, _n(x), _n(y - 4.5), attributes
            )
            if diamond
            else Markup('<circle class="{}" cx="{}" cy="{}" r="4"{}/>').format(css, _n(x), _n(y), attributes)
        )

    def begin(self, css: str, **data: str) -> None:
        """Open a group; ``end`` closes it."""
        self._parts.append(Markup('<g class="{}"{}>').format(css, _attributes(data)))

    def end(self) -> None:
        self._parts.append(Markup("</g>"))

    def across(self, axis: Axis, y: float, apart: float = 56) -> None:
        """Ticks of a horizontal axis below a line at y."""
        for value in axis.ticks(apart):
            self.text(axis.at(value), y + 14, _tick(value), "tick middle")

    def up(self, axis: Axis, left: float, right: float, apart: float = 24, sign: str = "") -> None:
        """Ticks of a vertical axis at the left, and lines from them to the right."""
        for value in axis.ticks(apart):
            self.line([(left, axis.at(value)), (right, axis.at(value))], "grid")
            self.text(left - 6, axis.at(value) + 4, _tick(value) + sign, "tick end")

    def svg(self, told: str, css: str = "") -> Markup:
        """The drawing as an element; ``told`` is the sentence for those who cannot see it."""
        width, height = self._size
        return Markup(
            '<svg class="plot {}" role="img" aria-label="{}" viewBox="0 0 {} {}" style="width: {}px">{}</svg>'
        ).format(css, told, _n(width), _n(height), _n(width), Markup().join(self._parts))


def _attributes(data: Mapping[str, str]) -> Markup:
    return Markup().join(Markup(' data-{}="{}"').format(key, escape(value)) for key, value in data.items())


def _tick(value: float) -> str:
    return f"{value:,.10g}" if value >= 1e-3 else f"{value:g}"


def _n(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")

"""Ratios on a log axis as small drawings, one a row of a table, with the axis at its head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from builder.plots import Axis
from kernel_twins.report.meaning.verdict import SAME, Ratio

_HEIGHT = 18
_HEAD = 22
_DOT = 3.0
_LANES = (0.0, -3.5, 3.5)  # dots that lie on each other are told apart by height


@dataclass(frozen=True, slots=True)
class Scale:
    """From ``1 / most`` to ``most``; ``name`` tells it from others of the page."""

    name: str
    most: float
    ticks: Sequence[float]
    width: int = 220

    def x(self, ratio: float) -> float:
        """Where a ratio lies; what is off the scale lies at its end."""
        return round(Axis(1 / self.most, self.most, 8, self.width - 8, log=True).at(ratio), 2)

    def head(self) -> Markup:
        """The axis with its ticks, and the grid that each row uses: the band within which two calls are the same.

        Where the band is thinner than a pixel, a line stands in its middle.
        """
        left, right = self.x(1 / SAME), self.x(SAME)
        band = round(right - left, 2)
        labels = Markup("").join(
            Markup('<text x="{}" y="14">{:g} ×</text>').format(self.x(tick), tick) for tick in self.ticks
        )
        lines = Markup("").join(
            Markup('<path class="{}" d="M{} 0V{}"/>').format("one" if tick == 1 else "tick", self.x(tick), _HEIGHT)
            for tick in self.ticks
            if tick != 1 or band < 1
        )
        return Markup(
            '<svg class="axis" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" aria-label="{about}"><defs>'
            '<g id="{name}-grid"><rect class="band" x="{left}" width="{band}" height="{row}"/>{lines}</g></defs>'
            "{labels}</svg>"
        ).format(
            w=self.width,
            h=_HEAD,
            row=_HEIGHT,
            about=f"log axis from {self.ticks[0]:g} × to {self.ticks[-1]:g} ×, faster to the right",
            name=self.name,
            left=left,
            band=band,
            lines=lines,
            labels=labels,
        )

    def interval(self, ratio: Ratio, verdict: str) -> Markup:
        """A ratio as a dot and its interval as a line; off the scale the dot is an arrow."""
        middle = self.x(ratio.value)
        if 1 / self.most <= ratio.value <= self.most:
            mark = Markup('<circle cx="{}" cy="9" r="{}"/>').format(middle, _DOT)
        else:
            mark = Markup('<path class="off" d="M{} 5v8l{} -4z"/>').format(middle, 7 if ratio.value > 1 else -7)
        line = Markup('<path d="M{} 9H{}"/>').format(self.x(ratio.low), self.x(ratio.high))
        return self._row(verdict, line + mark)

    def strip(self, ratios: Iterable[float], mean: float | None, series: str) -> Markup:
        """A dot a ratio and the mean as a stroke; a ratio of 0, a result without a time, is a cross at the left end."""
        ordered = sorted(ratios)
        dots = "".join(
            f"M{self.x(ratio)} {9 + _LANES[rank % len(_LANES)]}h0" for rank, ratio in enumerate(ordered) if ratio > 0
        )
        crosses = "M4 5l8 8m0-8l-8 8" if ordered and ordered[0] <= 0 else ""
        stroke = f"M{self.x(mean)} 1v16" if mean is not None else ""
        marks = Markup('<path class="dots" d="{}"/><path class="mean" d="{}"/><path class="cross" d="{}"/>')
        return self._row(series, marks.format(dots, stroke, crosses))

    def _row(self, kind: str, marks: Markup) -> Markup:
        return Markup(
            '<svg class="row {kind}" width="{w}" height="{h}" viewBox="0 0 {w} {h}" aria-hidden="true">'
            '<use href="#{name}-grid"/>{marks}</svg>'
        ).format(kind=kind, w=self.width, h=_HEIGHT, name=self.name, marks=marks)

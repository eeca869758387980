"""How figures look: one width, one set of colours, a white card that reads on a light page and on a dark one.

Lengths are pixels of a browser's, from the card's upper left corner. Text stays text, so the browser sets it in the
font that it finds: ``width`` measures in DejaVu Sans, which is as wide as any of the stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.textpath import text_to_path

WIDTH = 846
"""That of GitHub's column for a README."""
MARGIN = 18
PX = 0.75
"""Of a pixel, in points."""
SMALL, TEXT, TITLE = 11.0, 12.0, 15.0

INK, FAINT, GRID, BORDER = "#1f2328", "#59636e", "#e4e7eb", "#d0d7de"
# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {
    "cuda": "#009e73",
    "triton": "#0072b2",
    "auto": "#1f2328",
    "torch": "#d55e00",
    "compile": "#e69f00",
    "liger": "#56b4e9",
    "quack": "#cc79a7",
    "cub": "#4d4d4d",
    "cublaslt": "#4d4d4d",
    "cudnn": "#4d4d4d",
    "flash": "#56b4e9",
    "flash4": "#882255",
    "max_autotune": "#cc79a7",
    "ceiling": "#8c959f",
}
SHADE = "#f6f8fa"
"""Of a plot, and of every other row."""
MARKS = {"cuda": "o", "triton": "D"}
PALE = 0.4

_RC: dict[str, object] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "svg.fonttype": "none",
    "path.simplify": False,
    "svg.hashsalt": "kernel-twins",
    "text.color": INK,
    "axes.edgecolor": BORDER,
    "axes.linewidth": 0.75,
    "axes.axisbelow": True,
    "xtick.color": BORDER,
    "ytick.color": BORDER,
    "xtick.labelcolor": FAINT,
    "ytick.labelcolor": FAINT,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
}
_READABLE = 4.5  # contrast of text with white, after WCAG 2


@contextmanager
def in_force() -> Iterator[None]:
    """Where figures are made and where they are saved: ids and fonts are decided at the latter."""
    with matplotlib.rc_context(_RC):  # type: ignore[arg-type]  # its keys are literals there
        yield


@cache
def width(text: str, size: float = TEXT, bold: bool = False) -> float:
    """A text's, in pixels."""
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=size)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0])


@cache
def ink(colour: str) -> str:
    """A colour dark enough for text on white."""
    rgb = to_rgb(colour)
    while 1.05 / (_luminance(rgb) + 0.05) < _READABLE:
        rgb = (0.95 * rgb[0], 0.95 * rgb[1], 0.95 * rgb[2])
    return to_hex(rgb)


def _luminance(rgb: tuple[float, float, float]) -> float:
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def wrapped(text: str, room: float, size: float, bold: bool = False) -> list[str]:
    """The text in lines that are no wider than ``room``."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if width(longer, size, bold) > room and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


class Card:
    """A figure with its headline: the message in bold, what follows from it, and how the marks are read.

    ``top`` is where the headline ends; what is drawn below takes ``body`` pixels.
    """

    def __init__(self, message: str, more: str, key: str, body: float) -> None:
        lines: list[tuple[str, float, str]] = []
        room = WIDTH - 2 * MARGIN
        for text, size, weight in ((message, TITLE, "bold"), (more, 13.0, "normal"), (key, SMALL, "light")):
            lines += [(line, size, weight) for line in wrapped(text, 0.98 * room, size, weight == "bold") if text]
        self.top = MARGIN - 4 + sum(_leading(size) for _, size, _ in lines) + 6
        self.height = self.top + body
        self.figure = Figure(figsize=(WIDTH / 96, self.height / 96))
        self._card()
        below = MARGIN - 4.0
        for line, size, weight in lines:
            below += _leading(size)
            self.text(
                MARGIN, below - 5, line, size, FAINT if weight == "light" else INK, bold=weight == "bold", base=True
            )
        self.figure.set_label(message)

    def _card(self) -> None:
        card = FancyBboxPatch(
            (1, 1),
            WIDTH - 2,
            self.height - 2,
            boxstyle="round,pad=0,rounding_size=8",
            facecolor="white",
            edgecolor=BORDER,
            linewidth=PX,
            transform=self._pixels(),
            zorder=-3,
        )
        self.figure.add_artist(card)

    def _pixels(self) -> matplotlib.transforms.Transform:
        scaled = matplotlib.transforms.Affine2D().scale(1 / WIDTH, -1 / self.height).translate(0, 1)
        return scaled + self.figure.transFigure

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = TEXT,
        colour: str = INK,
        *,
        align: str = "left",
        bold: bool = False,
        base: bool = False,
    ) -> None:
        """A line of text, ``y`` being its middle, or its ``base`` line."""
        self.figure.text(
            x,
            y if base else y + 0.36 * size,
            text,
            fontsize=size * PX,
            color=colour,
            ha=align,
            va="baseline",
            weight="bold" if bold else "normal",
            transform=self._pixels(),
        )

    def line(self, xs: Sequence[float], ys: Sequence[float], colour: str = GRID, thick: float = 1.0) -> None:
        self.figure.add_artist(Line2D(xs, ys, color=colour, linewidth=thick * PX, transform=self._pixels(), zorder=-1))

    def box(self, x: float, y: float, wide: float, high: float, colour: str) -> None:
        self.figure.add_artist(
            Rectangle((x, y), wide, high, color=colour, linewidth=0, transform=self._pixels(), zorder=-2)
        )

    def band(self, middle: float, high: float) -> None:
        """The shade of every other row of a list, from border to border."""
        self.box(MARGIN - 6, middle - high / 2, WIDTH - 2 * MARGIN + 12, high, SHADE)

    def axes(self, left: float, top: float, wide: float, high: float) -> Axes:
        """Axes in that place, without a frame or ticks."""
        place = (left / WIDTH, 1 - (top + high) / self.height, wide / WIDTH, high / self.height)
        axes = self.figure.add_axes(place)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xticks([], minor=False)
        axes.set_yticks([], minor=False)
        axes.minorticks_off()
        return axes


def _leading(size: float) -> float:
    return round(1.4 * size)


def spread(wanted: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, in any order, at least ``apart`` from each other and within the range.

    ValueError where the range is too short for them.
    """
    if (len(wanted) - 1) * apart > high - low:
        raise ValueError(f"{len(wanted)} places {apart} apart do not fit between {low} and {high}")
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    # Of a run of places that touch, each is where it is nearest to all that were wanted: the mean of what they ask for.
    runs: list[tuple[float, int]] = []  # first place, how many
    for index in order:
        start, count = wanted[index], 1
        while runs and runs[-1][0] + runs[-1][1] * apart > start:
            before, many = runs.pop()
            start = (before * many + (start - many * apart) * count) / (many + count)
            count += many
        runs.append((start, count))
    flat = [start + index * apart for start, count in runs for index in range(count)]
    for index in range(len(flat)):
        flat[index] = max(flat[index], low + index * apart)
    for index in reversed(range(len(flat))):
        flat[index] = min(flat[index], high - (len(flat) - 1 - index) * apart)
    placed = [0.0] * len(wanted)
    for place, index in zip(flat, order, strict=True):
        placed[index] = place
    return placed

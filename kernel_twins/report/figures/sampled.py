"""Sampled cases of the public functions: a row a function and pass, a dot a case, a lane for each backend asked for."""

from __future__ import annotations

from collections.abc import Sequence
from math import log, nan
from pathlib import Path
from statistics import geometric_mean

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernel_twins.report.calls import sampled_table
from kernel_twins.report.calls.sampled_cases import CONTESTS
from kernel_twins.report.calls.sampled_figures import LEAST
from kernel_twins.report.figures import style, words
from kernel_twins.report.figures.style import COLOURS, FAINT, INK, MARGIN, PX, SMALL, WIDTH, Card, ink

_LANE, _GAP = 13.0, 7.0
_LEAST, _MOST = 0.1, 10.0
_TICKS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BESIDE = (0.0, -3.0, 3.0)
_MEAN, _BELOW = 62.0, 74.0  # columns
_ROW = len(sampled_table.OURS) * _LANE + _GAP


def read(folder: Path) -> pd.DataFrame:
    """A row for each of ours at a case with its ``ratio``; empty where no recording is published."""
    table = sampled_table.read(folder)
    return table if table.empty else sampled_table.compared(table)


def draw(cells: pd.DataFrame) -> Figure:
    """Of what ``read`` gives, where that is not empty."""
    rows = [(contest, its) for contest in CONTESTS if len(its := _of(cells, *contest))]
    card = Card(*_told(cells, rows), 34 + len(rows) * _ROW + 30)
    left = MARGIN + max(style.width(_name(contest)) for contest, _ in rows) + 72
    right, top = WIDTH - MARGIN - _MEAN - _BELOW, card.top + 34
    axes = card.axes(left, top, right - left, len(rows) * _ROW)
    axes.set_xscale("log")
    axes.set_xlim(_LEAST, _MOST)
    axes.set_ylim(len(rows) * _ROW, 0)
    axes.set_xticks([], minor=True)
    axes.set_xticks([])
    for index, (contest, its) in enumerate(rows):
        above = index * _ROW
        if index % 2 == 0:
            card.band(top + above + _ROW / 2, _ROW)
        card.text(left - 72, top + above + _ROW / 2, _name(contest), align="right")
        for lane, (backend, title) in enumerate(sampled_table.OURS.items()):
            middle = above + _GAP / 2 + (lane + 0.5) * _LANE
            card.text(left - 14, top + middle, title, SMALL, ink(COLOURS[backend]), align="right")
            ratios = list(its["ratio"][its["backend"] == backend])
            _lane(axes, ratios, middle, COLOURS[backend])
            for column, text in zip((_BELOW, 0.0), _figures(ratios), strict=True):
                card.text(WIDTH - MARGIN - column, top + middle, text, SMALL, ink(COLOURS[backend]), align="right")
    for tick in _TICKS:
        x = left + (right - left) * log(tick / _LEAST) / log(_MOST / _LEAST)
        axes.axvline(
            tick, color=INK if tick == 1 else style.GRID, linewidth=(1.25 if tick == 1 else 1) * PX, zorder=0.3
        )
        sign = "≤ " if tick == _LEAST else "≥ " if tick == _MOST else ""
        for y in (top - 10, top + len(rows) * _ROW + 12):
            card.text(x, y, f"{sign}{tick:g} ×", SMALL, INK if tick == 1 else FAINT, align="center", bold=tick == 1)
    card.text(WIDTH - MARGIN - _BELOW, top - 25, "geometric", SMALL, FAINT, align="right")
    card.text(WIDTH - MARGIN - _BELOW, top - 10, "mean", SMALL, FAINT, align="right")
    card.text(WIDTH - MARGIN, top - 25, "cases", SMALL, FAINT, align="right")
    card.text(WIDTH - MARGIN, top - 10, f"below {LEAST:g}", SMALL, FAINT, align="right")
    return card.figure


def _of(cells: pd.DataFrame, function: str, direction: str) -> pd.DataFrame:
    return cells[(cells["function"] == function) & (cells["pass"] == direction)]


def _name(contest: tuple[str, str]) -> str:
    function, direction = contest
    return f"{function}, {direction}" if direction != "forward" else function


def _lane(axes: Axes, ratios: Sequence[float], middle: float, colour: str) -> None:
    """A dot a case, and the geometric mean as a stroke. What is off the scale, or gave no time, lies at its end.

    Dots are the round ends of strokes without length, all of one path: a mark each would make a file of megabytes.
    Neighbours lie beside each other, so that they can be counted.
    """
    xs: list[float] = []
    ys: list[float] = []
    for rank, ratio in enumerate(sorted(ratios)):
        x, y = min(max(ratio, _LEAST), _MOST), middle + _BESIDE[rank % len(_BESIDE)]
        xs += [x, x, nan]
        ys += [y, y, nan]
    axes.plot(xs, ys, color=colour, linewidth=4.5 * PX, solid_capstyle="round", alpha=0.6, clip_on=False)
    if timed := [ratio for ratio in ratios if ratio > 0]:
        mean = min(max(geometric_mean(timed), _LEAST), _MOST)
        axes.plot(
            [mean, mean], [middle - 6, middle + 6], color=colour, linewidth=3 * PX, solid_capstyle="butt", zorder=4,
            clip_on=False,
        )  # fmt: skip


def _figures(ratios: Sequence[float]) -> tuple[str, str]:
    """The geometric mean of those with a time, and how many are below the least that is aimed at."""
    timed = [ratio for ratio in ratios if ratio > 0]
    below = sum(ratio < LEAST for ratio in ratios)
    return words.times(geometric_mean(timed)) if timed else "–", f"{below} of {len(ratios)}"


def _told(cells: pd.DataFrame, rows: Sequence[tuple[tuple[str, str], pd.DataFrame]]) -> tuple[str, str, str]:
    auto = [(mean, _name(contest)) for contest, its in rows if (mean := _mean(its)) is not None]
    overall = _mean(cells)
    if overall is None:
        message, more = 'Sampled cases: "auto" gave no time', ""
    else:
        ahead = sum(mean >= 1 for mean, _ in auto)
        (low, worst), (high, best) = min(auto), max(auto)
        message = (
            f'Sampled cases: "auto" is {words.times(overall)} as fast as the best of the others, '
            f"and ahead in {ahead} of {len(rows)} rows"
        )
        more = f"Geometric means go from {words.times(low)} ({worst}) to {words.times(high)} ({best})."
    count = len(_of(cells, *rows[0][0])) // len(sampled_table.OURS)
    key = (
        f"a dot is a case drawn by a seed, {count} a row; further right is faster; a stroke is the geometric mean; "
        "what is off the scale lies at its end, a wrong result at the left one; "
        "the best of the others is of PyTorch, Liger, quack and, at every third case, torch.compile"
    )
    return message, more, key


def _mean(cells: pd.DataFrame) -> float | None:
    """The geometric mean of "auto" where it gave a time; None where it never did."""
    timed = cells["ratio"][(cells["backend"] == "auto") & (cells["ratio"] > 0)]
    return geometric_mean(timed) if len(timed) else None

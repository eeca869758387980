"""Cases that have no size in common: a row a case, both languages' speed as a multiple of the best baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from matplotlib.figure import Figure

from kernel_twins.report.figures import style, words
from kernel_twins.report.figures.style import COLOURS, FAINT, INK, MARGIN, PX, SMALL, WIDTH, Card, ink
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import BACKENDS, Case

_ROW, _RATIO, _BASELINE = 21.0, 62.0, 122.0
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0)

Ratios = dict[str, float]  # by language


def draw(results: Results, cases: Sequence[Case]) -> Figure:
    """The cases where ours gain most stand at the top; those without a baseline's time at the bottom."""
    rows = [(case, _ratios(results, case)) for case in cases]
    rows.sort(key=lambda row: -max(row[1].values(), default=0.0))
    message, more = _told(results, [row for row in rows if row[1]])
    card = Card(message, more, _key(results), 32 + len(rows) * _ROW + 34)
    names = {case: words.case(case) for case, _ in rows}
    left = MARGIN + max(style.width(name) for name in names.values()) + 16
    right, top = WIDTH - MARGIN - _BASELINE - 2 * _RATIO - 8, card.top + 32
    axes = card.axes(left, top, right - left, len(rows) * _ROW)
    found = [ratio for _, its in rows for ratio in its.values()] or [1.0]
    least, most = min(0.9, *found) * 0.95, max(1.1, *found) * 1.05
    axes.set_xscale("log")
    axes.set_xlim(least, most)
    axes.set_ylim(len(rows) * _ROW, 0)
    axes.set_xticks([], minor=True)
    axes.set_xticks([])
    for index, (case, its) in enumerate(rows):
        middle = top + (index + 0.5) * _ROW
        if index % 2 == 0:
            card.band(middle, _ROW)
        card.text(left - 12, middle, names[case], align="right")
        if len(its) > 1:
            axes.plot(list(its.values()), [(index + 0.5) * _ROW] * len(its), color=style.BORDER, linewidth=2 * PX)
        for backend, ratio in its.items():
            axes.plot(
                ratio,
                (index + 0.5) * _ROW,
                marker=style.MARKS[backend],
                markersize=8 * PX,
                color=COLOURS[backend],
                markeredgecolor="white",
                markeredgewidth=PX,
                clip_on=False,
            )
        for backend, column in zip(BACKENDS, (1, 0), strict=True):
            told = words.times(its[backend]) if backend in its else "–"
            card.text(_column(column), middle, told, style.TEXT, ink(COLOURS[backend]), align="right")
        best = results.best_baseline(case)
        card.text(_column(0) + 16, middle, words.title(best.backend) if best else "–", SMALL, FAINT)
    axes.axvline(1, color=INK, linewidth=1.25 * PX, zorder=1)
    ticks = [1.0]
    for tick in _TICKS:
        apart = (right - left) / log(most / least)
        if least < tick < most and all(abs(log(tick / each)) * apart > 40 for each in ticks):
            ticks.append(tick)
    for tick in ticks:
        x = left + (right - left) * log(tick / least) / log(most / least)
        axes.axvline(tick, color=style.GRID, linewidth=PX, zorder=0.3)
        card.text(x, top + len(rows) * _ROW + 12, f"{tick:g} ×", SMALL, FAINT, align="center")
    for backend, column in zip(BACKENDS, (1, 0), strict=True):
        card.text(
            _column(column), top - 12, words.title(backend), SMALL, ink(COLOURS[backend]), align="right", bold=True
        )
    card.text(_column(0) + 16, top - 12, "best baseline", SMALL, FAINT)
    return card.figure


def _column(index: int) -> float:
    return WIDTH - MARGIN - _BASELINE - index * _RATIO


def _ratios(results: Results, case: Case) -> Ratios:
    best = results.best_baseline(case)
    if best is None:
        return {}
    lasts = words.last(results, case)
    found: dict[str, float | None] = {each: words.against(results, case, lasts[each], best) for each in lasts}
    return {backend: ratio for backend, ratio in found.items() if ratio is not None}


def _told(results: Results, rows: Sequence[tuple[Case, Ratios]]) -> tuple[str, str]:
    said = words.reached([ratios for _, ratios in rows])
    worst: list[str] = []
    for backend in BACKENDS:
        if its := [ratios[backend] for _, ratios in rows if backend in ratios]:
            worst.append(f"{words.title(backend)}'s {words.times(min(its))}")
    title = f"{results.op.title}, other shapes" if results.op.size_axis else results.op.title
    if not said:
        return title, ""
    more = f"Geometric mean of {len(rows)} cases; the worst {'are' if len(worst) > 1 else 'is'} {' and '.join(worst)}."
    return f"{title}: {said}", more


def _key(results: Results) -> str:
    told = ["speed over the best baseline's at each case", "further right is faster"]
    if results.ceilings:
        told.insert(0, words.gpu(results.ceilings.gpu))
    return " · ".join(told)

"""Speed against size, as a multiple of the best baseline's at each: what others lose, and where.

Each group of cases has a plot, and below it, in numbers, both languages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from statistics import geometric_mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernel_twins.report.figures import style, words
from kernel_twins.report.figures.groups import ALIGNED, JOINED, Group
from kernel_twins.report.figures.style import COLOURS, FAINT, INK, MARGIN, PX, SMALL, WIDTH, Card, ink
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import BACKENDS, Case, SizeAxis

_HIGH = 230.0  # of the plot
_LEFT = 66.0
_FLOOR = 0.2  # what is slower stands at the lower border
_TICKS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0)


def draw(results: Results, axis: SizeAxis, shown: Sequence[Group]) -> Figure:
    """Of groups whose cases were timed."""
    points = {case: words.multiples(results, case) for group in shown for case in group.cases}
    ends = _ends(shown[0], points, axis.size)
    labels = 24 + max((style.width(label, SMALL, bold=True) for label, _ in ends.values()), default=0)
    message, more = _told(results, shown, axis, points)
    longest = max(len(_stacked(group)) for group in shown)
    card = Card(message, more, _key(results, shown, axis, points), 14 + _HIGH + 22 + 2 * 17 + 10 + longest * 14 + 12)
    top, right = card.top + 14, WIDTH - MARGIN
    least, most = _range(points)
    room = right - _LEFT - labels - 14 * (len(shown) - 1)
    wide = _widths(shown, room)
    left = _LEFT
    for index, (group, its) in enumerate(zip(shown, wide, strict=True)):
        axes = card.axes(left, top, its, _HIGH)
        axes.set_xlim(-0.5, len(group.cases) - 0.5)
        axes.set_yscale("log")
        axes.set_ylim(least, most)
        axes.set_yticks([], minor=True)
        axes.set_yticks([])
        card.box(left, top, its, _HIGH, style.SHADE)
        for tick in _ticks(least, most):
            axes.axhline(tick, color=style.GRID, linewidth=PX, zorder=0.3)
        axes.axhline(1, color=INK, linewidth=1.25 * PX, zorder=1)
        _draw_group(axes, group, points)
        _numbers(card, group, points, axis.size, left, its, top + _HIGH)
        if index == 0:
            _scale(card, least, most, top)
            _label_ends(card, ends, left + its, top, lambda ratio: _at(ratio, least, most))
            left += labels
        left += its + 14
    return card.figure


def _range(points: dict[Case, dict[str, float]]) -> tuple[float, float]:
    ratios = [ratio for its in points.values() for ratio in its.values()] or [1.0]
    return max(_FLOOR, min(0.9, min(ratios))) * 0.96, max(1.1, max(ratios)) * 1.08


def _at(ratio: float, least: float, most: float) -> float:
    """Pixels below the plot's upper border."""
    return _HIGH * log(most / max(ratio, least)) / log(most / least)


def _widths(shown: Sequence[Group], room: float) -> list[float]:
    """Of each group, by its points, but wide enough for its caption and numbers."""
    least = [
        max([style.width(line, SMALL) + 4 for line in _stacked(group)] + [38.0 * len(group.cases)]) for group in shown
    ]
    spare = (room - sum(least)) / sum(len(group.cases) for group in shown)
    return [wide + spare * len(group.cases) for wide, group in zip(least, shown, strict=True)]


def _stacked(group: Group) -> list[str]:
    """A caption in lines as wide as its points ask for."""
    lines = [""]
    for fact in group.facts:
        longer = ", ".join(filter(None, (lines[-1], fact)))
        if lines[-1] and style.width(longer, SMALL) > 38 * len(group.cases):
            lines.append(fact)
        else:
            lines[-1] = longer
    return lines


def _draw_group(axes: Axes, group: Group, points: dict[Case, dict[str, float]]) -> None:
    names = dict.fromkeys(name for case in group.cases for name in points[case])
    for name in sorted(names, key=lambda each: each in BACKENDS):  # ours above the others
        places = [index for index, case in enumerate(group.cases) if name in points[case]]
        ratios = [max(points[group.cases[index]][name], _FLOOR) for index in places]
        ours = name in BACKENDS
        if group.is_joined and len(places) >= JOINED:
            axes.plot(
                places, ratios, color=COLOURS[name], linewidth=(2.2 if ours else 1.4) * PX, zorder=3 if ours else 2
            )
        for below in (False, True):
            its = [(at, ratio) for at, ratio in zip(places, ratios, strict=True) if (ratio == _FLOOR) == below]
            axes.plot(
                [at for at, _ in its],
                [ratio for _, ratio in its],
                linestyle="none",
                marker="v" if below else style.MARKS.get(name, "s"),
                markersize=(6.5 if ours or below else 5) * PX,
                markerfacecolor="white" if group.is_odd else COLOURS[name],
                markeredgecolor=COLOURS[name],
                markeredgewidth=(1.6 if group.is_odd else 0) * PX,
                zorder=4 if ours else 3,
                clip_on=False,
            )


def _numbers(
    card: Card,
    group: Group,
    points: dict[Case, dict[str, float]],
    size: Callable[[Case], int],
    left: float,
    wide: float,
    below: float,
) -> None:
    """Sizes, both languages' multiples, and the group's caption."""
    each = wide / len(group.cases)
    for index, case in enumerate(group.cases):
        x = left + (index + 0.5) * each
        card.text(x, below + 12, words.size(size(case)), SMALL, INK, align="center")
        for row, backend in enumerate(BACKENDS):
            ratio = points[case].get(backend)
            text = "–" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
            card.text(x, below + 33 + 17 * row, text, SMALL, ink(COLOURS[backend]), align="center")
    card.line([left, left + wide], [below + 65, below + 65], style.BORDER)
    for row, line in enumerate(_stacked(group)):
        card.text(left + wide / 2, below + 76 + 14 * row, line, SMALL, FAINT, align="center")


def _ticks(least: float, most: float) -> list[float]:
    """Labels at least 16 pixels apart, 1 among them."""
    found = [1.0]
    for tick in sorted(_TICKS, key=lambda tick: tick != 1):
        if least < tick < most and all(abs(_at(tick, least, most) - _at(each, least, most)) >= 16 for each in found):
            found.append(tick)
    return found


def _scale(card: Card, least: float, most: float, top: float) -> None:
    for tick in _ticks(least, most):
        card.text(_LEFT - 8, top + _at(tick, least, most), f"{tick:g} ×", SMALL, FAINT, align="right")
    for row, backend in enumerate(BACKENDS):
        card.text(
            MARGIN - 2, top + _HIGH + 33 + 17 * row, words.title(backend), SMALL, ink(COLOURS[backend]), bold=True
        )


def _ends(
    group: Group, points: dict[Case, dict[str, float]], size: Callable[[Case], int]
) -> dict[str, tuple[str, float]]:
    """By name, how it is labelled and its last point; of one that ends before the others do, where."""
    found: dict[str, tuple[str, float]] = {}
    for case in group.cases:
        for name, ratio in points[case].items():
            ended = f" to {words.size(size(case))}" if name not in points[group.cases[-1]] else ""
            found[name] = f"{words.title(name)}{ended}", ratio
    return found


def _label_ends(
    card: Card, ends: dict[str, tuple[str, float]], x: float, top: float, place: Callable[[float], float]
) -> None:
    """Who is who, beside the group's last points."""
    wanted = [place(ratio) for _, ratio in ends.values()]
    placed = style.spread(wanted, 15, 6, _HIGH - 6)
    for (name, (label, _)), point, at in zip(ends.items(), wanted, placed, strict=True):
        card.line([x + 1, x + 12], [top + point, top + at], COLOURS[name])
        card.text(x + 15, top + at, label, SMALL, ink(COLOURS[name]), bold=name in BACKENDS)


def _told(
    results: Results, shown: Sequence[Group], axis: SizeAxis, points: dict[Case, dict[str, float]]
) -> tuple[str, str]:
    said = words.reached(points.values())
    worst: list[str] = []
    for backend in BACKENDS:
        its = [(ratios[backend], case) for case, ratios in points.items() if backend in ratios]
        if its:
            ratio, case = min(its, key=lambda each: each[0])
            known = {*shown[0].cases[0].variant}
            other = words.facts(each for each in case.variant if each not in known)
            at = ", ".join([f"{words.size(axis.size(case))} {case.dtype}", *other])
            worst.append(f"{words.title(backend)}'s {words.times(ratio)} at {at}")
    if not said:
        return results.op.title, ""
    odd = [points[case] for group in shown if group.is_odd for case in group.cases]
    means = [
        words.times(geometric_mean(its[backend] for its in odd if backend in its))
        for backend in BACKENDS
        if any(backend in its for its in odd)
    ]
    apart = f" (unaligned alone {' and '.join(means)})" if means else ""
    verb = "are" if len(worst) > 1 else "is"
    more = f"Geometric mean of {len(points)} cases{apart}; the worst {verb} {' and '.join(worst)}."
    return f"{results.op.title}: {said}", more


def _key(results: Results, shown: Sequence[Group], axis: SizeAxis, points: dict[Case, dict[str, float]]) -> str:
    told = [f"speed over the best baseline's at each size, {axis.label}"]
    if results.ceilings:
        told.insert(0, words.gpu(results.ceilings.gpu))
    told.append("higher is faster")
    if any(ratio < _FLOOR for its in points.values() for ratio in its.values()):
        told.append(f"▾ slower than {_FLOOR} ×")
    if any(group.is_odd for group in shown):
        told.append(f"hollow: rows not at {ALIGNED} bytes")
    return " · ".join(told)

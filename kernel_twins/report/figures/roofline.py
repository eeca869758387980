"""The roofline, a panel a family: FLOP a byte moved in device memory, as counted, against TFLOP/s.

The steps of a ladder are a path with numbers, at the case at which each was profiled; the roofs are the survey's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, hypot, inf, log

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernel_twins.harness.ceilings import Ceilings
from kernel_twins.report.figures import style, words
from kernel_twins.report.figures.placing import Box, Room
from kernel_twins.report.figures.roofs import Path, paths, pipe_of, roof_at
from kernel_twins.report.figures.style import COLOURS, FAINT, INK, MARGIN, PX, SMALL, WIDTH, Card, ink
from kernel_twins.report.meaning.analysis import Results

_WIDE_HIGH, _HIGH, _HEAD, _FOOT, _SIDE = 330.0, 220.0, 24.0, 34.0, 36.0
_MANY = 3  # operations, and more, have a panel as wide as the card, where there is no fast end beside it
_SPARSE, _END = 30.0, 4.0  # factors between the slowest step and the fastest: of a panel, and of its fast end
_FAST = ": the frame at the left, enlarged"
_CLOSE = 13.0  # pixels: steps that share a label
_LEAST_SPAN = 1.5  # of an axis, as a factor
_NEAR = 0.9  # of the roof
_TICKS = tuple(lead * 10.0**power for power in range(-3, 5) for lead in (1, 1.5, 2, 3, 4, 5, 6, 8))


@dataclass(frozen=True, slots=True)
class Scale:
    """Logarithmic in both directions, to a panel's pixels on the card."""

    place: Box
    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, x: float) -> float:
        return self.place.left + (self.place.right - self.place.left) * log(x / self.x[0]) / log(self.x[1] / self.x[0])

    def down(self, y: float) -> float:
        return self.place.bottom - (self.place.bottom - self.place.top) * log(y / self.y[0]) / log(
            self.y[1] / self.y[0]
        )


def draw(results: Sequence[Results], ceilings: Ceilings) -> Figure:
    """Of all operations that were profiled."""
    families = _families(results)
    ends = {family for family in families if f"{family}{_FAST}" in families}
    wide = {family for family, its in families.items() if _is_wide(its)} - {*ends}
    rows = _rows(sorted(families, key=lambda family: (family.partition(":")[0] not in ends, family not in wide)), wide)
    heights = [_HEAD + (_HIGH if row[0] not in {*wide, *ends} else _WIDE_HIGH) + _FOOT for row in rows]
    message, more = _told(families, ceilings)
    key = (
        f"{words.gpu(ceilings.gpu)} · numbers are steps, each where it was profiled · up: TFLOP/s · "
        "right: FLOP a byte of device memory"
    )
    card = Card(message, more, key, 8 + sum(heights) + 6)
    top, right = card.top + 8, float(WIDTH - MARGIN)
    for backend, sign in (("triton", "◆ Triton"), ("cuda", "● CUDA")):
        card.text(right, card.top - 6, sign, SMALL, ink(COLOURS[backend]), align="right", bold=True)
        right -= style.width(sign, SMALL, bold=True) + 14
    for row, height in zip(rows, heights, strict=True):
        each = (WIDTH - 2 * MARGIN) / len(row)
        for column, family in enumerate(row):
            left = MARGIN + column * each + _SIDE
            right = MARGIN + (column + 1) * each - (10 if column + 1 < len(row) else 0)
            _panel(card, family, families[family], ceilings, Box(left, top + _HEAD, right, top + height - _FOOT))
        top += height
    return card.figure


def _families(results: Sequence[Results]) -> dict[str, list[Path]]:
    """The paths of each panel. Products by tensor cores and those in fp32 have one each, or neither could be read."""
    both = {each.op.family for each in results if each.op.ceiling == "bf16"}
    found: dict[str, list[Path]] = {}
    for each in results:
        kind = ", bf16" if each.op.ceiling == "bf16" else ", fp32"
        found.setdefault(each.op.family + (kind if each.op.family in both else ""), []).extend(paths(each))
    panels: dict[str, list[Path]] = {}
    for family, its in found.items():
        if its:
            panels[family] = its
            if fast := _fast_end(its):
                panels[f"{family}{_FAST}"] = fast
    return panels


def _fast_end(its: Sequence[Path]) -> list[Path]:
    """What is close together at the top, if the slowest step is so far away that it could not be read."""
    rates = [y for path in its for _, _, y in path.steps]
    if max(rates) < _SPARSE * min(rates):
        return []
    fast = [Path(path.op, path.backend, tuple(s for s in path.steps if s[2] * _END >= max(rates))) for path in its]
    return [path for path in fast if path.steps]


def _is_wide(its: Sequence[Path]) -> bool:
    return len({path.op for path in its}) >= _MANY


def _rows(order: Sequence[str], wide: set[str]) -> list[list[str]]:
    rows: list[list[str]] = []
    for family in order:
        if family not in wide and rows and len(rows[-1]) == 1 and rows[-1][0] not in wide:
            rows[-1].append(family)
        else:
            rows.append([family])
    return rows


def _panel(card: Card, family: str, its: Sequence[Path], ceilings: Ceilings, place: Box) -> None:
    xs = [x for path in its for _, x, _ in path.steps]
    ys = [y for path in its for _, _, y in path.steps]
    # Room at the sides for the steps' numbers, and above for the operations' names.
    across = _padded(min(xs), max(xs), (70, 80), place.right - place.left)
    scale = Scale(place, across, _padded(min(ys), max(ys), (24, 66), place.bottom - place.top))
    axes = card.axes(place.left, place.top, place.right - place.left, place.bottom - place.top)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(scale.x)
    axes.set_ylim(scale.y)
    for minor in (False, True):
        axes.set_xticks([], minor=minor)
        axes.set_yticks([], minor=minor)
    card.box(place.left, place.top, place.right - place.left, place.bottom - place.top, style.SHADE)
    card.text(place.left, place.top - 11, family, style.TEXT, INK, bold=True)
    _grid(card, axes, scale)
    room = Room(Box(place.left + 2, place.top + 2, place.right - 2, place.bottom - 2))
    for path in its:
        for _, x, y in path.steps:
            room.take(_around(scale.across(x), scale.down(y), 4))
        for (_, x, y), (_, next_x, next_y) in pairwise(path.steps):
            room.cross((scale.across(x), scale.down(y)), (scale.across(next_x), scale.down(next_y)))
    fast = _fast_end(its)
    if fast:
        _frame(card, room, scale, fast)
    elsewhere = min((y for path in fast for _, _, y in path.steps), default=inf)
    _roofs(card, axes, room, scale, its, ceilings)
    for path in its:
        _draw_path(axes, path)
    for op in dict.fromkeys(path.op for path in its):
        _name(card, room, scale, op, [step for path in its if path.op == op for step in path.steps], elsewhere)
    for path in its:
        _numbers(card, room, scale, path, elsewhere)


def _padded(low: float, high: float, pixels: tuple[float, float], length: float) -> tuple[float, float]:
    """Ends of an axis of that length, so many pixels before and after the lowest and the highest value."""
    middle = (log(low) + log(high)) / 2
    half = max(log(high / low), log(_LEAST_SPAN)) / 2
    a_pixel = 2 * half / (length - sum(pixels))
    return exp(middle - half - pixels[0] * a_pixel), exp(middle + half + pixels[1] * a_pixel)


def _around(x: float, y: float, reach: float) -> Box:
    return Box(x - reach, y - reach, x + reach, y + reach)


def _grid(card: Card, axes: Axes, scale: Scale) -> None:
    place, last = scale.place, 0.0
    for tick in _TICKS:
        x = scale.across(tick)
        if scale.x[0] < tick < scale.x[1] and x - last > 46:
            last = x
            axes.axvline(tick, color=style.GRID, linewidth=PX, zorder=0.3)
            card.text(x, place.bottom + 11, f"{tick:,g}", SMALL, FAINT, align="center")
    last = place.bottom + 30
    for tick in _TICKS:
        y = scale.down(tick)
        if scale.y[0] < tick < scale.y[1] and last - y > 24:
            last = y
            axes.axhline(tick, color=style.GRID, linewidth=PX, zorder=0.3)
            card.text(place.left - 6, y, f"{tick:,g}", SMALL, FAINT, align="right")


def _roofs(card: Card, axes: Axes, room: Room, scale: Scale, its: Sequence[Path], ceilings: Ceilings) -> None:
    """The memory's roof, and those of the pipes that are in sight, each with its name on it."""
    pipes = {pipe_of(path.op, ceilings) for path in its}
    slope = ceilings.dram_read / 1e3
    highest = max(rate for _, rate in pipes)
    end = min(scale.x[1], highest / slope)
    axes.plot([scale.x[0], end], [slope * scale.x[0], slope * end], color=COLOURS["ceiling"], linewidth=1.5 * PX)
    room.cross((scale.place.left, scale.down(slope * scale.x[0])), (scale.across(end), scale.down(slope * end)))
    at = min(scale.y[1] * 0.75, slope * end * 0.8)
    for share in (1.0, 0.7, 0.5, 0.35):
        x, y, text = (
            scale.across(at * share / slope),
            scale.down(at * share) - 9,
            f"DRAM {ceilings.dram_read:,.0f} GB/s",
        )
        box = Box(x - style.width(text, SMALL), y - 7, x, y + 7)
        if found := room.first_free([box]):
            card.text(found.right, y, text, SMALL, FAINT, align="right")
            break
    for label, rate in sorted(pipes, key=lambda pipe: pipe[1]):
        if scale.y[0] < rate < scale.y[1] and rate / slope < scale.x[1]:
            room.cross((scale.across(rate / slope), scale.down(rate)), (scale.place.right, scale.down(rate)))
            axes.plot([rate / slope, scale.x[1]], [rate, rate], color=COLOURS["ceiling"], linewidth=1.5 * PX)
            y, text = scale.down(rate) - 9, f"{label} {rate:,.0f} TFLOP/s"
            begin, end, long = scale.across(rate / slope) + 6, scale.place.right - 4, style.width(text, SMALL)
            places = [end - long - share * (end - long - max(begin, scale.place.left + 4)) for share in (0, 0.5, 1)]
            if found := room.first_free([Box(x, y - 7, x + long, y + 7) for x in places]):
                card.text(found.left, y, text, SMALL, FAINT)


def _draw_path(axes: Axes, path: Path) -> None:
    xs, ys = [x for _, x, _ in path.steps], [y for _, _, y in path.steps]
    colour = COLOURS[path.backend]
    axes.plot(xs, ys, color=colour, linewidth=1.2 * PX, alpha=0.7, zorder=2)
    axes.plot(
        xs, ys, linestyle="none", marker=style.MARKS[path.backend], markersize=5.5 * PX, color=colour, markeredgewidth=0
    )


def _name(
    card: Card, room: Room, scale: Scale, op: str, steps: Sequence[tuple[str, float, float]], elsewhere: float
) -> None:
    """The operation's, above the highest of its steps; but where that is in another panel, above the lowest one."""
    highest, lowest = (way(steps, key=lambda step: step[2]) for way in (max, min))
    if lowest[2] >= elsewhere:
        return
    _, x, y = lowest if highest[2] >= elsewhere else highest
    across, down, long = scale.across(x), scale.down(y), style.width(op, SMALL, bold=True)
    boxes = [
        Box(across + shift * long - long / 2, down - above - 7, across + shift * long + long / 2, down - above + 7)
        for above in (18, 30, 42, 54, 66, -18, -32)
        for shift in (0, -0.3, 0.3, -0.6, 0.6)
    ]
    if box := room.first_free(boxes):
        card.text(box.left, (box.top + box.bottom) / 2, op, SMALL, INK, bold=True)


def _frame(card: Card, room: Room, scale: Scale, fast: Sequence[Path]) -> None:
    """Around what the panel beside this one shows."""
    xs = [scale.across(x) for path in fast for _, x, _ in path.steps]
    ys = [scale.down(y) for path in fast for _, _, y in path.steps]
    left, right, top, bottom = min(xs) - 8, max(xs) + 8, min(ys) - 8, max(ys) + 8
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    for start, end in pairwise(corners):
        room.cross(start, end)
    card.line([x for x, _ in corners], [y for _, y in corners], FAINT, 0.8)


def _numbers(card: Card, room: Room, scale: Scale, path: Path, elsewhere: float) -> None:
    """CUDA's to the left of their points, Triton's to the right, where there is room.

    Steps of that rate and more have theirs in another panel.
    """
    side = -1 if path.backend == "cuda" else 1
    for label, x, y in _clusters(path, scale, elsewhere):
        long = style.width(label, SMALL)
        box = room.first_free(list(_beside(x, y, long, side)))
        if box is None:
            continue
        middle = (box.top + box.bottom) / 2
        near = box.left if box.left > x else box.right
        if abs(middle - y) > 9:
            card.line([x, near], [y, middle], COLOURS[path.backend], 0.6)
        card.text(box.left, middle, label, SMALL, ink(COLOURS[path.backend]))


def _beside(x: float, y: float, long: float, side: int) -> Iterator[Box]:
    for way in (side, -side):
        for off in (0, -8, 8, -16, 16, -26, 26, -38, 38):
            left = x + way * (8 + abs(off) / 3) - (long if way < 0 else 0)
            yield Box(left, y + off - 7, left + long, y + off + 7)


def _clusters(path: Path, scale: Scale, elsewhere: float) -> list[tuple[str, float, float]]:
    """Labels of slower steps that lie close to each other, with the place of the first of them."""
    found: list[tuple[list[int], float, float]] = []
    for index, (_, x, y) in enumerate(path.steps):
        if y >= elsewhere:
            continue
        across, down = scale.across(x), scale.down(y)
        near = [each for each in found if hypot(each[1] - across, each[2] - down) < _CLOSE]
        if near:
            near[0][0].append(index)
        else:
            found.append(([index], across, down))
    return [(_ranges(path, members), x, y) for members, x, y in found]


def _ranges(path: Path, members: Sequence[int]) -> str:
    """Such as ``4, 8–11``: of steps that follow each other on this ladder the first and the last."""
    runs: list[list[int]] = []
    for index in members:
        if runs and runs[-1][-1] + 1 == index:
            runs[-1].append(index)
        else:
            runs.append([index])
    names = [words.number(name)[1:].lstrip("0") for name, _, _ in path.steps]
    return ", ".join(names[run[0]] if len(run) == 1 else f"{names[run[0]]}–{names[run[-1]]}" for run in runs)


def _told(families: dict[str, list[Path]], ceilings: Ceilings) -> tuple[str, str]:
    best: dict[str, float] = {}
    for path in (path for its in families.values() for path in its):
        share = max(y / roof_at(path.op, x, ceilings) for _, x, y in path.steps)
        best[path.op] = max(best.get(path.op, 0.0), share)
    near = sum(share >= _NEAR for share in best.values())
    message = f"Roofline: the best step of {near} of {len(best)} operations reaches {100 * _NEAR:.0f} % of its roof"
    below = sorted((share, op) for op, share in best.items() if share < _NEAR)
    more = f"Below: {', '.join(f'{op} {100 * share:.0f} %' for share, op in below)}." if below else ""
    return message, more

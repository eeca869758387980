"""A ladder: a row a step, both languages' rates as bars, the best baseline and the ceiling as lines."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernel_twins.report.figures import style, words
from kernel_twins.report.figures.roofs import limits
from kernel_twins.report.figures.style import COLOURS, FAINT, MARGIN, PX, SMALL, TEXT, WIDTH, Card, ink
from kernel_twins.report.meaning import moved, write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import BACKENDS, Backend, Case, Name, Step

_ROW, _BAR = 22.0, 7.5
_COUNTER, _TIME = 186.0, 74.0  # columns
_LOST = 1.005


@dataclass(frozen=True, slots=True)
class _Cell:
    """A step in a language at the operation's profile case."""

    rate: float
    time_us: float
    is_own: bool  # else another step's kernel runs there
    gain: float | None  # over the step before


def draw(results: Results) -> Figure:
    """Of an operation that was measured at its profile case."""
    op, case = results.op, results.op.profile_case
    cells = {
        (step.name, backend): _cell(results, case, step, backend) for step in op.steps for backend in step.backends
    }
    steps = len(op.steps)
    message, more = _told(results, case, cells)
    card = Card(message, more, _key(results, case, cells), 36 + steps * _ROW + 34)
    left = MARGIN + max(style.width(step.name) for step in op.steps) + 12
    right = WIDTH - MARGIN - _COUNTER - 2 * _TIME - 12
    top = card.top + 36
    axes = card.axes(left, top, right - left, steps * _ROW)
    lines = _lines(results, case)
    most = 1.03 * max([*(rate for rate, _, _ in lines), *(cell.rate for cell in cells.values() if cell)], default=1.0)
    axes.set_xlim(0, most)
    axes.set_ylim(steps * _ROW, 0)
    for index, step in enumerate(op.steps):
        _row(card, axes, results, index, step, cells, top, left)
    _ticks(card, axes, results.rate_unit, left, top + steps * _ROW, (right - left) / most)
    _draw_lines(card, axes, lines, left, (right - left) / most, top)
    _headings(card, top)
    return card.figure


def _cell(results: Results, case: Case, step: Step, backend: Backend) -> _Cell | None:
    name = Name(backend, step.name)
    rate, time = results.rate(case, name), results.time_us(case, name)
    if rate is None or time is None:
        return None
    before = results.previous(step, backend, case)
    gain = words.against(results, case, name, Name(backend, before.name)) if before else None
    return _Cell(rate, time, results.op.profile_case_of(step, backend) == case, gain)


def _row(
    card: Card,
    axes: Axes,
    results: Results,
    index: int,
    step: Step,
    cells: dict[tuple[str, Backend], _Cell | None],
    top: float,
    left: float,
) -> None:
    middle = top + (index + 0.5) * _ROW
    if index % 2 == 0:
        card.band(middle, _ROW)
    card.text(left - 10, middle, step.name, align="right")
    for backend, place, column in zip(BACKENDS, (-0.5, 0.5), (1, 0), strict=True):
        at = _column(column)
        cell = cells.get((step.name, backend))
        if cell is None:
            card.text(at, middle, _gap(results, step, backend), SMALL, FAINT, align="right")
            continue
        lost = cell.gain is not None and cell.gain * _LOST < 1
        axes.barh(
            (index + 0.5) * _ROW + (place * (_BAR + 1) if len(step.backends) > 1 else 0),
            cell.rate,
            _BAR,
            facecolor=COLOURS[backend] if cell.is_own else "white",
            edgecolor=COLOURS[backend],
            linewidth=0 if cell.is_own else PX,
            alpha=style.PALE if lost else 1,
        )
        card.text(at, middle, words.time_us(cell.time_us), TEXT, ink(COLOURS[backend]), align="right")
    text, size, colour = _why(results, step, cells)
    lines = text.splitlines()
    for i, line in enumerate(lines):
        card.text(WIDTH - MARGIN - _COUNTER + 4, middle + (i - (len(lines) - 1) / 2) * size, line, size, colour)


def _gap(results: Results, step: Step, backend: Backend) -> str:
    """Why a language has no time: a dash where it has no such step."""
    if backend not in step.backends:
        return "–"
    return "no time" if results.status(results.op.profile_case, Name(backend, step.name)) else "unmeasured"


def _why(results: Results, step: Step, cells: dict[tuple[str, Backend], _Cell | None]) -> tuple[str, float, str]:
    """The counter that moved most, of the first language that has one; or why there is none, in up to two lines."""
    for backend in step.backends:
        cell = cells[step.name, backend]
        case = results.op.profile_case_of(step, backend)
        if cell and cell.is_own and case and (most := moved.of_step(results, step, backend, case)):
            return most[0], SMALL, ink(COLOURS[backend])
    own = [results.op.profile_case_of(step, backend) for backend in step.backends]
    if all(case == results.op.profile_case for case in own):
        return "", SMALL, FAINT
    elsewhere = next((case for case in own if case and case != results.op.profile_case), None)
    told = f"runs at {words.case(elsewhere)}".replace(", ", ",\n", 1) if elsewhere else "another step's kernel"
    return told, SMALL, FAINT


def _column(index: int) -> float:
    return WIDTH - MARGIN - _COUNTER - 10 - index * _TIME


def _headings(card: Card, top: float) -> None:
    for backend, column in zip(BACKENDS, (1, 0), strict=True):
        card.text(
            _column(column),
            top - 12,
            f"{words.title(backend)}, µs",
            SMALL,
            ink(COLOURS[backend]),
            align="right",
            bold=True,
        )
    card.text(WIDTH - MARGIN - _COUNTER + 4, top - 12, "counter that moved most", SMALL, FAINT)


def _lines(results: Results, case: Case) -> list[tuple[float, str, str]]:
    """Rate, label and colour: the best baseline, PyTorch where it is another one, and the ceiling."""
    lines = []
    best, torch = results.best_baseline(case), Name(next(iter(results.op.baselines)))
    for name in dict.fromkeys([best, torch]):
        rate = results.rate(case, name) if name else None
        if name and rate:
            time = words.time_us(results.time_us(case, name))
            lines.append((rate, f"{words.title(name.backend)} {time} µs", COLOURS[name.backend]))
    roofs = limits(results.op.name, results.ceilings) if results.ceilings else []
    floors = [(rate, f"{label} {words.time_us(_time_us(results, case, rate))} µs") for label, rate in roofs]
    return lines + [(rate, label, COLOURS["ceiling"]) for rate, label in floors]


def _time_us(results: Results, case: Case, rate: float) -> float | None:
    """What the operation takes at a rate."""
    floor_us = results.ceiling_us(case)
    return floor_us * results.ceiling / rate if floor_us and results.ceiling else None


def _draw_lines(
    card: Card, axes: Axes, lines: list[tuple[float, str, str]], left: float, scale: float, top: float
) -> None:
    """Labels stand in two rows above: ceilings in the upper one; in the lower one baselines, the best one first."""
    stems = [left + rate * scale for rate, _, colour in lines if colour == COLOURS["ceiling"]]
    taken: list[tuple[float, float, float]] = []
    end = _column(1) - style.width("CUDA, µs", SMALL, bold=True) - 12
    for rate, label, colour in lines:
        is_ceiling = colour == COLOURS["ceiling"]
        x, row, long = left + rate * scale, top - (27 if is_ceiling else 11), style.width(label, SMALL)
        begin = x - long / 2
        if not is_ceiling:
            struck = [stem for stem in stems if x - long - 6 < stem < x + long / 2 + 6]
            begin = max(MARGIN, min([begin, end - long, *(stem - long - 5 for stem in struck)]))
        if any(begin < other_end + 8 and begin + long > start - 8 for at, start, other_end in taken if at == row):
            continue
        taken.append((row, begin, begin + long))
        axes.axvline(rate, color=colour, linewidth=1.5 * PX, linestyle=(0, (4, 2)) if is_ceiling else "-", zorder=3)
        card.line([x, x], [row + 7, top], colour)
        card.text(begin, row, label, SMALL, ink(colour))


def _ticks(card: Card, axes: Axes, unit: str, left: float, below: float, scale: float) -> None:
    most = axes.get_xlim()[1]
    step = next(each for each in _STEPS if most / each <= 6)
    ticks = [step * index for index in range(int(most / step) + 1)]
    for tick in ticks:
        axes.axvline(tick, color=style.GRID, linewidth=PX, zorder=0.3)
        card.text(left + tick * scale, below + 12, write.number(tick, 4), SMALL, FAINT, align="center")
    card.text(_column(1) - 40, below + 12, unit, SMALL, FAINT)


_STEPS = tuple(lead * 10.0**power for power in range(-2, 5) for lead in (1, 2, 5))


def _told(results: Results, case: Case, cells: dict[tuple[str, Backend], _Cell | None]) -> tuple[str, str]:
    """The message, how far the best step of each language comes; and what brought it there."""
    op, best = results.op, results.best_baseline(case)
    said: list[str] = []
    for backend, step in _best(cells).items():
        name, who = Name(backend, step), f"{words.title(backend)}'s {words.number(step)}"
        if best and (ratio := words.against(results, case, name, best)) is not None:
            said.append(words.together(f"{who} {words.times(ratio)}") if said else _reaches(who, ratio, best))
    return f"{op.title}: {', '.join(said)}" if said else op.title, _climb(cells)


def _reaches(who: str, ratio: float, best: Name) -> str:
    return f"{who} reaches {words.times(ratio)} {words.title(best.backend)}"


def _best(cells: dict[tuple[str, Backend], _Cell | None]) -> dict[Backend, str]:
    """Each language's fastest step, of those whose own kernel runs."""
    found: dict[Backend, str] = {}
    for backend in BACKENDS:
        own = [(cell.time_us, step) for (step, of), cell in cells.items() if of == backend and cell and cell.is_own]
        if own:
            found[backend] = min(own)[1]
    return found


def _climb(cells: dict[tuple[str, Backend], _Cell | None]) -> str:
    """The steps that gained and lost most, in the first language that has any."""
    for backend in BACKENDS:
        gains = [
            (cell.gain, step)
            for (step, of), cell in cells.items()
            if of == backend and cell and cell.is_own and cell.gain is not None
        ]
        if gains:
            (most, best), (least, worst) = max(gains), min(gains)
            told = f"In {words.title(backend)} {best} brings most, {words.times(most)} the step before"
            if least * _LOST < 1:
                told += f"; {worst} loses {100 * (1 - least):.0f} %"
            return f"{told}."
    return ""


def _key(results: Results, case: Case, cells: dict[tuple[str, Backend], _Cell | None]) -> str:
    told = [words.case(case)]
    if results.ceilings:
        told.append(words.gpu(results.ceilings.gpu))
    told.append(f"bars: {results.rate_unit}")
    shown = [cell for cell in cells.values() if cell]
    if any(cell.gain is not None and cell.gain * _LOST < 1 for cell in shown):
        told.append("pale: slower than before")
    if not all(cell.is_own for cell in shown):
        told.append("outlined: another step's kernel")
    best = results.best_baseline(case)
    doubted = [
        f"{words.title(backend)}'s {words.number(step)}"
        for backend, step in _best(cells).items()
        if best and results.standing(case, Name(backend, step), best) == "AMBIGUOUS"
    ]
    if doubted:
        told.append(f"not confirmed by cycles: {', '.join(doubted)}")
    return " · ".join(told)

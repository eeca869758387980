"""A ladder's charts: the time of every step, and the last steps against all baselines by size."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from builder import numbers
from builder.plots import Axis, Plot
from kernel_twins.report.figures import words
from kernel_twins.report.figures.groups import Group, groups
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import BACKENDS, Backend, Case, Name, Step

_WIDE, _LEFT = 900, 190
_ROW, _BAR, _TOP = 30, 11, 22
_LOG = 20.0  # times that differ by more are drawn on a logarithmic axis

_HIGH, _PLOT_LEFT, _GAP, _LEAST = 250, 56, 16, 34
_FLOOR = 0.2  # what is slower stands at the lower border


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure, the table of its numbers, and what it is measured at."""

    svg: Markup
    heading: list[str]
    rows: list[tuple[str, list[Markup]]]
    caption: str


def times(results: Results) -> Chart | None:
    """A bar a step and language at the profile case; None before anything was timed there."""
    op, case = results.op, results.op.profile_case
    known = {
        (step.name, backend): time
        for step in op.steps
        for backend in step.backends
        if op.profile_case_of(step, backend) == case and (time := results.time_us(case, Name(backend, step.name)))
    }
    best = results.best_baseline(case)
    if not known:
        return None
    least, most = min(known.values()), max(known.values())
    baseline = results.time_us(case, best) if best else None
    log = most > _LOG * least
    low = min([least, *filter(None, [baseline])]) / 1.6 if log else 0.0
    axis = Axis(low, max([most, *filter(None, [baseline])]) * (1.4 if log else 1.08), _LEFT, _WIDE - 70, log)
    plot = Plot(_WIDE, _TOP + _ROW * len(op.steps) + 40)
    bottom = _TOP + _ROW * len(op.steps)
    for tick in axis.ticks(64):
        plot.line([(axis.at(tick), _TOP), (axis.at(tick), bottom)], "grid")
    for index, step in enumerate(op.steps):
        _bars(plot, axis, step, known, _TOP + _ROW * index)
    if best and baseline:
        plot.line([(axis.at(baseline), _TOP - 4), (axis.at(baseline), bottom)], "baseline")
        plot.text(axis.at(baseline) + 4, _TOP - 8, f"best baseline: {words.title(best.backend)}", "tick start")
    plot.across(axis, bottom, 64)
    plot.text(_WIDE - 70, bottom + 30, "µs, logarithmic" if log else "µs", "tick end")
    rows = [(step.name, [_time(results, case, step, backend) for backend in BACKENDS]) for step in op.steps]
    if best:
        rows.append(
            (f"best baseline: {words.title(best.backend)}", [numbers.quantity(results, best, case, "time")] * 2)
        )
    heading = ["step", *(f"{words.title(backend)}, µs" for backend in BACKENDS)]
    return Chart(plot.svg(_times_told(results, known, best), "times"), heading, rows, case.slug)


def _bars(plot: Plot, axis: Axis, step: Step, known: dict[tuple[str, Backend], float], top: float) -> None:
    plot.begin("step", step=step.name)
    plot.text(_LEFT - 8, top + _ROW / 2 + 4, step.name, "name end")
    for row, backend in enumerate(BACKENDS):
        time = known.get((step.name, backend))
        if time is not None:
            y = top + 3 + row * (_BAR + 1)
            plot.rect(_LEFT, y, axis.at(time) - _LEFT, _BAR, f"bar {backend}")
            plot.text(axis.at(time) + 4, y + 9.5, words.time_us(time), "tick start")
    plot.end()


def _time(results: Results, case: Case, step: Step, backend: Backend) -> Markup:
    if backend not in step.backends:
        return Markup("–")
    shown = numbers.quantity(results, Name(backend, step.name), case, "time")
    if results.op.profile_case_of(step, backend) != case and results.time_us(case, Name(backend, step.name)):
        return shown + " (another step's kernel)"
    return shown


def _times_told(results: Results, known: dict[tuple[str, Backend], float], best: Name | None) -> str:
    said = []
    for backend in BACKENDS:
        its = [time for (_, of), time in known.items() if of == backend]
        if its:
            said.append(f"{words.title(backend)} from {words.time_us(its[0])} to {words.time_us(its[-1])} µs")
    baseline = f"; the best baseline is {words.title(best.backend)}" if best else ""
    return f"Time of each step, first to last: {', '.join(said)}{baseline}."


def sizes(results: Results) -> Chart | None:
    """Multiples of the best baseline's speed at every case, by size where the operation has one."""
    op, axis = results.op, results.op.size_axis
    shown = groups(op, axis) if axis else []
    shown = shown or [Group((), tuple(op.timed_cases), is_odd=True)]
    points = {case: words.multiples(results, case) for group in shown for case in group.cases}
    ratios = [ratio for its in points.values() for ratio in its.values()]
    if not ratios:
        return None
    cases = sum(len(group.cases) for group in shown)
    wide = max(_WIDE, _PLOT_LEFT + 20 + _LEAST * cases + _GAP * len(shown))
    y = Axis(max(_FLOOR, min(0.9, *ratios)) * 0.96, max(1.1, *ratios) * 1.08, _TOP + _HIGH, _TOP, log=True)
    plot = Plot(wide, _TOP + _HIGH + 74)
    plot.up(y, _PLOT_LEFT, wide - 20, 18, " ×")
    each = (wide - 20 - _PLOT_LEFT - _GAP * (len(shown) - 1)) / cases
    left = float(_PLOT_LEFT)
    for group in shown:
        x = [left + each * (index + 0.5) for index in range(len(group.cases))]
        plot.line([(left, y.at(1)), (left + each * len(x), y.at(1))], "one")
        for case, at in zip(group.cases, x, strict=True):
            label = words.size(axis.size(case)) if axis else str(list(op.timed_cases).index(case) + 1)
            plot.text(at, _TOP + _HIGH + 16, label, "tick middle")
        plot.line([(left + 2, _TOP + _HIGH + 24), (left + each * len(x) - 2, _TOP + _HIGH + 24)], "grid")
        for row, fact in enumerate(_stacked(group, each)):
            plot.text(left + each * len(x) / 2, _TOP + _HIGH + 38 + 13 * row, fact, "tick middle")
        _series(plot, group, points, x, y)
        left += each * len(x) + _GAP
    names = [*op.baselines, *BACKENDS]
    rows = [
        (case.slug if axis else f"{number}: {case.slug}", _multiples(results, case, points[case], names))
        for number, case in enumerate((case for group in shown for case in group.cases), 1)
    ]
    told = words.reached(points.values()) or "no language has a time"
    heading = ["case", *map(words.title, names)]
    hollow = "; hollow marks are rows that are not aligned" if axis and any(group.is_odd for group in shown) else ""
    caption = f"by {axis.label}{hollow}" if axis else "by case, numbered as in the table"
    return Chart(plot.svg(f"Speed over the best baseline's {caption}: {told}.", "sizes"), heading, rows, caption)


def _stacked(group: Group, each: float) -> list[str]:
    """A group's caption, in lines that fit below its cases."""
    lines: list[str] = []
    for fact in group.facts:
        if lines and 6.2 * len(f"{lines[-1]}, {fact}") < each * len(group.cases):
            lines[-1] += f", {fact}"
        else:
            lines.append(fact)
    return lines


def _series(plot: Plot, group: Group, points: dict[Case, dict[str, float]], x: list[float], y: Axis) -> None:
    names = dict.fromkeys(name for case in group.cases for name in points[case])
    for name in sorted(names, key=lambda each: each in BACKENDS):  # ours above the others
        its = [(at, y.at(points[case][name])) for at, case in zip(x, group.cases, strict=True) if name in points[case]]
        plot.begin(f"series {name}")
        if group.is_joined:
            plot.line(its, "path")
        for across, down in its:
            plot.mark(across, down, "hollow" if group.is_odd else "point", diamond=name == "triton")
        plot.end()


def _multiples(results: Results, case: Case, known: dict[str, float], names: list[str]) -> list[Markup]:
    best, ours = results.best_baseline(case), words.last(results, case)
    if best is None:
        return [Markup("–")] * len(names)
    calls = {name: ours.get(name) if name in BACKENDS else Name(name) for name in names}
    return [
        numbers.multiple_at(results, case, call, best) if call and name in known else Markup("–")
        for name, call in calls.items()
    ]

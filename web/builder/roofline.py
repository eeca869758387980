"""A ladder's roofline: every step in both languages, under the roofs of device memory, L2 and the pipe in use."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from builder import numbers
from builder.plots import Axis, Plot, around
from kernel_twins.harness.ceilings import Ceilings
from kernel_twins.report.figures import roofs, words
from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import BACKENDS, Name, Step

_WIDE, _HIGH, _LEFT, _RIGHT, _TOP, _BOTTOM = 600, 360, 54, 14, 14, 42
_LABEL = 0.75  # of a roof's length, from its lower end
_TITLES = {"dram": "DRAM", "l2": "L2"}


@dataclass(frozen=True, slots=True)
class Roofline:
    """The figure, and a row of numbers for each step in a language."""

    svg: Markup
    rows: list[tuple[str, str, Markup, Markup, Markup]]


@dataclass(frozen=True, slots=True)
class _Mark:
    """A step in a language: TFLOP/s, and FLOP a byte by memory."""

    name: Name
    tflops: float
    intensity: dict[str, float]


def roofline(results: Results) -> Roofline | None:
    """None where no step was timed and profiled, or the GPU was not surveyed."""
    marks = {step.name: _marks(results, step) for step in results.op.steps}
    found = [mark for its in marks.values() for mark in its]
    if results.ceilings is None or not found:
        return None
    x = around([value for mark in found for value in mark.intensity.values()], _LEFT, _WIDE - _RIGHT)
    y = around([mark.tflops for mark in found], _HIGH - _BOTTOM, _TOP)
    plot = Plot(_WIDE, _HIGH)
    plot.rect(_LEFT, _TOP, _WIDE - _RIGHT - _LEFT, _HIGH - _BOTTOM - _TOP, "field")
    plot.up(y, _LEFT, _WIDE - _RIGHT)
    plot.across(x, _HIGH - _BOTTOM)
    plot.text(_WIDE - _RIGHT, _HIGH - 8, "FLOP a byte moved", "tick end")
    plot.text(_LEFT + 6, _TOP + 14, "TFLOP/s", "tick start")
    _roofs(plot, results.op.name, results.ceilings, x, y)
    for step, its in marks.items():
        _draw(plot, step, its, x, y)
    return Roofline(plot.svg(_told(results, found), "roofline"), _rows(results))


def _marks(results: Results, step: Step) -> list[_Mark]:
    found = []
    for backend in step.backends:
        case, name = results.op.profile_case_of(step, backend), Name(backend, step.name)
        at = roofs.point(results, case, name) if case else {}
        intensity = {memory: at[key] for memory in roofs.MEMORIES if (key := f"{memory}_intensity") in at}
        if intensity:
            found.append(_Mark(name, at["tflops"], intensity))
    return found


def _roofs(plot: Plot, op: str, ceilings: Ceilings, x: Axis, y: Axis) -> None:
    pipe, most = roofs.pipe_of(op, ceilings)
    slopes = {"dram": ceilings.dram_read / 1e3, "l2": ceilings.l2_read / 1e3}
    for memory, slope in slopes.items():
        begin, end = max(x.low, y.low / slope), min(x.high, y.high / slope, most / slope)
        if begin < end:
            plot.begin(memory)
            plot.line([(x.at(begin), y.at(slope * begin)), (x.at(end), y.at(slope * end))], "roof")
            middle = begin * (end / begin) ** _LABEL
            told = f"{_TITLES[memory]} {1e3 * slope:,.0f} GB/s"
            plot.text(x.at(middle) - 6, y.at(slope * middle) - 4, told, "tick end")
            plot.end()
    if y.low < most < y.high:
        plot.line([(x.at(most / max(slopes.values())), y.at(most)), (x.at(x.high), y.at(most))], "roof")
        plot.text(x.at(x.high) - 4, y.at(most) - 5, f"{pipe} {most:,.0f} TFLOP/s", "tick end")


def _draw(plot: Plot, step: str, its: list[_Mark], x: Axis, y: Axis) -> None:
    """A step's points, its languages joined, once for each memory."""
    plot.begin("step", step=step)
    for memory in roofs.MEMORIES:
        known = [mark for mark in its if memory in mark.intensity]
        if not known:
            continue
        plot.begin(memory)
        places = [(x.at(mark.intensity[memory]), y.at(mark.tflops)) for mark in known]
        plot.line(places, "join")
        for mark, (across, down) in zip(known, places, strict=True):
            cuda = mark.name.backend == "cuda"
            data = {"x": f"{mark.intensity[memory]:.6g}", "y": f"{mark.tflops:.6g}"}
            plot.mark(across, down, f"point {mark.name.backend}", diamond=not cuda, data=data)
            label = f"{step[:3]} {words.title(mark.name.backend)}"
            plot.text(across + (-9 if cuda else 9), down + 4, label, f"label {'end' if cuda else 'start'}")
        plot.end()
    plot.end()


def _rows(results: Results) -> list[tuple[str, str, Markup, Markup, Markup]]:
    rows = []
    for step in results.op.steps:
        for backend in step.backends:
            case, name = results.op.profile_case_of(step, backend), Name(backend, step.name)
            if case and roofs.point(results, case, name):
                dram, l2, rate = (
                    numbers.point(results, name, case, key) for key in ("dram_intensity", "l2_intensity", "tflops")
                )
                rows.append((step.name, words.title(backend), dram, l2, rate))
    return rows


def _told(results: Results, found: list[_Mark]) -> str:
    said = []
    for backend in BACKENDS:
        rates = [mark.tflops for mark in found if mark.name.backend == backend]
        if rates:
            said.append(f"{words.title(backend)} from {write.number(min(rates))} to {write.number(max(rates))} TFLOP/s")
    return f"Roofline of {results.op.title}: the steps of {', those of '.join(said)}."

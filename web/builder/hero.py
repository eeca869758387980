"""The front page's ladder in short: every step with its rate, the lines that it adds, and its place on the roofline."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from builder import code, numbers
from builder.plots import around
from builder.rungs import TITLES
from builder.site import WEB
from kernel_twins.report.figures import roofs
from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.pages import headers
from kernel_twins.report.rows.base import ROOT, InvalidDataError
from kernel_twins.spec import BACKENDS, Backend, Name, Op, Step

_CHOSEN = WEB / "pages" / "hero.toml"
_MOST = 20  # lines of code


@dataclass(frozen=True, slots=True)
class Side:
    """A language at a step; where it has no such step it stays at the one before, and ``gap`` says why.

    ``height`` is the share of the ceiling in percent.
    """

    backend: Backend
    title: str
    step: str
    gap: str
    stale: bool
    rate: Markup
    ratio: Markup
    share: Markup
    height: float
    lines: Sequence[code.Line]


@dataclass(frozen=True, slots=True)
class Point:
    """A step on the roofline, in the drawing's units."""

    backend: Backend
    step: str
    x: float
    y: float
    told: str


@dataclass(frozen=True, slots=True)
class Rung:
    """A step of the ladder, with both languages."""

    name: str
    title: str
    why: str
    sides: tuple[Side, ...]

    @property
    def number(self) -> str:
        return self.name[1:3]


def rungs(results: Results) -> list[Rung]:
    """The ladder's steps in reading order, each with those languages that have begun by then.

    All are compared at the operation's profile case, so those that leave it to another step's kernel are left out.
    """
    chosen = tomllib.loads(_CHOSEN.read_text())
    found, last = [], dict[Backend, Side]()
    for step in (step for step in results.op.steps if not step.profile_case):
        title, why = headers.told(results.op, step)
        for backend in BACKENDS:
            if backend in step.backends:
                last[backend] = _side(results, backend, step, chosen.get(step.name, {}).get(backend))
            elif backend in last:
                last[backend] = replace(last[backend], gap=step.gap)
        found.append(Rung(step.name, title, why, tuple(last[backend] for backend in BACKENDS if backend in last)))
    return found


def _side(results: Results, backend: Backend, step: Step, ends: list[str] | None) -> Side:
    op, case, name = results.op, results.op.profile_case, Name(backend, step.name)
    best = results.best_baseline(case)
    ladder = op.steps_of(backend)
    before = ladder[ladder.index(step) - 1] if step != ladder[0] else None
    return Side(
        backend=backend,
        title=TITLES[backend],
        step=step.name,
        gap="",
        stale=results.stale(name),
        rate=numbers.quantity(results, name, case, "rate"),
        ratio=numbers.ratio(results, case, name, best) if best else Markup("–"),
        share=numbers.quantity(results, name, case, "ceiling_share"),
        height=results.quantities(name, case)["ceiling_share"] or 0.0,
        lines=_lines(op, backend, step, before, ends),
    )


def _lines(op: Op, backend: Backend, step: Step, before: Step | None, ends: list[str] | None) -> list[code.Line]:
    """The chosen lines of a step's file, with those that the step before has not as new ones."""
    new = ROOT / op.file(step.name, backend)
    old = ROOT / op.file(before.name, backend) if before else None
    hunks = code.hunks(old, new) if old else []
    fresh = {line.number for hunk in hunks for line in hunk if line.kind == "new"}
    numbered = range(1, len(code.lines(new)) + 1)
    places = _between(new, *ends) if ends else [n for n in numbered if n in fresh or not old][:_MOST]
    if len(places) > _MOST:
        raise InvalidDataError(f"{_CHOSEN.name} [{step.name}] {backend} names {len(places)} lines, at most {_MOST} fit")
    indent = min(len(text) - len(text.lstrip()) for n in places if (text := code.lines(new)[n - 1]).strip())
    return [code.Line("new" if n in fresh or not old else "same", n, code.lines(new)[n - 1][indent:]) for n in places]


def _between(file: Path, first: str, last: str) -> list[int]:
    """The numbers of the lines from one that has a text to the next one that has another."""
    text = file.read_text().splitlines()
    begin = next((n for n, line in enumerate(text, 1) if first in line), None)
    end = next((n for n, line in enumerate(text, 1) if begin and n > begin and last in line), None)
    if begin is None or end is None:
        raise InvalidDataError(f"{_CHOSEN.name}: {file.name} has no line with {(last if begin else first)!r}")
    return list(range(begin, end + 1))


@dataclass(frozen=True, slots=True)
class Roofline:
    """The ladder in both languages below its roofs, in a box of ``WIDTH`` by ``HEIGHT``."""

    points: list[Point]
    roof: str
    paths: dict[Backend, str]
    across: list[tuple[float, str]]
    up: list[tuple[float, str]]

    WIDTH, HEIGHT = 420, 272
    LEFT, RIGHT, TOP, BOTTOM = 44, 412, 8, 236


def roofline(results: Results) -> Roofline:
    """Of the steps that were timed and profiled; FLOP a byte of device memory against TFLOP/s."""
    op, ceilings = results.op.name, results.ceilings
    if ceilings is None:
        raise InvalidDataError("the roofs are the survey's, and this GPU was not surveyed")
    most = roofs.pipe_of(op, ceilings)[1]
    ridge = 1e3 * most / ceilings.dram_read
    placed = [(path.backend, *step) for path in roofs.paths(results) for step in path.steps]
    x = around([ridge, *(intensity for _, _, intensity, _ in placed)], Roofline.LEFT, Roofline.RIGHT)
    y = around([most, *(rate for *_, rate in placed)], Roofline.BOTTOM, Roofline.TOP)

    def place(intensity: float, rate: float) -> tuple[float, float]:
        return round(x.at(intensity), 1), round(y.at(rate), 1)

    points = [
        Point(backend, step, *place(intensity, rate), _told(results, backend, step, intensity, rate))
        for backend, step, intensity, rate in placed
    ]
    return Roofline(
        points,
        _line([place(each, roofs.roof_at(op, each, ceilings)) for each in (x.low, ridge, x.high)]),
        {each: _line([(point.x, point.y) for point in points if point.backend == each]) for each in BACKENDS},
        [(round(x.at(tick), 1), f"{tick:,g}") for tick in x.ticks(apart=56)],
        [(round(y.at(tick), 1), f"{tick:,g}") for tick in y.ticks(apart=40)],
    )


def _told(results: Results, backend: Backend, step: str, intensity: float, rate: float) -> str:
    at = f"{write.number(intensity)} FLOP a byte"
    return f"{TITLES[backend]} {step[:3]}: {write.number(rate)} {results.rate_unit}, {at}"


def _line(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in places)

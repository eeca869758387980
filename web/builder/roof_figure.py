"""The roofline of one chip as a drawing: roofs, the operations' floors on them, and points that were measured.

The scale is that of all chips, so that a script can move the roofs to those of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from builder import chips
from builder.chips import Chip
from builder.plots import Axis
from builder.rungs import TITLES
from kernel_twins.report.figures import roofs
from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.spec import Op

WIDTH, HEIGHT = 820, 560
LEFT, RIGHT, TOP, BOTTOM = 56, 804, 12, 516
# Powers of ten at the ends: FLOP a byte across, TFLOP/s upwards.
ACROSS, UP = (-1.7, 4.1), (-2.4, 3.6)
A_DECADE_ACROSS = (RIGHT - LEFT) / (ACROSS[1] - ACROSS[0])
A_DECADE_UP = (BOTTOM - TOP) / (UP[1] - UP[0])
_X = Axis(10 ** ACROSS[0], 10 ** ACROSS[1], LEFT, RIGHT, log=True)
_Y = Axis(10 ** UP[0], 10 ** UP[1], BOTTOM, TOP, log=True)
_A_NAME = 14  # between the names of floors on the memory's roof
_A_LABEL = 24  # a pipe's name needs that much below the next roof, else it stands below its own


@dataclass(frozen=True, slots=True)
class Roof:
    """A pipe's roof, from the memory's to the right end, with its name."""

    name: str
    begin: float
    y: float
    label: float
    rate: str
    ops: str


@dataclass(frozen=True, slots=True)
class Floor:
    """An operation on its roof; ``pipe`` names the roof of its arithmetic."""

    op: str
    pipe: str
    intensity: float
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Named:
    """Names of operations of one intensity, joined to their floor by a line."""

    names: str
    x: float
    y: float
    label: float


@dataclass(frozen=True, slots=True)
class Point:
    """A last step as it was measured."""

    told: str
    backend: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Figure:
    """All that the template draws. ``memory`` is the end of the memory's roof; it begins at the left."""

    start: tuple[float, float]
    end: tuple[float, float]
    memory: str
    roofs: list[Roof]
    floors: list[Floor]
    named: list[Named]
    points: list[Point]
    across: list[tuple[float, str]]
    up: list[tuple[float, str]]


def x_of(intensity: float) -> float:
    return round(_X.at(intensity), 1)


def y_of(rate: float) -> float:
    return round(_Y.at(rate), 1)


def figure(chip: Chip, measured: Sequence[Results]) -> Figure:
    """Of a chip that has every pipe, on which the last steps were measured."""
    slope = chip.memory["dram_read"] / 1e3
    ridge = max(chip.pipes.values()) / slope
    ops = [each.op for each in measured]
    first = 10 ** ACROSS[0]
    return Figure(
        start=(x_of(first), y_of(first * slope)),
        end=(x_of(ridge), y_of(ridge * slope)),
        memory=f"{write.number(chip.memory['dram_read'], 4)} GB/s",
        roofs=_roofs(chip, slope, ops),
        floors=[_floor(chip, op) for op in ops],
        named=_named(chip, ops),
        points=[point for results in measured for point in _points(results)],
        across=[(x_of(10.0**power), f"{10.0**power:,g}") for power in range(-1, 5)],
        up=[(y_of(10.0**power), f"{10.0**power:,g}") for power in range(-2, 4)],
    )


def _roofs(chip: Chip, slope: float, ops: Sequence[Op]) -> list[Roof]:
    rates = sorted(chip.pipes.items(), key=lambda pipe: -pipe[1])
    return [
        Roof(
            name,
            x_of(rate / slope),
            y_of(rate),
            y_of(rate) + (18 if index and y_of(rate) - y_of(rates[index - 1][1]) < _A_LABEL else -9),
            write.number(rate, 4),
            ", ".join(op.name for op in ops if chips.pipe(op) == name and not _waits(chip, op)),
        )
        for index, (name, rate) in enumerate(rates)
    ]


def _floor(chip: Chip, op: Op) -> Floor:
    intensity, rate = chips.intensity(op), chip.rate(op)
    assert rate is not None
    return Floor(op.name, chips.pipe(op), intensity, x_of(intensity), y_of(rate))


def _waits(chip: Chip, op: Op) -> bool:
    """Whether memory takes longer than arithmetic."""
    rate, case = chip.pipe_of(op), op.profile_case
    return rate is not None and op.bytes(case) / (1e3 * chip.memory_of(op)) > op.flops(case) / (1e6 * rate)


def _named(chip: Chip, ops: Sequence[Op]) -> list[Named]:
    waiting = sorted((op for op in ops if _waits(chip, op)), key=chips.intensity, reverse=True)
    found = [(intensity, list(its)) for intensity, its in groupby(waiting, key=chips.intensity)]
    top = min(_floor(chip, its[0]).y for _, its in found)
    return [
        Named(", ".join(op.name for op in its), x_of(intensity), _floor(chip, its[0]).y, top + _A_NAME * index)
        for index, (intensity, its) in enumerate(found)
    ]


def _points(results: Results) -> list[Point]:
    return [
        Point(f"{path.op} {step[:3]} in {TITLES[path.backend]}", path.backend, x_of(intensity), y_of(rate))
        for path in roofs.paths(results)
        for step, intensity, rate in path.steps[-1:]
    ]

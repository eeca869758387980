"""Drawings of reduction_nd. A warp is drawn with eight lanes of its 32, and a sector with four elements."""

from __future__ import annotations

from typing import Literal

from kernel_twins.report.drawings.primitives import ALARM, Drawing, Level, drawn, patch

_SIDE, _ROWS, _COLUMNS, _LANES, _SECTOR = 16, 8, 16, 8, 4
_LEFT, _RIGHT = 16, 352

Direction = Literal["along rows", "down columns"]


@drawn("A thread per output: what a warp loads first, of a matrix that lies in memory row by row", 236)
def thread_per_output(drawing: Drawing) -> None:
    _load(drawing, _LEFT, "a sum for every row", "down columns", "along rows")
    _load(drawing, _RIGHT, "a sum for every column", "along rows", "down columns")
    drawing.text(_LEFT, 186, "neighbours lie a row apart: every lane", colour=ALARM)
    drawing.text(_LEFT, 202, "brings a sector, and uses one element", colour=ALARM)
    drawing.text(_RIGHT, 186, "neighbours lie side by side: every element\nof a sector is used")
    drawing.note(16, 222, "green: what the lanes load, one element each; blue: what comes with it")


@drawn("A block per output: what a warp loads first, of a matrix that lies in memory row by row", 236)
def block_per_output(drawing: Drawing) -> None:
    _load(drawing, _LEFT, "a sum for every row", "along rows", "along rows")
    _load(drawing, _RIGHT, "a sum for every column", "down columns", "down columns")
    drawing.text(_LEFT, 186, "neighbours lie side by side: every element\nof a sector is used")
    drawing.text(_RIGHT, 186, "neighbours lie a row apart, and what\ncomes with them is other blocks'", colour=ALARM)
    drawing.note(16, 222, "green: what the lanes load, one element each; blue: what comes with it")


def _load(drawing: Drawing, left: float, title: str, lanes: Direction, outputs: Direction) -> None:
    """A matrix with the first load of a warp, whose lanes lie in one direction, and its outputs' direction."""
    rows = range(_ROWS)
    loaded: dict[Level, set[tuple[int, int]]] = {"registers": patch([0], range(_LANES))}
    if lanes == "down columns":
        loaded = {"device": patch(rows, range(_SECTOR)), "registers": patch(rows, [0])}
    drawing.heading(left, 18, title)
    drawing.grid(left, 32, _ROWS, _COLUMNS, _SIDE, "plain", loaded)
    right, bottom = left + _SIDE * _COLUMNS, 32 + _SIDE * _ROWS
    first = 40  # the middle of the first row
    if outputs == "along rows":
        start = left + _SIDE * (_LANES if lanes == "along rows" else 1)
        drawing.across(start + 4, right - 4, first)
    else:
        start = 32 + _SIDE * (_ROWS - 2 if lanes == "down columns" else 1)
        drawing.down(start + 4, bottom + 10, left + _SIDE / 2)


@drawn("Threads along the axis that is contiguous: the reduced one, or the kept one", 284)
def along_the_layout(drawing: Drawing) -> None:
    drawing.heading(_LEFT, 18, "a sum for every row")
    drawing.heading(_RIGHT, 18, "a sum for every column")
    for row in range(_ROWS):
        y = 32 + _SIDE * row
        mine: Level = "registers" if row == 0 else "device"
        drawing.cells(_LEFT, y, _COLUMNS, _SIDE, _SIDE, mine)
        drawing.cells(_LEFT + _SIDE * _COLUMNS + 22, y, 1, _SIDE, _SIDE, mine)
        drawing.cells(_RIGHT, y, _COLUMNS, _SIDE, _SIDE, "device", marked={"registers": range(_LANES)})
        drawing.note(_RIGHT + _SIDE * _COLUMNS + 16, y + 8, str(row % 4), "middle")
    drawing.across(_LEFT + _SIDE * _COLUMNS, _LEFT + _SIDE * _COLUMNS + 22, 40)
    drawing.text(_LEFT, 178, "A warp's lanes walk along a row side by side,")
    drawing.text(_LEFT, 194, "and shuffles merge what they have; a short row\nis a few lanes', a long one a block's")
    drawing.note(_RIGHT + _SIDE * _COLUMNS + 6, 18, "warp", "middle")
    drawing.down(160, 172, _RIGHT + 4 * _SIDE)
    for warp in range(4):
        drawing.cells(_RIGHT, 172 + 8 * warp, _LANES, _SIDE, 8, "shared")
    drawing.text(_RIGHT + _LANES * _SIDE + 10, 188, "each warp's totals")
    drawing.down(204, 216, _RIGHT + 4 * _SIDE)
    drawing.cells(_RIGHT, 216, _LANES, _SIDE, _SIDE, "registers")
    drawing.text(_RIGHT + _LANES * _SIDE + 10, 224, "a column a lane")
    drawing.text(16, 250, "green: one warp's on the left, one block's on the right; either way the lanes of a warp")
    drawing.text(16, 266, "read neighbouring elements")


@drawn("Four outputs where there is room for sixteen blocks: a block each, and four each", 284)
def parts_of_few_outputs(drawing: Drawing) -> None:
    side, outputs, parts = 38, 4, 4
    drawing.heading(16, 20, "an output a block: most of the GPU has nothing to do")
    drawing.cells(16, 32, outputs * parts, side, 24, "idle", range(outputs), {"registers": range(outputs)})
    drawing.heading(16, 84, "four parts of each output, a block each")
    drawing.cells(16, 96, outputs * parts, side, 24, "registers", [block // parts for block in range(outputs * parts)])
    drawing.cells(16, 142, outputs * parts, side, 24, "l2", [f"p{block % parts}" for block in range(outputs * parts)])
    for output in range(outputs):
        left = 16 + side * parts * output
        for part in range(parts):
            x = left + side * (part + 0.5)
            drawing.down(120, 142, x)
        drawing.down(166, 186, left + 2 * side)
        drawing.box(left + 4, 186, side * parts - 8, 24, "registers", "p0, p1, p2, p3")
        drawing.down(210, 226, left + 2 * side)
        drawing.cells(left + 1.5 * side, 226, 1, side, 22, "device", [output])
    drawing.text(16, 268, "of an output's blocks the last one merges the parts, always in the same order")

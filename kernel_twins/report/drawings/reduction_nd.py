"""Drawings of reduction_nd. A warp is drawn with eight lanes of its 32, and a sector with four elements."""

from __future__ import annotations

from typing import Literal

from kernel_twins.report.drawings.primitives import ALARM, SOFT, Drawing, Level

_SIDE, _ROWS, _COLUMNS, _LANES, _SECTOR = 16, 8, 16, 8, 4
_LEFT, _RIGHT = 16, 352

Direction = Literal["along rows", "down columns"]


def thread_per_output() -> Drawing:
    drawing = Drawing("A thread per output: what a warp loads first, of a matrix that lies in memory row by row", 236)
    _load(drawing, _LEFT, "a sum for every row", "down columns", "along rows")
    _load(drawing, _RIGHT, "a sum for every column", "along rows", "down columns")
    drawing.text(_LEFT, 186, "neighbours lie a row apart: every lane", 11, colour=ALARM)
    drawing.text(_LEFT, 202, "brings a sector, and uses one element", 11, colour=ALARM)
    drawing.text(_RIGHT, 186, "neighbours lie side by side: every element", 11)
    drawing.text(_RIGHT, 202, "of a sector is used", 11)
    drawing.text(16, 222, "green: what the lanes load, one element each; blue: what comes with it", 11, colour=SOFT)
    return drawing


def block_per_output() -> Drawing:
    drawing = Drawing("A block per output: what a warp loads first, of a matrix that lies in memory row by row", 236)
    _load(drawing, _LEFT, "a sum for every row", "along rows", "along rows")
    _load(drawing, _RIGHT, "a sum for every column", "down columns", "down columns")
    drawing.text(_LEFT, 186, "neighbours lie side by side: every element", 11)
    drawing.text(_LEFT, 202, "of a sector is used", 11)
    drawing.text(_RIGHT, 186, "neighbours lie a row apart, and what", 11, colour=ALARM)
    drawing.text(_RIGHT, 202, "comes with them is other blocks'", 11, colour=ALARM)
    drawing.text(16, 222, "green: what the lanes load, one element each; blue: what comes with it", 11, colour=SOFT)
    return drawing


def _load(drawing: Drawing, left: float, title: str, lanes: Direction, outputs: Direction) -> None:
    """A matrix with the first load of a warp, whose lanes lie in one direction, and its outputs' direction."""

    def level(row: int, column: int) -> Level:
        if lanes == "along rows":
            return "registers" if row == 0 and column < _LANES else "plain"
        return "registers" if column == 0 else "device" if column < _SECTOR else "plain"

    drawing.text(left, 18, title)
    drawing.grid(left, 32, _ROWS, _COLUMNS, _SIDE, level)
    right, bottom = left + _SIDE * _COLUMNS, 32 + _SIDE * _ROWS
    first = 40  # the middle of the first row
    if outputs == "along rows":
        start = left + _SIDE * (_LANES if lanes == "along rows" else 1)
        drawing.arrow((start + 4, first), (right - 4, first))
    else:
        start = 32 + _SIDE * (_ROWS - 2 if lanes == "down columns" else 1)
        drawing.arrow((left + _SIDE / 2, start + 4), (left + _SIDE / 2, bottom + 10))


def along_the_layout() -> Drawing:
    drawing = Drawing("Threads along the axis that is contiguous: the reduced one, or the kept one", 284)
    drawing.text(_LEFT, 18, "a sum for every row")
    drawing.text(_RIGHT, 18, "a sum for every column")
    for row in range(_ROWS):
        y = 32 + _SIDE * row
        mine: Level = "registers" if row == 0 else "device"
        drawing.cells(_LEFT, y, _COLUMNS, _SIDE, _SIDE, mine)
        drawing.cells(_LEFT + _SIDE * _COLUMNS + 22, y, 1, _SIDE, _SIDE, mine)
        drawing.cells(_RIGHT, y, _COLUMNS, _SIDE, _SIDE, lambda column: "registers" if column < _LANES else "device")
        drawing.text(_RIGHT + _SIDE * _COLUMNS + 16, y + 8, str(row % 4), 11, "middle", SOFT)
    drawing.arrow((_LEFT + _SIDE * _COLUMNS, 40), (_LEFT + _SIDE * _COLUMNS + 22, 40))
    for line, text in enumerate(
        (
            "A warp's lanes walk along a row side by side,",
            "and shuffles merge what they have; a short row",
            "is a few lanes', a long one a block's",
        )
    ):
        drawing.text(_LEFT, 178 + 16 * line, text, 11)
    drawing.text(_RIGHT + _SIDE * _COLUMNS + 6, 18, "warp", 11, "middle", SOFT)
    drawing.arrow((_RIGHT + 4 * _SIDE, 160), (_RIGHT + 4 * _SIDE, 172))
    for warp in range(4):
        drawing.cells(_RIGHT, 172 + 8 * warp, _LANES, _SIDE, 8, "shared")
    drawing.text(_RIGHT + _LANES * _SIDE + 10, 188, "each warp's totals", 11)
    drawing.arrow((_RIGHT + 4 * _SIDE, 204), (_RIGHT + 4 * _SIDE, 216))
    drawing.cells(_RIGHT, 216, _LANES, _SIDE, _SIDE, "registers")
    drawing.text(_RIGHT + _LANES * _SIDE + 10, 224, "a column a lane", 11)
    drawing.text(16, 250, "green: one warp's on the left, one block's on the right; either way the lanes of a warp", 11)
    drawing.text(16, 266, "read neighbouring elements", 11)
    return drawing


def parts_of_few_outputs() -> Drawing:
    drawing = Drawing("Four outputs where there is room for sixteen blocks: a block each, and four each", 284)
    side, outputs, parts = 38, 4, 4
    drawing.text(16, 20, "an output a block: most of the GPU has nothing to do")
    drawing.cells(
        16, 32, outputs * parts, side, 24, lambda block: "registers" if block < outputs else "idle", range(outputs)
    )
    drawing.text(16, 84, "four parts of each output, a block each")
    drawing.cells(16, 96, outputs * parts, side, 24, "registers", [block // parts for block in range(outputs * parts)])
    drawing.cells(16, 142, outputs * parts, side, 24, "l2", [f"p{block % parts}" for block in range(outputs * parts)])
    for output in range(outputs):
        left = 16 + side * parts * output
        for part in range(parts):
            x = left + side * (part + 0.5)
            drawing.arrow((x, 120), (x, 142))
        drawing.arrow((left + 2 * side, 166), (left + 2 * side, 186))
        drawing.box(left + 4, 186, side * parts - 8, 24, "registers", "p0, p1, p2, p3", 11)
        drawing.arrow((left + 2 * side, 210), (left + 2 * side, 226))
        drawing.cells(left + 1.5 * side, 226, 1, side, 22, "device", [output])
    drawing.text(16, 268, "of an output's blocks the last one merges the parts, always in the same order", 11)
    return drawing

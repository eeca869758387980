"""Pieces of rows, from which the ladders along a matrix's rows draw: a walk, a row in registers, a cluster."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import ALARM, Drawing, Level


def walk(
    drawing: Drawing,
    y: float,
    title: str,
    rows: tuple[str, ...],
    level: Level,
    source: str,
    work: str,
    writes: bool = False,
) -> None:
    """One walk over a row, or over two side by side: where it comes from, and what comes of it."""
    height = 24 * len(rows)
    middle = y + height / 2
    drawing.text(16, middle, title)
    for index, name in enumerate(rows):
        if len(rows) > 1:
            drawing.note(100, y + 24 * index + 12, name, "end")
        drawing.cells(106, y + 24 * index, 14, 15, 24, level)
    drawing.note(106, y + height + 12, source)
    drawing.across(316, 352, middle)
    drawing.box(352, middle - 12, 150, 24, "registers", work)
    if writes:
        drawing.across(502, 536, middle)
        drawing.box(536, middle - 12, 88, 24, "device", "out")
    else:
        drawing.note(516, middle, "then a barrier")


def held_row(drawing: Drawing, passes: tuple[str, str, str]) -> None:
    """A row that comes to registers once, and what is then done with it, one after the other."""
    drawing.heading(16, 18, "a row of x")
    marked_row(drawing, 30)
    drawing.heading(392, 18, "registers of the block")
    drawing.heading(392, 136, "passes over registers")
    kept(drawing, 392, 29)
    drawing.arrow((272, 41), (384, 70))
    drawing.note(290, 36, "once")
    for index, text in enumerate(passes):
        drawing.box(392, 146 + 26 * index, 232, 22, "registers", text)
    drawing.arrow((392, 209), (272, 189))
    drawing.heading(16, 166, "the row of out")
    marked_row(drawing, 178)
    drawing.text(16, 84, "green: what one thread holds. All of its\nloads are on their way before the first")
    drawing.text(16, 116, "value is needed")


def marked_row(drawing: Drawing, y: float) -> None:
    """A row of 32 elements, of which those of one thread, every eighth, are marked."""
    drawing.cells(16, y, 32, 8, 22, "device", marked={"registers": range(2, 32, 8)})


def kept(drawing: Drawing, x: float, width: float) -> None:
    """The same elements in registers: a column a thread."""
    for turn in range(4):
        drawing.cells(x, 30 + 22 * turn, 8, width, 22, "idle", marked={"registers": [2]})


def state(drawing: Drawing, index: int, element: str, first: str, second: str) -> float:
    """A thread's element, and its two numbers after it, in a column; returns where the column begins."""
    left = 104 + 132 * index
    drawing.box(left, 34, 112, 24, "device", element)
    drawing.box(left, 68, 112, 24, "registers", first)
    drawing.box(left, 102, 112, 24, "registers", second)
    return left


def odd_rows(drawing: Drawing, side: float, packs: int) -> None:
    """Three rows of 13 elements without gaps, the second one marked, over pieces of 16 bytes."""
    drawing.heading(16, 18, "rows of 13 elements of 2 bytes, one behind the other")
    for row in range(3):
        drawing.bracket(20 + 13 * side * row + 2, 50, 13 * side - 4, f"row {row}", below=False)
    drawing.cells(20, 58, 39, side, 26, "device", marked={"registers": range(13, 26)})
    for pack in range(packs):
        drawing.bracket(20 + 8 * side * pack + 2, 94, 8 * side - 4, "16 bytes")


def cluster(drawing: Drawing, rows: tuple[str, ...], numbers: str) -> None:
    """Four blocks, each with its part of these rows, and the numbers that they exchange."""
    top = 18.0 + 26 * len(rows)
    drawing.text(16, 29, "\n".join(rows), spacing=26)
    drawing.text(16, top + 171, "out")
    drawing.frame(66, top + 12, 562, 128, dashed=True)
    drawing.note(76, top + 128, "a cluster")
    drawing.text(347, top + 128, "each writes its own into the shared memory of all", "middle", colour=ALARM)
    for block in range(4):
        left = 76.0 + 138 * block
        for index in range(len(rows)):
            drawing.box(left, 18 + 26 * index, 130, 22, "device", f"part {block}")
        drawing.down(top - 4, top + 22, left + 65)
        drawing.box(left, top + 22, 130, 40, "registers", f"block {block}:\nits part")
        drawing.down(top + 62, top + 80, left + 65)
        drawing.box(left, top + 80, 130, 24, "shared", numbers)
        if block:
            drawing.across(left - 8, left, top + 88, colour=ALARM)
            drawing.across(left, left - 8, top + 96, colour=ALARM)
        drawing.down(top + 140, top + 160, left + 20)
        drawing.box(left, top + 160, 130, 22, "device", f"part {block}")
    drawing.text(16, top + 200, "every element is read once, by one SM; nothing but those numbers passes between SMs,")
    drawing.text(16, top + 216, "and a barrier in each one's shared memory counts them")

"""Pieces of rows, from which the ladders along a matrix's rows draw: a walk, a row in registers, a cluster."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import ALARM, SOFT, Drawing, Level


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
    drawing.text(16, middle, title, 11)
    for index, name in enumerate(rows):
        if len(rows) > 1:
            drawing.text(100, y + 24 * index + 12, name, 11, "end", SOFT)
        drawing.cells(106, y + 24 * index, 14, 15, 24, level)
    drawing.text(106, y + height + 12, source, 11, colour=SOFT)
    drawing.arrow((316, middle), (352, middle))
    drawing.box(352, middle - 12, 150, 24, "registers", work, 11)
    if writes:
        drawing.arrow((502, middle), (536, middle))
        drawing.box(536, middle - 12, 88, 24, "device", "out", 11)
    else:
        drawing.text(516, middle, "then a barrier", 11, colour=SOFT)


def held_row(drawing: Drawing, passes: tuple[str, str, str]) -> None:
    """A row that comes to registers once, and what is then done with it, one after the other."""
    drawing.text(16, 18, "a row of x")
    marked_row(drawing, 16, 30, "device")
    drawing.text(392, 18, "registers of the block")
    drawing.text(392, 136, "passes over registers")
    kept(drawing, 392, 30)
    drawing.arrow((272, 41), (384, 70))
    drawing.text(290, 36, "once", 11, colour=SOFT)
    for index, text in enumerate(passes):
        drawing.box(392, 146 + 26 * index, 232, 22, "registers", text, 11)
    drawing.arrow((392, 209), (272, 189))
    drawing.text(16, 166, "the row of out")
    marked_row(drawing, 16, 178, "device")
    drawing.text(16, 84, "green: what one thread holds. All of its", 11)
    drawing.text(16, 100, "loads are on their way before the first", 11)
    drawing.text(16, 116, "value is needed", 11)


def marked_row(drawing: Drawing, x: float, y: float, level: Level) -> None:
    """A row of 32 elements, of which those of one thread, every eighth, are marked."""
    drawing.cells(x, y, 32, 8, 22, lambda element: "registers" if element % 8 == 2 else level)


def kept(drawing: Drawing, x: float, y: float, threads: int = 8, width: float = 29) -> None:
    """The same elements in registers: a column a thread."""
    for turn in range(4):
        drawing.cells(x, y + 22 * turn, threads, width, 22, lambda thread: "registers" if thread == 2 else "idle")


def cluster(title: str, rows: tuple[str, ...], numbers: str) -> Drawing:
    """Four blocks, each with its part of these rows, and the numbers that they exchange."""
    top = 18.0 + 26 * len(rows)
    drawing = Drawing(title, int(top) + 228)
    for index, row in enumerate(rows):
        drawing.text(16, 29 + 26 * index, row, 11)
    drawing.text(16, top + 171, "out", 11)
    drawing.frame(66, top + 12, 562, 128, dashed=True)
    drawing.text(76, top + 128, "a cluster", 11, colour=SOFT)
    drawing.text(347, top + 128, "each writes its own into the shared memory of all", 11, "middle", ALARM)
    for block in range(4):
        left = 76.0 + 138 * block
        for index in range(len(rows)):
            drawing.box(left, 18 + 26 * index, 130, 22, "device", f"part {block}", 11)
        drawing.arrow((left + 65, top - 4), (left + 65, top + 22))
        drawing.box(left, top + 22, 130, 40, "registers", f"block {block}:\nits part", 11)
        drawing.arrow((left + 65, top + 62), (left + 65, top + 80))
        drawing.box(left, top + 80, 130, 24, "shared", numbers, 11)
        if block:
            drawing.arrow((left - 8, top + 88), (left, top + 88), colour=ALARM)
            drawing.arrow((left, top + 96), (left - 8, top + 96), colour=ALARM)
        drawing.arrow((left + 20, top + 140), (left + 20, top + 160))
        drawing.box(left, top + 160, 130, 22, "device", f"part {block}", 11)
    drawing.text(
        16, top + 200, "every element is read once, by one SM; nothing but those numbers passes between SMs,", 11
    )
    drawing.text(16, top + 216, "and a barrier in each one's shared memory counts them", 11)
    return drawing

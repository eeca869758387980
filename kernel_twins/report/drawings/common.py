"""The drawings that more than one ladder shows: the levels of memory, the order of tiles, pipelining, tuning."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import ALARM, Drawing, drawn, patch


@drawn("The levels of memory of an H100, in the colours of all drawings", 190)
def levels(drawing: Drawing) -> None:
    drawing.box(16, 52, 120, 80, "device", "device memory", size=12)
    drawing.box(172, 52, 84, 80, "l2", "L2", size=12)
    drawing.frame(296, 26, 328, 132, dashed=True)
    drawing.note(306, 38, "one of 132 multiprocessors (SM)")
    drawing.box(312, 52, 98, 80, "shared", "shared\nmemory", size=12)
    drawing.box(440, 52, 76, 80, "registers", "registers", size=12)
    drawing.box(546, 52, 66, 36, "plain", "FMA\npipes")
    drawing.box(546, 96, 66, 36, "tensor", "tensor\ncores")
    for x, to in ((136, 172), (256, 312), (410, 440)):
        drawing.across(x, to, 92)
    drawing.across(516, 546, 70, 114)
    for x, size in ((76, "80 GB"), (214, "50 MiB"), (361, "228 KiB"), (478, "256 KiB")):
        drawing.note(x, 146, size, "middle")
    drawing.note(16, 174, "far, large, slow")
    drawing.note(624, 174, "near, small, fast", "end")


@drawn("Sixteen blocks at work: in row order, and grouped", 220)
def grouped_order(drawing: Drawing) -> None:
    side, rows, columns = 15, 6, 16
    for left, title, width, height, needs in (
        (46, "in row order", 16, 1, "1 strip of A + 16 strips of B = 17"),
        (370, "grouped, 4 rows at a time", 4, 4, "4 strips of A + 4 strips of B = 8"),
    ):
        drawing.heading(left, 18, title)
        drawing.cells(left, 44, width, side, 24, "l2")
        drawing.cells(left + width * side, 44, columns - width, side, 24, "plain")
        drawing.grid(left, 78, rows, columns, side, "idle", {"registers": patch(range(height), range(width))})
        for row in range(rows):
            drawing.box(left - 34, 78 + row * side, 24, side, "l2" if row < height else "plain")
        drawing.note(left - 22, 68, "A", "middle")
        drawing.note(left - 8, 56, "B", "middle")
        drawing.text(left, 184, needs)
        order = [(left + 8, 86), (left + 16 * side - 8, 86)]
        if height > 1:
            order = [
                (left + 8 + side * column, 86 + (45 if odd else 0)) for column in range(4) for odd in (False, True)
            ]
        drawing.arrow(*order)
    drawing.text(12, 206, "green: tiles of the output in work at this moment; teal: what L2 must hold for them")


@drawn("Load and compute in turns, and overlapped through a ring of stages", 214)
def pipeline(drawing: Drawing) -> None:
    width = 62
    drawing.heading(16, 20, "in turns")
    for step in range(4):
        drawing.box(96 + 2 * step * width, 34, width, 24, "shared", f"load {step}")
        drawing.box(96 + (2 * step + 1) * width, 34, width, 24, "registers", f"tile {step}")
    drawing.heading(16, 84, "through three stages of shared memory")
    drawing.text(16, 108, "copies")
    drawing.text(16, 140, "products")
    for step in range(8):
        drawing.box(96 + step * width, 96, width, 24, "shared", f"load {step}")
        if step < 6:
            drawing.box(96 + (step + 2) * width, 128, width, 24, "registers", f"tile {step}")
    for step in range(8):
        drawing.note(96 + (step + 0.5) * width, 166, f"stage {step % 3}", "middle")
    drawing.time_axis(96, 184)
    drawing.text(16, 200, "tile 0 is used while 2 is on its way; then load 3 takes the stage that tile 0 was in")


@drawn("Autotuning: every configuration of a short list is run on the problem at hand", 184)
def tuning(drawing: Drawing) -> None:
    drawing.heading(110, 20, "output tile", "end")
    drawing.heading(128, 20, "stages in flight: 2, 3, 4, 5")
    for row, tile in enumerate(("64 x 64", "64 x 128", "128 x 128", "128 x 256")):
        y = 36 + 26 * row
        drawing.text(110, y + 11, tile, "end")
        for column in range(4):
            unfit = row + column == 6
            drawing.box(128 + 64 * column, y, 58, 22, "idle" if unfit else "plain", "too big" if unfit else "run")
    drawing.frame(318, 86, 62, 26, ALARM)
    drawing.across(380, 442, 99, colour=ALARM)
    drawing.box(446, 80, 178, 38, "registers", "fastest on this GPU, for\nthis shape: kept")
    drawing.note(392, 132, "5 x (128 + 256) x 64 x 2 bytes")
    drawing.note(392, 147, "are 240 KiB; an SM has 228")
    drawing.text(16, 168, "a larger tile does more products a byte; more stages hide more latency; both take room")

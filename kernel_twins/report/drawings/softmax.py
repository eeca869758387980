"""Drawings of softmax and its backward pass."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import ALARM, SOFT, Drawing, Level, Part, drawn
from kernel_twins.report.drawings.row_pieces import cluster, held_row, kept, marked_row, odd_rows, state, walk


@drawn("A row is read three times: for its maximum, for its sum, and to write", 226)
def three_passes(drawing: Drawing) -> None:
    drawing.heading(16, 18, "a row of x, and what a block does with it")
    walk(drawing, 34, "pass 1", ("x",), "device", "from device memory", "maximum")
    walk(drawing, 88, "pass 2", ("x",), "shared", "from L1, where it is still there", "sum of exp(x - max)")
    walk(drawing, 142, "pass 3", ("x",), "shared", "from L1, where it is still there", "exp(x - max) / sum", True)
    drawing.text(16, 208, "a pass waits for every one of its loads, and at its end for the block's slowest warp")


@drawn("16 bytes of each of a warp's lanes: parts of five lines of 128 bytes, or four lines", 212)
def lines(drawing: Drawing) -> None:
    drawing.heading(16, 18, "a row that starts anywhere, in lines of 128 bytes")
    drawing.boxes(64, 30, 24, [(88, "device", f"line {line}") for line in range(6)])
    drawing.line((141, 24), (141, 184), colour=ALARM, dashed=True)
    for y, start, text in (
        (64, 141, "counted from the row's first 16 bytes on"),
        (124, 64, "counted from its first line on"),
    ):
        for warp in range(2):
            width = min(352.0, 592 - start - 352 * warp)
            drawing.box(start + 352 * warp, y, width, 24, "registers", f"warp {warp}")
        drawing.note(150, y + 36, text)
    drawing.text(16, 196, "lanes whose 16 bytes lie before the row have nothing to do")


@drawn("Every warp of a cluster holds a part of a row, and tells all blocks its maximum and sum", 214)
def warps_of_a_cluster(drawing: Drawing) -> None:
    drawing.text(16, 29, "x")
    drawing.frame(42, 48, 586, 118, SOFT)
    drawing.note(52, 156, "a cluster")
    drawing.text(335, 156, "each warp writes its own into the shared memory of all", "middle", colour=ALARM)
    for block in range(2):
        left = 52 + 290 * block
        drawing.note(left, 62, f"block {block}")
        for warp in range(4):
            x = left + 70 * warp
            drawing.box(x, 18, 66, 22, "device", f"part {4 * block + warp}")
            drawing.down(40, 70, x + 33)
            drawing.box(x, 70, 66, 24, "registers", f"warp {warp}")
            drawing.down(94, 116, x + 33, colour=ALARM)
        drawing.box(left, 116, 276, 24, "shared", "8 x (max, sum)")
    drawing.across(328, 342, 124, colour=ALARM)
    drawing.across(342, 328, 132, colour=ALARM)
    drawing.text(16, 188, "a warp waits for its own loads, and then for all numbers: no barrier between;")
    drawing.text(16, 204, "a block ends with its last store, and makes room for a block of the next cluster")


@drawn("A short row in a warp: whole packs for the lanes, and its ends an element each", 178)
def single_elements(drawing: Drawing) -> None:
    drawing.heading(16, 18, "a row that starts anywhere, in packs of 16 bytes")
    drawing.box(42, 30, 22, 24, "shared")
    for pack in range(6):
        drawing.box(64 + 88 * pack, 30, 88, 24, "device", f"pack {pack + 1}")
        drawing.down(54, 74, 108 + 88 * pack)
        drawing.box(64 + 88 * pack, 74, 88, 24, "registers", f"lane {pack + 1}")
    drawing.box(592, 30, 36, 24, "shared")
    drawing.text(16, 122, "head and tail: up to seven elements each, of which single lanes load, keep and store one;")
    drawing.text(16, 138, "by one instruction all heads, where one lane with its pack's elements takes seven,")
    drawing.text(16, 154, "and has the others wait")


@drawn("256 KiB of an SM, between L1 and shared memory, and the rows that are under way in L1", 214)
def small_l1(drawing: Drawing) -> None:
    all_of_it: list[Part] = [(560, "device", "L1, 228 KiB and more")]
    least: list[Part] = [(61, "device", "L1"), (499, "shared", "shared memory, which nobody uses")]
    for y, title, parts, rows, width in (
        (34, "as the driver has it", all_of_it, 5, 54),
        (122, "as much set aside for shared memory as can be", least, 2, 29),
    ):
        drawing.text(16, y - 8, title)
        drawing.boxes(42, y, 26, parts)
        drawing.boxes(42, y + 32, 20, [(width, "registers", "")] * rows, gap=2)
    drawing.note(340, 82, "what loads have asked for, 64 KiB and more")
    drawing.note(116, 170, "28 KiB: others ask when these are there")
    drawing.text(16, 202, "fewer rows at once, which device memory finds in fewer of its pages")


@drawn("Two rows are read twice: for the sum of their products, and to write", 218)
def two_rows(drawing: Drawing) -> None:
    drawing.heading(16, 18, "a row of dout and one of y, and what a block does with them")
    walk(drawing, 34, "pass 1", ("dout", "y"), "device", "from device memory", "sum of dout y")
    walk(drawing, 114, "pass 2", ("dout", "y"), "shared", "from L1, where they are still there", "y (dout - sum)", True)
    drawing.text(16, 200, "one number a row instead of two, but from twice as much to read")


@drawn("One pass: a running maximum, and the sum of exponentials relative to it", 264)
def online_sum(drawing: Drawing) -> None:
    drawing.heading(16, 18, "one thread's elements, one after the other")
    drawing.text(16, 46, "x\nmaximum m\nsum s", spacing=34)
    steps = (("1", "1", "1"), ("3", "3", "s e^-2 + 1"), ("2", "3", "s + e^-1"), ("5", "5", "s e^-2 + 1"))
    for index, (x, maximum, total) in enumerate(steps):
        left = state(drawing, index, x, maximum, total)
        if index:
            drawing.across(left - 20, left, 114)
        if total.startswith("s e"):
            drawing.frame(left, 68, 112, 58, ALARM)
            drawing.text(left + 56, 140, "m grew by 2", "middle", colour=ALARM)
    drawing.heading(16, 170, "two threads' pairs become one in the same way")
    drawing.boxes(16, 182, 26, [(120, "registers", "m = 5, sum s"), (120, "registers", "m = 7, sum t")], gap=20)
    drawing.box(340, 182, 200, 26, "registers", "m = 7, sum s e^-2 + t")
    drawing.across(276, 340, 195)
    drawing.text(16, 230, "a pair that has seen nothing but -inf keeps the sum 0: -inf - -inf would be NaN,")
    drawing.text(16, 246, "and 0 times NaN is NaN for good")


@drawn("A row is loaded once, and all passes run over registers", 230)
def row_in_registers(drawing: Drawing) -> None:
    held_row(drawing, ("maximum", "exp(x - max), and their sum", "times 1 / sum"))


@drawn("Two rows are loaded once; twice as many registers hold them", 230)
def two_rows_in_registers(drawing: Drawing) -> None:
    drawing.heading(16, 18, "a row of dout, and one of y")
    for y in (30, 56):
        marked_row(drawing, y)
    drawing.heading(392, 18, "registers of the block")
    for left in (392, 512):
        kept(drawing, left, 14)
    drawing.note(448, 126, "dout", "middle")
    drawing.note(568, 126, "y", "middle")
    drawing.arrow((272, 41), (384, 60))
    drawing.arrow((272, 67), (384, 84))
    drawing.note(290, 36, "once")
    for index, text in enumerate(("sum of dout y", "y (dout - sum)")):
        drawing.box(392, 148 + 28 * index, 232, 24, "registers", text)
    drawing.arrow((392, 188), (272, 181))
    drawing.heading(16, 158, "the row of dx")
    marked_row(drawing, 170)
    drawing.text(16, 104, "green: what one thread holds of both;\nall of its loads wait together")
    drawing.text(16, 214, "the same registers hold rows of half the length")


@drawn("Rows of 13 elements: each starts at another place within its 16 bytes", 244)
def ragged_edges(drawing: Drawing) -> None:
    side = 15.0
    odd_rows(drawing, side, packs=5)
    drawing.heading(16, 132, "what row 1 is made of")
    for left, first, last, text in ((60, 13, 16, "3 loads of 2 bytes"), (236, 16, 24, "one load of 16 bytes"),
                                    (474, 24, 26, "2 loads of 2 bytes")):  # fmt: skip
        drawing.cells(left, 146, last - first, side, 26, "registers", range(first - 13, last - 13))
        whole = last - first == 8
        drawing.frame(left, 146, side * (last - first), 26, SOFT if whole else ALARM, dashed=not whole)
        drawing.text(left, 186, text, colour=SOFT if whole else ALARM)
    drawing.text(16, 214, "only the first and the last piece of a row are taken element by element; the longer")
    drawing.text(16, 230, "the row, the less they weigh")


@drawn("As many threads for a row as it needs: part of a warp, a warp, or several", 250)
def rows_per_block(drawing: Drawing) -> None:
    for row, (title, lanes, note) in enumerate(
        (
            ("a block for a short row", 0, "three of four warps have nothing to do, and barriers wait for them"),
            ("four lanes a row", 4, "two shuffles inside a warp, and no barrier at all"),
            ("a warp a row", 8, "the same, with five shuffles"),
            ("two warps a row", 16, "a value a warp through shared memory, and a barrier"),
        )
    ):
        y = 20 + 52 * row
        drawing.text(16, y + 11, title)
        drawing.note(182, y + 33, note)
        for warp in range(4):
            level: Level = "idle" if warp and not lanes else "registers"
            labels = [(8 * warp + lane) // lanes if lanes else 0 for lane in range(8)]
            drawing.cells(182 + 110 * warp, y, 8, 13, 22, level, labels if level == "registers" else ())
    drawing.text(16, 234, "a cell is a lane with the number of its row; eight lanes are drawn for a warp's 32")


@drawn("Load, compute and store in turns, and rows that come ahead of time", 262)
def row_pipeline(drawing: Drawing) -> None:
    drawing.heading(16, 18, "a row a block: nothing is loaded while it computes, unless other blocks fill in")
    turn: list[Part] = [(92, "device", "load"), (64, "registers", "compute")]
    turn += [(64, "device", "store"), (32, "idle", "end")]
    drawing.boxes(96, 30, 24, turn * 2)
    drawing.text(16, 42, "one block")
    drawing.heading(16, 80, "a block that stays: rows come to three stages of shared memory")
    drawing.text(16, 104, "copies")
    drawing.text(16, 136, "threads")
    width = 84
    for row in range(6):
        drawing.box(96 + width * row, 92, width, 24, "shared", f"row {row}")
        drawing.note(96 + width * (row + 0.5), 162, f"stage {row % 3}", "middle")
        if row < 5:
            x = 96 + width * (row + 1)
            drawing.boxes(x, 124, 24, [(52, "registers", f"row {row}"), (width - 52, "device", "")])
    drawing.time_axis(96, 182)
    drawing.text(16, 206, "green: computed in registers; blue: stored. One thread asks for a row, the copy engine")
    drawing.text(16, 222, "brings it, and an mbarrier tells when its bytes are there. A stage is filled again")
    drawing.text(16, 238, "once every thread has read what was in it")


@drawn("A cluster of four blocks shares a row, and its maximum and sum", 272)
def cluster_row(drawing: Drawing) -> None:
    cluster(drawing, ("x",), "4 x (max, sum)")


@drawn("A cluster of four blocks shares two rows, and their sum", 298)
def cluster_two_rows(drawing: Drawing) -> None:
    cluster(drawing, ("dout", "y"), "4 sums")


@drawn("Programs that are all resident share a row, and exchange numbers through L2", 276)
def cooperative_row(drawing: Drawing) -> None:
    drawing.note(76, 18, "a row, or two of them")
    drawing.text(16, 158, "L2")
    drawing.text(16, 199, "out")
    for program in range(4):
        left = 76 + 138 * program
        drawing.box(left, 30, 130, 22, "device", f"part {program}")
        drawing.down(52, 70, left + 65)
        drawing.box(left, 70, 130, 40, "registers", f"program {program}:\nits part")
        drawing.down(110, 146, left + 25, colour=ALARM)
        drawing.down(146, 110, left + 75)
        drawing.box(left, 146, 100, 24, "l2", f"numbers of {program}")
        drawing.down(110, 188, left + 115)
        drawing.box(left, 188, 130, 22, "device", f"part {program}")
        drawing.text(left + 8, 128, "1.", colour=ALARM)
        drawing.text(left + 82, 128, "2.")
    drawing.text(16, 232, "1. each leaves the numbers of its part; 2. each waits until all have come, and reads them.")
    drawing.text(16, 248, "A cooperative launch starts all programs at once or none, so nobody waits for one that")
    drawing.text(16, 264, "has not begun")


@drawn("A row is split over two launches: one leaves the numbers of its parts, one merges them and writes", 236)
def split_row(drawing: Drawing) -> None:
    drawing.heading(16, 18, "launch 1 goes from the first part to the last, launch 2 from the last to the first")
    drawing.text(16, 45, "launch 1")
    drawing.text(16, 77, "L2")
    drawing.text(16, 153, "launch 2")
    for part in range(4):
        left = 76 + 138 * part
        drawing.box(left, 30, 130, 22, "device", f"part {part}")
        drawing.down(52, 62, left + 65)
        drawing.box(left + 15, 62, 100, 22, "l2", f"numbers of {part}")
        drawing.down(84, 132, left + 65, colour=ALARM)
    drawing.text(16, 191, "out")
    for place, part in enumerate((3, 2, 1, 0)):
        left = 76 + 138 * place
        drawing.box(left, 132, 130, 34, "l2" if part > 1 else "device", f"all numbers,\nx again: part {part}")
        drawing.down(166, 176, left + 65)
        drawing.box(left, 176, 130, 22, "device", f"part {part}")
    drawing.text(16, 220, "teal: L2 still has what launch 1 read last; the rest comes from device memory once more")

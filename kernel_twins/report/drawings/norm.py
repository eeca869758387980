"""Drawings of layer_norm, rms_norm and their backward passes."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import ALARM, Drawing, Part, drawn, patch
from kernel_twins.report.drawings.row_pieces import cluster, held_row, odd_rows, state, walk


@drawn("A row is read three times: for its mean, for the distances from it, and to write", 226)
def mean_then_distances(drawing: Drawing) -> None:
    drawing.heading(16, 18, "a row of x, and what a block does with it")
    walk(drawing, 34, "pass 1", ("x",), "device", "from device memory", "mean")
    walk(drawing, 88, "pass 2", ("x",), "shared", "from L1, where it is still there", "sum of (x - mean)^2")
    walk(drawing, 142, "pass 3", ("x",), "shared", "from L1, where it is still there", "(x - mean) rstd w + b", True)
    drawing.text(16, 208, "the second number needs the first one, so the row is seen twice before it is written")


@drawn("A row is read twice: for the sum of its squares, and to write", 172)
def squares_then_write(drawing: Drawing) -> None:
    drawing.heading(16, 18, "a row of x, and what a block does with it")
    walk(drawing, 34, "pass 1", ("x",), "device", "from device memory", "sum of x^2")
    walk(drawing, 88, "pass 2", ("x",), "shared", "from L1, where it is still there", "x rstd weight", True)
    drawing.text(16, 154, "one number a row instead of two, and a sum in which nothing cancels")


@drawn("One pass: a running mean, and the squared distances from it", 282)
def running_mean(drawing: Drawing) -> None:
    drawing.heading(16, 18, "one thread's elements, one after the other")
    drawing.text(16, 46, "x\nmean m\nsquares s", spacing=34)
    steps = (
        ("2", "2", "0"),
        ("4", "2 + 2 / 2 = 3", "0 + 2 x 1 = 2"),
        ("6", "3 + 3 / 3 = 4", "2 + 3 x 2 = 8"),
        ("8", "4 + 4 / 4 = 5", "8 + 4 x 3 = 20"),
    )
    for index, (x, mean, squares) in enumerate(steps):
        left = state(drawing, index, x, mean, squares)
        if index:
            drawing.across(left - 20, left, 80, 114)
    drawing.text(104, 142, "the n-th element moves the mean by its distance / n, and adds to the squares its")
    drawing.text(104, 158, "distance from the mean before times that from the mean after")
    drawing.heading(16, 190, "two threads' numbers become one by Chan's formula")
    sides: list[Part] = [(144, "registers", "n = 4, m = 5, s = 20"), (144, "registers", "n = 4, m = 9, s = 20")]
    drawing.boxes(16, 202, 26, sides, gap=16)
    drawing.box(384, 202, 240, 26, "registers", "n = 8, m = 7, s = 20 + 20 + 32")
    drawing.across(320, 384, 215)
    drawing.text(16, 250, "the 32 are what the distance of the two means adds: (9 - 5)^2 x 4 x 4 / 8")
    drawing.text(16, 266, "all that is added are products of distances: no large numbers have to cancel")


@drawn("A row is loaded once, and both statistics are taken from registers", 230)
def norm_in_registers(drawing: Drawing) -> None:
    held_row(drawing, ("sum: the mean", "sum of (x - mean)^2: rstd", "(x - mean) rstd weight + bias"))


@drawn("Whole pieces of 16 bytes, of which what is not the row's is masked", 232)
def whole_pieces(drawing: Drawing) -> None:
    side = 15.0
    odd_rows(drawing, side, packs=4)
    drawing.heading(16, 132, "what the threads of row 1 load: every piece that touches it, whole")
    for piece in range(1, 4):
        left = 60 + 180 * (piece - 1)
        elements = range(8 * piece - 13, 8 * piece - 5)
        labels = [element if element in range(13) else "-" for element in elements]
        held = [place for place, label in enumerate(labels) if label != "-"]
        drawing.cells(left, 146, 8, side, 26, "idle", labels, {"registers": held})
        drawing.frame(left, 146, 8 * side, 26)
        drawing.note(left, 186, "one load of 16 bytes")
    drawing.text(16, 216, "- is masked. It can be read: no memory is handed out in pieces smaller than these")


@drawn("A cluster of four blocks shares a row; means and squared distances of the parts are merged", 272)
def cluster_moments(drawing: Drawing) -> None:
    cluster(drawing, ("x",), "4 x (mean, squares)")


@drawn("A cluster of four blocks shares a row, and its sum of squares", 272)
def cluster_squares(drawing: Drawing) -> None:
    cluster(drawing, ("x",), "4 sums of squares")


@drawn("One kernel along rows, one along columns, and one that adds the slices", 266)
def rows_then_columns(drawing: Drawing) -> None:
    side, rows, columns = 12, 12, 12
    bottom = 66 + side * rows
    for left, title, what in ((16, "1: a block a row", "x, dout"), (238, "2: a thread a column", "x, dout, again")):
        drawing.heading(left, 18, title)
        drawing.note(left, 52, what)
    drawing.grid(16, 66, rows, columns, side, "device", {"registers": patch([3], range(columns))})
    drawing.across(162, 174, 108)
    drawing.text(178, 92, "dx")
    drawing.cells(178, 102, columns, 4, 12, "device")
    drawing.grid(238, 66, rows, columns, side, "device", {"registers": patch(range(4, 8), [5])})
    for cut in (4, 8):
        drawing.line((232, 66 + side * cut), (388, 66 + side * cut), colour=ALARM, dashed=True)
    drawing.note(392, 40, "sums of slices,")
    drawing.note(392, 54, "in fp32")
    for part in range(3):
        drawing.cells(392, 84 + 4 * side * part, columns, 8, 12, "l2")
    drawing.cells(392 + 8 * 5, 84 + 4 * side, 1, 8, 12, "registers")
    drawing.heading(514, 18, "3: adds slices")
    drawing.across(492, 518, 138)
    drawing.cells(522, 132, columns, 8, 12, "device")
    drawing.text(522, 158, "dweight, dbias")
    drawing.text(16, bottom + 22, "along a row go the sums that dx needs, along a column those of weight and bias;")
    drawing.text(16, bottom + 38, "each is simple by itself, but x and dout come from device memory twice")


@drawn("Blocks that stay add up their columns in registers; a second launch adds the blocks", 312)
def sums_that_stay(drawing: Drawing) -> None:
    drawing.heading(16, 18, "x and dout")
    for row in range(9):
        mine = row % 3 == 0
        drawing.cells(44, 30 + 17 * row, 12, 10, 17, "registers" if mine else "device")
        drawing.text(38, 38.5 + 17 * row, str(row % 3), "end")
    drawing.note(16, 196, "block of a row")
    drawing.heading(222, 18, "block 0, row after row")
    drawing.frame(214, 30, 190, 152, dashed=True)
    drawing.note(224, 44, "the row, in registers")
    drawing.cells(224, 54, 12, 14, 20, "registers")
    drawing.note(224, 88, "its two sums, then dx")
    drawing.note(224, 122, "dweight, dbias so far")
    drawing.cells(224, 132, 12, 14, 20, "registers")
    drawing.cells(224, 152, 12, 14, 20, "registers")
    for row in range(3):
        drawing.arrow((164, 38.5 + 51 * row), (220, 62 + 2 * row))
    drawing.down(74, 130, 350, colour=ALARM)
    drawing.text(358, 106, "added", colour=ALARM)
    drawing.across(404, 452, 64)
    drawing.heading(424, 18, "the rows of dx")
    for row in range(3):
        drawing.cells(456, 38 + 17 * row, 12, 10, 17, "registers" if row == 0 else "device")
    drawing.across(404, 452, 152)
    drawing.heading(424, 108, "a row for each block, in fp32")
    for block in range(3):
        drawing.cells(456, 122 + 17 * block, 12, 10, 17, "registers" if block == 0 else "l2")
        drawing.text(584, 130.5 + 17 * block, str(block))
    drawing.down(173, 208, 516)
    drawing.text(526, 190, "second launch")
    for y, name in ((212, "dweight"), (233, "dbias")):
        drawing.cells(456, y, 12, 10, 17, "device")
        drawing.text(450, y + 8.5, name, "end")
    drawing.text(16, 274, "a thread has the same columns of every row, so nobody else adds to its sums; blocks' sums")
    drawing.text(16, 290, "are added in a fixed order, never in that in which they finish")


@drawn("Rows of an odd length: those of a block start at the same place within 16 bytes", 254)
def rows_alike(drawing: Drawing) -> None:
    drawing.heading(16, 18, "rows of 13 elements of 2 bytes, drawn from the 16 bytes on in which they start")
    side = 15.0
    for piece in range(3):
        drawing.bracket(64 + 8 * side * piece + 2, 44, 8 * side - 4, "16 bytes", below=False)
    for row in range(10):
        y, start = 52 + 16 * row, 13 * row % 8
        drawing.text(56, y + 8, f"row {row}", "end")
        drawing.cells(64, y, 24, side, 16, "plain")
        drawing.cells(64 + side * start, y, 13, side, 16, "registers" if row % 8 == 0 else "device")
    for piece in range(4):
        drawing.line((64 + 8 * side * piece, 48), (64 + 8 * side * piece, 216), colour=ALARM, dashed=True)
    drawing.text(436, 60, "rows 0, 8, 16, ... are one\nblock's: a thread's 16")
    drawing.text(436, 92, "bytes are the same columns\nof all of them")
    drawing.note(436, 140, "the rows between start\nelsewhere, and are other\nblocks'")
    drawing.text(16, 236, "where rows are whole pieces of 16 bytes, all start alike, and a block may have any row")


@drawn("The warps of a block hold a short row each, and have weights and biases in common", 190)
def weights_of_a_block(drawing: Drawing) -> None:
    for warp in range(4):
        x = 42 + 146.0 * warp
        drawing.box(x, 18, 130, 22, "device", f"row {warp}")
        drawing.down(40, 54, x + 65)
        drawing.box(x, 54, 130, 24, "registers", f"warp {warp}")
        drawing.down(102, 78, x + 65, colour=ALARM)
    drawing.box(42, 102, 568, 24, "shared", "weights, biases: copied by all warps while their rows are on the way")
    drawing.text(16, 156, "one barrier, when every warp knows its row's numbers; a late one keeps only its")
    drawing.text(16, 172, "block waiting, and an SM has several")


@drawn("A pack of a row that starts elsewhere, shifted together from two aligned loads", 176)
def shifted_packs(drawing: Drawing) -> None:
    drawing.heading(16, 18, "packs as out's row has them, of 8 elements")
    drawing.cells(88, 30, 24, 20, 22, "registers", marked={"plain": range(8, 16)})
    drawing.heading(16, 72, "the same elements of x, whose row starts 3 elements behind a multiple of 16 bytes")
    drawing.cells(28, 84, 27, 20, 22, "device", marked={"plain": range(11, 19)})
    for index in range(4):
        drawing.line((28 + 160.0 * index, 80), (28 + 160.0 * index, 124), colour=ALARM)
    drawing.bracket(190, 128, 156, "first load")
    drawing.bracket(350, 128, 156, "second load")
    drawing.text(16, 162, "the second load of a lane is the first one of the next lane, and so in L1")


@drawn("A block that waits for its row, and one that has asked for the next before it starts", 258)
def next_row_ahead(drawing: Drawing) -> None:
    drawing.heading(16, 18, "it asks for a row when it is done with the one before")
    drawing.text(16, 42, "one block")
    turn: list[Part] = [(76, "device", "row"), (72, "registers", "sums")]
    turn += [(56, "registers", "dx"), (52, "device", "store")]
    for row in range(2):
        drawing.boxes(96 + 256 * row, 30, 24, ((width, level, f"{text} {row}") for width, level, text in turn))
    drawing.heading(16, 82, "it asks for the next row, then works on the one that is there")
    drawing.text(16, 106, "loads")
    drawing.text(16, 138, "threads")
    width = 124
    for row in range(4):
        drawing.box(96 + width * row, 94, width, 24, "device", f"row {row}")
        if row:
            x = 96 + width * row
            drawing.boxes(x, 126, 24, [(48, "registers", "sums"), (32, "registers", "dx"), (44, "device", "store")])
            drawing.note(x + width / 2, 164, f"row {row - 1}", "middle")
    drawing.time_axis(96, 184)
    drawing.text(16, 208, "in CUDA the row on its way has registers of its own, and moves over at its turn; in")
    drawing.text(16, 224, "Triton it travels to shared memory, through as many stages as the loop has. Memory has")
    drawing.text(16, 240, "something to do all the time, though no other block fills in")


@drawn("A cluster shares its rows, and each block owns a part of the columns", 324)
def cluster_columns(drawing: Drawing) -> None:
    drawing.text(16, 29, "x\ndout", spacing=26)
    drawing.text(16, 268, "sums")
    drawing.frame(66, 82, 562, 152, dashed=True)
    for block in range(4):
        left = 76.0 + 138 * block
        for index in range(2):
            drawing.box(left, 18 + 26 * index, 130, 22, "device", f"part {block}")
        drawing.down(66, 92, left + 65)
        drawing.box(left, 92, 130, 26, "registers", "its part of a row")
        drawing.down(118, 136, left + 30)
        drawing.box(left, 136, 130, 24, "shared", "4 x two sums")
        if block:
            drawing.across(left - 8, left, 144, colour=ALARM)
            drawing.across(left, left - 8, 152, colour=ALARM)
        drawing.down(118, 192, left + 108, dashed=True)
        drawing.box(left, 192, 130, 34, "registers", "dweight, dbias of\nits columns")
        drawing.down(226, 256, left + 65)
        drawing.box(left, 256, 130, 24, "l2", "after all rows")
    drawing.note(76, 176, "a cluster")
    drawing.text(16, 298, "for every row the blocks send each other two sums, and write their parts of dx; sums along")
    drawing.text(16, 312, "columns stay where they are, and are added once, by the second launch")


@drawn("A first launch leaves the sums of every part of a row, and in a second one programs own columns", 256)
def parts_then_columns(drawing: Drawing) -> None:
    drawing.heading(16, 18, "first launch: a block or program for every part of every row")
    drawing.text(16, 41, "row 0\nrow 1", spacing=26)
    for part in range(4):
        left = 76.0 + 138 * part
        for row in range(2):
            drawing.box(left, 30 + 26 * row, 130, 22, "device", f"two sums of part {part}")
    drawing.heading(16, 106, "second launch: one for every range of columns")
    drawing.text(16, 129, "row 1\nrow 0", spacing=26)
    drawing.text(16, 193, "sums")
    for block in range(6):
        left = 76.0 + 92 * block
        for row in range(2):
            drawing.box(left, 118 + 26 * row, 84, 22, "registers", "dx")
        drawing.down(166, 182, left + 42)
        drawing.box(left, 182, 84, 22, "device", "of a column")
    drawing.text(
        16, 224, "it merges the sums of a row's parts, writes dx, and adds the row to the sums of its columns;"
    )
    drawing.text(16, 240, "it begins with the last row, which is still in L2")

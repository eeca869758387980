"""Drawings of layer_norm, rms_norm and their backward passes."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import ALARM, SOFT, Drawing, Level
from kernel_twins.report.drawings.row_pieces import cluster, held_row, walk


def mean_then_distances() -> Drawing:
    drawing = Drawing("A row is read three times: for its mean, for the distances from it, and to write", 226)
    drawing.text(16, 18, "a row of x, and what a block does with it")
    walk(drawing, 34, "pass 1", ("x",), "device", "from device memory", "mean")
    walk(drawing, 88, "pass 2", ("x",), "shared", "from L1, where it is still there", "sum of (x - mean)^2")
    walk(drawing, 142, "pass 3", ("x",), "shared", "from L1, where it is still there", "(x - mean) rstd w + b", True)
    drawing.text(16, 208, "the second number needs the first one, so the row is seen twice before it is written", 11)
    return drawing


def squares_then_write() -> Drawing:
    drawing = Drawing("A row is read twice: for the sum of its squares, and to write", 172)
    drawing.text(16, 18, "a row of x, and what a block does with it")
    walk(drawing, 34, "pass 1", ("x",), "device", "from device memory", "sum of x^2")
    walk(drawing, 88, "pass 2", ("x",), "shared", "from L1, where it is still there", "x rstd weight", True)
    drawing.text(16, 154, "one number a row instead of two, and a sum in which nothing cancels", 11)
    return drawing


def running_mean() -> Drawing:
    drawing = Drawing("One pass: a running mean, and the squared distances from it", 282)
    drawing.text(16, 18, "one thread's elements, one after the other")
    for row, title in enumerate(("x", "mean m", "squares s")):
        drawing.text(16, 46 + 34 * row, title, 11)
    steps = (
        ("2", "2", "0"),
        ("4", "2 + 2 / 2 = 3", "0 + 2 x 1 = 2"),
        ("6", "3 + 3 / 3 = 4", "2 + 3 x 2 = 8"),
        ("8", "4 + 4 / 4 = 5", "8 + 4 x 3 = 20"),
    )
    for index, (x, mean, squares) in enumerate(steps):
        left = 104 + 132 * index
        drawing.box(left, 34, 112, 24, "device", x, 11)
        drawing.box(left, 68, 112, 24, "registers", mean, 11)
        drawing.box(left, 102, 112, 24, "registers", squares, 11)
        if index:
            for y in (80, 114):
                drawing.arrow((left - 20, y), (left, y))
    drawing.text(104, 142, "the n-th element moves the mean by its distance / n, and adds to the squares its", 11)
    drawing.text(104, 158, "distance from the mean before times that from the mean after", 11)
    drawing.text(16, 190, "two threads' numbers become one by Chan's formula")
    for left, width, text in (
        (16, 144, "n = 4, m = 5, s = 20"),
        (176, 144, "n = 4, m = 9, s = 20"),
        (384, 240, "n = 8, m = 7, s = 20 + 20 + 32"),
    ):
        drawing.box(left, 202, width, 26, "registers", text, 11)
    drawing.arrow((320, 215), (384, 215))
    drawing.text(16, 250, "the 32 are what the distance of the two means adds: (9 - 5)^2 x 4 x 4 / 8", 11)
    drawing.text(16, 266, "all that is added are products of distances: no large numbers have to cancel", 11)
    return drawing


def norm_in_registers() -> Drawing:
    drawing = Drawing("A row is loaded once, and both statistics are taken from registers", 230)
    held_row(drawing, ("sum: the mean", "sum of (x - mean)^2: rstd", "(x - mean) rstd weight + bias"))
    return drawing


def whole_pieces() -> Drawing:
    drawing = Drawing("Whole pieces of 16 bytes, of which what is not the row's is masked", 232)
    side = 15.0
    drawing.text(16, 18, "rows of 13 elements of 2 bytes, one behind the other")
    for row in range(3):
        drawing.bracket(20 + 13 * side * row + 2, 50, 13 * side - 4, f"row {row}", below=False)
    drawing.cells(20, 58, 39, side, 26, lambda element: "registers" if 13 <= element < 26 else "device")
    for piece in range(4):
        drawing.bracket(20 + 8 * side * piece + 2, 94, 8 * side - 4, "16 bytes")
    drawing.text(16, 132, "what the threads of row 1 load: every piece that touches it, whole")
    for piece in range(1, 4):
        left = 60 + 180 * (piece - 1)

        def held(place: int, first: int = 8 * piece) -> Level:
            return "registers" if 13 <= first + place < 26 else "idle"

        labels = [8 * piece + place - 13 if held(place) == "registers" else "-" for place in range(8)]
        drawing.cells(left, 146, 8, side, 26, held, labels)
        drawing.frame(left, 146, 8 * side, 26)
        drawing.text(left, 186, "one load of 16 bytes", 11, colour=SOFT)
    drawing.text(16, 216, "- is masked. It can be read: no memory is handed out in pieces smaller than these", 11)
    return drawing


def cluster_moments() -> Drawing:
    title = "A cluster of four blocks shares a row; means and squared distances of the parts are merged"
    return cluster(title, ("x",), "4 x (mean, squares)")


def cluster_squares() -> Drawing:
    return cluster("A cluster of four blocks shares a row, and its sum of squares", ("x",), "4 sums of squares")


def rows_then_columns() -> Drawing:
    drawing = Drawing("One kernel along rows, one along columns, and one that adds the slices", 266)
    side, rows, columns = 12, 12, 12
    bottom = 66 + side * rows
    for left, title, what in ((16, "1: a block a row", "x, dout"), (238, "2: a thread a column", "x, dout, again")):
        drawing.text(left, 18, title)
        drawing.text(left, 52, what, 11, colour=SOFT)
    drawing.grid(16, 66, rows, columns, side, lambda row, column: "registers" if row == 3 else "device")
    drawing.arrow((162, 108), (174, 108))
    drawing.text(178, 92, "dx", 11)
    drawing.cells(178, 102, columns, 4, 12, "device")

    def strip(row: int, column: int) -> Level:
        return "registers" if column == 5 and 4 <= row < 8 else "device"

    drawing.grid(238, 66, rows, columns, side, strip)
    for cut in (4, 8):
        drawing.line((232, 66 + side * cut), (388, 66 + side * cut), colour=ALARM, dashed=True)
    drawing.text(392, 40, "sums of slices,", 11, colour=SOFT)
    drawing.text(392, 54, "in fp32", 11, colour=SOFT)
    for part in range(3):
        drawing.cells(392, 84 + 4 * side * part, columns, 8, 12, "l2")
    drawing.cells(392 + 8 * 5, 84 + 4 * side, 1, 8, 12, "registers")
    drawing.text(514, 18, "3: adds slices")
    drawing.arrow((492, 138), (518, 138))
    drawing.cells(522, 132, columns, 8, 12, "device")
    drawing.text(522, 158, "dweight, dbias", 11)
    drawing.text(16, bottom + 22, "along a row go the sums that dx needs, along a column those of weight and bias;", 11)
    drawing.text(16, bottom + 38, "each is simple by itself, but x and dout come from device memory twice", 11)
    return drawing


def sums_that_stay() -> Drawing:
    drawing = Drawing("Blocks that stay add up their columns in registers; a second launch adds the blocks", 312)
    drawing.text(16, 18, "x and dout")
    for row in range(9):
        mine = row % 3 == 0
        drawing.cells(44, 30 + 17 * row, 12, 10, 17, "registers" if mine else "device")
        drawing.text(38, 38.5 + 17 * row, str(row % 3), 11, "end")
    drawing.text(16, 196, "block of a row", 11, colour=SOFT)
    drawing.text(222, 18, "block 0, row after row")
    drawing.frame(214, 30, 190, 152, dashed=True)
    drawing.text(224, 44, "the row, in registers", 11, colour=SOFT)
    drawing.cells(224, 54, 12, 14, 20, "registers")
    drawing.text(224, 88, "its two sums, then dx", 11, colour=SOFT)
    drawing.text(224, 122, "dweight, dbias so far", 11, colour=SOFT)
    drawing.cells(224, 132, 12, 14, 20, "registers")
    drawing.cells(224, 152, 12, 14, 20, "registers")
    for row in range(3):
        drawing.arrow((164, 38.5 + 51 * row), (220, 62 + 2 * row))
    drawing.arrow((350, 74), (350, 130), colour=ALARM)
    drawing.text(358, 106, "added", 11, colour=ALARM)
    drawing.arrow((404, 64), (452, 64))
    drawing.text(424, 18, "the rows of dx")
    for row in range(3):
        drawing.cells(456, 38 + 17 * row, 12, 10, 17, "registers" if row == 0 else "device")
    drawing.arrow((404, 152), (452, 152))
    drawing.text(424, 108, "a row for each block, in fp32")
    for block in range(3):
        drawing.cells(456, 122 + 17 * block, 12, 10, 17, "registers" if block == 0 else "l2")
        drawing.text(584, 130.5 + 17 * block, str(block), 11)
    drawing.arrow((516, 173), (516, 208))
    drawing.text(526, 190, "second launch", 11)
    drawing.cells(456, 212, 12, 10, 17, "device")
    drawing.text(450, 220.5, "dweight", 11, "end")
    drawing.cells(456, 233, 12, 10, 17, "device")
    drawing.text(450, 241.5, "dbias", 11, "end")
    drawing.text(
        16, 274, "a thread has the same columns of every row, so nobody else adds to its sums; blocks' sums", 11
    )
    drawing.text(16, 290, "are added in a fixed order, never in that in which they finish", 11)
    return drawing


def rows_alike() -> Drawing:
    drawing = Drawing("Rows of an odd length: those of a block start at the same place within 16 bytes", 254)
    drawing.text(16, 18, "rows of 13 elements of 2 bytes, drawn from the 16 bytes on in which they start")
    side = 15.0
    for piece in range(3):
        drawing.bracket(64 + 8 * side * piece + 2, 44, 8 * side - 4, "16 bytes", below=False)
    for row in range(10):
        y, start = 52 + 16 * row, 13 * row % 8
        drawing.text(56, y + 8, f"row {row}", 11, "end")
        drawing.cells(64, y, 24, side, 16, "plain")
        drawing.cells(64 + side * start, y, 13, side, 16, "registers" if row % 8 == 0 else "device")
    for piece in range(4):
        drawing.line((64 + 8 * side * piece, 48), (64 + 8 * side * piece, 216), colour=ALARM, dashed=True)
    for line, text in enumerate(
        ("rows 0, 8, 16, ... are one", "block's: a thread's 16", "bytes are the same columns", "of all of them")
    ):
        drawing.text(436, 60 + 16 * line, text, 11)
    for line, text in enumerate(("the rows between start", "elsewhere, and are other", "blocks'")):
        drawing.text(436, 140 + 16 * line, text, 11, colour=SOFT)
    drawing.text(16, 236, "where rows are whole pieces of 16 bytes, all start alike, and a block may have any row", 11)
    return drawing


def weights_of_a_block() -> Drawing:
    drawing = Drawing("The warps of a block hold a short row each, and have weights and biases in common", 190)
    for warp in range(4):
        x = 42 + 146.0 * warp
        drawing.box(x, 18, 130, 22, "device", f"row {warp}", 11)
        drawing.arrow((x + 65, 40), (x + 65, 54))
        drawing.box(x, 54, 130, 24, "registers", f"warp {warp}", 11)
        drawing.arrow((x + 65, 102), (x + 65, 78), colour=ALARM)
    drawing.box(42, 102, 568, 24, "shared", "weights, biases: copied by all warps while their rows are on the way", 11)
    drawing.text(16, 156, "one barrier, when every warp knows its row's numbers; a late one keeps only its", 11)
    drawing.text(16, 172, "block waiting, and an SM has several", 11)
    return drawing


def packs_of_a_lane() -> Drawing:
    drawing = Drawing("A row in the warps of a cluster, with five packs a lane and with four", 208)
    drawing.text(16, 18, "a row of 10,240 elements of 2 bytes: 1,280 packs of 16 bytes")
    drawing.box(40, 30, 480, 22, "device", "a row", 11)
    for y, packs, used, blocks in ((66, 5, 8, 2), (126, 4, 10, 3)):
        width = 12.0 * packs
        for warp in range(4 * blocks):
            level: Level = "registers" if warp < used else "idle"
            drawing.box(40 + width * warp, y, width, 24, level, f"warp {warp % 4}", 11)
        for block in range(blocks):
            drawing.bracket(40 + 4 * width * block + 2, y + 28, 4 * width - 4, f"block {block}, {packs} packs a lane")
    drawing.text(16, 190, "what the two grey warps could hold nobody asks for", 11)
    return drawing


def laid_before_the_rows() -> Drawing:
    drawing = Drawing(
        "A warp that lays weights and biases on its way to the result, and one that does while it waits", 226
    )
    factors: tuple[int, Level, str] = (72, "shared", "lay")
    wait: tuple[int, Level, str] = (148, "idle", "wait for rows")
    less: tuple[int, Level, str] = (76, "idle", "wait")
    sums: tuple[int, Level, str] = (68, "registers", "sums")
    exchange: tuple[int, Level, str] = (92, "plain", "exchange")
    write: tuple[int, Level, str] = (76, "device", "write")
    for y, title, parts, barrier in (
        (34, "v08: with the result", (wait, sums, exchange, factors, write), 84 + 148 + 68),
        (124, "v11: as soon as weights and biases have come", (factors, less, sums, exchange, write), 84 + 72),
    ):
        drawing.text(16, y - 16, title)
        drawing.text(16, y + 17, "a warp", 11)
        left = 84.0
        for width, level, text in parts:
            drawing.box(left, y, width, 28, level, text, 11)
            left += width
        drawing.line((barrier, y - 4), (barrier, y + 38), dashed=True)
        drawing.text(barrier + 6, y + 42, "it meets the cluster", 11, colour=SOFT)
    drawing.arrow((84, 186), (604, 186))
    drawing.text(612, 186, "t", 11)
    drawing.text(16, 212, "the barrier keeps the compiler from mixing what waits for the rows with what does not", 11)
    return drawing


def next_row_ahead() -> Drawing:
    drawing = Drawing("A block that waits for its row, and one that has asked for the next before it starts", 258)
    drawing.text(16, 18, "it asks for a row when it is done with the one before")
    drawing.text(16, 42, "one block", 11)
    left = 96.0
    parts: tuple[tuple[int, Level, str], ...] = (
        (76, "device", "row"), (72, "registers", "sums"), (56, "registers", "dx"), (52, "device", "store"),
    )  # fmt: skip
    for row in range(2):
        for width, level, text in parts:
            drawing.box(left, 30, width, 24, level, f"{text} {row}", 11)
            left += width
    drawing.text(16, 82, "it asks for the next row, then works on the one that is there")
    drawing.text(16, 106, "loads", 11)
    drawing.text(16, 138, "threads", 11)
    width = 124
    for row in range(4):
        drawing.box(96 + width * row, 94, width, 24, "device", f"row {row}", 11)
        if row:
            x = 96 + width * row
            for offset, wide, text in ((0, 48, "sums"), (48, 32, "dx"), (80, 44, "store")):
                drawing.box(x + offset, 126, wide, 24, "device" if text == "store" else "registers", text, 11)
            drawing.text(x + width / 2, 164, f"row {row - 1}", 11, "middle", SOFT)
    drawing.arrow((96, 184), (604, 184))
    drawing.text(612, 184, "t", 11)
    drawing.text(16, 208, "in CUDA the row on its way has registers of its own, and moves over at its turn; in", 11)
    drawing.text(16, 224, "Triton it travels to shared memory, through as many stages as the loop has. Memory has", 11)
    drawing.text(16, 240, "something to do all the time, though no other block fills in", 11)
    return drawing


def cluster_columns() -> Drawing:
    drawing = Drawing("A cluster shares its rows, and each block owns a part of the columns", 324)
    for index, name in enumerate(("x", "dout")):
        drawing.text(16, 29 + 26 * index, name, 11)
    drawing.text(16, 268, "sums", 11)
    drawing.frame(66, 82, 562, 152, dashed=True)
    for block in range(4):
        left = 76.0 + 138 * block
        for index in range(2):
            drawing.box(left, 18 + 26 * index, 130, 22, "device", f"part {block}", 11)
        drawing.arrow((left + 65, 66), (left + 65, 92))
        drawing.box(left, 92, 130, 26, "registers", "its part of a row", 11)
        drawing.arrow((left + 30, 118), (left + 30, 136))
        drawing.box(left, 136, 130, 24, "shared", "4 x two sums", 11)
        if block:
            drawing.arrow((left - 8, 144), (left, 144), colour=ALARM)
            drawing.arrow((left, 152), (left - 8, 152), colour=ALARM)
        drawing.arrow((left + 108, 118), (left + 108, 192), dashed=True)
        drawing.box(left, 192, 130, 34, "registers", "dweight, dbias of\nits columns", 11)
        drawing.arrow((left + 65, 226), (left + 65, 256))
        drawing.box(left, 256, 130, 24, "l2", "after all rows", 11)
    drawing.text(76, 176, "a cluster", 11, colour=SOFT)
    drawing.text(
        16, 298, "for every row the blocks send each other two sums, and write their parts of dx; sums along", 11
    )
    drawing.text(16, 312, "columns stay where they are, and are added once, by the second launch", 11)
    return drawing

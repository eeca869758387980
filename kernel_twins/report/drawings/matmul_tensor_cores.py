"""Drawings of the ladders on tensor cores: fragments, swizzle, the split into TF32, promotion, what both cost."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import ALARM, COLOURS, SOFT, Drawing, drawn


@drawn("One mma.sync: a warp multiplies 16 x 16 by 16 x 8, its lanes hold the pieces", 240)
def fragments(drawing: Drawing) -> None:
    side = 8
    drawing.heading(16, 18, "one instruction of a warp (m16n8k16)")
    drawing.frame(12, 34, 336, 168, COLOURS["tensor"][1])
    drawing.grid(24, 46, 16, 16, side, "plain", {"registers": {(2, 2), (2, 3)}})
    drawing.note(88, 188, "A, 16 x 16", "middle")
    drawing.heading(166, 110, "x", "middle")
    drawing.grid(180, 46, 16, 8, side, "plain", {"registers": {(2, 2), (3, 2)}})
    drawing.note(212, 188, "B, 16 x 8", "middle")
    drawing.heading(257, 110, "+=", "middle")
    drawing.grid(272, 46, 16, 8, side, "plain", {"registers": {(2, 2), (2, 3)}})
    drawing.note(304, 188, "sums, 16 x 8", "middle")
    drawing.heading(404, 18, "upper half of the sums, by lane")
    drawing.across(336, 400, 78)
    for row in range(8):
        labels = [4 * row + pair for pair in range(4)]
        drawing.cells(404, 46 + 17 * row, 4, 44, 17, "registers", labels)
    drawing.note(404, 196, "a lane holds two neighbours")
    drawing.text(16, 222, "left, in green: a part of what lane 9 holds; purple: an instruction of the tensor cores")


@drawn("Eight rows of 128 bytes, as they are and with their chunks permuted by XOR", 236)
def swizzle(drawing: Drawing) -> None:
    width, height = 33, 19
    for x, title, swizzled, turns in (
        (44, "as it is: chunk c at place c", 0, "chunk 2 of all rows: one set of banks, 8 turns"),
        (362, "swizzled: chunk c at place c XOR row", 1, "chunk 2 of all rows: all banks, one turn"),
    ):
        drawing.heading(x, 18, title)
        for place in range(8):
            drawing.note(x + (place + 0.5) * width, 38, str(4 * place), "middle")
        for row in range(8):
            chunks = [place ^ (row * swizzled) for place in range(8)]
            drawing.cells(x, 48 + row * height, 8, width, height, "shared", chunks, {"registers": [chunks.index(2)]})
            if not swizzled:
                drawing.note(x - 8, 48 + (row + 0.5) * height, str(row), "end")
        drawing.text(x, 212, turns, colour=SOFT if swizzled else ALARM)
    drawing.note(8, 38, "bank")


@drawn("An fp32 number as the sum of two TF32 numbers, and the three products kept", 236)
def split(drawing: Drawing) -> None:
    side = 13.5
    for row, (name, mantissa, note) in enumerate(
        (("x, fp32", 23, ""), ("big", 10, "x rounded to TF32"), ("small", 10, "x - big, rounded to TF32"))
    ):
        y = 34 + 30 * row
        drawing.text(16, y + 10, name)
        drawing.cells(76, y, 1, side, 20, "plain")
        drawing.cells(76 + side, y, 8, side, 20, "idle")
        drawing.cells(76 + 9 * side, y, mantissa, side, 20, "registers" if row == 0 else "tensor")
        if note:
            drawing.note(76 + (10 + mantissa) * side, y + 10, note)
    drawing.note(76, 20, "sign, 8 bits of exponent, then the mantissa: 23 bits, or 10")
    drawing.heading(16, 136, "a x b  =  (a big + a small) x (b big + b small)")
    products = (("a big x b big", True), ("a big x b small", True), ("a small x b big", True), ("small x small", False))
    for index, (text, kept) in enumerate(products):
        drawing.box(16 + 154 * index, 152, 146, 32, "tensor" if kept else "idle", text, size=12)
        drawing.note(89 + 154 * index, 196, ("kept", "left out")[not kept], "middle")
    drawing.text(16, 220, "three TF32 products on the tensor cores; small x small is at most 2^-22 of a x b")


@drawn("One long sum in the tensor cores, and short pieces added up outside", 236)
def promotion(drawing: Drawing) -> None:
    drawing.heading(16, 18, "not so: one sum along all of K, rounded towards zero at every addition")
    for k in range(8):
        drawing.box(16 + 72 * k, 32, 60, 28, "tensor", f"k {k}")
        drawing.across(76 + 72 * k, 88 + 72 * k, 46)
    drawing.text(594, 46, "sum")
    drawing.heading(16, 92, "but so: every piece of K starts from zero, and its sum is added outside")
    for piece in range(4):
        x = 16 + 144 * piece
        drawing.box(x, 106, 60, 28, "tensor", f"k {2 * piece}")
        drawing.across(x + 60, x + 72, 120)
        drawing.box(x + 72, 106, 60, 28, "tensor", f"k {2 * piece + 1}")
        drawing.down(134, 160, x + 102)
        drawing.box(x + 62, 160, 80, 28, "registers", "+= piece")
        if piece < 3:
            drawing.across(x + 142, x + 206, 174)
    drawing.note(16, 174, "sums")
    drawing.text(16, 206, "purple: added by the tensor cores, rounded towards zero")
    drawing.text(16, 222, "green: added in registers by the FMA pipes, rounded to the nearest number")


@drawn("What a warp issues for a step of 8 along K, before and after", 208)
def lean_split(drawing: Drawing) -> None:
    """Counted in the CUDA steps, whose warps compute 32 x 32 elements."""
    drawing.heading(16, 20, "instructions of a warp for its 32 x 32 sums and 8 of K (CUDA), loads aside")
    width = 4.9
    for y, name, counts in ((36, "before", (24, 48, 32)), (78, "after", (24, 32, 8))):
        drawing.text(16, y + 15, name)
        mma, split, add = counts
        drawing.boxes(70, y, 30, [(mma * width, "tensor", f"mma {mma}"), (split * width, "plain", f"split {split}")])
        drawing.box(70 + (mma + split) * width, y, add * width, 30, "registers", f"add {add}" if add > 8 else str(add))
        drawing.note(78 + sum(counts) * width, y + 15, str(sum(counts)))
    drawing.text(16, 132, "split, for each of 16 elements a lane:")
    drawing.note(288, 132, "round, subtract, round: 3 instructions; after: 2")
    drawing.text(16, 152, "add 32 sums a lane to those outside:")
    drawing.note(288, 152, "in every step; after: in every fourth")
    drawing.text(16, 186, "the three products (purple) stay: there is less for the warps to issue between them")

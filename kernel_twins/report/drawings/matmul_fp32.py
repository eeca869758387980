"""Drawings of the fp32 matmul ladder: from strided access to tiles of tiles."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import ALARM, SOFT, Drawing, Level, drawn, patch

_SECTOR = 8  # fp32 elements


@drawn("The lanes of a warp in 32 rows of A: a sector each, of which one element is used", 216)
def strided_access(drawing: Drawing) -> None:
    side = 16
    lanes = range(8)
    drawing.heading(16, 20, "A, rows of K elements")
    for row in range(8):
        drawing.note(72, 40 + row * side, f"lane {row}", "end")
    drawing.grid(80, 32, 8, 20, side, "plain", {"device": patch(lanes, range(_SECTOR)), "registers": patch(lanes, [0])})
    drawing.bracket(80, 168, _SECTOR * side, "sector: 32 bytes")
    drawing.heading(440, 20, "B, one element")
    drawing.grid(440, 32, 8, 10, side, "plain", {"device": patch([0], range(_SECTOR)), "registers": {(0, 0)}})
    drawing.note(440, 174, "the same for all lanes")
    drawing.text(16, 198, "one load of A: 32 lanes (8 drawn), 32 sectors, 1,024 bytes fetched for 128 bytes used")


@drawn("The lanes of a warp in 32 columns of B: four sectors, all of them used", 186)
def coalesced_access(drawing: Drawing) -> None:
    drawing.heading(16, 20, "A, one row")
    drawing.cells(16, 32, 12, 16, 16, "device", marked={"registers": [0]})
    drawing.note(224, 40, "the same element for all lanes")
    drawing.heading(16, 76, "B, one row")
    for sector in range(4):
        x = 16 + 152 * sector
        drawing.cells(x, 88, _SECTOR, 18.5, 20, "registers")
        drawing.bracket(x, 116, 148, "sector: 32 bytes")
        drawing.note(x + 74, 142, f"lanes {8 * sector} to {8 * sector + 7}", "middle")
    drawing.text(16, 168, "one load of A: one sector; one load of B: four sectors, 128 bytes fetched and used")


@drawn("Tiles of A and B pass through shared memory and serve a whole block", 226)
def shared_tile(drawing: Drawing) -> None:
    side = 11
    ours, there, all_k = range(2, 5), range(3, 6), range(9)
    drawing.grid(120, 14, 9, 9, side, "plain", {"idle": patch(all_k, ours), "device": patch(there, ours)})
    drawing.grid(14, 120, 9, 9, side, "plain", {"idle": patch(ours, all_k), "device": patch(ours, there)})
    drawing.grid(120, 120, 9, 9, side, "plain", {"registers": patch(ours, ours)})
    drawing.heading(104, 60, "B", "end")
    drawing.heading(60, 108, "A", "middle")
    drawing.heading(230, 208, "out")
    drawing.across(17, 44, 147, colour=ALARM)
    drawing.down(17, 44, 147, colour=ALARM)
    drawing.box(262, 40, 86, 60, "device", "device\nmemory")
    drawing.box(392, 40, 104, 60, "shared", "one tile of\nA, one of B")
    drawing.box(540, 40, 84, 60, "registers", "one sum\na thread")
    drawing.across(348, 392, 70)
    drawing.across(496, 540, 70)
    drawing.note(370, 112, "once", "middle")
    drawing.note(518, 112, "32 times", "middle")
    drawing.text(262, 142, "The tiles walk along K. An element that was\nfetched once is used by a whole row or column")
    drawing.text(262, 174, "of the block's 32 x 32 threads.")


@drawn("One sum a thread, and a column of eight sums a thread", 226)
def register_tile_1d(drawing: Drawing) -> None:
    _outer_product(drawing, 60, "one sum a thread", 1, 1)
    _outer_product(drawing, 340, "eight sums a thread", 8, 1)


@drawn("A column of eight sums a thread, and a square of 8 x 8", 226)
def register_tile_2d(drawing: Drawing) -> None:
    _outer_product(drawing, 60, "eight sums a thread", 8, 1)
    _outer_product(drawing, 340, "8 x 8 sums a thread", 8, 8)


def _outer_product(drawing: Drawing, x: float, title: str, rows: int, columns: int) -> None:
    """What a thread loads from shared memory for one k, and the sums that this feeds."""
    side = 15
    drawing.heading(x - 36, 18, title)
    drawing.cells(x, 34, columns, side, side, "shared")
    for row in range(rows):
        drawing.cells(x - 30, 60 + row * side, 1, side, side, "shared")
    drawing.grid(x, 60, rows, columns, side, "registers")
    drawing.note(x + columns * side + 8, 42, f"{columns} of B")
    drawing.note(x - 36, 60 + rows * side + 10, f"{rows} of A")
    loads, products = rows + columns, rows * columns
    drawing.text(x - 36, 210, f"{loads} values loaded for {products} FMA{'s' if products > 1 else ''}")


@drawn("Bank conflicts when a tile is read down a column, and how padding removes them", 242)
def vectors_and_banks(drawing: Drawing) -> None:
    side, banks = 18, 8
    for x, title, padding, turns in (
        (16, "rows of 8: column 0", 0, "all in bank 0: 8 turns"),
        (212, "rows of 8 + 1: column 0", 1, "8 banks: one turn"),
    ):
        drawing.heading(x, 18, title)
        wanted, unused = (
            {divmod(place, banks) for place in range(first, banks**2, banks + padding)} for first in (0, banks)
        )
        drawing.grid(x, 50, banks, banks, side, "shared", {"idle": unused, "registers": wanted})
        for bank in range(banks):
            drawing.note(x + (bank + 0.5) * side, 40, str(bank), "middle")
        drawing.text(x, 206, turns, colour=SOFT if padding else ALARM)
    drawing.heading(412, 18, "16-byte loads")
    drawing.note(412, 40, "four instructions")
    for cell in range(4):
        drawing.cells(412 + 36 * cell, 50, 1, side, side, "shared")
        drawing.down(68, 92, 421 + 36 * cell)
        drawing.cells(412 + 36 * cell, 92, 1, side, side, "registers")
    drawing.note(412, 136, "one instruction")
    drawing.cells(412, 146, 4, side, side, "shared")
    drawing.down(164, 184, 448)
    drawing.cells(412, 184, 4, side, side, "registers")
    drawing.text(16, 228, "columns are banks (8 drawn for 32); a bank serves one row in a turn; grey: padding")


@drawn("The warps of a block: as strips, and as tiles nearer to a square", 224)
def warp_tile(drawing: Drawing) -> None:
    for x, title, width, height, needs in (
        (16, "16 rows of 128 each", 128, 16, "16 + 128 = 144 values a k"),
        (226, "tiles of 64 x 32", 32, 64, "64 + 32 = 96 values a k"),
    ):
        drawing.heading(x, 18, title)
        for warp in range(8):
            column, row = warp % (128 // width), warp // (128 // width)
            chosen: Level = "registers" if warp == 3 else "plain"
            drawing.box(x + column * width, 34 + row * height, width, height, chosen, str(warp))
        drawing.note(x, 176, needs)
    drawing.heading(430, 18, "the 32 lanes of warp 3")
    for row in range(8):
        lanes = [column // 2 * 16 + row * 2 + column % 2 for column in range(4)]
        drawing.cells(430, 34 + 16 * row, 4, 44, 16, "registers", lanes)
    drawing.note(430, 176, "each with 8 x 8 sums")
    drawing.arrow((354, 66), (424, 82))
    drawing.text(16, 206, "fewer values for a warp's 2,048 sums; lanes 0 and 1 share A, 0 and 2 share B")


@drawn("A loop of half the code, and a thread's sums in two patches", 236)
def short_loop(drawing: Drawing) -> None:
    drawing.heading(16, 20, "the loop's FMAs for one tile of 32 k")
    drawing.box(16, 40, 256, 30, "registers", "32 k: 64 KiB of code, once")
    drawing.box(16, 112, 128, 30, "registers", "16 k: 32 KiB")
    drawing.arrow((272, 55), (288, 55), (288, 84), (8, 84), (8, 55), (16, 55), dashed=True)
    drawing.arrow((144, 127), (160, 127), (160, 156), (8, 156), (8, 127), (16, 127), dashed=True)
    drawing.note(172, 128, "twice")
    drawing.note(16, 176, "fetched from the instruction\ncaches over and over")
    side = 17
    drawing.heading(340, 20, "a thread's 8 x 16 sums, in order")
    drawing.grid(340, 40, 8, 16, side, "plain", {"registers": patch(range(8), range(8))})
    for left, rows in ((340, range(8)), (340 + 8 * side, range(7, -1, -1))):
        path = []
        for turn, row in enumerate(rows):
            ends = [(left + side / 2, 40 + (row + 0.5) * side), (left + 7.5 * side, 40 + (row + 0.5) * side)]
            path += ends if turn % 2 == 0 else ends[::-1]
        drawing.arrow(*path, colour=ALARM)
    drawing.note(340, 190, "each FMA keeps a row or a column")
    drawing.text(16, 220, "the next tile, or the next half of one, takes the same instructions")

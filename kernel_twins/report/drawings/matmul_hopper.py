"""Drawings of the steps that need Hopper: copies of whole tiles, roles for warps, clusters, orders, leftover tiles."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import ALARM, SOFT, Drawing, Level, Part, drawn, patch


@drawn("A tile on its way: asked for by one thread, swizzled by the copy engine, read by wgmma", 244)
def tma_tile(drawing: Drawing) -> None:
    drawing.heading(16, 20, "A, as the tensor map describes it")
    drawing.grid(16, 34, 9, 11, 12, "plain", {"device": patch(range(2, 6), range(4, 8))})
    drawing.note(16, 156, "asked for: row, column")
    drawing.box(196, 58, 92, 44, "plain", "copy engine")
    drawing.across(112, 196, 82)
    drawing.heading(324, 20, "shared memory")
    drawing.box(324, 34, 112, 50, "shared", "64 x 64 of A,\nswizzled")
    drawing.box(324, 92, 112, 50, "shared", "64 x 64 of B,\nswizzled")
    drawing.arrow((288, 72), (324, 59))
    drawing.arrow((288, 88), (324, 117))
    drawing.heading(484, 20, "tensor cores")
    drawing.box(484, 34, 140, 108, "tensor", "wgmma: four\nwarps multiply\n64 x 64 x 16")
    drawing.arrow((436, 59), (484, 72))
    drawing.arrow((436, 117), (484, 104))
    drawing.box(324, 160, 112, 30, "idle", "mbarrier")
    drawing.arrow((242, 102), (242, 175), (324, 175))
    drawing.note(150, 190, "counts the bytes")
    drawing.arrow((436, 175), (554, 175), (554, 142))
    drawing.note(450, 190, "all have come: go")
    drawing.text(16, 224, "no thread copies, computes addresses, masks edges or loads fragments")


@drawn("Rows and columns that are fetched for a tile, and the sums that they serve", 232)
def large_tile(drawing: Drawing) -> None:
    for x, size, cells, sums in ((60, "64 x 64", 2, "4,096"), (290, "128 x 128", 4, "16,384")):
        side = 24
        edge = cells * side
        drawing.heading(x - 44, 20, f"a tile of {size}")
        drawing.cells(x, 40, cells, side, 20, "l2")
        for row in range(cells):
            drawing.cells(x - 28, 68 + row * side, 1, 20, side, "l2")
        drawing.grid(x, 68, cells, cells, side, "registers")
        drawing.note(x + edge + 8, 50, "of B")
        drawing.note(x - 44, 68 + edge + 12, "of A")
        drawing.text(x - 44, 196, f"{cells * 64} elements a k, {sums} sums")
    drawing.note(470, 90, "twice the strips,\nfour times the\nproducts")
    drawing.text(16, 218, "teal: what L2 has to deliver for each k; green: sums; a cell is 32 elements wide")


@drawn("A producer fills a ring of stages, a consumer empties it; two barriers for each stage", 232)
def producer_ring(drawing: Drawing) -> None:
    drawing.box(16, 62, 108, 60, "plain", "producer:\none thread\nasks for tiles")
    drawing.box(516, 62, 108, 60, "tensor", "consumer:\na warpgroup\nmultiplies")
    drawing.heading(152, 20, "shared memory of one block: a ring of six stages")
    texts = ("read", "full", "full", "coming", "coming", "empty")
    levels: tuple[Level, ...] = ("tensor", "shared", "shared", "idle", "idle", "plain")
    for index, (text, level) in enumerate(zip(texts, levels, strict=True)):
        drawing.box(152 + 56 * index, 62, 52, 60, level, text)
        drawing.note(178 + 56 * index, 134, f"stage {index}", "middle")
    drawing.across(124, 152, 80)
    drawing.across(488, 516, 80)
    drawing.arrow((70, 62), (70, 42), (570, 42), (570, 62))
    drawing.note(236, 50, "full[s]: its bytes have come")
    drawing.arrow((570, 122), (570, 160), (70, 160), (70, 122), dashed=True)
    drawing.note(200, 172, "empty[s]: it has been multiplied, and may be filled again")
    drawing.text(16, 200, "the producer runs ahead by as many tiles as the ring holds; barriers flip with every")
    drawing.text(16, 216, "round of the ring, and who waits names the round by its parity")


@drawn("Two warpgroups at one tile, and wgmma with a group left under way", 258)
def two_consumers(drawing: Drawing) -> None:
    drawing.heading(16, 20, "a tile of 128 x 256")
    drawing.box(16, 56, 150, 40, "registers", "warpgroup 1: 64 x 256")
    drawing.box(16, 96, 150, 40, "registers", "warpgroup 2: 64 x 256")
    drawing.note(16, 156, "both read the same B")
    drawing.box(16, 34, 150, 18, "shared", "64 x 256 of B")
    drawing.heading(200, 20, "a warpgroup that waits for its products")
    for step in range(4):
        drawing.boxes(200 + 106 * step, 34, 28, [(76, "tensor", f"k {step}"), (30, "idle", "")])
    drawing.note(200, 78, "grey: it notices, waits for the next stage, starts the next group")
    drawing.heading(200, 106, "one group stays under way")
    drawing.boxes(200, 120, 28, [(76, "tensor", f"k {step}") for step in range(5)])
    for step in range(4):
        drawing.down(172, 150, 222 + 76 * (step + 1))
        drawing.note(240 + 76 * step + 38, 184, f"frees {step}", "middle")
    drawing.time_axis(200, 208)
    drawing.text(16, 238, "when the wait for k 0 returns, k 1 has been started: a stage is freed one step later")


@drawn("Blocks of one tile each on an SM, and one block that stays", 236)
def persistent(drawing: Drawing) -> None:
    drawing.heading(16, 20, "a block for every tile: set up, fill the ring, multiply, store, end")
    drawing.text(16, 48, "one SM")
    start: Part = (40, "idle", "start")
    fetch: Part = (50, "shared", "fetch")
    store: Part = (54, "registers", "store")
    for tile in range(2):
        drawing.boxes(96 + 262 * tile, 34, 28, [start, fetch, (118, "tensor", f"tile {tile}"), store])
    drawing.heading(16, 100, "a block that stays")
    drawing.text(16, 128, "producer")
    drawing.text(16, 164, "consumers")
    drawing.boxes(96, 114, 28, [start, (118, "shared", "fetch 0")])
    drawing.boxes(254, 114, 28, [(168, "shared", "fetch 1"), (168, "shared", "fetch 2")])
    tiles: list[Part] = [(118, "tensor", "tile 0"), store, (118, "tensor", "tile 1"), store, (60, "tensor", "tile 2")]
    drawing.boxes(186, 150, 28, tiles)
    drawing.time_axis(96, 196)
    drawing.text(16, 218, "the ring is full again when the sums are stored; starting is paid once")


@drawn("Two blocks that need the same tile of B: fetched twice, and once for both", 262)
def multicast(drawing: Drawing) -> None:
    for x, title, note, colour in (
        (16, "two blocks by themselves", "L2 delivers A0, A1 and B twice", ALARM),
        (334, "a cluster of two", "L2 delivers A0, A1 and B once", SOFT),
    ):
        drawing.heading(x, 20, title)
        drawing.box(x, 34, 52, 160, "l2", "L2", size=12)
        drawing.text(x, 214, note, colour=colour)
    for block in range(2):
        y = 34 + 84 * block
        drawing.box(178, y, 112, 76, "shared", f"block {block}:\nA{block}, B")
        drawing.across(68, 178, y + 22)
        drawing.note(122, y + 12, f"A{block}", "middle")
        drawing.across(68, 178, y + 56)
        drawing.note(122, y + 46, "all of B", "middle")
        drawing.box(508, y, 116, 76, "shared", f"block {block}:\nA{block}, B")
        drawing.across(386, 508, y + 18)
        drawing.note(440, y + 8, f"A{block}", "middle")
        drawing.line((386, y + 56), (460, y + 56))
        drawing.note(424, y + 46, f"half {block}", "middle")
        for target in range(2):
            drawing.arrow((460, y + 56), (508, 34 + 84 * target + (42 if block == 0 else 62)))
    drawing.text(16, 244, "multicast: what L2 delivers once is written, and counted, in the shared memory of both")


@drawn("A warpgroup's 64 x 256 sums leave in four pieces, through two places in shared memory", 264)
def staged_store(drawing: Drawing) -> None:
    drawing.heading(16, 20, "registers")
    for piece in range(4):
        drawing.box(16, 34 + 30 * piece, 96, 28, "registers", f"columns {64 * piece}+")
    drawing.heading(188, 20, "shared memory, swizzled")
    drawing.box(188, 42, 112, 44, "shared", "piece 0, then 2")
    drawing.box(188, 100, 112, 44, "shared", "piece 1, then 3")
    drawing.arrow((112, 48), (188, 58))
    drawing.arrow((112, 78), (188, 116))
    drawing.arrow((112, 108), (188, 72), dashed=True)
    drawing.arrow((112, 138), (188, 130), dashed=True)
    drawing.note(16, 166, "stmatrix: whole rows of 16 bytes")
    drawing.box(376, 64, 92, 56, "plain", "copy engine")
    drawing.arrow((300, 64), (376, 82))
    drawing.arrow((300, 122), (376, 102))
    drawing.note(304, 166, "after fence.proxy.async")
    drawing.box(536, 42, 88, 102, "device", "out, in\nwhole lines")
    drawing.across(468, 536, 92)
    drawing.text(16, 196, "products")
    drawing.box(120, 184, 150, 24, "tensor", "tile 0")
    drawing.box(350, 184, 240, 24, "tensor", "tile 1")
    drawing.text(16, 226, "stores")
    drawing.boxes(282, 214, 24, [(44, "shared", str(piece)) for piece in range(4)], gap=2)
    drawing.note(500, 226, "2 and 3 drain here")
    drawing.text(16, 250, "a place is written again once the copy engine has read it, not once out has it")


@drawn("A run of 64 tiles in groups of four rows, and along a Hilbert curve", 254)
def hilbert(drawing: Drawing) -> None:
    side, cells, first, run = 11, 16, 80, 64
    grouped = [(4 * group + within % 4, within // 4) for group in range(4) for within in range(64)]
    for x, title, order in ((70, "groups of four rows", grouped), (380, "Hilbert curve", _hilbert(cells))):
        working = set(order[first : first + run])
        drawing.heading(x, 20, title)
        drawing.grid(x, 34, cells, cells, side, "plain", {"registers": working})
        drawing.line(*((x + side * (column + 0.5), 34 + side * (row + 0.5)) for row, column in order))
        rows, columns = (len({cell[way] for cell in working}) for way in (0, 1))
        drawing.text(x, 222, f"{rows} strips of A + {columns} strips of B = {rows + columns}")
    drawing.text(16, 242, f"green: the {run} tiles in work at some moment, the same ones of either order")


def _hilbert(size: int) -> list[tuple[int, int]]:
    """The cells (row, column) of a square in the order of the curve: hilbert.h's, for a power of two."""
    if size == 1:
        return [(0, 0)]
    half = size // 2
    quarter = _hilbert(half)
    return [
        *((column, row) for row, column in quarter),
        *((row + half, column) for row, column in quarter),
        *((row + half, column + half) for row, column in quarter),
        *((half - 1 - column, size - 1 - row) for row, column in quarter),
    ]


@drawn("Twenty tiles on eight SMs: a last round of four, and those four split along K", 262)
def split_tiles(drawing: Drawing) -> None:
    width, height = 70, 18
    for x, title in ((66, "whole tiles"), (356, "the last four split in two")):
        drawing.heading(x, 20, title)
        for sm in range(8):
            if x == 66:
                drawing.note(16, 44 + height * sm, f"SM {sm}")
            for turn in range(2):
                drawing.box(x + width * turn, 35 + height * sm, width, height, "tensor", f"tile {8 * turn + sm}")
    for sm in range(8):
        y = 35 + height * sm
        level: Level = "tensor" if sm < 4 else "idle"
        drawing.box(66 + 2 * width, y, width, height, level, f"tile {16 + sm}" if sm < 4 else "idle")
        drawing.box(356 + 2 * width, y, width / 2, height, "tensor", f"{16 + sm // 2}{'ab'[sm % 2]}")
        if sm % 2:
            drawing.box(356 + 2.5 * width, y, 40, height, "registers", "a + b")
        else:
            drawing.arrow((356 + 2.5 * width, y + 9), (356 + 2.5 * width + 24, y + 9), (556, y + height))
    for x in (66, 356):
        drawing.across(x, x + 3 * width + 20, 192)
        drawing.text(x + 3 * width + 26, 192, "t")
    drawing.text(16, 216, "a and b: the two halves of K. Whoever comes last adds a and b, always in this order")
    drawing.text(16, 232, "whole rounds come first: what is split, and has to be written and read again, are only")
    drawing.text(16, 248, "the tiles of the round that would have left SMs idle")


@drawn("Rows of an odd number of elements, as they are and copied into padded rows", 232)
def unaligned_rows(drawing: Drawing) -> None:
    left, cells = 16, 15
    for y, title, shifts in (
        (20, "rows of 15 units where a line holds 16: most lie across two lines", (0, 15, 30, 45)),
        (112, "copied once into rows of 16: each begins with a line", (0, 16, 32, 48)),
    ):
        drawing.heading(left, y, title)
        width = 148.0
        for line in range(4):
            drawing.box(left + width * line, y + 34, width, 20, "plain")
            drawing.note(left + width * (line + 0.5), y + 66, f"line {line}", "middle")
        unit = width / 16
        for row, shift in enumerate(shifts):
            level: Level = "registers" if row == 2 else "device"
            drawing.box(left + unit * shift, y + 14, unit * cells, 18, level, f"row {row}")
    drawing.text(16, 206, "green: row 2, which is in lines 1 and 2, or in one line alone")
    drawing.note(16, 222, "a line is 128 bytes, drawn as 16 units")


@drawn("Eight warps in step, and three roles at their own pace", 258)
def roles_by_hand(drawing: Drawing) -> None:
    drawing.heading(16, 20, "Triton: the compiler lets all eight warps do everything")
    drawing.text(16, 48, "warps 0 to 7")
    for step in range(3):
        drawing.boxes(130 + 160 * step, 34, 28, [(44, "shared", "ask"), (100, "tensor", f"k {step}"), (16, "idle", "")])
    drawing.heading(16, 98, "Gluon: who copies and who multiplies is written down")
    drawing.text(16, 126, "warp 8\nwarps 0 to 3\nwarps 4 to 7", spacing=34)
    drawing.boxes(130, 112, 28, [(76, "shared", "ask")] * 6, gap=4)
    for step in range(4):
        drawing.box(150 + 104 * step, 146, 104, 28, "tensor", f"k {step}")
        drawing.box(182 + 104 * step, 180, 104, 28, "tensor", f"k {step}")
    drawing.time_axis(130, 222)
    drawing.text(16, 244, "grey: all meet; below, while one warpgroup waits or stores, the other one multiplies")


@drawn("Two small kernels of a stream, one after the other and the second set up early", 284)
def early_start(drawing: Drawing) -> None:
    set_up: Part = (48, "idle", "set up")
    describe: Part = (80, "device", "write\ndescriptors")
    multiply: Part = (70, "tensor", "fetch and\nmultiply")
    store: Part = (48, "registers", "store")
    wait: Part = (48, "plain", "wait")
    drawing.heading(16, 20, "as before: a kernel begins when the one before it has ended")
    drawing.heading(16, 132, "now: descriptors come with the launch, and kernel 2 is set up beside kernel 1")
    for name, x, y, parts in (
        ("kernel 1", 84, 34, (set_up, describe, multiply, store)),
        ("kernel 2", 330, 74, (set_up, describe, multiply, store)),
        ("kernel 1", 84, 146, (set_up, multiply, store)),
        ("kernel 2", 154, 186, (set_up, wait, multiply, store)),
    ):
        drawing.text(16, y + 17, name)
        drawing.boxes(x, y, 34, parts)
    for x, y in ((330, 34), (250, 146)):
        drawing.line((x, y - 4), (x, y + 78), dashed=True)
        drawing.note(x + 8, y + 17, "kernel 1 has ended")
    drawing.bracket(368, 203, 208, "sooner")
    drawing.time_axis(84, 240)
    drawing.text(16, 264, "kernel 2 touches no data before kernel 1 has ended, and then multiplies at once")


@drawn("Few rows as rows of a tile and as its columns, and a cluster whose blocks share K", 300)
def swapped_operands(drawing: Drawing) -> None:
    drawing.heading(16, 20, "four rows of a as rows of a tile")
    drawing.grid(16, 34, 16, 16, 6, "idle", {"registers": patch(range(1), range(16))})
    drawing.note(120, 44, "64 x 64 sums,\n4 x 64 of use")
    drawing.heading(16, 164, "as its columns")
    drawing.grid(16, 178, 16, 2, 6, "idle", {"registers": patch(range(16), range(1))})
    drawing.note(40, 190, "64 x 8 sums,\n64 x 4 of use")
    drawing.heading(250, 20, "a cluster of four blocks shares a tile's K")
    for block in range(4):
        x = 250 + 96 * block
        drawing.box(x, 34, 84, 34, "device", f"K, part {block}")
        drawing.box(x, 96, 84, 30, "tensor", "multiply")
        drawing.arrow((x + 42, 68), (x + 42, 96))
        drawing.arrow((x + 42, 126), (x + 42, 148))
        for share in range(4):
            level: Level = "registers" if share == 1 else "shared"
            drawing.box(x, 148 + 16 * share, 84, 16, level, f"rows {share}")
        drawing.arrow((x + 84, 172), (x + 90, 172), (x + 90, 226), (388, 226), (388, 240))
    drawing.box(338, 240, 100, 30, "registers", "sum of rows 1")
    drawing.note(446, 252, "by block 1; the others\nadd up rows 0, 2 and 3")
    drawing.text(16, 290, "each block adds up its share of the rows, from all blocks' shared memory, in one order")


@drawn("Tiles of 256 columns leave the second round nearly empty, tiles of 160 fill it", 236)
def fitted_tiles(drawing: Drawing) -> None:
    for x, columns, left in ((16, 256, 14), (336, 160, 62)):
        drawing.heading(x, 20, f"tiles of {columns} columns: {66 + left}")
        drawing.text(x, 48, "first round: 66 clusters")
        drawing.grid(x, 58, 3, 22, 12, "idle", {"tensor": patch(range(3), range(22))})
        drawing.text(x, 122, f"second round: {left}")
        taken = {divmod(cluster, 22) for cluster in range(left)}
        drawing.grid(x, 132, 3, 22, 12, "idle", {"tensor": taken})
        drawing.note(x, 190, f"a round takes {columns // 32} parts of time,\nthe product {columns // 16}")
    drawing.text(16, 228, "1024 x 5120, in clusters of two blocks, 256 rows high; a cluster has two of 132 SMs")


@drawn("A stage of fp32 tiles: fetched by one warp, turned round by three, read by eight", 248)
def turned_pieces(drawing: Drawing) -> None:
    drawing.heading(16, 20, "device memory")
    drawing.box(16, 34, 100, 56, "device", "A: k side\nby side")
    drawing.box(16, 118, 100, 56, "device", "B: columns\nside by side")
    drawing.heading(196, 20, "a stage in shared memory")
    drawing.boxes(196, 34, 56, [(44, "shared", "32 x\n32")] * 4, gap=2)
    drawing.boxes(196, 118, 56, [(22, "shared", "")] * 8, gap=1)
    drawing.across(116, 196, 62, 146)
    drawing.note(122, 104, "copy engine")
    drawing.box(414, 34, 96, 56, "registers", "three warps\ntranspose")
    drawing.across(380, 414, 50)
    drawing.across(414, 380, 74)
    drawing.box(534, 34, 90, 140, "registers", "eight warps:\nFMAs only")
    drawing.across(510, 534, 62)
    drawing.across(380, 534, 146)
    drawing.note(404, 106, "turned[s]")
    drawing.note(404, 134, "full[s]")
    drawing.arrow((580, 174), (580, 196), (66, 196), (66, 174), dashed=True)
    drawing.note(200, 208, "empty[s]: read by all, fetch the next")
    drawing.text(16, 232, "pieces are turned in place; only where k lies side by side is there any need")


@drawn("B is split by a kernel of its own, A by the warpgroup that multiplies it", 262)
def split_once(drawing: Drawing) -> None:
    drawing.heading(16, 20, "first kernel")
    drawing.box(16, 34, 68, 60, "device", "B, rows\nof N")
    drawing.box(120, 34, 100, 26, "device", "B big")
    drawing.box(120, 68, 100, 26, "device", "B small")
    drawing.arrow((84, 54), (120, 47))
    drawing.arrow((84, 74), (120, 81))
    drawing.note(16, 112, "turned round: rows along K")
    drawing.heading(284, 20, "second kernel")
    drawing.box(284, 34, 104, 26, "shared", "tile of big")
    drawing.box(284, 68, 104, 26, "shared", "tile of small")
    drawing.across(220, 284, 47, 81)
    drawing.box(120, 134, 100, 40, "device", "A", size=12)
    drawing.box(284, 134, 104, 40, "shared", "tile of A,\nas it is")
    drawing.across(220, 284, 154)
    drawing.box(424, 128, 96, 24, "registers", "A big")
    drawing.box(424, 158, 96, 24, "registers", "A small")
    drawing.arrow((388, 148), (424, 140))
    drawing.arrow((388, 160), (424, 170))
    drawing.box(550, 34, 74, 148, "tensor", "wgmma:\nthree\nproducts")
    drawing.arrow((388, 47), (550, 60))
    drawing.arrow((388, 81), (550, 88))
    drawing.across(520, 550, 140, 170)
    drawing.text(16, 208, "wgmma takes its right operand from shared memory, in TF32 along K only, its left one")
    drawing.text(16, 224, "from there or from registers: what is split once for all lies in memory, what only one")
    drawing.text(16, 240, "warpgroup uses is split in its registers")

"""Drawings of the ladder of attention's gradients: who owns a gradient, where p and ds lie, what runs under what."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import ALARM, Drawing, Level, Part, drawn, patch


@drawn("A block that owns keys sums down a column of tiles, one that owns queries along a row", 232)
def owners(drawing: Drawing) -> None:
    side, n = 24, 5
    for left, title, owned, mine in (
        (60, "kernel of keys", "its dk, dv", patch(range(n), (2,))),
        (370, "kernel of queries", "its dq", patch((2,), range(n))),
    ):
        drawing.heading(left - 44, 18, title)
        drawing.note(left, 40, "keys")
        drawing.note(left - 44, 110, "queries")
        drawing.grid(left + 10, 52, n, n, side, "plain", {"tensor": mine})
        drawing.box(left + 144, 52, 88, 30, "registers", owned)
        drawing.note(left + 144, 100, "written once,")
        drawing.note(left + 144, 116, "in one order")
    drawing.text(16, 200, "every tile of scores belongs to one block of each kernel: it is computed twice,")
    drawing.text(16, 218, "seven products in place of five")


@drawn("A tile of queries lies in shared memory once, and wgmma reads it along either dimension", 206)
def either_way(drawing: Drawing) -> None:
    drawing.heading(16, 18, "shared memory, by TMA, two stages")
    drawing.boxes(16, 32, 44, [(120, "shared", "q\n64 queries"), (120, "shared", "dout\n64 queries")], gap=10)
    drawing.boxes(340, 32, 44, [(120, "shared", "k\n64 keys"), (120, "shared", "v\n64 keys")], gap=10)
    drawing.note(16, 94, "rows along D")
    products: tuple[Part, ...] = ((140, "tensor", "q k^T"), (140, "tensor", "dout v^T"))
    drawing.boxes(130, 84, 22, products, gap=8)
    drawing.note(16, 126, "in between")
    drawing.boxes(130, 116, 22, ((140, "registers", "p"), (140, "registers", "ds")), gap=8)
    drawing.note(16, 158, "transposed")
    drawing.boxes(130, 148, 22, ((140, "tensor", "p^T dout"), (140, "tensor", "ds^T q")), gap=8)
    drawing.text(16, 190, "p and ds pass through shared memory: wgmma's left operand is transposed only there")


@drawn("One kernel of keys computes each tile of scores once, and adds its part of dq in memory", 232)
def added_in_memory(drawing: Drawing) -> None:
    side, n = 24, 5
    drawing.note(76, 18, "keys")
    drawing.note(16, 92, "queries")
    drawing.grid(76, 30, n, n, side, "plain", {"tensor": patch(range(n), (1, 3))})
    for column, name in ((1, "0"), (3, "1")):
        x = 76 + (column + 0.5) * side
        drawing.down(150, 166, x)
        drawing.note(x, 174, f"block {name}", "middle")
    drawing.heading(330, 18, "dq in memory, fp32")
    for row in range(n):
        drawing.box(330, 30 + side * row, 120, side, "l2", "sum")
    drawing.across(198, 324, 42, 66, 90, 114, 138)
    drawing.note(462, 92, "rounded by a small kernel")
    drawing.text(
        16, 200, "dk and dv stay in a block's registers; a row of dq gets a part from every block that sees it,"
    )
    drawing.text(16, 218, "and L2 adds the parts in the order in which they come")


@drawn("Scores [queries, keys] have to be transposed for dv and dk; scores [keys, queries] have not", 206)
def scores_by_keys(drawing: Drawing) -> None:
    for y, name, first, way, last in (
        (40, "v03", "q k^T, dout v^T", "p, ds to shared memory", "ds k as it lies"),
        (104, "v04", "k q^T, v dout^T", "ds to shared memory", "ds k transposed"),
    ):
        drawing.note(16, y + 12, name)
        drawing.boxes(60, y, 24, ((130, "tensor", first), (170, "shared", way), (130, "tensor", last)), gap=8)
    drawing.boxes(198, 72, 20, ((170, "shared", "read from there"), (196, "tensor", "p^T dout, ds^T q")), gap=8)
    drawing.boxes(198, 136, 20, ((170, "registers", "p, ds"), (196, "tensor", "p^T dout, ds^T q")), gap=8)
    drawing.text(
        16, 186, "a warpgroup's rows are its own keys, as dk's and dv's are: p and ds are left operands at once"
    )


@drawn("One warp fetches, another one adds parts of dq to memory, and two warpgroups only compute", 214)
def fetch_and_add(drawing: Drawing) -> None:
    drawing.heading(16, 18, "warpgroup 0, few registers")
    drawing.boxes(16, 32, 26, ((130, "plain", "warp 0: fetches"), (130, "plain", "warp 1: adds")), gap=240)
    drawing.heading(16, 86, "shared memory")
    drawing.boxes(16, 98, 26, ((130, "shared", "q, dout, 2 stages"), (110, "shared", "ds, 2 stages")), gap=40)
    drawing.box(386, 98, 130, 26, "shared", "parts of dq")
    drawing.heading(160, 148, "warpgroups 1 and 2, many registers")
    drawing.boxes(16, 164, 26, ((246, "tensor", "products of 64 keys"), (246, "tensor", "products of 64 keys")), gap=8)
    drawing.down(60, 94, 130)
    drawing.down(94, 60, 451)
    drawing.down(126, 160, 81)
    drawing.down(160, 126, 451)
    drawing.note(16, 204, "an mbarrier stands behind each arrow; the consumers meet once a tile, for each other's ds")


@drawn("A consumer waits for one product while the next one runs, and has something else to do meanwhile", 190)
def one_under_another(drawing: Drawing) -> None:
    drawing.time_axis(120, 22)
    rows: tuple[tuple[str, Level, tuple[tuple[float, float, str], ...]], ...] = (
        (
            "tensor cores",
            "tensor",
            ((126, 76, "k q^T"), (206, 76, "v dout^T"), (286, 84, "p^T dout"), (398, 64, "ds k"), (466, 84, "ds^T q")),
        ),
        ("the rest", "registers", ((206, 76, "exp"), (286, 84, "ds"), (466, 84, "dq leaves"))),
    )
    for row, (name, level, boxes) in enumerate(rows):
        y = 40 + 34 * row
        drawing.note(16, y + 12, name)
        for x, width, text in boxes:
            drawing.box(x, y, width, 24, level, text)
    drawing.line((384, 36), (384, 102), dashed=True)
    drawing.note(384, 114, "both consumers have stored ds", "middle")
    drawing.text(16, 152, "each product is a group of its own: a wait for all but the last one lets that one run on;")
    drawing.text(16, 170, "under the scores and ds k nothing else stands, but the other consumer")


@drawn("Parts of dq go through shared memory and the copy engine, or from registers to L2 at once", 170)
def past_shared_memory(drawing: Drawing) -> None:
    steps: tuple[tuple[str, tuple[Part, ...]], ...] = (
        ("v06", ((110, "registers", "dq's part"), (130, "shared", "stored, read"), (160, "l2", "added in blocks"))),
        ("v07", ((110, "registers", "dq's part"), (130, "plain", ""), (160, "l2", "added by fours"))),
    )
    for row, (name, boxes) in enumerate(steps):
        y = 32 + 48 * row
        drawing.note(16, y + 13, name)
        x = 64.0
        for width, level, text in boxes:
            if text:
                drawing.box(x, y, width, 26, level, text)
            x += width + 30
    drawing.across(174, 202, 45)
    drawing.across(334, 362, 45)
    drawing.across(174, 362, 93)
    drawing.text(
        16, 148, "the addition returns nothing, so no thread waits for it; the barriers of the store fall away"
    )


@drawn("A block that draws its next tile late leaves it to whoever is done first", 226)
def late_draw(drawing: Drawing) -> None:
    unit, lengths = 14, (8, 4, 4, 4, 3, 1)
    drawn_early, drawn_late = ((8, 4), (4, 3), (4, 1)), ((8,), (4, 4), (4, 3, 1))
    assert sorted(sum(drawn_early, ())) == sorted(sum(drawn_late, ())) == sorted(lengths)
    for left, title, blocks in (
        (16, "early: when a tile begins, for the next one", drawn_early),
        (336, "late: when its last copies have begun", drawn_late),
    ):
        drawing.heading(left, 18, title)
        for row, tiles in enumerate(blocks):
            y = 38 + 34 * row
            drawing.note(left, y + 12, f"block {row}")
            parts: list[Part] = [(unit * tile - 2, "tensor", str(tile)) for tile in tiles]
            drawing.boxes(left + 54, y, 24, parts, gap=2)
        drawing.arrow((left + 54, 146), (left + 270, 146))
        drawing.note(left + 276, 146, "t")
    drawing.frame(16 + 54 + 8 * unit - 3, 35, 4 * unit + 4, 30, colour=ALARM)
    drawing.note(246, 50, "kept waiting")
    drawing.text(16, 176, "a number: how many tiles of queries see the tile of keys; the queue begins with the most")
    drawing.text(16, 194, "left, block 0 keeps a tile that another block could have begun long before; right, it goes")
    drawing.text(16, 212, "to the block that is done first. Its consumers have full stages until the number is there")


@drawn("With the last queries first, causal blocks in turns end together; with the first ones first, they wait", 338)
def adding_in_turns(drawing: Drawing) -> None:
    tiles, unit = 5, 24
    for left, title, last_first in ((16, "the last queries first", True), (330, "the first queries first", False)):
        drawing.heading(left, 18, title)
        ends = [0] * tiles  # when the tile of queries was last added to
        for block in range(tiles):
            visits = range(block, tiles)
            time = 0
            parts: list[Part] = []
            for query in reversed(visits) if last_first else visits:
                if ends[query] > time:
                    parts.append((unit * (ends[query] - time) - 2, "idle", "waits" if ends[query] - time > 1 else ""))
                    time = ends[query]
                time += 1
                ends[query] = time
                parts.append((unit - 2, "tensor", str(query)))
            drawing.note(left, 42 + 26 * block, f"keys {block}")
            drawing.boxes(left + 52, 32 + 26 * block, 20, parts, gap=2)
        drawing.arrow((left + 52, 170), (left + 66 + unit * max(ends), 170))
        drawing.note(left + 72 + unit * max(ends), 170, "t")
    drawing.note(16, 192, "a number: the tile of dq that is added to; no two blocks add to the same one at a time")
    steps: tuple[tuple[float, float, Level, str], ...] = (
        (16, 118, "plain", "warp 1 waits\nfor the counter"),
        (220, 118, "tensor", "consumers add\nto dq"),
        (424, 118, "plain", "warp 2 passes\nthe turn on"),
    )
    for x, width, level, text in steps:
        drawing.box(x, 216, width, 38, level, text)
    drawing.across(134, 220, 228)
    drawing.note(177, 216, "granted", "middle")
    drawing.across(338, 424, 228)
    drawing.note(381, 216, "added", "middle")
    drawing.arrow((424, 244), (341, 244), (341, 268), (100, 268), (100, 254))
    drawing.note(381, 260, "passed", "middle")
    drawing.box(424, 284, 118, 22, "l2", "counter + 1")
    drawing.down(254, 284, 483)
    drawing.box(190, 284, 148, 22, "plain", "next block's warp 1")
    drawing.across(424, 338, 295)
    drawing.text(16, 324, "mbarriers within a block; between blocks a counter in L2 for each tile of dq")


@drawn("How two consumers share a visit: 64 keys each, or both the same 64 with half of everything", 282)
def shared_visits(drawing: Drawing) -> None:
    halves: tuple[tuple[Level, str], ...] = (("tensor", "0"), ("registers", "1"))
    down, across = "down", "across"
    # Of each matrix: its rows and columns in tiles of 64, and along which side the consumers share it.
    widths: tuple[tuple[str, str, tuple[tuple[int, int, str], ...]], ...] = (
        ("D up to 64", "128 keys, 128 queries", ((2, 2, down), (2, 1, down), (2, 1, down))),
        ("D up to 128", "128 keys, 64 queries", ((2, 1, down), (2, 2, down), (1, 2, across))),
        ("D up to 256", "64 keys, 64 queries", ((1, 1, across), (1, 4, across), (1, 4, across))),
    )
    names = (("p, ds", "keys x queries"), ("dk, dv", "keys x D"), ("dq", "queries x D"))
    for row, (name, sides) in enumerate(names):
        drawing.text(16, 66 + 58 * row, name)
        drawing.note(16, 82 + 58 * row, sides)
    for column, (title, visit, matrices) in enumerate(widths):
        left = 136 + 164 * column
        drawing.heading(left, 18, title)
        drawing.note(left, 34, visit)
        for row, (rows, columns, shared) in enumerate(matrices):
            height, width = 22 * rows, 34 * columns
            for index, (level, text) in enumerate(halves):
                x, y = left, 50 + 58 * row
                if shared == down:
                    drawing.box(x, y + height / 2 * index, width, height / 2, level, text)
                else:
                    drawing.box(x + width / 2 * index, y, width / 2, height, level, text)
    drawing.text(16, 232, "0, 1: the consumer that has it")
    drawing.text(16, 250, "up to 128 a consumer multiplies p and ds of its own keys from registers, and ds of both")
    drawing.text(16, 268, "from shared memory for dq; above, p and ds of both from shared memory for all three")

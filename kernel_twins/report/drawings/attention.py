"""Drawings of attention's ladder: a query a thread, tiles of scores, masks, copies ahead."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import Drawing, Level, Part, drawn

_THIRDS: tuple[tuple[Level, str], ...] = (("tensor", "q k"), ("registers", "exp"), ("tensor", "p v"))


@drawn("A thread holds one query and its result; all threads of a block read the same key", 214)
def one_query(drawing: Drawing) -> None:
    drawing.heading(16, 18, "shared memory: a tile of keys, a tile of values")
    drawing.cells(16, 34, 8, 34, 22, "shared", [f"k{i}" for i in range(8)], {"tensor": [2]})
    drawing.cells(336, 34, 8, 34, 22, "shared", [f"v{i}" for i in range(8)], {"tensor": [2]})
    drawing.down(58, 96, 100, 420)
    drawing.note(112, 78, "one broadcast to all threads")
    drawing.heading(16, 110, "of each thread: its query, also in shared memory, and its registers")
    for index, name in enumerate(("thread 0", "thread 1", "thread 127")):
        x = 16 + 206 * index
        drawing.boxes(
            x, 124, 26, ((52, "shared", f"q{(0, 1, 127)[index]}"), (136, "registers", "out, max, sum")), gap=4
        )
        drawing.note(x, 164, name)
    drawing.text(16, 190, "s = q k2; if the maximum rises, out and sum shrink; then out += e^(s - max) v2")


@drawn("Tiles of scores: a maximum, a sum and a result of each row go along, and no score is stored", 258)
def score_tiles(drawing: Drawing) -> None:
    drawing.heading(120, 18, "keys, tile by tile")
    drawing.boxes(120, 30, 26, [(92, "device", f"k tile {i}") for i in range(5)], gap=4)
    drawing.box(16, 70, 92, 74, "device", "q tile\n64 queries")
    drawing.boxes(
        120,
        70,
        74,
        [
            (92, "idle", "done"),
            (92, "idle", "done"),
            (92, "tensor", "scores\nnow"),
            (92, "plain", ""),
            (92, "plain", ""),
        ],
        gap=4,
    )
    drawing.down(146, 170, 358)
    drawing.note(368, 158, "exponentials, still in registers")
    drawing.boxes(120, 174, 26, [(92, "device", f"v tile {i}") for i in range(5)], gap=4)
    drawing.text(16, 222, "of each row in registers: the maximum so far, the sum so far, the result so far [D]")
    drawing.text(16, 240, "a higher maximum shrinks sum and result by e^(old - new); at the end out = result / sum")


@drawn("Causal scores in tiles: most are clean or not there, the diagonal alone needs a mask", 236)
def masked_tiles(drawing: Drawing) -> None:
    side, n = 24, 7
    clean = {(r, c) for r in range(n) for c in range(r)}
    drawing.heading(40, 18, "keys")
    drawing.grid(40, 32, n, n, side, "plain", {"tensor": clean, "shared": {(i, i) for i in range(n)}})
    drawing.note(16, 110, "q")
    drawing.heading(260, 18, "a tile of scores is")
    kinds: tuple[tuple[Level, str, str], ...] = (
        ("tensor", "clean", "every query sees every key: no comparison"),
        ("shared", "masked", "a comparison for each score"),
        ("plain", "outside", "never visited"),
    )
    for index, (level, name, what) in enumerate(kinds):
        y = 36 + 40 * index
        drawing.grid(260, y, 1, 1, side, level)
        drawing.text(296, y + 7, name)
        drawing.note(296, y + 23, what)
    drawing.text(260, 172, "with a window, a second edge is masked on the left")
    drawing.text(16, 220, "a tile's kind depends on its place alone, and is known before its scores are")


@drawn("Copies run ahead: while a tile of keys and values is computed, the next ones arrive", 214)
def copies_ahead(drawing: Drawing) -> None:
    width = 92
    drawing.time_axis(70, 24)
    rows: tuple[tuple[str, Level, float, float, tuple[str, ...]], ...] = (
        ("copies", "device", 0.0, 0.96, ("k0 v0", "k1 v1", "k2 v2", "k3 v3", "k4 v4")),
        ("scores", "tensor", 1.0, 0.33, ("q k0", "q k1", "q k2", "q k3")),
        ("softmax", "registers", 1.35, 0.24, ("", "", "", "")),
        ("result", "tensor", 1.6, 0.36, ("p v0", "p v1", "p v2", "p v3")),
    )
    for row, (name, level, shift, share, labels) in enumerate(rows):
        y = 42 + 34 * row
        drawing.note(16, y + 11, name)
        for index, label in enumerate(labels):
            x = 74 + (shift + index) * width
            drawing.box(x, y, share * width, 22, level, label)
    drawing.text(16, 194, "one barrier a tile: all warps have read the old tile, and the next one is there for all")


@drawn("Two warpgroups share each tile of keys: 128 queries for one copy, probabilities in registers", 186)
def two_warpgroups(drawing: Drawing) -> None:
    drawing.heading(16, 18, "shared memory, by TMA")
    drawing.boxes(16, 32, 30, [(128, "shared", "q 0-63"), (128, "shared", "q 64-127")], gap=6)
    drawing.boxes(320, 32, 30, [(144, "shared", "k tile, 128 keys"), (144, "shared", "v tile")], gap=12)
    drawing.heading(16, 86, "registers")
    steps: tuple[Part, ...] = (
        (120, "tensor", "q k^T"), (120, "registers", "p"), (130, "tensor", "p v"), (120, "registers", "out"),
    )  # fmt: skip
    for index in range(2):
        y = 98 + 28 * index
        drawing.note(16, y + 10, f"warpgroup {index}")
        drawing.boxes(110, y, 20, steps, gap=8)
    drawing.text(16, 168, "each product waits for the one before it; the other warpgroup may use the tensor cores then")


@drawn("Two consumers take turns: one's softmax runs while the other's products do", 186)
def turns(drawing: Drawing) -> None:
    width = 66
    drawing.time_axis(90, 22)
    for row, shift in enumerate((0, 1)):
        y = 40 + 42 * row
        drawing.note(16, y + 12, f"consumer {row}")
        for index in range(4):
            x = 96 + (2 * index + shift) * width
            if x + width > 610:
                break
            drawing.box(x, y, width - 3, 24, "tensor", "products")
            if x + 2 * width < 620:
                drawing.box(x + width, y, width - 3, 24, "registers", "softmax")
    for index in range(6):
        x = 96 + (index + 1) * width - 2
        a, b = (64, 82) if index % 2 == 0 else (82, 64)
        drawing.arrow((x, a), (x, b))
    drawing.text(16, 146, "an arrow hands the turn over, by a named barrier: one consumer arrives and goes on,")
    drawing.text(16, 164, "the other waits there before it issues its products")


@drawn("A consumer's next scores and the products of its last tile run while it takes exponentials", 206)
def under_own_products(drawing: Drawing) -> None:
    drawing.time_axis(120, 22)
    rows: tuple[tuple[str, Level, tuple[tuple[float, float, str], ...]], ...] = (
        ("tensor cores", "tensor", ((126, 74, "q k1"), (202, 92, "p0 v0"), (376, 74, "q k2"), (452, 92, "p1 v1"))),
        ("softmax", "registers", ((202, 120, "exp(s1)"), (452, 120, "exp(s2)"))),
        ("rest", "registers", ((324, 46, "p1"), (574, 32, "p2"))),
    )
    for row, (name, level, boxes) in enumerate(rows):
        y = 40 + 34 * row
        drawing.note(16, y + 12, name)
        for x, width, text in boxes:
            drawing.box(x, y, width, 24, level, text)
    drawing.text(16, 160, "the exponentials wait for the scores alone; rounding and rescaling wait for the products,")
    drawing.text(16, 178, "whose registers they write. A basic block ends before that wait, or it would move up.")


@drawn("Three consumers share each tile of keys, and two multiply while one takes exponentials", 190)
def three_consumers(drawing: Drawing) -> None:
    width = 58
    drawing.time_axis(90, 22)
    for row in range(3):
        y = 40 + 32 * row
        drawing.note(16, y + 12, f"consumer {row}")
        for index in range(3):
            x = 96 + (3 * index + row) * width
            for place, (level, text) in enumerate(_THIRDS):
                if x + (place + 1) * width < 622:
                    drawing.box(x + place * width, y, width - 3, 24, level, text)
    drawing.text(16, 156, "no barrier between consumers: one that finds the tensor cores busy waits, so they")
    drawing.text(16, 174, "spread out in time; the keys and values of a copy serve 192 queries")


@drawn("Blocks draw tiles of queries from a queue that begins with those that see the most keys", 226)
def heaviest_first(drawing: Drawing) -> None:
    drawing.heading(16, 18, "in the order of rows")
    drawing.heading(336, 18, "heaviest first, from a queue")
    lengths = (1, 2, 3, 4, 5, 6, 7, 8)
    in_rows = ((1, 4, 7), (2, 5, 8), (3, 6))
    by_weight = ((8, 3, 2), (7, 4, 1), (6, 5))
    assert sorted(sum(in_rows, ())) == sorted(sum(by_weight, ())) == list(lengths)
    for left, blocks in ((16, in_rows), (336, by_weight)):
        for row, tiles in enumerate(blocks):
            drawing.note(left, 50 + 34 * row, f"SM {row}")
            parts: list[Part] = [(14.0 * tile, "tensor", str(tile)) for tile in tiles]
            drawing.boxes(left + 44, 38 + 34 * row, 24, parts, gap=2)
        drawing.arrow((left + 44, 146), (left + 280, 146))
        drawing.note(left + 284, 146, "t")
    drawing.text(16, 176, "a number: the key tiles that a tile of queries sees under a causal mask")
    drawing.text(16, 194, "left, the longest begins last, and other SMs have nothing left to do; right, the SMs")
    drawing.text(16, 212, "end together: what comes last is short")


@drawn("A row keeps its maximum until a score exceeds it by more than 8 powers of two", 190)
def kept_maximum(drawing: Drawing) -> None:
    drawing.heading(16, 18, "bars: the largest score of each tile of keys; line: the maximum that is subtracted")
    bottom, unit = 132, 7.0
    highest, kept = 0.0, 0.0
    for index, score in enumerate((5.0, 6.5, 4.0, 7.5, 6.0, 14.5, 9.0, 13.0, 15.0, 12.0)):
        x = 40 + 54 * index
        drawing.box(x, bottom - score * unit + 4, 40, score * unit, "tensor")
        highest = max(highest, score)
        if index == 0 or highest - kept > 8:
            kept = highest
            drawing.note(x + 20, bottom + 16, "rescale", "middle")
        drawing.line((x - 7, bottom - kept * unit + 4), (x + 47, bottom - kept * unit + 4))
    drawing.text(16, 174, "two rescalings in ten tiles; above the line exponentials are larger than 1, up to 2^8")


@drawn("At the diagonal a consumer passes over tiles of keys that none of its own rows sees", 206)
def own_tiles(drawing: Drawing) -> None:
    kinds: tuple[tuple[Level, str], ...] = (("tensor", "clean"), ("shared", "masked"), ("plain", "passed over"))
    drawing.note(16, 28, "keys")
    of_consumers = ((0, 0, 0, 1, 2), (0, 0, 0, 1, 2), (0, 0, 0, 0, 1))  # numbers of kinds
    for column in range(5):
        drawing.note(140 + 96 * column + 46, 28, f"{128 * column}-{128 * column + 127}", "middle")
    for row, tiles in enumerate(of_consumers):
        y = 42 + 32 * row
        drawing.note(16, y + 8, f"consumer {row}")
        drawing.note(16, y + 22, f"rows {384 + 64 * row} to {447 + 64 * row}")
        drawing.boxes(140, y, 26, [(92, *kinds[kind]) for kind in tiles], gap=4)
    drawing.text(16, 164, "passing over a tile: the consumer waits for its copy, then releases the stage at once;")
    drawing.text(16, 182, "an earlier arrival would count for the stage's previous use; the tensor cores are free")


@drawn("A consumer takes exponentials at once, and searches for maxima only where a sum is large", 214)
def late_search(drawing: Drawing) -> None:
    drawing.time_axis(120, 22)
    rows: tuple[tuple[str, Level, tuple[tuple[float, float, str], ...]], ...] = (
        ("tensor cores", "tensor", ((126, 50, "q k1"), (180, 62, "p0 v0"), (274, 50, "q k2"), (328, 62, "p1 v1"))),
        ("exponentials", "registers", ((180, 62, "exp(s1)"), (328, 62, "exp(s2)"), (488, 62, "exp(s2)"))),
        ("vote and search", "shared", ((246, 20, "ok"), (394, 90, "large: maxima"))),
    )
    for row, (name, level, boxes) in enumerate(rows):
        y = 40 + 34 * row
        drawing.note(16, y + 12, name)
        for x, width, text in boxes:
            drawing.box(x, y, width, 24, level, text)
    drawing.text(16, 160, "while a thread's sums are at most 2^8, its exponentials serve, and no score is compared;")
    drawing.text(16, 178, "otherwise the warp searches for maxima and takes the same exponentials again, since")
    drawing.text(16, 196, "the scores are still there")


@drawn("Sequences without padding: a slot tells its sequence by a search among the sequences' starts", 226)
def packed_sequences(drawing: Drawing) -> None:
    drawing.heading(16, 18, "tokens: sequences of 5, 2, 0 and 7, one after the other; starts 0, 5, 7, 7, 14")
    sequences: tuple[Part, ...] = (
        (187, "tensor", "sequence 0"), (73, "shared", "1"), (263, "registers", "sequence 3"),
    )  # fmt: skip
    drawing.boxes(16, 32, 26, sequences, gap=3)
    drawing.heading(16, 90, "slots for tiles of 4 queries: sequence n begins at slot start / 4 + n, rounded down")
    slots: tuple[tuple[Level, str], ...] = (
        ("tensor", "0: 0-3"), ("tensor", "0: 4"), ("shared", "1: 0-1"), ("plain", "2: none"),
        ("registers", "3: 0-3"), ("registers", "3: 4-6"), ("plain", ""),
    )  # fmt: skip
    drawing.boxes(16, 104, 26, [(76, level, text) for level, text in slots], gap=4)
    for index in range(7):
        drawing.note(16 + 80 * index + 38, 142, f"slot {index}", "middle")
    drawing.text(16, 176, "14 / 4 + 4 = 7 slots: the host knows their number without any length. An empty one costs a")
    drawing.text(16, 194, "search. Tokens after a sequence's last key are hidden, and their values are set to 0,")
    drawing.text(16, 212, "since 0 times a neighbour's NaN would be NaN")

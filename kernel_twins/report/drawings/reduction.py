"""Drawings of the reduction ladder. Warps are drawn with four lanes, where a real one has 32."""

from __future__ import annotations

from collections.abc import Callable

from kernel_twins.report.drawings.primitives import ALARM, SOFT, Drawing, drawn

_LANES, _SIDE, _LEFT = 16, 25, 116


@drawn("A tree whose active threads are picked with a modulo", 254)
def interleaved_tree(drawing: Drawing) -> None:
    notes = ["4 warps busy", "4 warps", "2 warps", "1 warp"]
    _tree(drawing, [1, 2, 4, 8], lambda thread, distance: thread % (2 * distance) == 0, notes)


@drawn("A tree whose active threads are neighbours", 254)
def sequential_tree(drawing: Drawing) -> None:
    notes = ["2 warps busy", "1 warp", "1 warp", "1 warp"]
    _tree(drawing, [8, 4, 2, 1], lambda thread, distance: thread < distance, notes)


def _tree(drawing: Drawing, distances: list[int], active: Callable[[int, int], bool], notes: list[str]) -> None:
    middle = _LEFT + _SIDE / 2
    for warp in range(4):
        drawing.bracket(_LEFT + 4 * _SIDE * warp + 2, 26, 4 * _SIDE - 4, f"warp {warp}", below=False)
    for level, distance in enumerate(distances):
        y = 34 + 42 * level
        adding = [thread for thread in range(_LANES) if active(thread, distance)]
        drawing.text(16, y + 10, f"distance {distance}")
        drawing.cells(_LEFT, y, _LANES, _SIDE, 20, "idle", marked={"shared": adding})
        for thread in adding:
            drawing.arrow((middle + (thread + distance) * _SIDE, y + 20), (middle + thread * _SIDE + 2, y + 41))
        drawing.note(524, y + 10, notes[level])
    drawing.cells(_LEFT, 202, 1, _SIDE, 20, "shared")
    drawing.text(_LEFT + _SIDE + 8, 212, "the block's sum")
    drawing.text(16, 238, "orange: a thread that adds another's value to its own, in shared memory; then a barrier")


@drawn("Lanes of a warp hand their values to each other; shared memory sees one value a warp", 226)
def warp_shuffle(drawing: Drawing) -> None:
    side = 31
    drawing.heading(16, 18, "one warp (8 lanes drawn): registers only")
    for level, distance in enumerate((4, 2, 1)):
        y = 46 + 50 * level
        drawing.text(16, y + 12, f"down by {distance}")
        drawing.cells(96, y, 8, side, 24, "registers", range(8) if level == 0 else ())
        for lane in range(distance):
            drawing.arrow((96 + (lane + distance + 0.5) * side, y + 24), (96 + (lane + 0.5) * side, y + 50))
    drawing.cells(96, 196, 1, side, 20, "registers")
    drawing.text(96 + side + 8, 206, "the warp's sum")
    drawing.heading(392, 18, "once a block")
    for warp in range(4):
        drawing.box(392, 36 + 36 * warp, 84, 26, "registers", f"warp {warp}")
        drawing.across(476, 514, 49 + 36 * warp)
        drawing.box(514, 36 + 36 * warp, 36, 26, "shared")
        drawing.arrow((550, 49 + 36 * warp), (580, 103))
    drawing.box(580, 82, 48, 42, "registers", "warp\n0")
    drawing.note(392, 196, "shared memory: one value a warp")


@drawn("Four independent 16-byte loads a thread, then additions, then shuffles", 214)
def loads_in_flight(drawing: Drawing) -> None:
    drawing.heading(16, 20, "a block's tile: four rows, one 16-byte load of every thread from each")
    for row in range(4):
        y = 34 + 30 * row
        drawing.cells(16, y, 8, 34, 22, "device", marked={"registers": [7]})
        drawing.across(288, 330, y + 11)
        drawing.cells(330, y, 4, 18, 22, "registers")
        drawing.arrow((402, y + 11), (440, 90))
    drawing.box(440, 72, 60, 36, "registers", "added\nup")
    drawing.across(500, 530, 90)
    drawing.box(530, 72, 94, 36, "registers", "shuffles, as\nbefore")
    drawing.text(16, 172, "green: one thread; all of its loads are issued before the first value is needed,")
    drawing.text(16, 188, "and wait for memory together")


@drawn("Blocks stride over the vector; a running total keeps what rounding would lose", 214)
def running_totals(drawing: Drawing) -> None:
    drawing.heading(16, 20, "three blocks stride over all tiles; x: a thread's sum of a tile")
    drawing.cells(16, 32, 12, 32, 26, "device", [tile % 3 for tile in range(12)], {"registers": range(0, 12, 3)})
    for tile in (0, 3, 6, 9):
        drawing.line((32 + 32 * tile, 58), (32 + 32 * tile, 76))
    drawing.across(32, 420, 76)
    drawing.box(420, 62, 110, 28, "registers", "thread's sum x")
    drawing.down(90, 112, 475)
    drawing.box(210, 112, 110, 30, "registers", "total", size=12)
    drawing.across(320, 410, 127)
    drawing.box(410, 112, 130, 30, "plain", "total + x", size=12)
    drawing.arrow((475, 142), (475, 162), (265, 162), (265, 142))
    drawing.note(370, 174, "rounded to fp32", "middle")
    drawing.arrow((540, 127), (578, 127), (578, 152))
    drawing.box(530, 152, 94, 26, "registers", "+= lost bits")
    drawing.note(16, 112, "TwoSum gives the exact\nrounding error of an\naddition, as a second\nfp32 number")
    drawing.text(16, 198, "at the end, lost bits are added to the total: the error does not grow with the rounds")


@drawn("Every block adds to one address in L2, in whatever order they finish", 190)
def atomic(drawing: Drawing) -> None:
    for block, place in enumerate(("second", "fifth", "first", "fourth", "third")):
        x = 16 + 124 * block
        drawing.box(x, 24, 112, 42, "registers", f"sum of block {block}\narrives {place}")
        drawing.arrow((x + 56, 66), (320 + 20 * (block - 2), 112))
    drawing.box(250, 112, 140, 34, "l2", "out += (L2)", size=12)
    drawing.text(16, 172, "the order differs from run to run, and with it the last bits of an fp32 sum")


@drawn("The block that takes the last ticket adds up what the others left, in a fixed order", 236)
def last_block(drawing: Drawing) -> None:
    tickets = [1, 4, 0, 2, 3]
    for block, ticket in enumerate(tickets):
        x = 60 + 92 * block
        last = ticket == 4
        drawing.box(x, 34, 80, 28, "registers", f"block {block}")
        drawing.down(62, 106, x + 20)
        drawing.text(x + 62, 84, f"ticket {ticket}", "middle", colour=ALARM if last else SOFT)
    drawing.cells(60, 106, 5, 92, 26, "l2", [f"sum {block}" for block in range(5)])
    drawing.text(60, 18, "every block writes its sum and, once that has arrived, takes a ticket")
    drawing.box(544, 56, 80, 40, "l2", "tickets\n0 to 4")
    drawing.arrow((544, 80), (516, 84))
    drawing.arrow((510, 132), (544, 132), (544, 160), (400, 160), dashed=True)
    drawing.box(184, 148, 216, 26, "registers", "block 1 had the last ticket")
    drawing.across(184, 116, 161)
    drawing.box(60, 148, 56, 26, "l2", "out")
    drawing.text(60, 194, "it adds all sums in a fixed order, whoever was last: every run gives the same bits.")
    drawing.text(60, 210, "With the last ticket the counter goes back to 0, for the next call.")


@drawn("Sum and flag in one word: block 0 reads all words until every flag is there", 236)
def polling(drawing: Drawing) -> None:
    drawing.text(60, 18, "every block stores a flag and its sum as one word of 8 bytes")
    for block in range(5):
        x, late = 60 + 104 * block, block == 3
        drawing.box(x, 34, 92, 28, "registers", f"block {block}")
        drawing.down(62, 100, x + 46, dashed=late)
        drawing.cells(x, 100, 1, 26, 26, "idle" if late else "l2", [0 if late else 1])
        drawing.box(x + 26, 100, 66, 26, "idle" if late else "l2", "" if late else f"sum {block}")
    drawing.note(428, 82, "on its way")
    drawing.arrow((568, 126), (568, 161), (470, 161), dashed=True)
    drawing.box(184, 148, 286, 26, "registers", "block 0 reads until all flags are 1")
    drawing.across(184, 116, 161)
    drawing.box(60, 148, 56, 26, "l2", "out")
    drawing.text(60, 194, "a word arrives in one piece: who sees the flag has the sum, and no fence is needed.")
    drawing.text(60, 210, "Block 0 adds the sums in a fixed order and sets the words back to 0.")

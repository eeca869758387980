"""Drawings of vector_add."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import Drawing, Level, Part, drawn


@drawn("A warp's 32 loads of neighbouring elements fall into four sectors", 190)
def one_element_a_thread(drawing: Drawing) -> None:
    drawing.heading(16, 40, "a[ ]")
    drawing.note(16, 54, "device")
    for sector in range(4):
        drawing.cells(76 + sector * 138, 34, 8, 16.5, 24, "device")
        drawing.bracket(76 + sector * 138, 24, 132, "sector: 32 bytes", below=False)
        drawing.down(58, 104, *(76 + sector * 138 + (lane + 0.5) * 16.5 for lane in range(8)))
        drawing.cells(76 + sector * 138, 104, 8, 16.5, 24, "registers")
        drawing.note(142 + sector * 138, 138, f"lanes {8 * sector} to {8 * sector + 7}", "middle")
    drawing.heading(16, 116, "warp")
    drawing.text(16, 170, "one load instruction: 32 x 4 bytes, four sectors, every byte of them is used")


@drawn("A grid that covers the vector once, and one that strides over it", 210)
def grid_stride(drawing: Drawing) -> None:
    drawing.heading(16, 20, "a block for every tile")
    drawing.cells(16, 32, 24, 25, 26, "device", range(24))
    drawing.heading(16, 86, "eight blocks, three rounds")
    drawing.cells(16, 118, 24, 25, 26, "device", [tile % 8 for tile in range(24)], {"registers": range(0, 24, 8)})
    for start in (0, 8):
        x = 16 + 25 * (start + 0.5)
        drawing.arrow((x, 118), (x, 102), (x + 200, 102), (x + 200, 118))
    for each in range(3):
        drawing.bracket(18 + 200 * each, 154, 196, f"round {each}")
    drawing.note(16, 192, "a cell is a tile with the number of its block; green: block 0")


@drawn("Four loads of 4 bytes, and one of 16", 206)
def wide_loads(drawing: Drawing) -> None:
    drawing.heading(16, 20, "4 bytes a lane: four instructions for 512 bytes")
    for load in range(4):
        x = 16 + 152 * load
        drawing.cells(x, 34, 8, 18.5, 24, "device", marked={"registers": [0]})
        drawing.bracket(x, 64, 148, f"load {load}: 4 sectors")
    drawing.heading(16, 104, "16 bytes a lane: one instruction for the same bytes")
    for lane in range(8):
        level: Level = "registers" if lane == 0 else "device"
        drawing.cells(16 + 76 * lane, 118, 4, 18.5, 24, level)
    drawing.bracket(16, 148, 604, "load 0: 16 sectors")
    drawing.note(16, 186, "green: what lane 0 takes (eight lanes are drawn for 32)")


@drawn("A loop waits for every pair of loads; independent loads wait once", 196)
def independent_loads(drawing: Drawing) -> None:
    drawing.heading(16, 20, "loop: the next loads start when the add is done")
    turn: list[Part] = [(36, "device", "a"), (36, "device", "b"), (150, "idle", "wait"), (50, "plain", "add")]
    drawing.boxes(16, 34, 26, turn * 2)
    drawing.heading(16, 92, "unrolled: all four loads are on their way before the first add")
    drawing.boxes(16, 106, 26, [(36, "device", text) for text in ("a0", "b0", "a1", "b1")])
    drawing.boxes(160, 106, 26, [(100, "idle", "wait"), (50, "plain", "add"), (50, "plain", "add")])
    drawing.time_axis(16, 150)
    drawing.text(16, 176, "the latency of device memory is paid once for four loads instead of twice")


@drawn("A ring of tiles in shared memory, filled and emptied by the copy engine", 216)
def bulk_ring(drawing: Drawing) -> None:
    drawing.box(16, 62, 92, 60, "device", "a and b", size=12)
    drawing.box(532, 62, 92, 60, "device", "out", size=12)
    stages = ["being\nstored", "threads\nadd", "on its\nway", "on its\nway", "on its\nway"]
    for index, text in enumerate(stages):
        level: Level = "registers" if index == 1 else "shared"
        drawing.box(166 + 64 * index, 62, 58, 60, level, text)
        drawing.note(195 + 64 * index, 134, f"stage {index}", "middle")
    drawing.heading(166, 20, "shared memory of one block")
    drawing.arrow((108, 92), (136, 92), (136, 44), (387, 44), (387, 62))
    drawing.note(16, 44, "bulk loads")
    drawing.arrow((195, 62), (195, 34), (578, 34), (578, 62), dashed=True)
    drawing.note(528, 20, "bulk store")
    drawing.arrow((480, 146), (480, 160), (166, 160), (166, 146))
    drawing.note(323, 172, "after the last stage comes the first again", "middle")
    drawing.text(16, 198, "one thread asks for a whole tile; the data pass no registers on their way")


@drawn("Blocks of one tile each, overlapping on one SM", 200)
def bulk_tile(drawing: Drawing) -> None:
    drawing.heading(16, 20, "places for blocks on one SM")
    for block in range(8):
        place = block % 4
        x, y = 80 + 46 * place + 198 * (block // 4), 34 + 30 * place
        drawing.boxes(x, y, 24, [(118, "shared", f"{block}: load"), (34, "registers", "add"), (46, "device", "store")])
        if block < 4:
            drawing.note(16, y + 12, f"place {place}")
    drawing.time_axis(80, 162)
    drawing.text(16, 184, "a block ends after its tile, and the next number takes its place: tiles stay in order")

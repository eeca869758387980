"""Drawings of the dropout ladders."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import Drawing, drawn


@drawn("One call for every element, of whose four words one is used, and one call for four elements", 214)
def four_words(drawing: Drawing) -> None:
    drawing.heading(16, 20, "a call for every element: one word of four is used")
    for element in range(4):
        x = 16 + 152 * element
        drawing.cells(x, 34, 4, 30, 24, "idle", range(4), {"registers": [element]})
        drawing.down(58, 78, x + 30 * element + 15)
        drawing.cells(x + 30 * element, 78, 1, 30, 24, "device", [element])
    drawing.heading(16, 130, "a call for four neighbours: every word is used")
    drawing.cells(16, 144, 4, 30, 24, "registers", range(4))
    drawing.down(168, 178, 31, 61, 91, 121)
    drawing.cells(16, 178, 4, 30, 24, "device", range(4))
    drawing.note(160, 161, "green: the words of block i / 4 that are used")
    drawing.note(160, 195, "blue: elements i, each with word i % 4")

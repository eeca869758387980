"""The drawing of the fused linear layer."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import ALARM, SOFT, Drawing


def fused_epilogue() -> Drawing:
    drawing = Drawing("A tile's sums on their way out: fused, and through a second kernel", 284)
    drawing.text(16, 18, "fused: one kernel")
    drawing.box(16, 34, 84, 40, "registers", "sums of\na tile", 11)
    drawing.box(116, 34, 70, 40, "registers", "+ bias", 11)
    drawing.box(202, 34, 92, 40, "registers", "activation", 11)
    drawing.box(310, 34, 70, 40, "registers", "round", 11)
    drawing.box(310, 88, 70, 40, "registers", "round", 11)
    drawing.box(404, 34, 100, 94, "shared", "staging,\nthe same\npieces", 11)
    drawing.box(536, 34, 88, 40, "device", "out", 11)
    drawing.box(536, 88, 88, 40, "device", "pre", 11)
    for x, to in ((100, 116), (186, 202), (294, 310), (380, 404), (504, 536)):
        drawing.arrow((x, 54), (to, 54))
    drawing.arrow((151, 74), (151, 108), (310, 108), dashed=True)
    drawing.arrow((380, 108), (404, 108), dashed=True)
    drawing.arrow((504, 108), (536, 108), dashed=True)
    drawing.text(158, 122, "for a backward pass", 11, colour=SOFT)
    drawing.text(16, 160, "one after the other: two kernels")
    drawing.box(16, 176, 84, 40, "registers", "sums\n+ bias", 11)
    drawing.box(116, 176, 58, 40, "registers", "round", 11)
    drawing.box(190, 176, 70, 40, "shared", "staging", 11)
    drawing.box(300, 176, 64, 40, "device", "pre", 11)
    drawing.box(404, 176, 100, 40, "registers", "activation,\nround", 11)
    drawing.box(536, 176, 88, 40, "device", "out", 11)
    for x, to in ((100, 116), (174, 190), (504, 536)):
        drawing.arrow((x, 196), (to, 196))
    drawing.arrow((260, 196), (300, 196), colour=ALARM)
    drawing.arrow((364, 196), (404, 196), colour=ALARM)
    drawing.bracket(16, 226, 244, "the product's kernel")
    drawing.bracket(404, 226, 100, "the activation's")
    drawing.text(332, 230, "written, and", 11, "middle", ALARM)
    drawing.text(332, 244, "read again", 11, "middle", ALARM)
    drawing.text(16, 266, "fused, the activation gets the fp32 sums; dashed: only where a gradient will need it", 11)
    return drawing

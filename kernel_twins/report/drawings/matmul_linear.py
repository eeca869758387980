"""The drawing of the fused linear layer."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import ALARM, Drawing, drawn


@drawn("A tile's sums on their way out: fused, and through a second kernel", 284)
def fused_epilogue(drawing: Drawing) -> None:
    drawing.heading(16, 18, "fused: one kernel")
    drawing.box(16, 34, 84, 40, "registers", "sums of\na tile")
    drawing.box(116, 34, 70, 40, "registers", "+ bias")
    drawing.box(202, 34, 92, 40, "registers", "activation")
    drawing.box(310, 34, 70, 40, "registers", "round")
    drawing.box(310, 88, 70, 40, "registers", "round")
    drawing.box(404, 34, 100, 94, "shared", "staging,\nthe same\npieces")
    drawing.box(536, 34, 88, 40, "device", "out")
    drawing.box(536, 88, 88, 40, "device", "pre")
    for x, to in ((100, 116), (186, 202), (294, 310), (380, 404), (504, 536)):
        drawing.across(x, to, 54)
    drawing.arrow((151, 74), (151, 108), (310, 108), dashed=True)
    drawing.across(380, 404, 108, dashed=True)
    drawing.across(504, 536, 108, dashed=True)
    drawing.note(158, 122, "for a backward pass")
    drawing.heading(16, 160, "one after the other: two kernels")
    drawing.box(16, 176, 84, 40, "registers", "sums\n+ bias")
    drawing.box(116, 176, 58, 40, "registers", "round")
    drawing.box(190, 176, 70, 40, "shared", "staging")
    drawing.box(300, 176, 64, 40, "device", "pre")
    drawing.box(404, 176, 100, 40, "registers", "activation,\nround")
    drawing.box(536, 176, 88, 40, "device", "out")
    for x, to in ((100, 116), (174, 190), (504, 536)):
        drawing.across(x, to, 196)
    drawing.across(260, 300, 196, colour=ALARM)
    drawing.across(364, 404, 196, colour=ALARM)
    drawing.bracket(16, 226, 244, "the product's kernel")
    drawing.bracket(404, 226, 100, "the activation's")
    drawing.text(332, 230, "written, and", "middle", colour=ALARM)
    drawing.text(332, 244, "read again", "middle", colour=ALARM)
    drawing.text(16, 266, "fused, the activation gets the fp32 sums; dashed: only where a gradient will need it")

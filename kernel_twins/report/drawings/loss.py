"""Drawings of cross_entropy and its backward pass."""

from __future__ import annotations

from kernel_twins.report.drawings.primitives import Drawing, drawn
from kernel_twins.report.drawings.row_pieces import walk


@drawn("A row of logits is read twice: for its maximum, and for the sum of exponentials", 172)
def maximum_then_sum(drawing: Drawing) -> None:
    drawing.heading(16, 18, "a row of logits, and what a block does with it")
    walk(drawing, 34, "pass 1", ("x",), "device", "from device memory", "maximum")
    walk(drawing, 88, "pass 2", ("x",), "device", "from device memory, again", "sum of exp(x - max)")
    drawing.text(16, 154, "256 KiB a row, and a thousand rows at once: nothing is still at hand")


@drawn("A row of logits becomes a row of gradients; every element is computed by itself", 196)
def logits_to_gradient(drawing: Drawing) -> None:
    drawing.heading(16, 18, "a row of logits, and the numbers that are known of it")
    drawing.cells(16, 34, 14, 15, 24, "device", marked={"shared": [4]})
    drawing.note(16, 72, "the target's in another colour")
    for top, text in ((34, "lse, from the forward pass"), (66, "target"), (98, "dout")):
        drawing.box(424, top, 200, 24, "registers", text)
        drawing.arrow((424, top + 12), (386, 108))
    drawing.box(206, 96, 180, 24, "registers", "(exp(x - lse) - w) dout")
    drawing.arrow((140, 60), (206, 100))
    drawing.arrow((206, 116), (140, 150))
    drawing.cells(16, 152, 14, 15, 24, "device", marked={"shared": [4]})
    drawing.text(240, 164, "as many elements as were read, and no sum in between")


@drawn("What lies in memory: logits and all logarithms, logits and gradient, or one of them", 204)
def in_the_place_of_the_logits(drawing: Drawing) -> None:
    rows = (
        ("PyTorch", ("logits", "log-probabilities", "gradient")),
        ("cross_entropy", ("logits", "gradient")),
        ("cross_entropy_gradient_", ("logits, then gradient",)),
    )
    drawing.heading(16, 18, "tensors of batch x vocabulary, in the backward pass")
    for index, (title, tensors) in enumerate(rows):
        top = 34 + 54 * index
        drawing.text(16, top + 16, title)
        drawing.boxes(176, top, 32, [(140, "device", text) for text in tensors], gap=12)
    drawing.note(16, 194, "and one number a row, which is nothing beside them")

"""Cross entropy, computed wrongly."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.wrong.faults import OTHERS, SUMS, Fault, Formula, Outputs, exponential


def cross_entropy(
    fault: Fault, logits: Tensor, target: Tensor, *, ignore_index: int, label_smoothing: float
) -> Outputs:
    most = fault.at("maximum", logits.amax(-1, keepdim=True))
    lse = fault.at("sum", exponential(logits - most)).sum(-1).log() + most[:, 0]
    chosen = fault.at("target", logits).gather(1, target[:, None])[:, 0]
    mean = fault.at("smoothing", logits).mean(-1)
    losses = lse - (1 - label_smoothing) * chosen - label_smoothing * mean
    return (losses.masked_fill(target == ignore_index, 0.0),)


def cross_entropy_backward(
    fault: Fault,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
) -> Outputs:
    p = fault.at("softmax", (logits - lse[:, None]).exp())
    wanted = torch.full_like(p, label_smoothing / p.shape[-1])
    wanted.scatter_add_(1, target[:, None], torch.full_like(p[:, :1], 1 - label_smoothing))
    dx = (p - fault.at("target", wanted)) * fault.at("dout", dout[:, None])
    return (dx.masked_fill((target == ignore_index)[:, None], 0.0),)


FORMULAS = {
    "cross_entropy": Formula(
        cross_entropy,
        {"sum": SUMS, "maximum": {"missing": torch.zeros_like}, "smoothing": SUMS, "target": OTHERS},
        lambda case: not case.get("lse"),
    ),
    "cross_entropy_backward": Formula(
        cross_entropy_backward, {"softmax": OTHERS, "target": OTHERS, "dout": OTHERS}, lambda case: not case.get("lse")
    ),
}

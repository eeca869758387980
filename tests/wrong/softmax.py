"""Softmax, computed wrongly."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.wrong.faults import SUMS, Fault, Formula, Outputs, exponential


def softmax(fault: Fault, x: Tensor, *, log: bool) -> Outputs:
    distance = x - fault.at("maximum", x.amax(-1, keepdim=True))
    total = fault.at("sum", exponential(distance)).sum(-1, keepdim=True)
    return (distance - total.log() if log else distance.exp() / total,)


def softmax_backward(fault: Fault, dout: Tensor, y: Tensor, *, log: bool) -> Outputs:
    if log:
        return (dout - y.exp() * fault.at("sum", dout).sum(-1, keepdim=True),)
    return (y * (dout - fault.at("sum", dout * y).sum(-1, keepdim=True)),)


FORMULAS = {
    "softmax": Formula(softmax, {"sum": SUMS, "maximum": {"missing": torch.zeros_like}}),
    "softmax_backward": Formula(softmax_backward, {"sum": SUMS}),
}

"""Dropout, computed wrongly."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_twins.ops.activations import ACTIVATIONS, slope
from kernel_twins.ops.dropout import shared
from tests.wrong.faults import OTHERS, SUMS, Change, Fault, Formula, Outputs


def dropout_add(
    fault: Fault,
    x: Tensor,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    p: float,
    activation: str,
    seed: int,
    offset: int,
) -> Outputs:
    kept = shared.kept(tuple(x.shape), slice(0, x.shape[0]), x.device, p=p, seed=seed, offset=offset)
    z = x if bias is None else x + fault.at("bias", bias[None])
    out = ACTIVATIONS[activation](z) * fault.at("scale", torch.full_like(x, shared.scale(p)))
    out = torch.where(fault.at("mask", kept.double()) > 0, out, 0.0)
    return (out if residual is None else out + fault.at("residual", residual),)


def dropout_add_backward(
    fault: Fault,
    dout: Tensor,
    x: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    p: float,
    activation: str,
    seed: int,
    offset: int,
) -> Outputs:
    kept = shared.kept(tuple(dout.shape), slice(0, dout.shape[0]), dout.device, p=p, seed=seed, offset=offset)
    dx = dout * fault.at("scale", torch.full_like(dout, shared.scale(p)))
    if x is not None:
        z = x if bias is None else x + fault.at("bias", bias[None])
        dx = dx * fault.at("slope", slope(z, activation))
    dx = torch.where(fault.at("mask", kept.double()) > 0, dx, 0.0)
    return dx, fault.at("columns", dx.t()).sum(-1)  # the bias's, where there is one


MASKS: dict[str, Change] = {
    "of the element before": lambda kept: kept.roll(1, -1),
    "of the row before": lambda kept: kept.roll(1, 0),
    "the other way round": lambda kept: 1 - kept,
    "missing": torch.ones_like,
}
FORMULAS = {
    "dropout_add": Formula(dropout_add, {"mask": MASKS, "scale": OTHERS, "bias": OTHERS, "residual": OTHERS}),
    "dropout_add_backward": Formula(
        dropout_add_backward, {"mask": MASKS, "scale": OTHERS, "slope": OTHERS, "columns": SUMS}
    ),
}

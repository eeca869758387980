"""Norms, computed wrongly."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_twins.spec import Case
from tests.wrong.faults import OTHERS, SUMS, Fault, Formula, Outputs, same


def added(fault: Fault, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a norm is of, rounded as it is returned."""
    return x if residual is None else (x + fault.at("residual", residual)).to(dtype).double()


def layer_norm(
    fault: Fault,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    *,
    eps: float,
    dtype: torch.dtype,
) -> Outputs:
    x = added(fault, x, residual, dtype)
    mean = fault.at("sum", x).sum(-1, keepdim=True) / x.shape[-1]
    variance = fault.at("squares", (x - mean).square()).sum(-1, keepdim=True) / x.shape[-1]
    if fault.place == "variance":
        wide = x.float()
        variance = (wide.square().mean(-1, keepdim=True) - wide.mean(-1, keepdim=True).square()).clamp_min(0).double()
    rstd = (variance + eps).rsqrt()
    shift = fault.at("bias", bias[None])
    return (x - mean) * rstd * fault.at("weight", weight[None]) + shift, mean[:, 0], rstd[:, 0], x


def rms_norm(
    fault: Fault, x: Tensor, weight: Tensor, residual: Tensor | None = None, *, eps: float, dtype: torch.dtype
) -> Outputs:
    x = added(fault, x, residual, dtype)
    rstd = (fault.at("squares", x.square()).sum(-1, keepdim=True) / x.shape[-1] + eps).rsqrt()
    return x * rstd * fault.at("weight", weight[None]), rstd[:, 0], x


def norm_backward(fault: Fault, dout: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor) -> Outputs:
    xhat = (x if mean is None else x - mean[:, None]) * rstd[:, None]
    g = dout * fault.at("weight", weight[None])
    dx = g - xhat * fault.at("products", g * xhat).mean(-1, keepdim=True)
    if mean is not None:
        dx = dx - fault.at("sum", g).mean(-1, keepdim=True)
    sums = (dout * xhat, dout) if mean is not None else (dout * xhat,)
    return fault.at("rstd", rstd[:, None]) * dx, *(fault.at("columns", each.t()).sum(-1) for each in sums)


def layer_norm_backward(fault: Fault, dout: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> Outputs:
    return norm_backward(fault, dout, x, mean, rstd, weight)


def rms_norm_backward(fault: Fault, dout: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Outputs:
    return norm_backward(fault, dout, x, None, rstd, weight)


def is_affine(case: Case) -> bool:
    return case.get("affine") != "none"


def is_plain(case: Case) -> bool:
    return is_affine(case) and not case.get("residual")


BACKWARD = {"products": SUMS, "columns": SUMS, "weight": OTHERS}
FORMULAS = {
    "layer_norm": Formula(
        layer_norm,
        {
            "sum": SUMS,
            "squares": SUMS,
            "variance": {"in one pass of fp32": same},
            "bias": OTHERS,
            "weight": OTHERS,
            "residual": OTHERS,
        },
        is_affine,
        rounds=True,
    ),
    "layer_norm_backward": Formula(layer_norm_backward, {"sum": SUMS, **BACKWARD}, is_plain),
    "rms_norm": Formula(rms_norm, {"squares": SUMS, "weight": OTHERS, "residual": OTHERS}, is_affine, rounds=True),
    "rms_norm_backward": Formula(rms_norm_backward, BACKWARD, is_plain),
}

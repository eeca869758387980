"""Kernels that are wrong as kernels are: each computes in float64, but for one thing, and rounds its results once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_twins.ops.activations import ACTIVATIONS
from kernel_twins.ops.dropout import shared
from kernel_twins.spec import Case

Change = Callable[[Tensor], Tensor]
PACK, WARP = 8, 256  # elements of 16 bits: a lane's load, a warp's


def same(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Fault:
    """What is done otherwise: ``name`` is the place, ``change`` what becomes of the values there."""

    place: str
    name: str
    change: Change

    def at(self, place: str, values: Tensor) -> Tensor:
        return self.change(values) if place == self.place else values


RIGHT = Fault("nowhere", "right", same)

# ----------------------------------------------------------------------------------------------------------------------
# What goes wrong with a sum over the last dimension: its terms are changed
# ----------------------------------------------------------------------------------------------------------------------


def without(first: int | None, last: int | None) -> Change:
    """Those terms are lost, counted as a slice counts."""

    def change(terms: Tensor) -> Tensor:
        kept = terms.clone()
        kept[..., first:last] = 0
        return kept

    return change


def without_last_rank(terms: Tensor) -> Tensor:
    """The last of a cluster of eight."""
    return without(terms.shape[-1] - terms.shape[-1] // 8, None)(terms)


def twice_the_last_pack(terms: Tensor) -> Tensor:
    """As where a tail and a whole pack overlap."""
    changed = terms.clone()
    changed[..., -PACK:] *= 2
    return changed


def in_half(dtype: torch.dtype) -> Change:
    """Terms and partial sums are rounded, as in a tree of half precision."""

    def change(terms: Tensor) -> Tensor:
        level = terms.to(dtype)
        while level.shape[-1] > 1:
            if level.shape[-1] % 2:
                level = torch.cat([level, torch.zeros_like(level[..., :1])], -1)
            level = level[..., ::2] + level[..., 1::2]
        whole = torch.zeros_like(terms)
        whole[..., :1] = level.double()
        return whole

    return change


SUMS: dict[str, Change] = {
    "without its last pack": without(-PACK, None),
    "without its last warp": without(-WARP, None),
    "without the last rank": without_last_rank,
    "without its first tile": without(0, 1024),
    "without its last element": without(-1, None),
    "with its last pack twice": twice_the_last_pack,
    "in half precision": in_half(torch.float16),
    "of the row before": lambda terms: terms.roll(1, 0),
    "missing": torch.zeros_like,
}

# ----------------------------------------------------------------------------------------------------------------------
# What goes wrong with results
# ----------------------------------------------------------------------------------------------------------------------


def size_of(values: Tensor) -> Tensor:
    return values.nan_to_num(0.0, 0.0, 0.0).square().mean(-1, keepdim=True).sqrt()


RESULTS: dict[str, Change] = {  # what is stale is zeros, as an earlier call may have left them
    "stale in their last pack": without(-PACK, None),
    "stale in their last element": without(-1, None),
    "with halves swapped": lambda values: values.roll(values.shape[-1] // 2, -1),
    "with a small bias": lambda values: values + 0.01 * size_of(values),
    "with small ones flushed": lambda values: values.masked_fill(values.abs() < 0.02 * size_of(values), 0.0),
    "a 64th too large": lambda values: values * (1 + 2.0**-6),
    "negative zeroed": lambda values: values.clamp_min(0.0),
    "of the element before": lambda values: values.roll(1, -1),
}

# ----------------------------------------------------------------------------------------------------------------------
# Operations, with their places
# ----------------------------------------------------------------------------------------------------------------------

Outputs = tuple[Tensor, ...]
Formula = Callable[..., Outputs]  # of a fault, the inputs in float64 and the options


def exponential(x: Tensor) -> Tensor:
    """As in fp32, which overflows where float64 does not."""
    return x.float().exp().double()


def softmax(fault: Fault, x: Tensor, *, log: bool) -> Outputs:
    distance = x - fault.at("maximum", x.amax(-1, keepdim=True))
    total = fault.at("sum", exponential(distance)).sum(-1, keepdim=True)
    return (distance - total.log() if log else distance.exp() / total,)


def softmax_backward(fault: Fault, dout: Tensor, y: Tensor, *, log: bool) -> Outputs:
    if log:
        return (dout - y.exp() * fault.at("sum", dout).sum(-1, keepdim=True),)
    return (y * (dout - fault.at("sum", dout * y).sum(-1, keepdim=True)),)


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


def matmul(fault: Fault, a: Tensor, b: Tensor) -> Outputs:
    return (fault.at("a", a) @ b,)


def linear(fault: Fault, x: Tensor, weight: Tensor, bias: Tensor, *, activation: str) -> Outputs:
    z = fault.at("x", x) @ weight.t()
    return (fault.at("epilogue", ACTIVATIONS[activation](z + fault.at("bias", bias[None]))),)


def reduction(fault: Fault, x: Tensor) -> Outputs:
    return (fault.at("sum", x[None]).sum(),)


def vector_add(fault: Fault, a: Tensor, b: Tensor) -> Outputs:
    return (fault.at("a", a[None])[0] + b,)


def reduction_nd(fault: Fault, x: Tensor, *, dims: tuple[int, ...], kind: str) -> Outputs:
    axes = [axis % x.dim() for axis in dims]
    whole = [axis for axis in range(x.dim()) if axis not in axes]
    terms = fault.at("sum", x.permute(*whole, *axes).flatten(len(whole)))
    if kind == "argmax":
        return (terms.argmax(-1),)
    return (terms.amax(-1) if kind == "max" else terms.sum(-1) if kind == "sum" else terms.mean(-1),)


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
        dx = dx * fault.at("slope", shared.slope(z, activation))
    dx = torch.where(fault.at("mask", kept.double()) > 0, dx, 0.0)
    return dx, fault.at("columns", dx.t()).sum(-1)  # the bias's, where there is one


OTHERS: dict[str, Change] = {
    "missing": torch.zeros_like,
    "of the column before": lambda values: values.roll(1, -1),
    "a 64th too large": RESULTS["a 64th too large"],
    "without its last pack": without(-PACK, None),
}
MASKS: dict[str, Change] = {
    "of the element before": lambda kept: kept.roll(1, -1),
    "of the row before": lambda kept: kept.roll(1, 0),
    "the other way round": lambda kept: 1 - kept,
    "missing": torch.ones_like,
}
FORMULAS: dict[str, tuple[Formula, dict[str, dict[str, Change]]]] = {
    "softmax": (softmax, {"sum": SUMS, "maximum": {"missing": torch.zeros_like}}),
    "softmax_backward": (softmax_backward, {"sum": SUMS}),
    "layer_norm": (
        layer_norm,
        {
            "sum": SUMS,
            "squares": SUMS,
            "variance": {"in one pass of fp32": same},
            "bias": OTHERS,
            "weight": OTHERS,
            "residual": OTHERS,
        },
    ),
    "layer_norm_backward": (layer_norm_backward, {"sum": SUMS, "products": SUMS, "columns": SUMS, "weight": OTHERS}),
    "rms_norm": (rms_norm, {"squares": SUMS, "weight": OTHERS, "residual": OTHERS}),
    "rms_norm_backward": (rms_norm_backward, {"products": SUMS, "columns": SUMS, "weight": OTHERS}),
    "cross_entropy": (
        cross_entropy,
        {"sum": SUMS, "maximum": {"missing": torch.zeros_like}, "smoothing": SUMS, "target": OTHERS},
    ),
    "cross_entropy_backward": (cross_entropy_backward, {"softmax": OTHERS, "target": OTHERS, "dout": OTHERS}),
    "matmul_fp32": (matmul, {"a": SUMS}),
    "matmul_tf32x3": (matmul, {"a": SUMS}),
    "matmul_bf16": (matmul, {"a": SUMS}),
    "linear": (linear, {"x": SUMS, "bias": OTHERS, "epilogue": RESULTS}),
    "dropout_add": (dropout_add, {"mask": MASKS, "scale": OTHERS, "bias": OTHERS, "residual": OTHERS}),
    "dropout_add_backward": (
        dropout_add_backward,
        {"mask": MASKS, "scale": OTHERS, "slope": OTHERS, "columns": SUMS},
    ),
    "reduction": (reduction, {"sum": SUMS}),
    "reduction_nd": (reduction_nd, {"sum": SUMS}),
    "vector_add": (vector_add, {"a": OTHERS}),
}


def knows(op: str, case: Case) -> bool:
    """Whether the formula of the operation is the case's."""
    is_backward = op.endswith("norm_backward")
    return not (is_backward and case.get("residual")) and case.get("affine") != "none" and not case.get("lse")


def faults(op: str) -> Iterator[Fault]:
    _, places = FORMULAS[op]
    for place, changes in places.items():
        for name, change in changes.items():
            yield Fault(place, name, change)
    if op != "reduction":
        for name, change in RESULTS.items():
            yield Fault("out", name, change)


def call_of(op: str, fault: Fault) -> Callable[..., None]:
    """A kernel that has the fault."""
    formula, _ = FORMULAS[op]

    def call(*inputs: Tensor, out: Any, **options: Any) -> None:
        wide = (each.double() if each.is_floating_point() else each for each in inputs)
        if formula in (layer_norm, rms_norm):
            options["dtype"] = inputs[0].dtype
        results = tuple(each.double() for each in formula(fault, *wide, **options))
        outs = out if isinstance(out, tuple) else (out,)
        for index, (each, values) in enumerate(zip(outs, results[: len(outs)], strict=True)):
            each.copy_(fault.at("out", torch.atleast_1d(values)).reshape(each.shape) if index == 0 else values)

    return call

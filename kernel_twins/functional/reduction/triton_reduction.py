"""The Triton side of ``kernel_twins.sum``, ``mean``, ``amax`` and ``argmax``: kernel_twins::reduction_nd_triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from kernel_twins.functional.backends import (
    HALF,
    is_plain,
    on_device,
    refuse_tangents,
    require_gpu,
    triton_launcher,
)
from kernel_twins.functional.reduction.shared import axes_of, batching_rule
from kernel_twins.functional.triton_operator import FLOATS, differentiable, register
from kernel_twins.ops.reduction.shared import KINDS, MOST_AXES
from kernel_twins.ops.tensors import DTYPE, require_dtype


def reduction(x: Tensor, dims: Sequence[int], keepdim: bool, kind: str) -> Tensor:
    """Runs the last Triton step on a tensor on a GPU; bypasses the operator, which is slow to dispatch, if it can."""
    tracing = torch.compiler.is_compiling()
    if not tracing and not triton.knobs.runtime.interpret:
        require_gpu("x", x, "triton")
    if kind == "sum" and x.dtype in HALF and torch.is_autocast_enabled("cuda"):
        x = x.float()  # as PyTorch's
    if tracing:  # Triton launches cannot be traced
        return operator(x, dims, keepdim, kind)
    if not is_plain(x):
        if kind == "argmax":  # an index has no derivative, but torch.func.grad would ask for one
            x = x.detach()
        refuse_tangents("amax" if kind == "max" else kind, x)
        return operator(x, dims, keepdim, kind)
    if x.requires_grad and torch.is_grad_enabled() and kind != "argmax":
        return _differentiable(x, dims, keepdim, kind)
    return _compute(x, dims, keepdim, kind)


def _compute(x: Tensor, dims: Sequence[int], keepdim: bool, kind: str) -> Tensor:
    axes, sizes = _known_axes_and_sizes(x.shape, tuple(dims), keepdim, kind)
    out = _empty(x, sizes, kind)
    if out.numel() > 0:
        with on_device(x.device):
            launch = triton_launcher("reduction_nd", x.device.index)
            launch(x if x.dim() else x.view(1), out=out.squeeze(axes) if keepdim else out, dims=axes or (0,), kind=kind)
    return out


def _axes_and_sizes(
    shape: Sequence[int], dims: Sequence[int], keepdim: bool, kind: str
) -> tuple[tuple[int, ...], list[int]]:
    """The reduced axes and the result's sizes; ValueError or IndexError if the arguments do not fit together."""
    if len(shape) > MOST_AXES:
        raise ValueError(f"x has {len(shape)} dimensions, must have up to {MOST_AXES}: pass backend='torch'")
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, must be one of {', '.join(KINDS)}")
    axes = axes_of(dims, len(shape))[: len(shape)]
    if kind in ("max", "argmax") and any(guard_or_false(shape[axis] == 0) for axis in axes):  # unbacked: taken as not 0
        raise IndexError(f"x has shape {tuple(shape)}, must have elements along dims for {kind}")
    return axes, [1 if axis in axes else size for axis, size in enumerate(shape) if keepdim or axis not in axes]


# Only for sizes that are numbers: while a graph is traced they may be symbols.
_known_axes_and_sizes = lru_cache(maxsize=4096)(_axes_and_sizes)


def _empty(x: Tensor, sizes: list[int], kind: str) -> Tensor:
    if x.dtype not in FLOATS:
        require_dtype("x", x, *DTYPE)
    return x.new_empty(sizes, dtype=torch.int64 if kind == "argmax" else x.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The operator
# ----------------------------------------------------------------------------------------------------------------------


def _fake(x: Tensor, dims: Sequence[int], keepdim: bool, kind: str) -> Tensor:
    return _empty(x, _axes_and_sizes(x.shape, dims, keepdim, kind)[1], kind)


def _save(ctx: Any, inputs: tuple[Tensor, Sequence[int], bool, str], output: Tensor) -> None:
    x, dims, ctx.keepdim, ctx.kind = inputs
    ctx.axes, ctx.shape = axes_of(dims, x.dim())[: x.dim()], x.shape
    ctx.save_for_backward(*((x, output) if ctx.kind == "max" else ()))


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, None, None, None]:
    """The gradient by operations that can be differentiated again. A sum's and a mean's are small ones, expanded."""
    if ctx.kind == "argmax":
        return None, None, None, None
    dout = _restored(dout, ctx)
    if ctx.kind == "max":
        x, out = ctx.saved_tensors
        return _shared(dout, _restored(out, ctx) == x, ctx.axes), None, None, None
    if ctx.kind == "mean":  # divided before it is expanded: few elements
        dout = dout / math.prod(ctx.shape[axis] for axis in ctx.axes)
    return dout.expand(ctx.shape), None, None, None


def _shared(dout: Tensor, is_largest: Tensor, axes: tuple[int, ...]) -> Tensor:
    """A maximum's gradient by PyTorch's rule: equal maxima share it evenly, and that of NaN is NaN.

    PyTorch's sum of bools first writes int64s, of which half precision takes a quarter; it is summed in fp32.
    """
    counts = is_largest.half()
    if axes:  # for PyTorch no dims means all dims
        counts = counts.sum(axes, keepdim=True, dtype=torch.float32)
    share = (dout / counts).to(dout.dtype)
    return torch.where(is_largest, share, share * 0)


def _restored(tensor: Tensor, ctx: Any) -> Tensor:
    """The tensor with the reduced axes inserted at their places."""
    for axis in () if ctx.keepdim else ctx.axes:
        tensor = tensor.unsqueeze(axis)
    return tensor


operator = register(
    "reduction_nd_triton",
    _compute,
    "(Tensor x, int[] dims, bool keepdim, str kind) -> Tensor",
    _fake,
    gradient=(_save, _backward),
    vmap=batching_rule,
)
_differentiable = differentiable("_Reduction", _compute, _save, _backward)

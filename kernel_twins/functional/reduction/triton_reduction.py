"""The Triton side of ``kernel_twins.sum``, ``mean``, ``amax`` and ``argmax``: torch.ops.kernel_twins.*_triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from kernel_twins._triton.reduction.reduction_nd.amax_backward import amax_backward
from kernel_twins.functional.backends import (
    HALF,
    is_plain,
    on_device,
    refuse_tangents,
    require_gpu,
    triton_launcher,
)
from kernel_twins.functional.reduction.shared import axes_of, batching_rule, gradient_batching_rule, shared
from kernel_twins.functional.triton_operator import FLOATS, differentiable, goes_past, register, require_like
from kernel_twins.ops.reduction.shared import KINDS, MOST_AXES
from kernel_twins.ops.tensors import DTYPE, require_dtype

_MOST_TIES = 2**31 - 1  # of an output, which the kernel counts in int32


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


def _compute_backward(dout: Tensor, x: Tensor, out: Tensor, dims: Sequence[int]) -> Tensor:
    """dx from dout and out, the maxima, both of x's rank."""
    axes = _check_backward(dout, x, out, dims)
    dx = torch.empty_like(x)
    if math.prod(x.shape[axis] for axis in axes) > _MOST_TIES:
        return dx.copy_(shared(dout, out == x, axes))
    if dx.numel() > 0:
        with on_device(x.device):
            amax_backward(dout.contiguous(), x, out.contiguous(), dx=dx, dims=axes)
    return dx


def _check_backward(dout: Tensor, x: Tensor, out: Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    """The reduced axes; TypeError or ValueError if the arguments do not fit together."""
    if x.dtype not in FLOATS:
        require_dtype("x", x, *DTYPE)
    axes, sizes = _axes_and_sizes(x.shape, dims, True, "max")
    for name, each in (("dout", dout), ("out", out)):
        require_like(name, each, "x", x, "x with reduced axes of 1", torch.Size(sizes))
    return axes


# ----------------------------------------------------------------------------------------------------------------------
# The operators
# ----------------------------------------------------------------------------------------------------------------------


def _fake(x: Tensor, dims: Sequence[int], keepdim: bool, kind: str) -> Tensor:
    return _empty(x, _axes_and_sizes(x.shape, dims, keepdim, kind)[1], kind)


def _fake_backward(dout: Tensor, x: Tensor, out: Tensor, dims: Sequence[int]) -> Tensor:
    _check_backward(dout, x, out, dims)
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, Sequence[int], bool, str], output: Tensor) -> None:
    x, dims, ctx.keepdim, ctx.kind = inputs
    ctx.axes, ctx.shape = axes_of(dims, x.dim())[: x.dim()], x.shape
    ctx.save_for_backward(*((x, output) if ctx.kind == "max" else ()))


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, None, None, None]:
    """The gradient, which can be differentiated again. A sum's and a mean's are small ones, expanded."""
    if ctx.kind == "argmax":
        return None, None, None, None
    dout = _restored(dout, ctx)
    if ctx.kind == "max":
        x, out = ctx.saved_tensors
        return _of_largest(dout, x, _restored(out, ctx), ctx.axes), None, None, None
    if ctx.kind == "mean":  # divided before it is expanded: few elements
        dout = dout / math.prod(ctx.shape[axis] for axis in ctx.axes)
    return dout.expand(ctx.shape), None, None, None


def _of_largest(dout: Tensor, x: Tensor, out: Tensor, axes: Sequence[int]) -> Tensor:
    if torch.is_grad_enabled():  # PyTorch's operations can be differentiated again
        return shared(dout, out == x, axes)
    backward = _compute_backward if goes_past("amax", dout, x, out) else backward_operator
    return backward(dout, x, out, axes)


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
backward_operator = register(
    "amax_backward_triton",
    _compute_backward,
    "(Tensor dout, Tensor x, Tensor out, int[] dims) -> Tensor",
    _fake_backward,
    vmap=gradient_batching_rule,
)
_differentiable = differentiable("_Reduction", _compute, _save, _backward)

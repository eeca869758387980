"""The Triton side of ``kernel_twins.softmax`` and ``log_softmax``: torch.ops.kernel_twins.softmax_triton."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from kernel_twins.functional.backends import (
    HALF,
    is_plain,
    on_device,
    refuse_tangents,
    require_gpu,
    triton_launcher,
)
from kernel_twins.functional.rows import counted, empty_rows, in_rows
from kernel_twins.functional.softmax.shared import batching_rule
from kernel_twins.functional.triton_operator import FLOATS, differentiable, goes_past, register, require_shape_of
from kernel_twins.ops.tensors import DTYPE, require_device, require_dtype, require_same_dtype


def softmax(x: Tensor, dim: int, log: bool) -> Tensor:
    """Runs the last Triton step on a tensor on a GPU; bypasses the operator, which is slow to dispatch, if it can."""
    if torch.compiler.is_compiling():  # Triton launches cannot be traced
        return operator(x, dim, log)
    if not triton.knobs.runtime.interpret:
        require_gpu("x", x, "triton")
    if not is_plain(x) or (x.dtype in HALF and torch.is_autocast_enabled("cuda")):
        refuse_tangents("softmax", x)
        return operator(x, dim, log)
    return (_differentiable if x.requires_grad and torch.is_grad_enabled() else _compute)(x, dim, log)


def _compute(x: Tensor, dim: int = -1, log: bool = False) -> Tensor:
    dim = _check(x, dim)
    out = empty_rows(x, dim)
    if out.numel() > 0:
        with on_device(x.device):
            launch = triton_launcher("softmax", x.device.index)
            launch(in_rows(x, dim), out=in_rows(out, dim), log=log)
    return out


def _compute_backward(dout: Tensor, y: Tensor, dim: int, log: bool = False) -> Tensor:
    """dx from dout and y, the result of the forward pass."""
    dim = _check_backward(dout, y, dim)
    out = empty_rows(dout, dim)
    if out.numel() > 0:
        launch = triton_launcher("softmax_backward", dout.device.index)
        with on_device(dout.device):
            launch(in_rows(dout, dim), in_rows(y, dim), out=in_rows(out, dim), log=log)
    return out


def _check(x: Tensor, dim: int) -> int:
    """``dim`` counted from the front; TypeError or IndexError if the arguments do not fit together."""
    if x.dtype not in FLOATS:
        require_dtype("x", x, *DTYPE)
    return counted(dim, "x", x.dim())


def _check_backward(dout: Tensor, y: Tensor, dim: int) -> int:
    if dout.dtype not in FLOATS:
        require_dtype("dout", dout, *DTYPE)
    require_same_dtype("y", y, "dout", dout)
    require_device("y", y, "dout", dout)
    require_shape_of("y", y, "dout", dout.shape)
    return counted(dim, "dout", dout.dim())


# ----------------------------------------------------------------------------------------------------------------------
# The operators
# ----------------------------------------------------------------------------------------------------------------------


def _fake(x: Tensor, dim: int = -1, log: bool = False) -> Tensor:
    return empty_rows(x, _check(x, dim))


def _fake_backward(dout: Tensor, y: Tensor, dim: int, log: bool = False) -> Tensor:
    return empty_rows(dout, _check_backward(dout, y, dim))


def _save(ctx: Any, inputs: tuple[Tensor, int, bool], output: Tensor) -> None:
    _, ctx.dim, ctx.log = inputs
    ctx.save_for_backward(output)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
    (y,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # PyTorch's operator can be differentiated again
        aten = torch.ops.aten
        again = aten._log_softmax_backward_data if ctx.log else aten._softmax_backward_data
        return again(dout, y, ctx.dim, y.dtype), None, None
    backward = _compute_backward if goes_past("softmax_backward", dout) else backward_operator
    return backward(dout, y, ctx.dim, ctx.log), None, None


operator = register(
    "softmax_triton",
    _compute,
    "(Tensor x, int dim=-1, bool log=False) -> Tensor",
    _fake,
    gradient=(_save, _backward),
    vmap=partial(batching_rule, names=("x",)),
    widened=True,
)
backward_operator = register(
    "softmax_backward_triton",
    _compute_backward,
    "(Tensor dout, Tensor y, int dim, bool log=False) -> Tensor",
    _fake_backward,
    vmap=partial(batching_rule, names=("dout", "y")),
)
_differentiable = differentiable("_Softmax", _compute, _save, _backward)

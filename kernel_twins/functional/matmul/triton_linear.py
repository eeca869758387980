"""The Triton side of ``kernel_twins.linear``: torch.ops.kernel_twins.linear_triton and the parts of its gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from kernel_twins.functional.backends import (
    is_plain,
    on_device,
    refuse_tangents,
    require_gpu,
    step_behind,
    triton_launcher,
    wants_gradient,
)
from kernel_twins.functional.matmul import triton_matmul
from kernel_twins.functional.matmul.batching import backward_rule, linear_rule
from kernel_twins.functional.triton_operator import differentiable, goes_past, register
from kernel_twins.ops.activations import ACTIVATIONS, differentiable_dz
from kernel_twins.ops.tensors import require_device, require_dtype, require_same_dtype

SAVES_NOTHING = ("none", "relu")  # relu's gradient needs only its result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Runs the fused step. It bypasses the operator, which is slow to dispatch, if it can."""
    given = (x, weight) if bias is None else (x, weight, bias)
    out: Tensor
    past = False
    if not torch.compiler.is_compiling():  # Triton launches cannot be traced
        shape = _check(x, weight, bias, activation)  # before the dispatcher, whose errors name no remedy
        past = is_plain(*given)
        if past and not wants_gradient(*given):
            out, _ = _forward(x, weight, bias, activation, shape, save=False)
            return out
        if not past:
            refuse_tangents("linear", *given)
    gradient = wants_gradient(*given)
    if activation not in SAVES_NOTHING and gradient:
        out, _ = (_differentiable_saving if past else saving_operator)(x, weight, bias, activation)
    else:
        out = (_differentiable if past else operator)(x, weight, bias, activation)
    return out


def _compute(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    return _forward(x, weight, bias, activation, _check(x, weight, bias, activation), save=False)[0]


def _compute_saving(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    _check_saves(activation)
    out, pre = _forward(x, weight, bias, activation, _check(x, weight, bias, activation), save=True)
    assert pre is not None
    return out, pre


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, shape: tuple[int, ...], save: bool
) -> tuple[Tensor, Tensor | None]:
    """The result of that shape and, with ``save``, the activation's input."""
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    launch = None if x.dtype == torch.float32 else _fused(x.device.index if x.is_cuda else None)
    if launch is None:
        product = triton_matmul.matmul(rows, weight.t(), None).view(shape)
        if bias is not None:
            product.add_(bias)
        return ACTIVATIONS[activation](product), product if save else None
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    pre = torch.empty_like(out) if save else None
    if out.numel() > 0:
        matrix = rows.shape[0], weight.shape[0]
        target = out.view(matrix) if pre is None else (out.view(matrix), pre.view(matrix))
        with on_device(x.device):
            launch(rows, weight, None if bias is None else bias.contiguous(), out=target, activation=activation)
    return out, pre


def _compute_backward(dout: Tensor, saved: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """dz = dout * activation'(saved), and its sum over all rows. ``saved`` is the activation's input."""
    _check_backward(dout, saved, activation)
    matrix = dout.shape[:-1].numel(), dout.shape[-1]
    if dout.dtype == torch.float32:
        dz = differentiable_dz(dout, saved, activation)
        dbias = dz.reshape(matrix).sum(0)
    else:
        from kernel_twins._triton.matmul.linear import backward

        with on_device(dout.device):
            rows, values = (tensor.contiguous().view(matrix) for tensor in (dout, saved))
            dz, dbias = backward.linear_backward(rows, values, activation)
    return dz.contiguous().view(dout.shape), dbias


@cache
def _fused(device: int | None) -> Callable[..., None] | None:
    """The fused step's launcher; None if the GPU cannot run it."""
    capability = None if device is None else torch.cuda.get_device_capability(device)
    return triton_launcher("linear", device) if step_behind("linear", "triton", capability) else None


# ----------------------------------------------------------------------------------------------------------------------
# Argument checks
# ----------------------------------------------------------------------------------------------------------------------


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[int, ...]:
    """The result's shape; TypeError or ValueError if the arguments do not fit together."""
    _check_activation(activation)
    if not ((isinstance(x, Tensor) and (x.is_cuda or x.is_meta)) or triton.knobs.runtime.interpret):
        require_gpu("x", x, "triton")
    _check_operand("x", x, x)
    _check_operand("weight", weight, x)
    if x.dim() == 0:
        raise ValueError("x has 0 dimensions, must have 1 or more: call x.unsqueeze(0)")
    if weight.dim() != 2:
        raise ValueError(f"weight has {weight.dim()} dimensions, must have 2")
    if weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, must have {x.shape[-1]} columns, as many as x, of shape "
            f"{tuple(x.shape)}, has in its last dimension: slice one, or transpose a matrix with .mT"
        )
    if bias is not None:
        _check_operand("bias", bias, x)
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}, must have ({weight.shape[0]},): one element for each row of "
                f"weight"
            )
    return (*x.shape[:-1], weight.shape[0])


def _check_operand(name: str, tensor: Tensor, x: Tensor) -> None:
    require_dtype(name, tensor, "fp32", "bf16", "fp16")
    require_same_dtype(name, tensor, "x", x)
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} has another layout than torch.strided: call {name}.to_dense()")
    require_device(name, tensor, "x", x)


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        *most, last = ACTIVATIONS
        raise ValueError(
            f"activation is {activation!r}, must be {', '.join(most)} or {last}: apply others to the result"
        )


def _check_backward(dout: Tensor, saved: Tensor, activation: str) -> None:
    _check_activation(activation)
    if activation == "none":
        raise ValueError("activation is 'none', whose dz is dout")
    require_dtype("dout", dout, "fp32", "bf16", "fp16")
    require_same_dtype("saved", saved, "dout", dout)
    require_device("saved", saved, "dout", dout)
    if dout.dim() == 0 or saved.shape != dout.shape:
        raise ValueError(f"saved has shape {tuple(saved.shape)}, must have that of dout, {tuple(dout.shape)}")


def _check_saves(activation: str) -> None:
    if activation in SAVES_NOTHING:
        raise ValueError(f"activation is {activation!r}, which saves nothing of its own")


# ----------------------------------------------------------------------------------------------------------------------
# The operators
# ----------------------------------------------------------------------------------------------------------------------


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    return torch.empty(_check(x, weight, bias, activation), dtype=x.dtype, device=x.device)


def _fake_saving(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    _check_saves(activation)
    return _fake(x, weight, bias, activation), _fake(x, weight, bias, activation)


def _fake_backward(dout: Tensor, saved: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    _check_backward(dout, saved, activation)
    return torch.empty(dout.shape, dtype=dout.dtype, device=dout.device), dout.new_empty(dout.shape[-1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, str], output: Tensor) -> None:
    x, weight, bias, activation = inputs
    ctx.activation = activation
    ctx.alone = activation not in SAVES_NOTHING  # called directly: linear itself calls the operator that saves
    if ctx.alone:
        ctx.save_for_backward(x, weight, bias)
        return
    x_grad, weight_grad, *_ = ctx.needs_input_grad
    ctx.save_for_backward(
        x if weight_grad else None, weight if x_grad else None, output if activation == "relu" else None
    )


def _save_pre(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, str], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, activation = inputs
    ctx.activation, ctx.alone = activation, False
    x_grad, weight_grad, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if weight_grad else None, weight if x_grad else None, output[1])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dout: Tensor | None, dpre: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    """dx = dz @ weight, dweight = dz.T @ x and dbias, dz's sum over all rows.

    ``dpre`` is the gradient of the saved input of the activation. Second derivatives arrive there, and so need neither
    x nor weight again.
    """
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    wants_bias = any(ctx.needs_input_grad[2:3])  # the dispatcher drops trailing defaults
    dz, dx, dweight, dbias = dpre, None, None, None
    x, weight, saved = ctx.saved_tensors
    if dout is not None:
        if ctx.alone:
            saved = linear(x, weight, saved, "none")
        if ctx.activation != "none" and not torch.is_grad_enabled():
            backward = _compute_backward if goes_past("linear_backward", dout, saved) else backward_operator
            dz, dbias = backward(dout, saved, ctx.activation)
        else:
            dz = differentiable_dz(dout, saved, ctx.activation)
        if dpre is not None:
            dz, dbias = dz + dpre, None
    if dz is None:
        return None, None, None, None
    multiply = triton_matmul.product_with(dz)
    if wants_x:
        dx = multiply(dz, weight)
    if wants_weight:
        dweight = multiply(triton_matmul.as_matrix(dz).mT, triton_matmul.as_matrix(x))
    if wants_bias and dbias is None:
        dbias = dz.sum_to_size(dz.shape[-1])
    return dx, dweight, dbias if wants_bias else None, None


operator = register(
    "linear_triton",
    _compute,
    "(Tensor x, Tensor weight, Tensor? bias=None, str activation='none') -> Tensor",
    _fake,
    gradient=(_save, _backward),
    vmap=partial(linear_rule, product=triton_matmul.operator),
)
saving_operator = register(
    "linear_saving_triton",
    _compute_saving,
    "(Tensor x, Tensor weight, Tensor? bias, str activation) -> (Tensor, Tensor)",
    _fake_saving,
    gradient=(_save_pre, _backward),
    vmap=partial(linear_rule, product=triton_matmul.operator, saves=True),
)
backward_operator = register(
    "linear_backward_triton",
    _compute_backward,
    "(Tensor dout, Tensor saved, str activation) -> (Tensor, Tensor)",
    _fake_backward,
    vmap=backward_rule,
)
_differentiable = differentiable("_Layer", _compute, _save, _backward)
_differentiable_saving = differentiable("_SavingLayer", _compute_saving, _save_pre, _backward)

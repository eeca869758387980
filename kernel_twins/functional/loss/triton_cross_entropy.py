"""The Triton side of ``kernel_twins.cross_entropy``: torch.ops.kernel_twins.cross_entropy_triton and others.

``reduction`` is 0 for none, 1 for mean, 2 for sum, except in functions that kernel_twins.functional.loss.cross_entropy
calls. The users' input is called logits here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kernel_twins._triton.loss.cross_entropy.mean import cross_entropy_mean
from kernel_twins.functional.backends import (
    HALF,
    Operator,
    is_plain,
    on_device,
    refuse_tangents,
    require_gpu,
    triton_launcher,
    wants_gradient,
)
from kernel_twins.functional.loss.shared import (
    REDUCTIONS,
    Options,
    backward_batching_rule,
    batching_rule,
    has_rows_apart,
    in_place_batching_rule,
    require_one_gradient,
)
from kernel_twins.functional.rows import empty_rows, in_rows, rows_of
from kernel_twins.functional.triton_operator import FLOATS, applied, goes_past, register, require_shape_of
from kernel_twins.ops.tensors import DTYPE, require_device, require_dtype

Losses = tuple[Tensor, Tensor, Tensor]
"""The loss of each row or of all rows, lse of each row, and the factor of a row's loss in the loss of all rows.

The factor is an empty tensor without a reduction.
"""

_MEAN = REDUCTIONS["mean"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    in_place: bool = False,
    fp32_loss: bool = False,
) -> Tensor:
    """Runs the last Triton step on tensors on a GPU. It bypasses the operator, which is slow to dispatch, if it can.

    With ``in_place`` the gradient overwrites the logits; they must not require grad if gradients are recorded.
    """
    compiling = torch.compiler.is_compiling()  # Triton launches cannot be traced
    if not compiling and not triton.knobs.runtime.interpret:
        require_gpu("input", logits, "triton")
    # Autocast widens the loss, as PyTorch's.
    widens = fp32_loss or (logits.dtype in HALF and torch.is_autocast_enabled("cuda"))
    arguments = logits, target, ignore_index, REDUCTIONS[reduction], float(label_smoothing), widens
    if not compiling:
        if is_plain(logits, target):
            if not in_place:
                return _differentiable(*arguments) if wants_gradient(logits) else _compute(*arguments)[0]
            loss = _compute_in_place(*arguments)
            if not logits.is_inference():
                torch.autograd.graph.increment_version(logits)
            return loss
        refuse_tangents("cross_entropy_gradient_" if in_place else "cross_entropy", logits)
    return in_place_operator(*arguments) if in_place else operator(*arguments)[0]


def _compute(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: int = _MEAN,
    label_smoothing: float = 0.0,
    fp32_loss: bool = False,
) -> Losses:
    dim = _check(logits, target, reduction, label_smoothing)
    losses = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    dtype = torch.float32 if fp32_loss else logits.dtype
    with on_device(logits.device):
        flat_losses, flat_target = _flat(losses), _flat(target)
        if losses.numel() > 0:
            launch = triton_launcher("cross_entropy", logits.device.index)
            launch(
                in_rows(logits, dim) if logits.shape[dim] else logits.new_empty(target.numel(), 0),
                flat_target,
                out=(flat_losses, _flat(lse)),
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
            )
        if reduction:
            loss, scale = lse.new_empty((), dtype=dtype), lse.new_empty(())
            cross_entropy_mean(flat_losses, flat_target, loss, scale, ignore_index, reduction == _MEAN)
            return loss, lse, scale
    return losses.to(dtype), lse, lse.new_empty(0)


def _flat(tensor: Tensor) -> Tensor:
    """The tensor as a contiguous vector; itself if it is one already."""
    return tensor.contiguous() if tensor.dim() == 1 else tensor.reshape(-1).contiguous()


def _compute_backward(
    dout: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    scale: Tensor,
    ignore_index: int,
    reduction: int,
    label_smoothing: float,
) -> Tensor:
    dim = _check_backward(dout, logits, target, lse, scale, reduction, label_smoothing)
    out = empty_rows(logits, dim)
    if out.numel() > 0:
        of_rows = (dout * scale).float() if reduction else dout.float().reshape(-1)
        _launch_backward(in_rows(logits, dim), target, lse, of_rows, in_rows(out, dim), ignore_index, label_smoothing)
    return out


def _compute_in_place(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: int = _MEAN,
    label_smoothing: float = 0.0,
    fp32_loss: bool = False,
) -> Tensor:
    dim = _check_in_place(logits, target, reduction, label_smoothing)
    loss, lse, scale = _compute(logits, target, ignore_index, reduction, label_smoothing, fp32_loss)
    rows = rows_of(logits, dim) if logits.numel() else None
    if rows is not None:
        _launch_backward(rows, target, lse, scale, rows, ignore_index, label_smoothing)
    return loss


def _launch_backward(
    rows: Tensor,
    target: Tensor,
    lse: Tensor,
    dout: Tensor,
    out: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    """``dout`` is one number for each row, or for all of them; ``out`` may be the logits' own rows."""
    with on_device(rows.device):
        launch = triton_launcher("cross_entropy_backward", rows.device.index)
        launch(
            rows,
            _flat(target),
            _flat(lse),
            dout.expand(len(rows)),
            out=out,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )


def _check(logits: Tensor, target: Tensor, reduction: int, label_smoothing: float) -> int:
    """The dimension of the classes; TypeError or ValueError if the arguments do not fit together."""
    if logits.dtype not in FLOATS:
        require_dtype("input", logits, *DTYPE)
    if logits.dim() == 0:
        raise ValueError("input has 0 dimensions, must have 1 or more: the classes' is the second, or the only one")
    if target.dtype != torch.int64:
        raise TypeError(f"target is {target.dtype}, must be torch.int64: call target.to(...)")
    require_device("target", target, "input", logits)
    dim = 0 if logits.dim() == 1 else 1
    shape = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    if target.shape != shape:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, must have {shape}: one class for each row of input, which has "
            f"shape {tuple(logits.shape)}"
        )
    if reduction not in REDUCTIONS.values():
        raise ValueError(f"reduction is {reduction}, must be 0 for none, 1 for mean or 2 for sum")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}, must be from 0 to 1")
    return dim


def _check_in_place(logits: Tensor, target: Tensor, reduction: int, label_smoothing: float) -> int:
    """The same as ``_check``; and the rows must be such that they can be overwritten."""
    require_one_gradient(reduction)
    dim = _check(logits, target, reduction, label_smoothing)
    if not has_rows_apart(logits) and logits.numel() > 0:
        raise ValueError(
            f"input has strides {logits.stride()}, must have rows of neighbouring classes, apart from each other and "
            "all equally far: take input.contiguous(), classes last"
        )
    return dim


def _check_backward(
    dout: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    scale: Tensor,
    reduction: int,
    label_smoothing: float,
) -> int:
    dim = _check(logits, target, reduction, label_smoothing)
    shape = torch.Size() if reduction else target.shape
    if dout.shape != shape:
        raise ValueError(f"dout has shape {tuple(dout.shape)}, must have {tuple(shape)} like the loss")
    require_shape_of("lse", lse, "target", target.shape)
    for name, tensor in (("lse", lse), ("scale", scale)):
        require_dtype(name, tensor, "fp32")
    for name, tensor in (("dout", dout), ("lse", lse), ("scale", scale)):
        require_device(name, tensor, "input", logits)
    return dim


def _differentiable_backward(
    dout: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: int,
    label_smoothing: float,
) -> Tensor:
    """dx by operations that can be differentiated again; probabilities are computed anew, as they depend on logits."""
    dim = 0 if logits.dim() == 1 else 1
    ignored = target == ignore_index
    # As in the kernels, a target that is no class makes its row NaN; scatter_add would abort the process.
    no_class = (target < 0) | (target >= logits.shape[dim])
    of_rows = dout.float()
    if reduction == _MEAN:
        of_rows = of_rows / ignored.logical_not().sum()
    of_rows = of_rows.expand(target.shape).masked_fill(no_class & ~ignored, math.nan)
    p = torch.softmax(logits.float(), dim)
    wanted = torch.full_like(p, label_smoothing / max(1, logits.shape[dim]))
    classes = target.masked_fill(no_class, 0).unsqueeze(dim)
    wanted = wanted.scatter_add(dim, classes, torch.full_like(classes, 1 - label_smoothing, dtype=p.dtype))
    dx = (p - wanted) * of_rows.unsqueeze(dim)
    return dx.masked_fill(ignored.unsqueeze(dim), 0.0).to(logits.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# The operators
# ----------------------------------------------------------------------------------------------------------------------


def _fake(logits: Tensor, target: Tensor, *options: Any) -> Losses:
    _, reduction, label_smoothing, fp32_loss = Options(*options)
    _check(logits, target, reduction, label_smoothing)
    lse = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    dtype = torch.float32 if fp32_loss else logits.dtype
    if reduction:
        return logits.new_empty((), dtype=dtype), lse, lse.new_empty(())
    return torch.empty_like(lse, dtype=dtype), lse, lse.new_empty(0)


def _fake_backward(
    dout: Tensor, logits: Tensor, target: Tensor, lse: Tensor, scale: Tensor, _: int, *options: Any
) -> Tensor:
    return empty_rows(logits, _check_backward(dout, logits, target, lse, scale, *options))


def _fake_in_place(logits: Tensor, target: Tensor, *options: Any) -> Tensor:
    _, reduction, label_smoothing, _ = Options(*options)
    _check_in_place(logits, target, reduction, label_smoothing)
    return _fake(logits, target, *options)[0]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Losses) -> None:
    logits, target, ctx.ignore_index, ctx.reduction, ctx.label_smoothing, _ = inputs
    _, lse, scale = output
    ctx.save_for_backward(logits, target, lse, scale)


def _save_from_operator(ctx: Any, inputs: tuple[Any, ...], output: Losses) -> None:
    _save(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    logits, target, lse, scale = ctx.saved_tensors
    options = ctx.ignore_index, ctx.reduction, ctx.label_smoothing
    if torch.is_grad_enabled():
        dx = _differentiable_backward(dout, logits, target, *options)
    else:
        backward = _compute_backward if goes_past("cross_entropy_backward", dout) else backward_operator
        dx = backward(dout, logits, target, lse, scale, *options)
    return dx, None, None, None, None, None


_OPTIONS = "int ignore_index=-100, int reduction=1, float label_smoothing=0.0, bool fp32_loss=False"

operator = register(
    "cross_entropy_triton",
    _compute,
    f"(Tensor input, Tensor target, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _fake,
    gradient=(_save_from_operator, _backward),
    vmap=batching_rule,
)
backward_operator = register(
    "cross_entropy_backward_triton",
    _compute_backward,
    "(Tensor dout, Tensor input, Tensor target, Tensor lse, Tensor scale, int ignore_index, int reduction, "
    "float label_smoothing) -> Tensor",
    _fake_backward,
    vmap=backward_batching_rule,
)
in_place_operator = register(
    "cross_entropy_gradient_triton_",
    _compute_in_place,
    f"(Tensor(a!) input, Tensor target, {_OPTIONS}) -> Tensor",
    _fake_in_place,
    vmap=lambda _: in_place_batching_rule(operator, backward_operator),
    mutates=("input",),
)


class _CrossEntropy(torch.autograd.Function):
    """The operator's derivative, for a call that bypasses the operator."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _compute(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    backward = staticmethod(_backward)


_differentiable: Operator = applied(_CrossEntropy)

"""The Triton side of ``kernel_twins.layer_norm`` and ``rms_norm``: torch.ops.kernel_twins.layer_norm_triton and others.

``name`` is layer_norm or rms_norm. None is what is not there: a residual, weights, the mean of rms_norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import torch
import triton
from torch import Tensor

from kernel_twins.functional.backends import (
    HALF,
    Function,
    is_batched,
    is_plain,
    on_device,
    refuse_tangents,
    require_gpu,
    require_tensors,
    triton_launcher,
    wants_gradient,
)
from kernel_twins.functional.norm.shared import Affine, Result, batching_rule, no_row
from kernel_twins.functional.rows import in_rows, one_by_one
from kernel_twins.ops.tensors import DTYPE, require_device, require_dtype

_DTYPES = tuple(DTYPE.values())


class Normed(NamedTuple):
    y: Tensor
    added: Tensor | None
    mean: Tensor | None
    rstd: Tensor


def norm(name: str, x: Tensor, residual: Tensor | None, shape: Sequence[int], affine: Affine, eps: float) -> Result:
    """By the last Triton step, of tensors on a GPU; past the operator, slow to dispatch, where nobody needs it."""
    y: Tensor
    weight, bias, *_ = *affine, None
    past = False
    if not torch.compiler.is_compiling():  # nothing of Triton's can be traced
        if not triton.knobs.runtime.interpret:
            require_gpu("x", x, "triton")
        given = [each for each in (x, residual, weight, bias) if each is not None]
        past = is_plain(*given)
        if past and torch.is_autocast_enabled("cuda"):
            past = all(each.dtype not in HALF for each in given)
        if past and wants_gradient(*given):
            return _differentiable(name, x, residual, shape, weight, bias, eps)
        if not past:
            require_tensors(residual, weight, bias)
            refuse_tangents(name, *given)
    if past:
        y, added, _, _ = _compute(name, x, residual, shape, weight, bias, eps)
        return y if added is None else (y, added)
    if residual is None:
        y, *_ = OPERATORS[name](x, shape, *affine, eps)
        return y
    y, added, *_ = OPERATORS[f"add_{name}"](x, residual, shape, *affine, eps)
    return y, added


# ----------------------------------------------------------------------------------------------------------------------
# Forward
# ----------------------------------------------------------------------------------------------------------------------


def _compute(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Normed:
    leading = _check(x, residual, shape, weight, bias)
    out = _empty(name, x, residual, leading)
    y, added, mean, rstd = out
    if x.numel() == 0:  # the mean of nothing
        rstd.fill_(math.nan)
        if mean is not None:
            mean.fill_(math.nan)
        return out
    dims = len(shape)
    centered = mean is not None
    affine = (_vector(weight), _vector(bias)) if centered else (_vector(weight),)
    statistics = (_vector(mean), _vector(rstd)) if centered else (_vector(rstd),)
    sums = () if added is None else (in_rows(added, leading, dims),)
    others = None if residual is None else in_rows(residual, leading, dims)
    with on_device(x.device):
        launch = triton_launcher(name, x.device.index)
        outputs = (in_rows(y, leading, dims), *statistics, *sums)
        launch(in_rows(x, leading, dims), *affine, others, eps=eps, out=outputs)
    return out


def _empty(name: str, x: Tensor, residual: Tensor | None, leading: int) -> Normed:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    added = None if residual is None else torch.empty_like(y)
    sizes = x.shape[:leading] if leading else ((),)
    rstd = torch.empty(*sizes, dtype=torch.float32, device=x.device)  # sizes in a tuple take four times as long
    return Normed(y, added, torch.empty_like(rstd) if name == "layer_norm" else None, rstd)


@overload
def _vector(tensor: Tensor) -> Tensor: ...
@overload
def _vector(tensor: Tensor | None) -> Tensor | None: ...
def _vector(tensor: Tensor | None) -> Tensor | None:
    """Its elements one after the other."""
    if tensor is None:
        return None
    dense = tensor.contiguous()
    return dense if dense.dim() == 1 else dense.view(-1)


def _check(x: Tensor, residual: Tensor | None, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None) -> int:
    """How many dimensions lie in front of a row's; TypeError or ValueError where the arguments do not go together."""
    if x.dtype not in _DTYPES:
        require_dtype("x", x, *DTYPE)
    if not shape:
        raise ValueError("normalized_shape is (), must hold 1 or more sizes: those of x's last dimensions")
    leading = x.dim() - len(shape)
    row = x.shape[max(leading, 0) :]
    if row != tuple(shape):
        raise no_row(shape, x.shape)
    if residual is not None:
        _require_like("residual", residual, "x", x, "x", x.shape)
    if weight is not None:
        _require_like("weight", weight, "x", x, "normalized_shape", row)
    if bias is not None:
        _require_like("bias", bias, "x", x, "normalized_shape", row)
    return leading


def _require_like(
    name: str, tensor: Tensor, like_name: str, like: Tensor, shape_name: str, shape: Sequence[int]
) -> None:
    if tensor.dtype != like.dtype:
        raise TypeError(
            f"{name} is {tensor.dtype}, must be {like.dtype} like {like_name}: "
            f"call {name}.to({like_name}.dtype), or pass backend='torch'"
        )
    require_device(name, tensor, like_name, like)
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must have that of {shape_name}, {tuple(shape)}")


# ----------------------------------------------------------------------------------------------------------------------
# Backward
# ----------------------------------------------------------------------------------------------------------------------


def _compute_backward(
    name: str,
    dout: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    dadded: Tensor | None,
    x_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias, each of no elements where nobody asks."""
    leading = _check_backward(dout, x, mean, rstd, weight, dadded)
    dx, dweight, dbias = _empty_backward(x, leading, x_grad, weight_grad, bias_grad)
    if x.numel() == 0:  # the sum of no rows
        return dx, dweight.zero_(), dbias.zero_()
    row, dims = x.shape[leading:], x.dim() - leading
    if not x_grad:
        if weight_grad or bias_grad:
            sums = _vector(dweight) if weight_grad else None, _vector(dbias) if bias_grad else None
            from kernel_twins._triton.norm.layer_norm_backward import weights

            matrices = in_rows(dout, leading, dims), in_rows(x, leading, dims)
            with on_device(x.device):
                weights.norm_weights(*matrices, _vector(mean), _vector(rstd), *sums)
        return dx, dweight, dbias
    outputs: tuple[Tensor, ...] = (in_rows(dx, leading, dims),)
    # Steps write both or, without a weight, neither.
    if weight is None and (weight_grad or bias_grad):
        weight = x.new_ones(row)
    if weight is not None:
        wanted = ((dweight, weight_grad), (dbias, bias_grad))[: 1 if mean is None else 2]
        outputs += tuple(_vector(sums if asked else x.new_empty(row)) for sums, asked in wanted)
    statistics = (_vector(rstd),) if mean is None else (_vector(mean), _vector(rstd))
    others = None if dadded is None else in_rows(dadded, leading, dims)
    with on_device(x.device):
        launch = triton_launcher(f"{name}_backward", x.device.index)
        matrices = in_rows(dout, leading, dims), in_rows(x, leading, dims)
        launch(*matrices, *statistics, _vector(weight), others, out=outputs if len(outputs) > 1 else outputs[0])
    return dx, dweight, dbias


def _empty_backward(
    x: Tensor, leading: int, x_grad: bool, weight_grad: bool, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if x_grad else x.new_empty(0)
    row = x.shape[leading:]
    return dx, x.new_empty(row if weight_grad else 0), x.new_empty(row if bias_grad else 0)


def _check_backward(
    dout: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, dadded: Tensor | None
) -> int:
    """How many dimensions lie in front of a row's: as many as the statistics have."""
    if dout.dtype not in _DTYPES:
        require_dtype("dout", dout, *DTYPE)
    _require_like("x", x, "dout", dout, "dout", dout.shape)
    leading = rstd.dim()
    if leading >= x.dim() or rstd.shape != x.shape[:leading]:
        raise ValueError(
            f"rstd has shape {tuple(rstd.shape)}, must hold the sizes of x's first dimensions: "
            f"x has shape {tuple(x.shape)}"
        )
    require_dtype("rstd", rstd, "fp32")
    require_device("rstd", rstd, "x", x)
    if mean is not None:
        _require_like("mean", mean, "rstd", rstd, "rstd", rstd.shape)
    if weight is not None:
        _require_like("weight", weight, "x", x, "a row of x", x.shape[leading:])
    if dadded is not None:
        _require_like("dadded", dadded, "x", x, "x", x.shape)
    return leading


def _differentiable_backward(
    name: str,
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    dadded: Tensor | None,
    dims: int,
    eps: float,
    x_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """In operations that can be differentiated again; the statistics must be known to come from x."""
    along, row = tuple(range(-dims, 0)), x.shape[-dims:]
    wide, dy = x.float(), dout.float()
    if name == "layer_norm":
        wide = wide - wide.mean(along, keepdim=True)
    rstd = torch.rsqrt(wide.square().mean(along, keepdim=True) + eps)
    xhat = wide * rstd
    dweight = (dy * xhat).sum_to_size(row).to(x.dtype) if weight_grad else None
    dbias = dy.sum_to_size(row).to(x.dtype) if bias_grad else None
    if not x_grad:
        return None, dweight, dbias
    g = dy if weight is None else dy * weight.float()
    dx = g - xhat * (g * xhat).mean(along, keepdim=True)
    if name == "layer_norm":
        dx = dx - g.mean(along, keepdim=True)
    dx = dx * rstd
    if dadded is not None:
        dx = dx + dadded.float()
    return dx.to(x.dtype), dweight, dbias


def _save(ctx: Any, name: str, x: Tensor, dims: int, weight: Tensor | None, eps: float, out: Normed) -> None:
    ctx.name, ctx.dims, ctx.eps = name, dims, eps
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if out.added is None else out.added, out.mean, out.rstd, weight)


def _gradients(
    ctx: Any, dy: Tensor | None, dadded: Tensor | None, x_grad: bool, weight_grad: bool, bias_grad: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, and of the residual as well, where either asks; of weight and of bias."""
    if dy is None:
        return dadded, None, None
    x, mean, rstd, weight = ctx.saved_tensors
    asked = x_grad, weight_grad, bias_grad
    if torch.is_grad_enabled():
        return _differentiable_backward(ctx.name, dy, x, weight, dadded, ctx.dims, ctx.eps, *asked)
    given = (dy,) if dadded is None else (dy, dadded)
    if torch.compiler.is_compiling() or not is_plain(*given) or any(map(is_batched, given)):
        refuse_tangents(f"{ctx.name}_backward", *given)
        statistics = (rstd,) if mean is None else (mean, rstd)
        operator = OPERATORS[f"{ctx.name}_backward"]
        dx, dweight, *rest = operator(dy, x, *statistics, weight, dadded, *asked[: 2 if mean is None else 3])
        dbias = rest[0] if rest else None
    else:
        dx, dweight, dbias = _compute_backward(ctx.name, dy, x, mean, rstd, weight, dadded, *asked)
    return dx if x_grad else None, dweight if weight_grad else None, dbias if bias_grad else None


class _Norm(torch.autograd.Function):
    """The operator's derivative, of a call that goes past the operator; without a setup_context, as _Product."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        x: Tensor,
        residual: Tensor | None,
        shape: Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Result:
        out = _compute(name, x, residual, shape, weight, bias, eps)
        _save(ctx, name, x, len(shape), weight, eps, out)
        if out.added is None:
            return out.y
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):  # weights have no say in the sum
            ctx.mark_non_differentiable(out.added)
        return out.y, out.added

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dadded: Tensor | None = None) -> tuple[Tensor | None, ...]:
        _, x_grad, residual_grad, _, *asked, _ = ctx.needs_input_grad
        dx, dweight, dbias = _gradients(ctx, dy, dadded, x_grad or residual_grad, *asked)
        return None, dx if x_grad else None, dx if residual_grad else None, None, dweight, dbias, None


# Its apply as C++ has it: Python's asks for torch.func's transforms once more, which takes as long as a launch.
_differentiable: Callable[..., Result] = super(torch.autograd.Function, _Norm).apply


# ----------------------------------------------------------------------------------------------------------------------
# The operators
# ----------------------------------------------------------------------------------------------------------------------


def _operator(name: str, adds: bool) -> Function:
    """Of one of the norms, with a residual or without."""
    centered = name == "layer_norm"
    inputs = "Tensor x, Tensor residual" if adds else "Tensor x"
    affine = "Tensor? weight, Tensor? bias" if centered else "Tensor? weight"
    results = ["Tensor"] * (2 + adds + centered)
    schema = f"({inputs}, SymInt[] normalized_shape, {affine}, float eps) -> ({', '.join(results)})"

    def given(*inputs: Any) -> tuple[Any, ...]:
        """x, residual, normalized_shape, weight, bias and eps."""
        x, *others, eps = inputs
        residual = others.pop(0) if adds else None
        shape, weight, bias, *_ = *others, None
        return x, residual, shape, weight, bias, eps

    def there(out: Normed) -> tuple[Tensor, ...]:
        return tuple(each for each in out if each is not None)

    def fake(*inputs: Any) -> tuple[Tensor, ...]:
        x, residual, shape, weight, bias, _ = given(*inputs)
        return there(_empty(name, x, residual, _check(x, residual, shape, weight, bias)))

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, _, shape, weight, _, eps = given(*inputs)
        y, *others, rstd = output
        added = others.pop(0) if adds else None
        mean = others.pop() if centered else None
        x_grad, residual_grad, *_ = given(*ctx.needs_input_grad[: len(inputs)])  # as of _Norm, and one more behind them
        constant = None if x_grad or residual_grad else added
        ctx.mark_non_differentiable(*(each for each in (constant, mean, rstd) if each is not None))
        _save(ctx, name, x, len(shape), weight, eps, Normed(y, added, mean, rstd))

    def backward(ctx: Any, dy: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        x_grad, residual_grad, _, weight_grad, bias_grad, _ = map(bool, given(*ctx.needs_input_grad))
        dadded = others[0] if adds else None
        dx, dweight, dbias = _gradients(ctx, dy, dadded, x_grad or residual_grad, weight_grad, bias_grad)
        rows = (dx if x_grad else None, dx if residual_grad else None) if adds else (dx,)
        return *rows, None, *((dweight, dbias) if centered else (dweight,)), None

    operator = torch.library.custom_op(
        f"kernel_twins::{'add_' * adds}{name}_triton",
        lambda *inputs: there(_compute(name, *given(*inputs))),
        mutates_args=(),
        schema=schema,
    )
    operator.register_fake(fake)
    operator.register_autograd(backward, setup_context=save)
    if centered:
        operator.register_autocast("cuda", torch.float32)  # as PyTorch's
    operator.register_vmap(batching_rule(operator, 1 + adds))
    return operator


def _backward_operator(name: str) -> Function:
    centered = name == "layer_norm"
    statistics = "Tensor mean, Tensor rstd" if centered else "Tensor rstd"
    asked = f"bool x_grad, bool weight_grad{', bool bias_grad' * centered}"
    results = ["Tensor"] * (2 + centered)
    schema = f"(Tensor dout, Tensor x, {statistics}, Tensor? weight, Tensor? dadded, {asked}) -> ({', '.join(results)})"

    def given(dout: Tensor, x: Tensor, *others: Any) -> tuple[Any, ...]:
        return (dout, x, *others) if centered else (dout, x, None, *others, False)

    def fake(*inputs: Any) -> tuple[Tensor, ...]:
        *tensors, x_grad, weight_grad, bias_grad = given(*inputs)
        return _empty_backward(tensors[1], _check_backward(*tensors), x_grad, weight_grad, bias_grad)[: len(results)]

    operator = torch.library.custom_op(
        f"kernel_twins::{name}_backward_triton",
        lambda *inputs: _compute_backward(name, *given(*inputs))[: len(results)],
        mutates_args=(),
        schema=schema,
    )
    operator.register_fake(fake)
    operator.register_vmap(one_by_one(operator))
    return operator


OPERATORS: dict[str, Function] = {}
for _name in ("layer_norm", "rms_norm"):
    OPERATORS[_name] = _operator(_name, False)
    OPERATORS[f"add_{_name}"] = _operator(_name, True)
    OPERATORS[f"{_name}_backward"] = _backward_operator(_name)

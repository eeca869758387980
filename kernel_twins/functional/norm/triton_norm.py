"""The Triton side of ``kernel_twins.layer_norm`` and ``rms_norm``: torch.ops.kernel_twins.layer_norm_triton and others.

``name`` is layer_norm or rms_norm. A residual or weights that are not given are None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

from kernel_twins.functional.backends import (
    HALF,
    Function,
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
from kernel_twins.functional.triton_operator import (
    FLOATS,
    applied,
    goes_past,
    register,
    require_like,
)
from kernel_twins.ops.tensors import DTYPE, require_device, require_dtype

Statistics = tuple[Tensor, ...]  # mean and rstd; rms_norm has rstd only
Asked = tuple[bool, ...]  # which gradients are asked for: x's, weight's and, for layer_norm, bias's

_Given = TypeVar("_Given", Tensor, Tensor | None)


class Normed(NamedTuple):
    y: Tensor
    added: Tensor | None
    statistics: Statistics


def norm(name: str, x: Tensor, residual: Tensor | None, shape: Sequence[int], affine: Affine, eps: float) -> Result:
    """Runs the last Triton step on tensors on a GPU. It bypasses the operator, which is slow to dispatch, if it can."""
    y: Tensor
    past = False
    if not torch.compiler.is_compiling():  # Triton launches cannot be traced
        if not triton.knobs.runtime.interpret:
            require_gpu("x", x, "triton")
        given = [each for each in (x, residual, *affine) if each is not None]
        past = is_plain(*given)
        if past and torch.is_autocast_enabled("cuda"):
            past = all(each.dtype not in HALF for each in given)
        if past and wants_gradient(*given):
            return _differentiable(name, x, residual, shape, eps, *affine)
        if not past:
            require_tensors(residual, *affine)
            refuse_tangents(name, *given)
    if past:
        y, added, _ = _compute(name, x, residual, shape, affine, eps)
        return y if added is None else (y, added)
    if residual is None:
        y, *_ = OPERATORS[name](x, shape, *affine, eps)
        return y
    y, added, *_ = OPERATORS[f"add_{name}"](x, residual, shape, *affine, eps)
    return y, added


# ----------------------------------------------------------------------------------------------------------------------
# Forward
# ----------------------------------------------------------------------------------------------------------------------


def _compute(name: str, x: Tensor, residual: Tensor | None, shape: Sequence[int], affine: Affine, eps: float) -> Normed:
    leading = _check(x, residual, shape, *affine)
    y, added, statistics = out = _empty(name, x, residual, leading)
    if x.numel() == 0:  # a mean of no elements is NaN
        for each in statistics:
            each.fill_(math.nan)
        return out
    dims = len(shape)
    sums = () if added is None else (in_rows(added, leading, dims),)
    others = None if residual is None else in_rows(residual, leading, dims)
    with on_device(x.device):
        launch = triton_launcher(name, x.device.index)
        outputs = (in_rows(y, leading, dims), *map(_vector, statistics), *sums)
        launch(in_rows(x, leading, dims), *map(_vector, affine), others, eps=eps, out=outputs)
    return out


def _empty(name: str, x: Tensor, residual: Tensor | None, leading: int) -> Normed:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    added = None if residual is None else torch.empty_like(y)
    sizes = x.shape[:leading] if leading else ((),)
    rstd = torch.empty(*sizes, dtype=torch.float32, device=x.device)  # slower with a tuple of sizes
    return Normed(y, added, (torch.empty_like(rstd), rstd) if name == "layer_norm" else (rstd,))


def _vector(tensor: _Given) -> _Given:
    """A contiguous vector of its elements."""
    if tensor is None:
        return tensor
    dense = tensor.contiguous()
    return dense if dense.dim() == 1 else dense.view(-1)


def _check(
    x: Tensor, residual: Tensor | None, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None = None
) -> int:
    """The number of dimensions in front of a row's; TypeError or ValueError if the arguments do not fit together."""
    if x.dtype not in FLOATS:
        require_dtype("x", x, *DTYPE)
    if not shape:
        raise ValueError("normalized_shape is (), must hold 1 or more sizes: those of x's last dimensions")
    leading = x.dim() - len(shape)
    row = x.shape[max(leading, 0) :]
    if row != tuple(shape):
        raise no_row(shape, x.shape)
    if residual is not None:
        require_like("residual", residual, "x", x, "x", x.shape)
    if weight is not None:
        require_like("weight", weight, "x", x, "normalized_shape", row)
    if bias is not None:
        require_like("bias", bias, "x", x, "normalized_shape", row)
    return leading


# ----------------------------------------------------------------------------------------------------------------------
# Backward
# ----------------------------------------------------------------------------------------------------------------------


def _compute_backward(
    name: str,
    dout: Tensor,
    x: Tensor,
    statistics: Statistics,
    weight: Tensor | None,
    dadded: Tensor | None,
    asked: Asked,
) -> tuple[Tensor, ...]:
    """The gradients; each is empty if it is not asked for."""
    leading = _check_backward(dout, x, statistics, weight, dadded)
    dx, *daffine = out = _empty_backward(x, leading, asked)
    if x.numel() == 0:  # a sum of no rows is 0
        for each in daffine:
            each.zero_()
        return out
    x_grad, *affine_grad = asked
    row, dims = x.shape[leading:], x.dim() - leading
    if not x_grad:
        if any(affine_grad):
            _compute_sums(dout, x, statistics, dims, *(each if each.numel() else None for each in daffine))
        return out
    outputs: tuple[Tensor, ...] = (in_rows(dx, leading, dims),)
    # Steps write both or, without a weight, neither.
    if weight is None and any(affine_grad):
        weight = x.new_ones(row)
    if weight is not None:
        # A list takes less of the host's time than a generator, here and below.
        outputs += tuple([_vector(sums if sums.numel() else x.new_empty(row)) for sums in daffine])
    others = None if dadded is None else in_rows(dadded, leading, dims)
    with on_device(x.device):
        launch = triton_launcher(f"{name}_backward", x.device.index)
        matrices = in_rows(dout, leading, dims), in_rows(x, leading, dims)
        given = *map(_vector, statistics), _vector(weight), others
        launch(*matrices, *given, out=outputs if len(outputs) > 1 else outputs[0])
    return out


def _compute_sums(
    dout: Tensor, x: Tensor, statistics: Statistics, dims: int, dweight: Tensor | None, dbias: Tensor | None = None
) -> None:
    """Writes the gradients of weight and bias without computing x's."""
    from kernel_twins._triton.norm.layer_norm_backward import weights

    leading = x.dim() - dims
    *means, rstd = map(_vector, statistics)
    given = in_rows(dout, leading, dims), in_rows(x, leading, dims), means[0] if means else None, rstd
    with on_device(x.device):
        weights.norm_weights(*given, _vector(dweight), _vector(dbias))


def _empty_backward(x: Tensor, leading: int, asked: Asked) -> tuple[Tensor, ...]:
    x_grad, *affine_grad = asked
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if x_grad else x.new_empty(0)
    row = x.shape[leading:]
    return dx, *[x.new_empty(row if wanted else 0) for wanted in affine_grad]


def _check_backward(
    dout: Tensor, x: Tensor, statistics: Statistics, weight: Tensor | None, dadded: Tensor | None
) -> int:
    """The number of dimensions in front of a row's: as many as the statistics have."""
    if dout.dtype not in FLOATS:
        require_dtype("dout", dout, *DTYPE)
    require_like("x", x, "dout", dout, "dout", dout.shape)
    *means, rstd = statistics
    leading = rstd.dim()
    if leading >= x.dim() or rstd.shape != x.shape[:leading]:
        raise ValueError(
            f"rstd has shape {tuple(rstd.shape)}, must hold the sizes of x's first dimensions: "
            f"x has shape {tuple(x.shape)}"
        )
    require_dtype("rstd", rstd, "fp32")
    require_device("rstd", rstd, "x", x)
    for mean in means:
        require_like("mean", mean, "rstd", rstd, "rstd", rstd.shape)
    if weight is not None:
        require_like("weight", weight, "x", x, "a row of x", x.shape[leading:])
    if dadded is not None:
        require_like("dadded", dadded, "x", x, "x", x.shape)
    return leading


def _differentiable_backward(
    name: str,
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    dadded: Tensor | None,
    dims: int,
    eps: float,
    asked: Asked,
) -> tuple[Tensor | None, ...]:
    """The gradients by operations that can be differentiated again; statistics depend on x, so they are recomputed."""
    x_grad, weight_grad, *bias_grad = asked
    along, row = tuple(range(-dims, 0)), x.shape[-dims:]
    wide, dy = x.float(), dout.float()
    if name == "layer_norm":
        wide = wide - wide.mean(along, keepdim=True)
    rstd = torch.rsqrt(wide.square().mean(along, keepdim=True) + eps)
    xhat = wide * rstd
    dweight = (dy * xhat).sum_to_size(row).to(x.dtype) if weight_grad else None
    dbias = [dy.sum_to_size(row).to(x.dtype) if wanted else None for wanted in bias_grad]
    if not x_grad:
        return None, dweight, *dbias
    g = dy if weight is None else dy * weight.float()
    dx = g - xhat * (g * xhat).mean(along, keepdim=True)
    if name == "layer_norm":
        dx = dx - g.mean(along, keepdim=True)
    dx = dx * rstd
    if dadded is not None:
        dx = dx + dadded.float()
    return dx.to(x.dtype), dweight, *dbias


def _save(ctx: Any, name: str, x: Tensor, dims: int, weight: Tensor | None, eps: float, out: Normed) -> None:
    ctx.name, ctx.dims, ctx.eps = name, dims, eps
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if out.added is None else out.added, weight, *out.statistics)


def _gradients(ctx: Any, dy: Tensor | None, dadded: Tensor | None, asked: Asked) -> tuple[Tensor | None, ...]:
    """The gradients of x (which is also the residual's), of weight and of bias."""
    if dy is None:
        return dadded, *(None for _ in asked[1:])
    x, weight, *statistics = ctx.saved_tensors
    if torch.is_grad_enabled():
        return _differentiable_backward(ctx.name, dy, x, weight, dadded, ctx.dims, ctx.eps, asked)
    name = f"{ctx.name}_backward"
    if goes_past(name, *((dy,) if dadded is None else (dy, dadded))):
        found = _compute_backward(ctx.name, dy, x, tuple(statistics), weight, dadded, asked)
    else:
        found = OPERATORS[name](dy, x, *statistics, weight, dadded, *asked)
    return tuple([each if wanted else None for each, wanted in zip(found, asked, strict=True)])


class _Norm(torch.autograd.Function):
    """The operator's derivative, for a call that bypasses the operator."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        x: Tensor,
        residual: Tensor | None,
        shape: Sequence[int],
        eps: float,
        *affine: Tensor | None,
    ) -> Result:
        out = _compute(name, x, residual, shape, affine, eps)
        _save(ctx, name, x, len(shape), affine[0], eps, out)
        if out.added is None:
            return out.y
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):  # the sum does not depend on weights
            ctx.mark_non_differentiable(out.added)
        return out.y, out.added

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dadded: Tensor | None = None) -> tuple[Tensor | None, ...]:
        _, x_grad, residual_grad, _, _, *affine_grad = ctx.needs_input_grad
        dx, *daffine = _gradients(ctx, dy, dadded, (x_grad or residual_grad, *affine_grad))
        return None, dx if x_grad else None, dx if residual_grad else None, None, None, *daffine


_differentiable: Callable[..., Result] = applied(_Norm)


# ----------------------------------------------------------------------------------------------------------------------
# The operators
# ----------------------------------------------------------------------------------------------------------------------


def _operator(name: str, adds: bool) -> Function:
    """The operators of one norm, with a residual or without."""
    centered = name == "layer_norm"
    inputs = "Tensor x, Tensor residual" if adds else "Tensor x"
    vectors = "Tensor? weight, Tensor? bias" if centered else "Tensor? weight"
    results = ", ".join(["Tensor"] * (2 + adds + centered))

    def given(x: Any, *others: Any) -> tuple[Any, ...]:
        """x, residual, normalized_shape, affine and eps."""
        residual, (shape, *affine, eps) = others[0] if adds else None, others[adds:]
        return x, residual, shape, tuple(affine), eps

    def there(out: Normed) -> tuple[Tensor, ...]:
        y, added, statistics = out
        return (y, *statistics) if added is None else (y, added, *statistics)

    def compute(*inputs: Any) -> tuple[Tensor, ...]:
        return there(_compute(name, *given(*inputs)))

    def fake(*inputs: Any) -> tuple[Tensor, ...]:
        x, residual, shape, affine, _ = given(*inputs)
        return there(_empty(name, x, residual, _check(x, residual, shape, *affine)))

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, _, shape, (weight, *_), eps = given(*inputs)
        y, *added = output[: 1 + adds]
        statistics = output[1 + adds :]
        x_grad, residual_grad, *_ = given(*ctx.needs_input_grad[: len(inputs)])  # as in _Norm, and one more
        ctx.mark_non_differentiable(*(() if x_grad or residual_grad else added), *statistics)
        _save(ctx, name, x, len(shape), weight, eps, Normed(y, added[0] if adds else None, statistics))

    def backward(ctx: Any, dy: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        x_grad, residual_grad, _, affine_grad, _ = given(*ctx.needs_input_grad)
        asked = map(bool, (x_grad or residual_grad, *affine_grad))
        dx, *daffine = _gradients(ctx, dy, others[0] if adds else None, tuple(asked))
        rows = (dx if x_grad else None, dx if residual_grad else None) if adds else (dx,)
        return *rows, None, *daffine, None

    return register(
        f"{'add_' * adds}{name}_triton",
        compute,
        f"({inputs}, SymInt[] normalized_shape, {vectors}, float eps) -> ({results})",
        fake,
        gradient=(save, backward),
        vmap=partial(batching_rule, rows=1 + adds),
        widened=centered,
    )


def _backward_operator(name: str) -> Function:
    centered = name == "layer_norm"
    statistics = "Tensor mean, Tensor rstd" if centered else "Tensor rstd"
    asked = "bool x_grad, bool weight_grad, bool bias_grad" if centered else "bool x_grad, bool weight_grad"
    results = ", ".join(["Tensor"] * (2 + centered))

    def given(dout: Tensor, x: Tensor, *others: Any) -> tuple[Any, ...]:
        """dout, x, statistics, weight, dadded, and which gradients are asked for."""
        weight, dadded, *asked = others[1 + centered :]
        return dout, x, others[: 1 + centered], weight, dadded, tuple(asked)

    def compute(*inputs: Any) -> tuple[Tensor, ...]:
        return _compute_backward(name, *given(*inputs))

    def fake(*inputs: Any) -> tuple[Tensor, ...]:
        *tensors, asked = given(*inputs)
        return _empty_backward(tensors[1], _check_backward(*tensors), asked)

    return register(
        f"{name}_backward_triton",
        compute,
        f"(Tensor dout, Tensor x, {statistics}, Tensor? weight, Tensor? dadded, {asked}) -> ({results})",
        fake,
        vmap=one_by_one,
    )


OPERATORS: dict[str, Function] = {}
for _name in ("layer_norm", "rms_norm"):
    OPERATORS[_name] = _operator(_name, False)
    OPERATORS[f"add_{_name}"] = _operator(_name, True)
    OPERATORS[f"{_name}_backward"] = _backward_operator(_name)

"""The Triton side of ``kernel_twins.dropout_add``: torch.ops.kernel_twins.dropout_add_triton and its backward pass.

``state`` is the seed and the offset from which a mask is drawn. It is two numbers if the host knows them. It is a
tensor [2] of int64 on the GPU if an operator returns it, or if only the GPU knows it, as under graph capture.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernel_twins.functional.backends import (
    Operator,
    is_plain,
    on_device,
    refuse_tangents,
    require_gpu,
    require_tensors,
    triton_launcher,
    wants_gradient,
)
from kernel_twins.functional.dropout.shared import batching_rule
from kernel_twins.functional.rows import in_rows, one_by_one
from kernel_twins.functional.triton_operator import (
    FLOATS,
    applied,
    goes_past,
    register,
    require_like,
)
from kernel_twins.ops.activations import differentiable_dz
from kernel_twins.ops.dropout.shared import check_options, scale
from kernel_twins.ops.tensors import DTYPE, require_device, require_dtype, require_shape

State = Tensor | tuple[int, int]

_TRIES = 16  # to find an offset that no other thread uses


def dropout_add(x: Tensor, residual: Tensor | None, bias: Tensor | None, p: float, activation: str) -> Tensor:
    """Runs the last Triton step on tensors on a GPU. It bypasses the operator, which is slow to dispatch, if it can."""
    past = False
    if not torch.compiler.is_compiling():  # Triton launches cannot be traced
        if not triton.knobs.runtime.interpret:
            require_gpu("x", x, "triton")
        given = [each for each in (x, residual, bias) if each is not None]
        past = is_plain(*given)
        if past and wants_gradient(*given):
            return _differentiable(x, residual, bias, p, activation)
        if not past:
            require_tensors(residual, None, bias)
            refuse_tangents("dropout_add", *given)
    if past:
        return _compute(x, residual, bias, p, activation, _next_state(x.device, p))
    return operator(x, residual, bias, p, activation)[0]


def _next_state(device: torch.device, p: float) -> State:
    """The next seed and offset of a GPU's default generator; a p of 0 or 1 takes nothing from it.

    Python cannot hold the generator's mutex while it reads and sets the offset, so another thread could draw the same
    numbers in between. A draw of no elements lets PyTorch advance the offset under the mutex, without a launch. If the
    offset has advanced by exactly that draw, the numbers before it belong to this call. If it has advanced further,
    another thread has drawn, too, and the call tries again.
    """
    if not 0 < p < 1:
        return 0, 0
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return _drawn(device, p)
    generator = torch.cuda.default_generators[device.index]
    nothing, step = _draw_of_nothing(device)
    for _ in range(_TRIES if step else 0):
        seed, offset = generator.initial_seed(), generator.get_offset()
        torch._standard_gamma(nothing, generator)
        if generator.get_offset() == offset + step:
            return seed, offset
    return _drawn(device, p)


@cache
def _draw_of_nothing(device: torch.device) -> tuple[Tensor, int]:
    """An empty tensor on a GPU, and by how much drawing it advances a generator: 0 if PyTorch skips empty draws."""
    nothing, generator = torch.empty(0, device=device), torch.Generator(device)
    torch._standard_gamma(nothing, generator)
    return nothing, generator.get_offset()


def _drawn(device: torch.device, p: float) -> Tensor:
    """A state drawn by a kernel of PyTorch, so that every replay of a graph draws a new one."""
    if not 0 < p < 1:
        return torch.zeros(2, dtype=torch.int64, device=device)
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def _seed_and_offset(state: State) -> dict[str, Any]:
    """The launchers' arguments for a state."""
    if isinstance(state, Tensor):
        return {"seed": state.contiguous(), "offset": None}
    return {"seed": state[0], "offset": state[1]}


def _loading(state: State) -> contextlib.AbstractContextManager[Any]:
    """Allows graph capture to load the kernels that read a state from memory, which eager calls do not run before."""
    if isinstance(state, Tensor) and state.is_cuda and torch.cuda.is_current_stream_capturing():
        from kernel_twins._triton.lib import workspace

        return workspace.unrestricted()
    return contextlib.nullcontext()


def _compute(
    x: Tensor, residual: Tensor | None, bias: Tensor | None, p: float, activation: str, state: State
) -> Tensor:
    _check(x, residual, bias, p, activation)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() > 0:
        others = None if residual is None else _rows(residual)
        shift = None if bias is None else bias.contiguous()
        with on_device(x.device), _loading(state):
            launch = triton_launcher("dropout_add", x.device.index)
            given = _rows(x), others, shift
            launch(*given, p=p, activation=activation, out=_rows(out), **_seed_and_offset(state))
    return out


def _rows(tensor: Tensor) -> Tensor:
    """[M, N]: along the last dimension. A tensor without dimensions is a row of one element."""
    return in_rows(tensor, tensor.dim() - 1) if tensor.dim() > 0 else in_rows(tensor.unsqueeze(0), 0)


def _compute_operator(
    x: Tensor, residual: Tensor | None, bias: Tensor | None, p: float, activation: str
) -> tuple[Tensor, Tensor]:
    state = _drawn(x.device, p)
    return _compute(x, residual, bias, p, activation, state), state


def _compute_backward(
    dout: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    state: State,
    p: float,
    activation: str,
    x_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor]:
    """dx and dbias; each is empty if it is not asked for."""
    _check_backward(dout, x, bias, state, p, activation, bias_grad)
    dx, dbias = _empty_backward(dout, x_grad, bias_grad)
    if dout.numel() == 0:
        return dx, dbias.zero_()
    inputs = (
        _rows(dout),
        None if x is None else _rows(x),
        None if bias is None else bias.contiguous(),
    )
    options = {"p": p, "activation": activation, **_seed_and_offset(state)}
    with on_device(dout.device), _loading(state):
        if x_grad:
            launch = triton_launcher("dropout_add_backward", dout.device.index)
            rows = _rows(dx)
            launch(*inputs, out=(rows, dbias) if bias_grad else rows, **options)
        elif bias_grad:
            from kernel_twins._triton.dropout.dropout_add_backward import bias as alone

            alone.dropout_add_bias(*inputs, dbias, **options)
    return dx, dbias


def _empty_backward(dout: Tensor, x_grad: bool, bias_grad: bool) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(dout, memory_format=torch.contiguous_format) if x_grad else dout.new_empty(0)
    return dx, dout.new_empty(dout.shape[-1] if bias_grad else 0)


# ----------------------------------------------------------------------------------------------------------------------
# Argument checks
# ----------------------------------------------------------------------------------------------------------------------


def _check(x: Tensor, residual: Tensor | None, bias: Tensor | None, p: float, activation: str) -> None:
    if x.dtype not in FLOATS:
        require_dtype("x", x, *DTYPE)
    check_options(p, activation, 0, 0)
    if residual is not None:
        require_like("residual", residual, "x", x, "x", x.shape)
    _require_bias(bias, "x", x)


def _check_backward(
    dout: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    state: State,
    p: float,
    activation: str,
    bias_grad: bool,
) -> None:
    if dout.dtype not in FLOATS:
        require_dtype("dout", dout, *DTYPE)
    check_options(p, activation, 0, 0)
    if activation == "none" and (x is not None or bias is not None):
        raise ValueError("activation is 'none', which has no use for x and bias: leave them out")
    if activation != "none" and x is None:
        raise ValueError(f"x is missing, must be there: the slope of '{activation}' is taken at x + bias")
    if x is not None:
        require_like("x", x, "dout", dout, "dout", dout.shape)
    _require_bias(bias, "dout", dout)
    if bias_grad and dout.dim() == 0:
        raise ValueError("dout has 0 dimensions, must have 1 or more where there is a bias")
    if isinstance(state, Tensor):
        require_dtype("state", state, "int64")
        require_shape("state", state, (2,), "a seed and an offset")
        require_device("state", state, "dout", dout)


def _require_bias(bias: Tensor | None, like_name: str, like: Tensor) -> None:
    if bias is None:
        return
    require_like("bias", bias, like_name, like)
    if like.dim() == 0:
        raise ValueError(f"{like_name} has 0 dimensions, must have 1 or more where there is a bias")
    if bias.shape != like.shape[-1:]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}, must have ({like.shape[-1]},): "
            f"one element for each in {like_name}'s last dimension"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Gradients
# ----------------------------------------------------------------------------------------------------------------------


def _differentiable_backward(
    dout: Tensor, x: Tensor | None, bias: Tensor | None, state: State, p: float, activation: str, bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """dx by operations that can be differentiated again; the mask is a constant."""
    # The gradient of ones is not 0 where an element is kept.
    ones = torch.ones_like(dout)
    if isinstance(state, Tensor):
        mask = backward_operator(ones, None, None, state, p, "none", True, False)[0] != 0
    else:
        mask = _compute_backward(ones, None, None, state, p, "none", True, False)[0] != 0
    dx = dout.float() * scale(p)
    if x is not None:
        dx = differentiable_dz(dx, x.float() if bias is None else x.float() + bias.float(), activation)
    dx = torch.where(mask, dx, 0.0)
    return dx.to(dout.dtype), dx.sum_to_size(dx.shape[-1]).to(dout.dtype) if bias_grad else None


def _gradients(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, of the residual and of the bias."""
    x_grad, residual_grad, bias_grad = ctx.needs_input_grad[:3]
    if dout is None:
        return None, None, None
    dx = dbias = None
    if x_grad or bias_grad:
        x, bias, saved = ctx.saved_tensors
        state = ctx.state if saved is None else saved
        given = dout, x, bias, state, ctx.p, ctx.activation, x_grad, bias_grad
        if torch.is_grad_enabled():
            dx, dbias = _differentiable_backward(*given[:-2], bias_grad)
        elif goes_past("dropout_add_backward", dout):
            dx, dbias = _compute_backward(*given)
        else:
            if not isinstance(state, Tensor):
                given = (*given[:3], _as_tensor(state, dout.device), *given[4:])
            dx, dbias = backward_operator(*given)
    return dx if x_grad else None, dout if residual_grad else None, dbias if bias_grad else None


def _as_tensor(state: tuple[int, int], device: torch.device) -> Tensor:
    wrapped = [number - 2**64 if number >= 2**63 else number for number in state]
    return torch.tensor(wrapped, dtype=torch.int64, device=device)


def _save(ctx: Any, x: Tensor, bias: Tensor | None, p: float, activation: str, state: State) -> None:
    ctx.p, ctx.activation = p, activation
    ctx.set_materialize_grads(False)
    slopes = activation != "none"
    ctx.state = None if isinstance(state, Tensor) else state
    ctx.save_for_backward(x if slopes else None, bias if slopes else None, state if ctx.state is None else None)


def _backward(ctx: Any, dout: Tensor | None, _: Tensor | None = None) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, dout), None, None


class _DropoutAdd(torch.autograd.Function):
    """The operator's derivative, for a call that bypasses the operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, bias: Tensor | None, p: float, activation: str) -> Tensor:
        state = _next_state(x.device, p)
        out = _compute(x, residual, bias, p, activation, state)
        _save(ctx, x, bias, p, activation, state)
        return out

    backward = staticmethod(_backward)


_differentiable: Operator = applied(_DropoutAdd)


# ----------------------------------------------------------------------------------------------------------------------
# The operators
# ----------------------------------------------------------------------------------------------------------------------


def _fake(x: Tensor, residual: Tensor | None, bias: Tensor | None, p: float, activation: str) -> tuple[Tensor, Tensor]:
    _check(x, residual, bias, p, activation)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, torch.empty(2, dtype=torch.int64, device=x.device)


def _fake_backward(
    dout: Tensor, x: Tensor | None, bias: Tensor | None, state: Tensor, p: float, activation: str, *asked: bool
) -> tuple[Tensor, Tensor]:
    _check_backward(dout, x, bias, state, p, activation, asked[-1])
    return _empty_backward(dout, *asked)


def _save_from_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, bias, p, activation = inputs
    ctx.mark_non_differentiable(output[1])
    _save(ctx, x, bias, p, activation, output[1])


operator = register(
    "dropout_add_triton",
    _compute_operator,
    "(Tensor x, Tensor? residual, Tensor? bias, float p, str activation) -> (Tensor, Tensor)",
    _fake,
    gradient=(_save_from_operator, _backward),
    vmap=batching_rule,
    tags=(torch.Tag.nondeterministic_seeded,),
)
backward_operator = register(
    "dropout_add_backward_triton",
    _compute_backward,
    "(Tensor dout, Tensor? x, Tensor? bias, Tensor state, float p, str activation, bool x_grad, bool bias_grad) "
    "-> (Tensor, Tensor)",
    _fake_backward,
    vmap=one_by_one,
)

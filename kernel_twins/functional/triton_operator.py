"""The form of every function's Triton side: operators of PyTorch's, the way past them, and what they refuse.

An operator in Python is slow to dispatch. A call that nobody traces or transforms goes past it, and where a gradient is
wanted through a ``torch.autograd.Function`` with the operator's own derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernel_twins.functional.backends import Function, is_batched, is_plain, refuse_tangents
from kernel_twins.functional.rows import Rule
from kernel_twins.ops.tensors import DTYPE, require_device

FLOATS = tuple(DTYPE.values())

_Results = TypeVar("_Results")


def register(
    name: str,
    compute: Callable[..., _Results],
    schema: str,
    fake: Callable[..., _Results],
    *,
    gradient: tuple[Function, Function] | None = None,
    vmap: Callable[[Function], Rule] | None = None,
    widened: bool = False,
    mutates: tuple[str, ...] = (),
    tags: tuple[torch.Tag, ...] = (),
) -> Callable[..., _Results]:
    """The operator ``kernel_twins::<name>``; ``fake`` refuses what ``compute`` does, and makes results like its.

    ``gradient`` is what saves for the backward pass, and that pass. ``vmap`` makes a batching rule of the operator.
    ``widened`` is one that CUDA's autocast calls in float32, as PyTorch's.
    """
    operator = torch.library.custom_op(
        f"kernel_twins::{name}", compute, mutates_args=mutates, schema=schema, tags=tags or None
    )
    operator.register_fake(fake)
    if gradient is not None:
        save, backward = gradient
        operator.register_autograd(backward, setup_context=save)
    if widened:
        operator.register_autocast("cuda", torch.float32)
    if vmap is not None:
        operator.register_vmap(vmap(operator))
    return operator


def differentiable(
    name: str, compute: Callable[..., _Results], save: Function, backward: Function
) -> Callable[..., _Results]:
    """``compute`` with the operator's derivative, for a call that goes past the operator; graphs show ``name``."""

    def forward(ctx: Any, *inputs: Any) -> _Results:
        results = compute(*inputs)
        save(ctx, inputs, results)
        return results

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return applied(type(name, (torch.autograd.Function,), methods))


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The class's ``apply`` as C++ has it: Python's asks for torch.func's transforms once more, which takes as long as
    a launch.

    The class has no setup_context of its own: where there is one, PyTorch binds a call's arguments by inspection, which
    is a good part of a call's time.
    """
    of_cpp: Any = super(torch.autograd.Function, function)
    apply: Callable[..., Any] = of_cpp.apply
    return apply


def goes_past(name: str, *gradients: Tensor) -> bool:
    """Whether a backward pass needs no operator; NotImplementedError where forward mode follows the gradients."""
    if not torch.compiler.is_compiling() and is_plain(*gradients) and not any(map(is_batched, gradients)):
        return True
    refuse_tangents(name, *gradients)
    return False


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


def require_like(
    name: str, tensor: Tensor, like_name: str, like: Tensor, shape_name: str = "", shape: Sequence[int] | None = None
) -> None:
    """TypeError or ValueError where it has another dtype, lies on another device, or has not the shape, if one is given
    by what has it.
    """
    if tensor.dtype != like.dtype:
        raise TypeError(
            f"{name} is {tensor.dtype}, must be {like.dtype} like {like_name}: "
            f"call {name}.to({like_name}.dtype), or pass backend='torch'"
        )
    require_device(name, tensor, like_name, like)
    if shape is not None and tensor.shape != shape:
        require_shape_of(name, tensor, shape_name, shape)


def require_shape_of(name: str, tensor: Tensor, shape_name: str, shape: Sequence[int]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must have that of {shape_name}, {tuple(shape)}")

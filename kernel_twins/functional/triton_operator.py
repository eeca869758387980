"""The Triton side of the public functions: custom operators, a bypass around them, and argument checks.

A custom operator in Python is slow to dispatch. A call that is neither traced nor transformed bypasses it. If it needs
a gradient, it goes through a ``torch.autograd.Function`` with the operator's derivative.
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
    """The operator ``kernel_twins::<name>``. ``fake`` makes the same checks as ``compute``, and results without data.

    ``gradient`` holds two functions: one saves for the backward pass, the other computes it. ``vmap`` makes a batching
    rule from the operator. A ``widened`` operator is called in float32 by CUDA's autocast, as PyTorch's is.
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
    """``compute`` with the operator's derivative, for calls that bypass the operator; graphs show ``name``."""

    def forward(ctx: Any, *inputs: Any) -> _Results:
        results = compute(*inputs)
        save(ctx, inputs, results)
        return results

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return applied(type(name, (torch.autograd.Function,), methods))


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The class's ``apply`` in C++. Python's wrapper checks for torch.func's transforms and takes as long as a launch.

    The class has no setup_context of its own, because PyTorch would then bind each call's arguments by inspection,
    which is slow.
    """
    of_cpp: Any = super(torch.autograd.Function, function)
    apply: Callable[..., Any] = of_cpp.apply
    return apply


def goes_past(name: str, *gradients: Tensor) -> bool:
    """Whether a backward pass can bypass the operator; NotImplementedError if forward mode tracks the gradients."""
    if not torch.compiler.is_compiling() and is_plain(*gradients) and not any(map(is_batched, gradients)):
        return True
    refuse_tangents(name, *gradients)
    return False


# ----------------------------------------------------------------------------------------------------------------------
# Argument checks
# ----------------------------------------------------------------------------------------------------------------------


def require_like(
    name: str, tensor: Tensor, like_name: str, like: Tensor, shape_name: str = "", shape: Sequence[int] | None = None
) -> None:
    """TypeError or ValueError if the tensor has another dtype or device than ``like``, or another shape than ``shape``.

    ``like_name`` and ``shape_name`` name, in the message, the tensors that they are compared with.
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

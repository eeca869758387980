"""Argument checks for the specs of operations along a matrix's rows; errors are those of tensors.py."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kernel_twins.ops.tensors import (
    remedy_of,
    require_apart,
    require_contiguous,
    require_device,
    require_dtype,
    require_rank,
    require_same_dtype,
    require_shape,
    require_tensor,
)
from kernel_twins.spec import ITEMSIZE

# Outputs with one number for each row, or for each column; all others are matrices.
_NUMBERS = ("mean", "rstd", "losses", "lse")
_VECTORS = ("dweight", "dbias")


def require_rows(name: str, tensor: Tensor) -> None:
    """[M, N] of fp32, bf16 or fp16, with contiguous rows at any distance."""
    require_dtype(name, tensor, *ITEMSIZE)
    require_rank(name, tensor, 2)
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        remedy = remedy_of(name, "contiguous()")
        raise ValueError(f"{name} has strides {tensor.stride()}, must have contiguous rows: {remedy}")


def require_matrix(name: str, tensor: Tensor | None, like_name: str, like: Tensor) -> None:
    if tensor is None:
        return
    require_rows(name, tensor)
    require_same_dtype(name, tensor, like_name, like)
    require_device(name, tensor, like_name, like)
    require_shape(name, tensor, tuple(like.shape), f"one element for each of {like_name}")


def require_vector(name: str, tensor: Tensor | None, like_name: str, like: Tensor) -> None:
    if tensor is None:
        return
    require_dtype(name, tensor, *ITEMSIZE)
    require_same_dtype(name, tensor, like_name, like)
    require_device(name, tensor, like_name, like)
    require_shape(name, tensor, (like.shape[1],), f"one element for each column of {like_name}")
    require_contiguous(name, tensor)


def require_numbers(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """[M] of fp32, at any distance."""
    require_dtype(name, tensor, "fp32")
    require_device(name, tensor, like_name, like)
    require_shape(name, tensor, (like.shape[0],), f"one number for each row of {like_name}")


def require_result(tensor: Tensor, like_name: str, like: Tensor) -> None:
    """out: one element for each of another matrix, of its dtype, contiguous."""
    require_dtype("out", tensor, *ITEMSIZE)
    require_same_dtype("out", tensor, like_name, like)
    require_device("out", tensor, like_name, like)
    require_shape("out", tensor, tuple(like.shape), f"one element for each of {like_name}")
    require_contiguous("out", tensor)


def require_out(out: Tensor | tuple[Tensor, ...], names: list[str], like_name: str, like: Tensor) -> None:
    """A tensor for one name; a tuple of tensors in that order for several."""
    if len(names) > 1 and not isinstance(out, tuple):
        raise TypeError(f"out is a {type(out).__name__}, must be a tuple of {len(names)} tensors: {', '.join(names)}")
    if len(names) == 1 and isinstance(out, tuple):
        raise TypeError(f"out is a tuple, must be one tensor: {names[0]}")
    if isinstance(out, tuple) and len(out) != len(names):
        raise ValueError(f"out has {len(out)} tensors, must have {len(names)}: {', '.join(names)}")
    for index, (tensor, name) in enumerate(zip(_tensors(out), names, strict=True)):
        label = f"out[{index}]" if isinstance(out, tuple) else "out"
        require_tensor(label, tensor)  # an input may be None, an output may not
        if name in _NUMBERS:
            require_numbers(label, tensor, like_name, like)
        elif name in _VECTORS:
            require_vector(label, tensor, like_name, like)
        else:
            require_matrix(label, tensor, like_name, like)
        require_contiguous(label, tensor)


def require_all_apart(out: Tensor | tuple[Tensor, ...], inputs: Mapping[str, Tensor | None]) -> None:
    """No output overlaps an input, or another output."""
    outs = _tensors(out)
    for index, tensor in enumerate(outs):
        for name, other in inputs.items():
            if other is not None:
                require_apart(tensor, name, other)
        for before in range(index):
            require_apart(tensor, f"out[{before}]", outs[before])


def _tensors(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)

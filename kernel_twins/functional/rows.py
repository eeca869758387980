"""Rows of a tensor and batches of torch.func.vmap, for public functions along one dimension."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., tuple[Any, Any]]  # a batching rule for torch.library.register_vmap


def counted(dim: int, name: str, rank: int) -> int:
    """``dim`` counted from the front; IndexError if there is no such dimension. A rank of 0 is a row of one element."""
    try:
        dim = index(dim)
    except TypeError:
        raise TypeError(f"dim is {dim!r}, must be an int: pass -1 for the last dimension of {name}") from None
    dims = max(rank, 1)
    if not -dims <= dim < dims:
        raise IndexError(f"dim is {dim}, must be from {-dims} to {dims - 1}: {name} has {rank} dimensions")
    return dim % dims


def rows_of(tensor: Tensor, dim: int, dims: int = 1) -> Tensor | None:
    """A view [M, N] of a tensor that is not empty: its rows along ``dim`` (counted from the front), in order.

    A row may span the last ``dims`` dimensions; ``dim`` is then the first of them. None if strides allow no such view
    with contiguous rows.
    """
    if tensor.dim() == 2 and dim == 1 and tensor.stride(1) == 1:
        return tensor
    moved = tensor.movedim(dim, -1) if dim + dims < tensor.dim() else tensor
    n = moved.shape[-dims:].numel()
    try:
        rows = moved.view(-1, n)
    except RuntimeError:
        return None
    return rows if n == 1 or rows.stride(1) == 1 else None


def in_rows(tensor: Tensor, dim: int, dims: int = 1) -> Tensor:
    """The same, copied if strides allow no view. If all strides are 0, as in a sum's gradient, one row is copied."""
    rows = rows_of(tensor, dim, dims)
    if rows is not None:
        return rows
    n = tensor.shape[dim : dim + dims].numel()
    if all(stride == 0 or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor.as_strided((n,), (0,)).contiguous().expand(tensor.numel() // n, n)
    moved = tensor.movedim(dim, -1) if dims == 1 else tensor
    return moved.contiguous().view(-1, n)


def empty_rows(like: Tensor, dim: int) -> Tensor:
    """An empty result of a tensor's shape, with its rows along ``dim`` one after the other in memory."""
    if dim + 1 >= like.dim():
        return torch.empty_like(like, memory_format=torch.contiguous_format)  # faster than torch.empty
    shape = (*like.shape[:dim], *like.shape[dim + 1 :], like.shape[dim])
    return torch.empty(shape, dtype=like.dtype, device=like.device).movedim(-1, dim)


def with_batch(tensor: Tensor, batch: int | None, at: int, size: int) -> Tensor:
    """The tensor with the batch as dimension ``at``; expanded if it has no batch."""
    if batch is not None:
        return tensor.movedim(batch, at)
    one = tensor.unsqueeze(at)
    return one.expand(*one.shape[:at], size, *one.shape[at + 1 :])


def one_by_one(operator: Callable[..., Any]) -> Rule:
    """A rule for ``torch.library.register_vmap`` that calls the operator for one example after the other.

    It is for a backward pass that sums over all rows.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        each = [
            operator(*(value if at is None else value.select(at, i) for value, at in zip(given, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        outs = tuple(torch.stack(examples) for examples in zip(*each, strict=True))
        return outs, (0,) * len(outs)

    return rule

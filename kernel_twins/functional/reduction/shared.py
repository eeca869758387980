"""Axes, a maximum's gradient by PyTorch, and batching rules of torch.func.vmap for sum, mean, amax and argmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_twins.ops.reduction.shared import require_dims


def axes_of(dims: Sequence[int], rank: int) -> tuple[int, ...]:
    """The reduced axes in their order, counted from the front; all if none is named. A rank of 0 is one axis."""
    return tuple(sorted(require_dims(tuple(dims), max(rank, 1)))) or tuple(range(rank))


def batching_rule(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """A rule for ``torch.library.register_vmap``: the batch is one more kept axis, and stays where it is."""

    def rule(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, dims: Sequence[int], keepdim: bool, kind: str
    ) -> tuple[Tensor, int]:
        at = in_dims[0]
        assert at is not None  # the only tensor is batched
        rank = x.dim() - 1
        if rank == 0:  # a scalar is reduced over one axis of one element
            axes_of(dims, 0)
            return operator(x.unsqueeze(1), (1,), False, kind), 0
        axes = axes_of(dims, rank)
        out = operator(x, tuple(axis + (axis >= at) for axis in axes), keepdim, kind)
        return out, at if keepdim else at - len([axis for axis in axes if axis < at])

    return rule


def shared(dout: Tensor, is_largest: Tensor, axes: Sequence[int]) -> Tensor:
    """A maximum's gradient by PyTorch's rule: equal maxima share it evenly, and that of NaN is NaN.

    PyTorch's sum of bools first writes int64s, of which half precision takes a quarter; it is summed in fp32.
    """
    counts = is_largest.half()
    if axes:  # for PyTorch no dims means all dims
        counts = counts.sum(tuple(axes), keepdim=True, dtype=torch.float32)
    share = (dout / counts).to(dout.dtype)
    return torch.where(is_largest, share, share * 0)


def gradient_batching_rule(_: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """The rule for the gradients of maxima, by PyTorch: one batch of any of the tensors, however many axes that makes.

    Gradients of many losses at once share x, which would have to be repeated for a kernel.
    """

    def rule(
        info: Any, in_dims: tuple[int | None, ...], dout: Tensor, x: Tensor, out: Tensor, dims: Sequence[int]
    ) -> tuple[Tensor, int]:
        rank = x.dim() - (in_dims[1] is not None)
        dout, x, out = (
            each.unsqueeze(0) if at is None else each.movedim(at, 0)
            for each, at in zip((dout, x, out), in_dims[:3], strict=True)
        )
        return shared(dout, out == x, [axis + 1 for axis in axes_of(dims, rank)[:rank]]), 0

    return rule

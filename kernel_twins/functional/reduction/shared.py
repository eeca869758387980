"""Axes and the batching rule of torch.func.vmap for both sides of sum, mean, amax and argmax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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

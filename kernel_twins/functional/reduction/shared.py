"""What both sides of sum, mean, amax and argmax share: the axes, and the batches of torch.func.vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kernel_twins.ops.reduction.shared import require_dims


def axes_of(dims: Sequence[int], rank: int) -> tuple[int, ...]:
    """The reduced axes in their order, counted from the front; all where none is named. A rank of 0 is one axis."""
    return tuple(sorted(require_dims(tuple(dims), max(rank, 1)))) or tuple(range(rank))


def batching_rule(operator: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """What ``torch.library.register_vmap`` takes: the batch is one kept axis more, and stays where it lies."""

    def rule(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, dims: Sequence[int], keepdim: bool, kind: str
    ) -> tuple[Tensor, int]:
        at = in_dims[0]
        assert at is not None  # there is no other tensor
        rank = x.dim() - 1
        if rank == 0:  # reduced over one axis of one element
            axes_of(dims, 0)
            return operator(x.unsqueeze(1), (1,), False, kind), 0
        axes = axes_of(dims, rank)
        out = operator(x, tuple(axis + (axis >= at) for axis in axes), keepdim, kind)
        return out, at if keepdim else at - len([axis for axis in axes if axis < at])

    return rule

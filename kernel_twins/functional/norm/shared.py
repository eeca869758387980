"""Types, an error message and the batching rule of torch.func.vmap for both sides of layer_norm and rms_norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_twins.functional.backends import Function
from kernel_twins.functional.rows import Rule, with_batch

Affine = tuple[Tensor | None, ...]  # weight and bias; rms_norm has weight only
Result = Tensor | tuple[Tensor, Tensor]


def no_row(shape: Sequence[int], sizes: Sequence[int]) -> ValueError:
    """The error message for a ``normalized_shape`` that does not fit x's sizes."""
    return ValueError(
        f"normalized_shape is {tuple(shape)}, must hold the sizes of x's last dimensions: x has shape {tuple(sizes)}"
    )


def batching_rule(operator: Function, rows: int) -> Rule:
    """A rule for ``torch.library.register_vmap`` of ``operator(*rows, normalized_shape, *affine, eps)``.

    A batch in front of a row's dimensions stays where it is. Batched weights are applied by PyTorch to the rounded
    result, as PyTorch's own layer_norm does under vmap.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        inputs, (shape, *affine, eps) = given[:rows], given[rows:]
        places, of_affine = in_dims[:rows], in_dims[rows + 1 : -1]
        at = None  # not batched, unless one of the inputs is
        for tensor, place in zip(inputs, places, strict=True):
            if at is None and place is not None:
                if tensor.dim() == len(shape):  # else the batch would count as a dimension of the row
                    raise no_row(shape, (*tensor.shape[:place], *tensor.shape[place + 1 :]))
                at = place if place < tensor.dim() - len(shape) else 0
        if at is not None:
            inputs = tuple(with_batch(*each, at, info.batch_size) for each in zip(inputs, places, strict=True))
        if all(place is None for place in of_affine):
            outs = operator(*inputs, shape, *affine, eps)
            return outs, (at,) * len(outs)

        y, *others = operator(*inputs, shape, *(None for _ in affine), eps)
        y = y.unsqueeze(0) if at is None else y.movedim(at, 0)
        leading = (1,) * (y.dim() - 1 - len(shape))

        def spread(tensor: Tensor | None, place: int | None) -> Tensor | None:
            if tensor is None:
                return None
            batched = with_batch(tensor, place, 0, 1)
            return batched.view(batched.shape[0], *leading, *shape)

        weight, bias, *_ = *map(spread, affine, of_affine), None
        if weight is not None and bias is not None:
            y = torch.addcmul(bias, y, weight)
        else:
            y = y + bias if weight is None else y * weight
        return (y, *others), (0, *(at for _ in others))

    return rule

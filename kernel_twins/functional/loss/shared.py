"""Reductions, the rule which logits can be overwritten, and vmap's batching rules for both sides of cross_entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_twins.functional.backends import HALF
from kernel_twins.functional.rows import Rule, with_batch

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # PyTorch's numbers for them


class Options(NamedTuple):
    """The arguments of the losses' operators behind input and target; the dispatcher drops trailing defaults."""

    ignore_index: int = -100
    reduction: int = REDUCTIONS["mean"]
    label_smoothing: float = 0.0
    fp32_loss: bool = False


def has_rows_apart(logits: Tensor) -> bool:
    """Whether classes are contiguous, and rows do not overlap and are equally far apart. Sizes may be symbols."""
    dim, sizes, strides = int(logits.dim() > 1), logits.shape, logits.stride()
    if strides[dim] != 1 and sizes[dim] != 1:
        return False
    behind = None  # elements that the dimensions behind this one span
    for i in range(logits.dim() - 1, -1, -1):
        if i == dim or (isinstance(sizes[i], int) and sizes[i] == 1):
            continue
        if strides[i] < sizes[dim] if behind is None else strides[i] != behind:
            return False
        behind = strides[i] * sizes[i]
    return True


def weighted(losses: Tensor, target: Tensor, weight: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Rows' losses in fp32 times the weights of their classes, reduced: a mean's divisor is the sum of these weights.

    The loss of a row that does not count is 0, and that of one whose target is no class is NaN.
    """
    is_class = (target >= 0) & (target < weight.shape[0])
    known = target.where(is_class, 0)
    # Not weight[known]: of a single row that would bring the class to the host.
    of_rows = weight.float().index_select(0, known.reshape(-1)).view(known.shape).where(target != ignore_index, 0.0)
    losses = losses * of_rows
    if reduction == "none":
        return losses
    return losses.sum() / of_rows.sum() if reduction == "mean" else losses.sum()


def require_one_gradient(reduction: int) -> None:
    """ValueError if the rows' losses are not reduced to one."""
    if reduction not in (REDUCTIONS["mean"], REDUCTIONS["sum"]):
        raise ValueError(
            f"reduction is {reduction}, must be 1 for mean or 2 for sum: of rows' losses there is no one gradient"
        )


def batching_rule(operator: Callable[..., Any]) -> Rule:
    """A rule for ``torch.library.register_vmap`` of the losses: one call takes the rows of all examples."""

    def rule(info: Any, in_dims: tuple[int | None, ...], logits: Tensor, target: Tensor, *options: Any) -> Any:
        ignore_index, reduction, label_smoothing, fp32_loss = Options(*options)
        logits, target = _batched(info, in_dims, logits, target)
        as_rows, as_examples = _folding(logits, target)
        dtype = torch.float32 if fp32_loss else logits.dtype
        widened = fp32_loss or logits.dtype in HALF  # losses to be summed are rounded after the sum
        given = as_rows(logits), as_rows(target), ignore_index, REDUCTIONS["none"], label_smoothing, widened
        losses, lse = map(as_examples, operator(*given)[:2])
        if reduction == REDUCTIONS["none"]:
            return (losses.to(dtype), lse, lse.new_empty(info.batch_size, 0)), (0, 0, 0)
        total = losses.unsqueeze(-1).flatten(1).sum(1)
        if reduction == REDUCTIONS["sum"]:
            return (total.to(dtype), lse, lse.new_ones(info.batch_size)), (0, 0, 0)
        count = (target != ignore_index).unsqueeze(-1).flatten(1).sum(1)
        return ((total / count).to(dtype), lse, count.to(lse.dtype).reciprocal()), (0, 0, 0)

    return rule


def backward_batching_rule(operator: Callable[..., Tensor]) -> Rule:
    """The same rule for the gradient."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[Tensor, int]:
        tensors, (ignore_index, reduction, label_smoothing) = given[:5], given[5:]
        dout, logits, target, lse, scale = _batched(info, in_dims, *tensors)
        as_rows, as_examples = _folding(logits, target)
        if reduction != REDUCTIONS["none"]:  # one number for all rows of an example
            dout = (dout * scale).view(-1, *(1 for _ in target.shape[1:])).expand(target.shape)
        rows = map(as_rows, (dout, logits, target, lse))
        dx = operator(*rows, lse.new_empty(0), ignore_index, REDUCTIONS["none"], label_smoothing)
        return as_examples(dx), 0

    return rule


def in_place_batching_rule(operator: Callable[..., Any], backward_operator: Callable[..., Tensor]) -> Rule:
    """The same rule for the gradient in place, by the two operators above.

    One call in place has one scale for all rows, but each example needs its own. So the gradient is computed beside the
    logits, and then copied over them.
    """
    forward, backward = batching_rule(operator), backward_batching_rule(backward_operator)

    def rule(info: Any, in_dims: tuple[int | None, ...], logits: Tensor, target: Tensor, *given: Any) -> Any:
        options = Options(*given)
        if in_dims[0] is None:
            raise ValueError(
                "input is one for all of vmap's examples, must be one for each, as the gradients that overwrite it "
                "are: batch it, or pass backend='torch' and input.clone()"
            )
        require_one_gradient(options.reduction)
        (loss, lse, scale), _ = forward(info, in_dims, logits, target, *options)
        dims = None, *in_dims[:2], 0, 0
        dx, at = backward(info, dims, lse.new_ones(()), logits, target, lse, scale, *options[:3])
        logits.copy_(dx.movedim(at, in_dims[0]))
        return loss, 0

    return rule


def _batched(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """An operator's first arguments with the batch as first dimension."""
    dims = in_dims[: len(tensors)]
    return [with_batch(tensor, at, 0, info.batch_size) for tensor, at in zip(tensors, dims, strict=True)]


def _folding(logits: Tensor, target: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Functions from examples to their rows, and back. Rows are in the logits' memory order, so none is copied."""
    if target.dim() == 1:  # each example is one row
        return (lambda examples: examples), (lambda rows: rows)
    at = int(logits.stride(0) < logits.stride(1))  # the batch's dimension in memory order
    sizes = target.movedim(0, at).shape[:2]
    return (
        lambda examples: examples.movedim(0, at).flatten(0, 1),
        lambda rows: rows.unflatten(0, sizes).movedim(at, 0),
    )

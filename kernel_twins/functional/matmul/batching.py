"""The batching rules of torch.func.vmap for products: one launch for all examples, by the operator that they called.

Examples become more rows (or columns) where the other operand is the same for all of them, else a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_twins.functional.matmul.shared import product_sizes
from kernel_twins.functional.rows import Rule, with_batch
from kernel_twins.ops.activations import ACTIVATIONS

At = int | None  # the dimension of a tensor that holds the examples
Product = Callable[..., Tensor]


def product_rule(operator: Product) -> Rule:
    """A rule for ``torch.library.register_vmap`` of ``operator(a, b, out_dtype)``."""

    def rule(info: Any, in_dims: tuple[At, ...], a: Tensor, b: Tensor, *options: Any) -> tuple[Tensor, int]:
        a_at, b_at = in_dims[:2]
        rank_a, rank_b = a.dim() - (a_at is not None), b.dim() - (b_at is not None)
        for name, rank in (("a", rank_a), ("b", rank_b)):
            if rank == 0:
                raise ValueError(f"{name} has 0 dimensions, must have 1 or more: multiply by it with *")
        product_sizes(_without(a, a_at), _without(b, b_at))  # else an error would tell of the batch, too

        if b_at is None and rank_b <= 2:  # more rows of a
            assert a_at is not None
            if a_at == rank_a:  # a row must not hold the examples
                a, a_at = a.movedim(a_at, 0), 0
            return operator(a, b, *options), a_at
        if a_at is None and b_at is not None and rank_b == 1:  # columns of b
            out = operator(a, b.movedim(b_at, 1), *options)
            return out, out.dim() - 1
        if a_at is None and b_at is not None and rank_b == 2:
            columns = b.movedim(b_at, 1)  # [K, examples, N]
            if columns.stride(1) == columns.shape[2] * columns.stride(2):
                out = operator(a, columns.flatten(1), *options).unflatten(-1, columns.shape[1:])
                return out, out.dim() - 2

        left = with_batch(a, a_at, 0, 1).unsqueeze(1) if rank_a == 1 else with_batch(a, a_at, 0, 1)
        right = with_batch(b, b_at, 0, 1).unsqueeze(-1) if rank_b == 1 else with_batch(b, b_at, 0, 1)
        rank = max(left.dim(), right.dim())
        out = operator(_of_rank(left, rank), _of_rank(right, rank), *options)
        out = out.squeeze(-1) if rank_b == 1 else out
        return out.squeeze(-1 if rank_b == 1 else -2) if rank_a == 1 else out, 0

    return rule


def linear_rule(operator: Callable[..., Any], product: Product, saves: bool = False) -> Rule:
    """A rule for ``operator(x, weight, bias, activation)``, and for the one that also returns the activation's input.

    One weight for all examples, or one x, keeps the fused step. Otherwise ``product`` multiplies a batch, and PyTorch
    applies bias and activation to the rounded product.
    """

    def rule(
        info: Any, in_dims: tuple[At, ...], x: Tensor, weight: Tensor, bias: Tensor | None = None, name: str = "none"
    ) -> tuple[Any, Any]:
        x_at, weight_at, bias_at, *_ = *in_dims, None
        rank = x.dim() - (x_at is not None)
        if rank == 0:
            raise ValueError("x has 0 dimensions, must have 1 or more: call x.unsqueeze(0)")
        _require_layer(x, x_at, weight, weight_at, bias, bias_at)

        def results(out: Tensor | tuple[Tensor, Tensor], at: int) -> tuple[Any, Any]:
            return (out, (at, at)) if saves else (out, at)

        if weight_at is None and bias_at is None:  # more rows of x
            assert x_at is not None
            if x_at == rank:
                x, x_at = x.movedim(x_at, 0), 0
            return results(operator(x, weight, bias, name), x_at)
        if x_at is None and weight_at is not None:  # more rows of weight
            rows = weight.movedim(weight_at, 0)
            if bias is not None:
                bias = with_batch(bias, bias_at, 0, info.batch_size).reshape(-1)
            found = operator(x, rows.flatten(0, 1), bias, name)
            parts = tuple(each.unflatten(-1, rows.shape[:2]) for each in (found if saves else (found,)))
            return results((parts[0], parts[1]) if saves else parts[0], rank - 1)

        x = with_batch(x, x_at, 0, 1)
        if weight_at is None:
            pre = product(x, weight.mT)
        else:
            weights = weight.movedim(weight_at, 0).mT
            rows = x.reshape(len(x), math.prod(x.shape[1:-1]), x.shape[-1])
            pre = product(rows, weights).view(*x.shape[:-1], weights.shape[-1])
        if bias is not None:
            biases = with_batch(bias, bias_at, 0, 1)
            pre = pre + biases.reshape(len(biases), *(1 for _ in range(rank - 1)), biases.shape[1])
        out = ACTIVATIONS[name](pre)
        return results((out, pre) if saves else out, 0)

    return rule


def backward_rule(operator: Callable[..., tuple[Tensor, Tensor]]) -> Rule:
    """A rule for ``operator(dout, saved, activation)``: one call computes dz of all rows, whose sums are PyTorch's."""

    def rule(
        info: Any, in_dims: tuple[At, ...], dout: Tensor, saved: Tensor, activation: str
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        dout, saved = (
            with_batch(tensor, at, 0, info.batch_size) for tensor, at in zip((dout, saved), in_dims[:2], strict=True)
        )
        dz, _ = operator(dout, saved, activation)
        return (dz, dz.reshape(len(dz), math.prod(dz.shape[1:-1]), dz.shape[-1]).sum(1)), (0, 0)

    return rule


def _require_layer(x: Tensor, x_at: At, weight: Tensor, weight_at: At, bias: Tensor | None, bias_at: At) -> None:
    """ValueError for sizes that do not go together, in the words of the operators, which would count the batch."""
    sizes = _without(x, x_at)
    of_weight = _without(weight, weight_at)
    if len(of_weight) != 2:
        raise ValueError(f"weight has {len(of_weight)} dimensions, must have 2")
    if of_weight[1] != sizes[-1]:
        raise ValueError(
            f"weight has shape {tuple(of_weight)}, must have {sizes[-1]} columns, as many as x, of shape "
            f"{tuple(sizes)}, has in its last dimension: slice one, or transpose a matrix with .mT"
        )
    if bias is not None and _without(bias, bias_at) != of_weight[:1]:
        raise ValueError(
            f"bias has shape {tuple(_without(bias, bias_at))}, must have ({of_weight[0]},): one element for each row "
            f"of weight"
        )


def _without(tensor: Tensor, at: At) -> torch.Size:
    """The shape of one example."""
    return tensor.shape if at is None else torch.Size((*tensor.shape[:at], *tensor.shape[at + 1 :]))


def _of_rank(tensor: Tensor, rank: int) -> Tensor:
    """With 1s behind the examples, so that the other leading dimensions are matched from the last one on."""
    return tensor.reshape(tensor.shape[0], *(1 for _ in range(rank - tensor.dim())), *tensor.shape[1:])

"""The batching rule of torch.func.vmap for both sides of dropout_add."""

from __future__ import annotations

from typing import Any

from kernel_twins.functional.backends import Function
from kernel_twins.functional.rows import Rule, with_batch


def batching_rule(operator: Function) -> Rule:
    """A rule for ``torch.library.register_vmap`` of ``operator(x, residual, bias, p, activation)``.

    The batch becomes the first dimension, so that each example has a mask of its own. A bias that is batched is added
    by PyTorch, which rounds x + bias.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Any, Any]:
        (x, residual, bias, p, activation), (x_at, residual_at, bias_at, *_) = given, in_dims
        if 0 < p < 1 and info.randomness != "different":
            raise RuntimeError(
                f"vmap's randomness is {info.randomness!r}, must be 'different' for dropout_add, which draws a mask "
                f"for each example: pass that to torch.func.vmap, or backend='torch'"
            )
        x = with_batch(x, x_at, 0, info.batch_size)
        if residual is not None:
            residual = with_batch(residual, residual_at, 0, info.batch_size)
        if bias is not None and x.dim() == 1:
            raise ValueError("x has 0 dimensions, must have 1 or more where there is a bias")
        if bias_at is not None:
            spread = with_batch(bias, bias_at, 0, info.batch_size)
            x, bias = x + spread.view(len(spread), *(1,) * (x.dim() - 2), -1), None
        return operator(x, residual, bias, p, activation), (0, None)

    return rule

"""The activations of a linear layer, by name, and their derivatives, as PyTorch computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
"""``gelu`` is the exact form, with the error function."""


def differentiable_dz(dout: Tensor, saved: Tensor, activation: str) -> Tensor:
    """``dout * activation'(saved)`` in operations that can be differentiated again.

    ``saved`` is what the activation was applied to; of relu it may be the result.
    """
    aten, dz = torch.ops.aten, dout
    if activation == "relu":
        dz = aten.threshold_backward(dout, saved, 0)
    elif activation == "gelu":
        dz = aten.gelu_backward(dout, saved)
    elif activation == "gelu_tanh":
        dz = aten.gelu_backward(dout, saved, approximate="tanh")
    elif activation == "silu" and torch.is_grad_enabled():  # silu_backward has no derivative of its own
        s = torch.sigmoid(saved)
        dz = dout * s * (1 + saved * (1 - s))
    elif activation == "silu":
        dz = aten.silu_backward(dout, saved)
    return dz

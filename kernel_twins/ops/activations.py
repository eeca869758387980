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


def dz(dout: Tensor, saved: Tensor, activation: str) -> Tensor:
    """``dout * activation'(saved)``, as PyTorch's autograd takes it.

    ``saved`` is the activation's input; for relu it may be its result.
    """
    aten, found = torch.ops.aten, dout
    if activation == "relu":
        found = aten.threshold_backward(dout, saved, 0)
    elif activation == "silu":
        found = aten.silu_backward(dout, saved)
    elif activation != "none":
        found = aten.gelu_backward(dout, saved, approximate="tanh" if activation == "gelu_tanh" else "none")
    return found


def differentiable_dz(dout: Tensor, saved: Tensor, activation: str) -> Tensor:
    """The same by operations that can be differentiated again."""
    if activation == "silu" and torch.is_grad_enabled():  # silu_backward has no derivative of its own
        s = torch.sigmoid(saved)
        return dout * s * (1 + saved * (1 - s))
    return dz(dout, saved, activation)


def slope(z: Tensor, activation: str) -> Tensor:
    """The activation's derivative, as PyTorch takes it."""
    if activation == "none":
        return torch.ones_like(z)
    with torch.enable_grad():
        leaf = z.detach().requires_grad_()
        (found,) = torch.autograd.grad(ACTIVATIONS[activation](leaf).sum(), leaf)
    return found

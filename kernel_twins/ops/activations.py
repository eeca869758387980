"""The activations of a linear layer, by name, as PyTorch computes them."""

from __future__ import annotations

from collections.abc import Callable

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

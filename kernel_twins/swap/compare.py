"""Whether a norm with a forward of its own computes what ours does: asked of that forward, on small tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

_LEADING = ((3,), (2, 3), (2, 2, 3))  # a module may tell its layout by the rank
_NEAR = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def difference(module: nn.Module, function: str, eps: float, offset: float = 0.0) -> str:
    """Why a module is no ``layer_norm`` or ``rms_norm`` with its weight plus ``offset``, or an empty string.

    A stand-in with random weights on the CPU is called, so neither the module nor the generators change.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        try:
            return _difference(module, function, eps, offset)
        except Exception as error:
            return f"its forward is its own, and fails on a tensor of the CPU: {type(error).__name__}"


def _difference(module: nn.Module, function: str, eps: float, offset: float) -> str:
    random = torch.Generator().manual_seed(0)
    shapes = {name: each.shape for name, each in module._parameters.items() if each is not None}
    for dtype, near in _NEAR.items():
        values = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}
        stand_in = _with_parameters(module, {name: nn.Parameter(value) for name, value in values.items()})
        leaves = [each for each in stand_in._parameters.values() if each is not None]
        for leading in _LEADING:
            # Rows about sqrt(eps) tell which eps there is, and an offset whether a mean is subtracted.
            scales = torch.tensor([1.0, eps**0.5, 30.0]).reshape(3, *(1 for _ in shapes["weight"]))
            x = (torch.randn(*leading, *shapes["weight"], generator=random) + 0.5) * scales
            x = x.to(dtype).requires_grad_()
            found = type(stand_in).forward(stand_in, x)
            weight, *bias = leaves
            right = getattr(functional, function)(x, shapes["weight"], weight + offset, *bias, eps=eps)
            if not isinstance(found, Tensor) or found.dtype != right.dtype or found.shape != right.shape:
                return f"its forward is its own, and does not return what {function} does"
            dout = torch.randn(right.shape, generator=random).to(dtype)
            pairs = [(found, right)]
            pairs += zip(*(torch.autograd.grad(y, [x, *leaves], dout) for y in (found, right)), strict=True)
            if any(_distance(a, b) > near for a, b in pairs):
                return f"its forward is its own, and computes something else than {function}"
    return ""


def _with_parameters(module: nn.Module, parameters: dict[str, nn.Parameter]) -> nn.Module:
    """A module of that class and those attributes, but for its parameters."""
    stand_in = type(module).__new__(type(module))
    stand_in.__dict__.update(vars(module) | {"_parameters": dict.fromkeys(module._parameters) | parameters})
    return stand_in


def _distance(found: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest number of each row's."""
    found, right = found.detach().float(), right.detach().float()
    size = right.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((found - right).abs() / size).amax().nan_to_num(torch.inf))

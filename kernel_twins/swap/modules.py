"""Which modules are replaced, by which class, and why others are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from kernel_twins.swap.classes import (
    Replaced,
    ReplacedCrossEntropyLoss,
    ReplacedLayerNorm,
    ReplacedLinear,
    ReplacedOwnLayerNorm,
    ReplacedOwnRMSNorm,
    ReplacedRMSNorm,
)
from kernel_twins.swap.compare import difference

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_PLAIN = (nn.Parameter, Tensor)


@dataclass(frozen=True)
class Swap:
    """The class for a module, and the attributes that it gets beside ``backend``."""

    mixin: type[Replaced]
    settings: dict[str, Any] = field(default_factory=dict)


Found = Swap | str | None
"""A swap, why the module is left, or None if it is of another kind."""


def norm(module: nn.Module, backend: str) -> Found:
    kind = type(module)
    name = kind.__name__.lower()
    if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and not name.endswith(("rmsnorm", "layernorm")):
        return None
    if reason := _why_left(module):
        return reason
    if kind.forward is nn.LayerNorm.forward:
        return Swap(ReplacedLayerNorm)
    if kind.forward is nn.RMSNorm.forward:
        return Swap(ReplacedRMSNorm)
    return _own_norm(module)


def _own_norm(module: nn.Module) -> Swap | str:
    """A norm with a forward of its own is replaced if that computes what ours does."""
    parameters = {name for name, value in module._parameters.items() if value is not None}
    if module._modules or module._buffers or "weight" not in parameters:
        return "its forward is its own, and it has more, or less, than a weight"
    if isinstance(module, nn.LayerNorm):
        return difference(module, "layer_norm", module.eps) or Swap(ReplacedOwnLayerNorm)
    epsilon = next((name for name in _EPSILONS if isinstance(getattr(module, name, None), float)), "")
    weight = module._parameters["weight"]
    assert weight is not None
    if parameters != {"weight"} or weight.dim() != 1 or not epsilon:
        return f"its forward is its own, and it is not one weight [N] and one of {', '.join(_EPSILONS)}"
    reasons = []
    for offset in (0.0, 1.0):  # weights that are kept as a distance from 1 are Gemma's
        reasons.append(difference(module, "rms_norm", getattr(module, epsilon), offset))
        if not reasons[-1]:
            return Swap(ReplacedOwnRMSNorm, {"epsilon_name": epsilon, "offset": offset})
    return reasons[0]


def linear(module: nn.Module, backend: str) -> Found:
    kind = type(module)
    if not isinstance(module, nn.Linear):
        if kind.__name__ == "Conv1D":
            return "its weight is [in_features, out_features]"
        return "it is no torch.nn.Linear" if kind.__name__.endswith("Linear") and not module._modules else None
    if reason := _why_left(module):
        return reason
    if kind.forward is not nn.Linear.forward:
        return f"the forward of {kind.__qualname__} is its own"
    shape, needed = tuple(module.weight.shape), (module.out_features, module.in_features)
    if shape != needed:
        return f"its weight is {list(shape)}, not [out_features, in_features]"
    return Swap(ReplacedLinear, {"activation": None})


def loss(module: nn.Module, backend: str) -> Found:
    if not isinstance(module, nn.CrossEntropyLoss):
        return None
    if reason := _why_left(module):
        return reason
    if type(module).forward is not nn.CrossEntropyLoss.forward:
        return f"the forward of {type(module).__qualname__} is its own"
    if module.weight is not None and module.label_smoothing and backend not in ("auto", "torch"):
        return f"class weights with label smoothing are PyTorch's alone, and backend is {backend!r}"
    return Swap(ReplacedCrossEntropyLoss)


RULES = {"norm": norm, "linear": linear, "loss": loss}


def _why_left(module: nn.Module) -> str:
    """Why a module is left, whatever its kind, or an empty string."""
    if parametrize.is_parametrized(module):
        return "it is parametrized"
    if "forward" in vars(module):
        return "its forward is patched"
    if taken := {"activation", "backend", "epsilon_name", "offset"} & vars(module).keys():
        return f"it has an attribute {min(taken)} of its own"
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) not in _PLAIN:
            return f"its {name} is a {type(parameter).__name__}"
    if isinstance(module, nn.Linear) and "weight" not in module._parameters:
        return "its weight is no parameter of its own"
    return ""


# ----------------------------------------------------------------------------------------------------------------------
# Activations behind a linear layer
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Behind:
    """The activation behind a linear layer of a Sequential; ``reason`` says why it is not fused, or is empty."""

    name: str
    module: nn.Module
    activation: str
    reason: str


def behind(model: nn.Module) -> dict[int, Behind]:
    """The activations by the id of the linear layer before them."""
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    found: dict[int, Behind] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            found |= dict(_pairs(name, module, uses))
    return found


def _pairs(name: str, sequential: nn.Sequential, uses: Counter[int]) -> Iterator[tuple[int, Behind]]:
    for (_, first), (key, second) in pairwise(sequential._modules.items()):
        assert first is not None and second is not None
        activation = _activation(second)
        if not isinstance(first, nn.Linear) or not activation:
            continue
        reason = ""
        if uses[id(first)] > 1 or uses[id(second)] > 1:
            reason = "it, or the linear layer before it, stands at several places"
        elif _has_hooks(first) or _has_hooks(second):
            reason = "it, or the linear layer before it, has hooks, which see what lies between"
        elif "forward" in vars(sequential) or "forward" in vars(second):
            reason = "its forward, or the Sequential's, is patched"
        yield id(first), Behind(f"{name}.{key}" if name else key, second, activation, reason)


def _activation(module: nn.Module) -> str:
    """Its name as an argument of ``kernel_twins.linear``, or an empty string."""
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return {nn.ReLU: "relu", nn.SiLU: "silu"}.get(type(module), "")


def _has_hooks(module: nn.Module) -> bool:
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)

"""Classes for modules that are replaced in place: a subclass of a module's own class, whose forward is ours.

The module stays the same object, so names, parameters, hooks and mode stay. Its class is made when it is first needed,
has the original's name, and is pickled as the original and the mixin.
"""

from __future__ import annotations

import types
from typing import Any, ClassVar

from torch import Tensor, nn

from kernel_twins.functional.backends import is_on_gpu
from kernel_twins.functional.loss.cross_entropy import cross_entropy
from kernel_twins.functional.matmul.linear import linear
from kernel_twins.functional.norm.norm import layer_norm, rms_norm


class Replaced(nn.Module):
    """The mixin of all. ``replaced`` is the original class, ``settings`` are the attributes that a module gets."""

    replaced: ClassVar[type[nn.Module]]
    kind: ClassVar[str]
    after: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ("backend",)
    backend: str

    def extra_repr(self) -> str:
        told = (f"{name}={getattr(self, name)!r}" for name in self.settings)
        return ", ".join(filter(None, (super().extra_repr(), *told)))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(2)
        mixin = next(each for each in type(self).__mro__ if each.__module__ == __name__)
        return _empty, (mixin, self.replaced), *reduced[2:]


class ReplacedLinear(Replaced):
    kind = "linear"
    after = "kernel_twins.linear"
    settings = ("activation", "backend")
    activation: str | None
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch.nn's name
        return linear(input, self.weight, self.bias, self.activation, self.backend)


class PassThrough(Replaced):
    """An activation that the linear layer before it applies."""

    kind = "activation"
    after = "fused into the linear layer before it"
    settings = ()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch.nn's name
        return input


class _Norm(Replaced):
    kind = "norm"
    weight: Tensor
    bias: Tensor | None
    normalized_shape: tuple[int, ...]
    eps: float


class ReplacedLayerNorm(_Norm):
    after = "kernel_twins.layer_norm"

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch.nn's name
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, backend=self.backend)


class ReplacedRMSNorm(_Norm):
    after = "kernel_twins.rms_norm"

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, backend=self.backend)


class _OwnNorm(_Norm):
    """A norm with a forward of its own, which keeps all calls that it was not compared with ours for."""

    def is_ours(self, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """One tensor of the weight's dtype, over the weight's shape; with "auto" on a GPU."""
        if len(given) != 1 or named or not isinstance(given[0], Tensor):
            return False
        (x,), weight = given, self.weight
        if x.dtype != weight.dtype or x.shape[-weight.dim() :] != weight.shape:
            return False
        return self.backend != "auto" or is_on_gpu(x)


class ReplacedOwnLayerNorm(_OwnNorm):
    after = "kernel_twins.layer_norm"

    def forward(self, *given: Any, **named: Any) -> Any:
        if not self.is_ours(given, named):
            return super().forward(*given, **named)
        return layer_norm(given[0], self.weight.shape, self.weight, self.bias, self.eps, backend=self.backend)


class ReplacedOwnRMSNorm(_OwnNorm):
    after = "kernel_twins.rms_norm"
    settings = ("epsilon_name", "offset", "backend")
    epsilon_name: str
    offset: float

    def forward(self, *given: Any, **named: Any) -> Any:
        if not self.is_ours(given, named):
            return super().forward(*given, **named)
        eps, weight = getattr(self, self.epsilon_name), self.weight
        return rms_norm(given[0], weight.shape, weight, eps, offset=self.offset, backend=self.backend)


class ByCrossEntropy(nn.Module):
    """The forward of a module with torch.nn.CrossEntropyLoss's attributes, and a backend."""

    backend: str
    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002  # torch.nn's name
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            backend=self.backend,
        )


class ReplacedCrossEntropyLoss(Replaced, ByCrossEntropy):
    kind = "loss"
    after = "kernel_twins.cross_entropy"


_CLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def class_of(mixin: type[Replaced], original: type[nn.Module]) -> type[nn.Module]:
    """The class of a module of ``original`` that is replaced: one object for all of them."""
    if (mixin, original) not in _CLASSES:
        content = {name: getattr(original, name) for name in ("__qualname__", "__module__", "__doc__")}
        content["replaced"] = original
        _CLASSES[mixin, original] = types.new_class(
            original.__name__, (mixin, original), {}, lambda to: to.update(content)
        )
    return _CLASSES[mixin, original]


def is_outermost(module: Replaced) -> bool:
    """Whether no other class, such as a parametrization's, lies over the one that it was given here."""
    return "replaced" in vars(type(module))


def put(module: nn.Module, mixin: type[Replaced], settings: dict[str, Any]) -> None:
    """Replaces a module in place."""
    module.__dict__.update(settings)
    module.__class__ = class_of(mixin, type(module))


def take_away(module: Replaced) -> None:
    """Gives a module its class back."""
    for name in module.settings:
        del module.__dict__[name]
    module.__class__ = module.replaced  # type: ignore[assignment]


def _empty(mixin: type[Replaced], original: type[nn.Module]) -> nn.Module:
    made = class_of(mixin, original)
    return made.__new__(made)

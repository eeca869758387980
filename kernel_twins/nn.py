"""Modules of the public functions, named and shaped like torch.nn's. This module imports torch."""

from __future__ import annotations

from typing import Any

from torch import Size, Tensor, nn

from kernel_twins.functional.activations import ACTIVATIONS
from kernel_twins.functional.backends import BACKENDS
from kernel_twins.functional.cross_entropy import cross_entropy
from kernel_twins.functional.dropout import dropout_add
from kernel_twins.functional.norm import layer_norm, rms_norm
from kernel_twins.functional.softmax import log_softmax, softmax


def _known(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")
    return backend


class _AlongRows(nn.Module):
    """A function along one dimension."""

    def __init__(self, dim: int = -1, backend: str = "auto") -> None:
        super().__init__()
        self.dim = dim
        self.backend = _known(backend)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, backend={self.backend!r}"


class Softmax(_AlongRows):
    """``kernel_twins.softmax`` along ``dim``, by ``backend``."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch.nn's name
        return softmax(input, self.dim, self.backend)


class LogSoftmax(_AlongRows):
    """``kernel_twins.log_softmax`` along ``dim``, by ``backend``."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch.nn's name
        return log_softmax(input, self.dim, self.backend)


class LayerNorm(nn.LayerNorm):
    """``kernel_twins.layer_norm`` by ``backend``, with torch.nn.LayerNorm's parameters and state dict.

    Called with a residual of the input's shape, it adds that first and returns (y, added).
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.backend = _known(backend)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:  # noqa: A002  # torch.nn's name
        return layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, residual=residual, backend=self.backend
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend!r}"


class RMSNorm(nn.RMSNorm):
    """``kernel_twins.rms_norm`` by ``backend``, with torch.nn.RMSNorm's parameter and state dict; see ``LayerNorm``."""

    def __init__(
        self,
        normalized_shape: int | list[int] | Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.backend = _known(backend)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps, residual=residual, backend=self.backend)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend!r}"


class CrossEntropyLoss(nn.Module):
    """``kernel_twins.cross_entropy`` by ``backend``; torch.nn.CrossEntropyLoss without class weights."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.backend = _known(backend)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002  # torch.nn's name
        return cross_entropy(
            input,
            target,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, backend={self.backend!r}"
        )


class DropoutAdd(nn.Module):
    """``kernel_twins.dropout_add`` by ``backend``, called with the input and, as far as there are, residual and bias.

    As torch.nn.Dropout it drops in training alone; activation, bias and residual are applied always.
    """

    def __init__(self, p: float = 0.5, activation: str = "none", backend: str = "auto") -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p is {p}, must be from 0 to 1: the share of elements that are dropped")
        if activation not in ACTIVATIONS:
            *most, last = ACTIVATIONS
            raise ValueError(f"activation is {activation!r}, must be {', '.join(most)} or {last}: apply others before")
        self.p = p
        self.activation = activation
        self.backend = _known(backend)

    def forward(self, input: Tensor, residual: Tensor | None = None, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        return dropout_add(
            input, residual, self.p, self.training, bias=bias, activation=self.activation, backend=self.backend
        )

    def extra_repr(self) -> str:
        return f"p={self.p}, activation={self.activation!r}, backend={self.backend!r}"

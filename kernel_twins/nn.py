"""Modules of the public functions, named and shaped like torch.nn's, and what puts them into a model: ``replace_``.

This module imports torch.
"""

from __future__ import annotations

from typing import Any

from torch import Size, Tensor, nn

from kernel_twins.functional.backends import BACKENDS
from kernel_twins.functional.dropout.dropout import dropout_add, require_options
from kernel_twins.functional.norm.norm import layer_norm, rms_norm
from kernel_twins.functional.softmax.softmax import log_softmax, softmax
from kernel_twins.swap.classes import ByCrossEntropy
from kernel_twins.swap.replace import replace_ as replace_
from kernel_twins.swap.replace import restore_ as restore_
from kernel_twins.swap.table import Table as Table


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
    """``kernel_twins.rms_norm`` by ``backend``, with torch.nn.RMSNorm's parameter and state dict; see ``LayerNorm``.

    ``offset`` is added to the weight, which begins at 1 - offset: with 1.0 it is kept as a distance from 1.
    """

    offset = 0.0  # until the first parameters are made

    def __init__(
        self,
        normalized_shape: int | list[int] | Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        backend: str = "auto",
        *,
        offset: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        if offset and not elementwise_affine:
            raise ValueError(f"offset is {offset}, must be 0.0 without a weight: pass elementwise_affine=True")
        self.backend = _known(backend)
        self.offset = offset
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            residual=residual,
            offset=self.offset,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        return f"{super().extra_repr()}{offset}, backend={self.backend!r}"


class CrossEntropyLoss(ByCrossEntropy):
    """``kernel_twins.cross_entropy`` by ``backend``, with torch.nn.CrossEntropyLoss's state dict.

    ``weight``, one number for each class, comes first as there; "auto" leaves it to PyTorch, and "cuda" and "triton"
    take it without label smoothing.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if weight is not None and not isinstance(weight, Tensor):
            raise TypeError(
                f"weight is {weight!r}, must be None or a torch.Tensor of a number for each class: name the arguments "
                "that come after it, as ignore_index=..."
            )
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.backend = _known(backend)

    def extra_repr(self) -> str:
        weight = "" if self.weight is None else f"weight={tuple(self.weight.shape)}, "
        return (
            f"{weight}ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, backend={self.backend!r}"
        )


class DropoutAdd(nn.Module):
    """``kernel_twins.dropout_add`` by ``backend``, called with the input and, as far as there are, residual and bias.

    As torch.nn.Dropout it drops in training alone; activation, bias and residual are applied always.
    """

    def __init__(self, p: float = 0.5, activation: str = "none", backend: str = "auto") -> None:
        super().__init__()
        require_options(p, activation)
        self.p = p
        self.activation = activation
        self.backend = _known(backend)

    def forward(self, input: Tensor, residual: Tensor | None = None, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        return dropout_add(
            input, residual, self.p, self.training, bias=bias, activation=self.activation, backend=self.backend
        )

    def extra_repr(self) -> str:
        return f"p={self.p}, activation={self.activation!r}, backend={self.backend!r}"

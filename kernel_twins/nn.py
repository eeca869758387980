"""Modules of the public functions, named and shaped like torch.nn's. This module imports torch."""

from __future__ import annotations

from torch import Tensor, nn

from kernel_twins.functional.backends import BACKENDS
from kernel_twins.functional.softmax import log_softmax, softmax


class _AlongRows(nn.Module):
    """A function along one dimension."""

    def __init__(self, dim: int = -1, backend: str = "auto") -> None:
        super().__init__()
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")
        self.dim = dim
        self.backend = backend

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

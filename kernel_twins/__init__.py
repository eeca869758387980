"""The same GPU kernels, step by step, in CUDA C++ and in Triton.

``kernel_twins.load(op, step, backend)`` returns a step as a callable; ``kernel_twins.matmul(a, b)`` and
``kernel_twins.linear(x, weight)`` are the public functions that the last steps stand behind. Importing this package
imports neither torch nor Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernel_twins._load import load, load_baseline
from kernel_twins.ops import OPS

if TYPE_CHECKING:
    from kernel_twins.functional.linear import linear as linear
    from kernel_twins.functional.matmul import matmul as matmul

__all__ = ["OPS", "load", "load_baseline"]
__version__ = "0.1.0"

_FUNCTIONS = ("linear", "matmul")


def __getattr__(name: str) -> Any:
    """A public function, imported when it is first asked for: its module imports torch."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = getattr(importlib.import_module(f"kernel_twins.functional.{name}"), name)
    globals()[name] = function
    return function

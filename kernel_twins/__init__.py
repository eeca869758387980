"""The same GPU kernels, step by step, in CUDA C++ and in Triton.

``kernel_twins.load(op, step, backend)`` returns a step as a callable; ``kernel_twins.matmul(a, b)``,
``kernel_twins.linear(x, weight)``, ``kernel_twins.softmax(x)``, ``kernel_twins.log_softmax(x)``,
``kernel_twins.layer_norm(x, normalized_shape)``, ``kernel_twins.rms_norm(x, normalized_shape)``,
``kernel_twins.cross_entropy(input, target)``, ``kernel_twins.cross_entropy_gradient_(input, target)``,
``kernel_twins.dropout_add(x, residual)``, ``kernel_twins.attention(q, k, v)``,
``kernel_twins.scaled_dot_product_attention(query, key, value)`` and ``kernel_twins.sum(x, dim)`` with its kin ``mean``,
``amax`` and ``argmax`` are the public functions that the last steps stand behind, ``kernel_twins.nn`` has modules of
most. ``kernel_twins.explain(function, *args)`` tells what ``backend="auto"`` takes for a call, and why. Importing this
package imports neither torch nor Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernel_twins.built import load
from kernel_twins.harness.load import load_baseline
from kernel_twins.ops import OPS

if TYPE_CHECKING:
    from kernel_twins import nn as nn
    from kernel_twins.functional.attention.attention import attention as attention
    from kernel_twins.functional.attention.attention import (
        scaled_dot_product_attention as scaled_dot_product_attention,
    )
    from kernel_twins.functional.dropout.dropout import dropout_add as dropout_add
    from kernel_twins.functional.explain import explain as explain
    from kernel_twins.functional.loss.cross_entropy import cross_entropy as cross_entropy
    from kernel_twins.functional.loss.cross_entropy import cross_entropy_gradient_ as cross_entropy_gradient_
    from kernel_twins.functional.matmul.linear import linear as linear
    from kernel_twins.functional.matmul.matmul import matmul as matmul
    from kernel_twins.functional.norm.norm import layer_norm as layer_norm
    from kernel_twins.functional.norm.norm import rms_norm as rms_norm
    from kernel_twins.functional.reduction.reduction import amax as amax
    from kernel_twins.functional.reduction.reduction import argmax as argmax
    from kernel_twins.functional.reduction.reduction import mean as mean
    from kernel_twins.functional.reduction.reduction import sum as sum  # noqa: A004
    from kernel_twins.functional.softmax.softmax import log_softmax as log_softmax
    from kernel_twins.functional.softmax.softmax import softmax as softmax

__all__ = ["OPS", "load", "load_baseline"]
__version__ = "0.1.0"

_MODULES = {
    "amax": "reduction.reduction",
    "argmax": "reduction.reduction",
    "attention": "attention.attention",
    "cross_entropy": "loss.cross_entropy",
    "cross_entropy_gradient_": "loss.cross_entropy",
    "dropout_add": "dropout.dropout",
    "layer_norm": "norm.norm",
    "linear": "matmul.linear",
    "log_softmax": "softmax.softmax",
    "matmul": "matmul.matmul",
    "mean": "reduction.reduction",
    "rms_norm": "norm.norm",
    "scaled_dot_product_attention": "attention.attention",
    "softmax": "softmax.softmax",
    "sum": "reduction.reduction",
}
_BESIDE = {"explain": "functional.explain", "nn": "nn"}


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_BESIDE})


def __getattr__(name: str) -> Any:
    """A public function, or the modules, imported when first asked for: what defines them imports torch."""
    if name not in _MODULES and name not in _BESIDE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = _BESIDE[name] if name in _BESIDE else f"functional.{_MODULES[name]}"
    try:
        module = importlib.import_module(f"kernel_twins.{path}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f"kernel_twins.{name} needs PyTorch: pip install torch", name="torch") from error
    found = globals()[name] = module if name == "nn" else getattr(module, name)
    return found

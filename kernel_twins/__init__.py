"""The same GPU kernels, step by step, in CUDA C++ and in Triton.

``kernel_twins.load(op, step, backend)`` returns a step as a callable. Importing this package imports neither torch
nor Triton.
"""

from __future__ import annotations

from kernel_twins._load import load, load_baseline
from kernel_twins.ops import OPS

__all__ = ["OPS", "load", "load_baseline"]
__version__ = "0.1.0"

"""Other people's libraries of kernels, which are baselines where they are installed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass

from kernel_twins.ops import baselines
from kernel_twins.spec import Op


@dataclass(frozen=True, slots=True)
class Library:
    title: str
    module: str
    package: str


LIBRARIES = {
    "liger": Library("Liger-Kernel", "liger_kernel", "liger-kernel"),
    "quack": Library("quack-kernels", "quack", "quack-kernels"),
    "flash4": Library("FlashAttention-4", "flash_attn", "flash-attn-4"),
}
"""By the name of their baselines."""

# What takes long to import of what baselines need. quack's own modules, which FlashAttention-4 imports, too, ask for
# the GPU; their compiler's do not.
_IMPORTS = {
    "compile": "torch._inductor.compile_fx",
    "liger": "liger_kernel.ops",
    "quack": "cutlass.cute",
    "flash4": "cutlass.cute",
}

COMPILED = ("compile", "liger", "quack")
"""The baselines that compile a kernel at its first call, and leave it in a cache; what max_autotune compiles depends on
times, and FlashAttention-4 keeps its kernels to itself.
"""


def load(op: Op) -> None:
    """Import what an operation's baselines need, as far as it is installed and leaves the GPU alone."""
    for baseline, module in _IMPORTS.items():
        if baseline in op.baselines:
            with contextlib.suppress(Exception):  # which the baseline's own loading meets again, and tells
                baselines.imported(module)


def versions() -> dict[str, str]:
    """By the name of their baselines, empty of what is not installed."""
    return {name: version(each.module, each.package) for name, each in LIBRARIES.items()}


def version(module: str, package: str) -> str:
    """An installed package's, without importing it; empty where it is not there."""
    if importlib.util.find_spec(module) is None:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # it lies on the path, and nobody installed it by that name
        return "unknown"

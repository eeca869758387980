"""Other people's libraries of kernels, which are baselines where they are installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kernel_twins.report.rows import store
from kernel_twins.spec import Op


@dataclass(frozen=True, slots=True)
class Library:
    title: str
    module: str
    package: str


LIBRARIES = {
    "liger": Library("Liger-Kernel", "liger_kernel", "liger-kernel"),
    "quack": Library("quack-kernels", "quack", "quack-kernels"),
}
"""By the name of their baselines."""

# What takes long to import of what baselines need. quack's own modules ask for the GPU; its compiler's do not.
_IMPORTS = {"compile": "torch._inductor.compile_fx", "liger": "liger_kernel.ops", "quack": "cutlass.cute"}

COMPILED = tuple(_IMPORTS)
"""The baselines that compile a kernel at its first call; what max_autotune compiles depends on times."""


def load(op: Op) -> None:
    """Import what an operation's baselines need, as far as it is installed and leaves the GPU alone."""
    for baseline, module in _IMPORTS.items():
        if baseline in op.baselines:
            with contextlib.suppress(Exception):  # which the baseline's own loading meets again, and tells
                importlib.import_module(module)


def versions() -> dict[str, str]:
    """By the name of their baselines, empty of what is not installed."""
    return {name: _version(each) for name, each in LIBRARIES.items()}


def missed(ops: Iterable[Op], folder: Path) -> str:
    """What a run without them lacks that is recorded of these operations, with the remedy; empty where nothing is."""
    timed: set[str] = set()
    for op in ops:
        table = store.read_table(folder, op.name, "timings")
        timed |= set(table["backend"][table["status"] == "ok"])
    absent = [each for name, each in LIBRARIES.items() if name in timed and not _is_installed(each)]
    if not absent:
        return ""
    return (
        f"{' and '.join(each.title for each in absent)} not installed here: what is recorded has times of their "
        f"kernels, and this run will have none; `pip install {' '.join(each.package for each in absent)}` first"
    )


def _version(library: Library) -> str:
    if not _is_installed(library):
        return ""
    try:
        return importlib.metadata.version(library.package)
    except importlib.metadata.PackageNotFoundError:  # it lies on the path, and nobody installed it
        return "unknown"


def _is_installed(library: Library) -> bool:
    return importlib.util.find_spec(library.module) is not None

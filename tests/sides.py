"""Triton's sides of functions on tensors of the CPU, for tests that put PyTorch in the place of kernels."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import pytest

_FOLDER = Path(__file__).resolve().parents[1] / "triton-kernels"


def as_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has Triton's sides take what lies on the CPU, which else is refused before all; skips without Triton."""
    knobs = pytest.importorskip("triton").knobs
    _import_kernels()
    monkeypatch.setattr(knobs.runtime, "interpret", True)


@functools.cache
def _import_kernels() -> None:
    """Kernels of a module that is imported while they are interpreted stay so, for tests of a GPU that come later."""
    for file in sorted(_FOLDER.rglob("*.py")):
        importlib.import_module(".".join(["kernel_twins._triton", *file.relative_to(_FOLDER).with_suffix("").parts]))

"""The two sides of functions on tensors of the CPU, where PyTorch stands in the place of kernels."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest

import kernel_twins
from kernel_twins.errors import UnavailableError
from kernel_twins.harness.load import extension

_FOLDER = Path(__file__).resolve().parents[1] / "triton-kernels"


def cuda_library(operator: str = "") -> Any:
    """``torch.ops.kernel_twins``, of which C++ computes by PyTorch's own on the CPU.

    Skips where the CUDA side is missing, or was built before there was that operator in it.
    """
    torch = pytest.importorskip("torch")
    try:
        extension()
    except UnavailableError as error:
        pytest.skip(str(error))
    if operator and not hasattr(torch.ops.kernel_twins, operator):
        pytest.skip(f"the extension was built before there was {operator} in it")
    return torch.ops.kernel_twins


def as_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has Triton's sides take what lies on the CPU, which else is refused before all; skips without Triton."""
    knobs = pytest.importorskip("triton").knobs
    _import_kernels()
    monkeypatch.setattr(knobs.runtime, "interpret", True)


@functools.cache
def _import_kernels() -> None:
    """Kernels of a module that is imported while they are interpreted stay so, for tests of a GPU that come later.

    Inductor's kernels call those of one module, which the first call of torch.compile on a GPU's machine imports.
    """
    importlib.import_module("torch._inductor.runtime.triton_helpers")
    for file in sorted(_FOLDER.rglob("*.py")):
        importlib.import_module(".".join(["kernel_twins._triton", *file.relative_to(_FOLDER).with_suffix("").parts]))


def cuda_takes_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``backend="cuda"`` takes tensors of the CPU, of which its operators compute by PyTorch's own."""
    cuda_library()
    for name in {*kernel_twins._MODULES.values()}:
        monkeypatch.setattr(f"kernel_twins.functional.{name}.require_gpu", lambda *_: None)


def triton_multiplies_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``backend="triton"`` of matmul and linear takes tensors of the CPU, for PyTorch to multiply."""
    as_interpreted(monkeypatch)
    import torch

    from kernel_twins.ops.activations import differentiable_dz

    def multiply(a: Any, b: Any, *, out: Any) -> None:
        torch.matmul(a.to(out.dtype), b.to(out.dtype), out=out)

    def linear_backward(dout: Any, saved: Any, activation: str) -> Any:
        dz = differentiable_dz(dout, saved, activation)
        return dz, dz.sum(0)

    family = "kernel_twins.functional.matmul"
    monkeypatch.setattr(f"{family}.triton_matmul.triton_launcher", lambda *_: multiply)
    monkeypatch.setattr(f"{family}.triton_linear._fused", lambda _: None)
    monkeypatch.setattr("kernel_twins._triton.matmul.linear.backward.linear_backward", linear_backward)

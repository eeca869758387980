"""Faults that were found in use: each stands under the name of what was seen.

One that is mended is a test like any other. One that is not is a strict expected failure, whose reason says what is to
be mended; whoever mends it takes the mark away.
"""

from __future__ import annotations

from typing import Any

import pytest

import kernel_twins
from tests.sides import as_interpreted, cuda_library


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``backend="cuda"`` takes tensors of the CPU, of which its operators compute by PyTorch's own."""
    cuda_library()
    for name in {*kernel_twins._MODULES.values()}:
        monkeypatch.setattr(f"kernel_twins.functional.{name}.require_gpu", lambda *_: None)


@pytest.fixture(params=["cuda", "triton"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a backend whose matmul and linear take fp32 tensors of the CPU, for PyTorch to multiply."""
    if request.param == "cuda":
        request.getfixturevalue("on_cpu")
        return "cuda"
    as_interpreted(monkeypatch)
    torch = pytest.importorskip("torch")

    def multiply(a: Any, b: Any, *, out: Any) -> None:
        torch.matmul(a, b, out=out)

    monkeypatch.setattr("kernel_twins.functional.matmul.triton_matmul.triton_launcher", lambda *_: multiply)
    return "triton"

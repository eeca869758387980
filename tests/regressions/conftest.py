"""Faults that were found in use: each stands under the name of what was seen.

One that is mended is a test like any other. One that is not is a strict expected failure, whose reason says what is to
be mended; whoever mends it takes the mark away.
"""

from __future__ import annotations

import pytest

from tests.sides import cuda_takes_the_cpu, triton_multiplies_on_the_cpu


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_takes_the_cpu(monkeypatch)


@pytest.fixture(params=["cuda", "triton"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a backend whose matmul and linear take tensors of the CPU, for PyTorch to multiply."""
    if request.param == "cuda":
        cuda_takes_the_cpu(monkeypatch)
        return "cuda"
    triton_multiplies_on_the_cpu(monkeypatch)
    return "triton"

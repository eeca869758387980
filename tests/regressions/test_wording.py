"""One behaviour, said alike, whichever backend a call goes to."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins as kt  # noqa: E402
from kernel_twins.errors import UnavailableError  # noqa: E402
from kernel_twins.functional import backends  # noqa: E402

functional: Any = importlib.import_module("kernel_twins.functional.loss.cross_entropy")  # which the function hides
TARGET = torch.tensor([0, 2, 1])


def test_cross_entropy_without_the_extension_speaks_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the extension that is missing, wherever the tensor is."""

    def missing() -> None:
        raise UnavailableError("the CUDA side is missing")

    monkeypatch.setattr(backends, "extension", missing)
    operator, reason = backends.cuda_operator("cross_entropy_result")
    monkeypatch.setattr(functional, "_cuda_operator", operator)
    monkeypatch.setattr(functional, "_no_cuda", reason)
    with pytest.raises(UnavailableError, match=r"^the CUDA side is missing, or pass backend='torch'$"):
        kt.cross_entropy(torch.randn(3, 4), TARGET, backend="cuda")


@pytest.mark.parametrize("backend", ["auto", "cuda", "triton", "torch"])
def test_negative_label_smoothing_is_taken_by_auto(backend: str) -> None:
    with pytest.raises(ValueError, match=r"^label_smoothing is -0\.1, must be from 0 to 1: the share of a target that"):
        kt.cross_entropy(torch.randn(3, 4), TARGET, label_smoothing=-0.1, backend=backend)


def test_target_that_is_no_class_ends_the_process_where_auto_takes_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradient of its row are NaN, as by the kernels, on a GPU, for which the CPU stands here."""
    monkeypatch.setattr(functional, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(functional, "_kept", lambda *_: "torch")
    x = torch.randn(3, 4, requires_grad=True)
    losses = kt.cross_entropy(x, torch.tensor([0, 4, 1]), reduction="none")
    assert losses.isnan().tolist() == [False, True, False]
    (dx,) = torch.autograd.grad(losses.sum(), x)
    assert dx.isnan().all(1).tolist() == [False, True, False]

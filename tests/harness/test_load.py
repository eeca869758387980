"""What a step is asked for before it is launched, whoever launches it."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from kernel_twins.harness import load  # noqa: E402


class Own(Tensor):
    """Whose shape need not be its memory's."""


def test_a_step_takes_no_tensor_of_another_class() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(TypeError, match=r"^x is a Own, must be a torch.Tensor: pass the torch.Tensor that holds"):
        load.require("softmax", "triton", "v02_online", x.as_subclass(Own), out=torch.empty(2, 8))
    with pytest.raises(TypeError, match=r"^out is a Own, must be a torch.Tensor"):
        load.require("softmax", "cuda", "v02_online", x, out=torch.empty(2, 8).as_subclass(Own))
    out = (torch.empty(2, 8), torch.empty(2).as_subclass(Own), torch.empty(2))
    with pytest.raises(TypeError, match=r"^out\[1\] is a Own, must be a torch.Tensor"):
        load.require("layer_norm", "cuda", "v02_welford", x, out=out)


@pytest.mark.parametrize(
    ("backend", "remedy"),
    [
        ("cuda", "call x.cuda()"),
        ("triton", "call x.cuda() or set TRITON_INTERPRET=1 before Triton is imported"),
    ],
)
def test_a_parameter_is_a_tensor_and_must_be_on_a_gpu(monkeypatch, backend, remedy) -> None:
    monkeypatch.setattr(load, "_is_interpreted", lambda: False)
    x = torch.nn.Parameter(torch.ones(2, 8))
    with pytest.raises(ValueError, match=rf"^x is on cpu, must be on a CUDA device: {re.escape(remedy)}$"):
        load.require("softmax", backend, "v02_online", x, out=torch.empty(2, 8))

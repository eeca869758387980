"""What a step is asked for before it is launched, whoever launches it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from kernel_twins.errors import UnavailableError  # noqa: E402
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


LADDER = "kernel_twins._ladder"


class Built:
    """In the place of kernel_twins._C: launches what it has, to which the ladder adds."""

    def __init__(self, *steps: str) -> None:
        self.steps = {*steps}

    def has(self, op: str, step: str) -> bool:
        return step in self.steps

    def softmax(self, step: str) -> str:
        return step


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[Built]:
    built = Built("v02_online")
    monkeypatch.setattr(load, "extension", lambda: built)
    load.require_built.cache_clear()
    yield built
    load.require_built.cache_clear()


@pytest.mark.usefixtures("built")
def test_what_a_wheel_has_is_found_without_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LADDER, None)
    assert load.load("softmax", "v02_online", "cuda")() == "v02_online"


@pytest.mark.usefixtures("built")
def test_a_step_that_a_wheel_lacks_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LADDER, None)
    said = r"^the CUDA side of softmax v01_three_passes is missing, .*no wheel has it: run `python setup\.py build_ext`"
    with pytest.raises(UnavailableError, match=said):
        load.load("softmax", "v01_three_passes", "cuda")


def test_the_ladder_is_imported_once_a_step_of_it_is_asked_for(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = []

    def import_module(name: str) -> ModuleType:
        imported.append(name)
        built.steps.add("v01_three_passes")
        return ModuleType(name)

    monkeypatch.setattr(load, "importlib", SimpleNamespace(import_module=import_module))
    load.load("softmax", "v02_online", "cuda")
    assert imported == []
    for _ in range(2):
        assert load.load("softmax", "v01_three_passes", "cuda")() == "v01_three_passes"
    assert imported == [LADDER]


@pytest.mark.usefixtures("built")
def test_a_step_that_was_left_out_of_the_build_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LADDER, ModuleType(LADDER))
    said = r"^the CUDA side of softmax v01_three_passes is missing, .* of this build: run `python setup\.py build_ext`"
    with pytest.raises(UnavailableError, match=said):
        load.load("softmax", "v01_three_passes", "cuda")


@pytest.mark.usefixtures("built")
def test_a_ladder_that_does_not_import_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> ModuleType:
        raise ImportError(f"{name}.so: undefined symbol")

    monkeypatch.setattr(load, "importlib", SimpleNamespace(import_module=import_module))
    with pytest.raises(UnavailableError, match=r"softmax v01_three_passes is missing, .*_ladder\.so: undefined symbol"):
        load.load("softmax", "v01_three_passes", "cuda")

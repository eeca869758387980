"""Which CUDA steps are built, and what a step is told that is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from kernel_twins import built as built_module
from kernel_twins import load
from kernel_twins.errors import UnavailableError
from kernel_twins.harness import load as harness

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
    monkeypatch.setattr(built_module, "extension", lambda: built)
    monkeypatch.setattr(harness, "extension", lambda: built)
    built_module.require_built.cache_clear()
    yield built
    built_module.require_built.cache_clear()


@pytest.mark.usefixtures("built")
def test_what_a_wheel_has_is_found_without_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LADDER, None)
    assert load("softmax", "v02_online", "cuda")() == "v02_online"


@pytest.mark.usefixtures("built")
def test_a_step_that_a_wheel_lacks_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LADDER, None)
    said = r"^the CUDA side of softmax v01_three_passes is missing, .*no wheel has it: run `python setup\.py build_ext`"
    with pytest.raises(UnavailableError, match=said):
        load("softmax", "v01_three_passes", "cuda")


def test_the_ladder_is_imported_once_a_step_of_it_is_asked_for(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = []

    def import_module(name: str) -> ModuleType:
        imported.append(name)
        built.steps.add("v01_three_passes")
        return ModuleType(name)

    monkeypatch.setattr(built_module, "importlib", SimpleNamespace(import_module=import_module))
    load("softmax", "v02_online", "cuda")
    assert imported == []
    for _ in range(2):
        assert load("softmax", "v01_three_passes", "cuda")() == "v01_three_passes"
    assert imported == [LADDER]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("op", "step"), [("softmax", "v01_three_passes"), ("matmul_bf16", "v15_dispatch")])
def test_what_was_left_out_of_the_build_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, op: str, step: str
) -> None:
    monkeypatch.setitem(sys.modules, LADDER, ModuleType(LADDER))
    said = rf"^the CUDA side of {op} {step} is missing, .* of this build: run `python setup\.py build_ext`"
    with pytest.raises(UnavailableError, match=said):
        load(op, step, "cuda")


@pytest.mark.usefixtures("built")
def test_a_ladder_that_does_not_import_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> ModuleType:
        raise ImportError(f"{name}.so: undefined symbol")

    monkeypatch.setattr(built_module, "importlib", SimpleNamespace(import_module=import_module))
    with pytest.raises(UnavailableError, match=r"softmax v01_three_passes is missing, .*_ladder\.so: undefined symbol"):
        load("softmax", "v01_three_passes", "cuda")

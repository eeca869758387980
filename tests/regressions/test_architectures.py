"""What the extension is built for, and that "auto" asks."""

from __future__ import annotations

import importlib

import pytest

import kernel_twins
from build_support import sources


def test_arch_list_of_9_0_builds_no_wgmma() -> None:
    """9.0 is what is mostly exported on this GPU; without 9.0a the fastest products would be left out."""
    lines: list[str] = []
    archs = sources.architectures({"TORCH_CUDA_ARCH_LIST": "9.0"}, [(9, 0)], lines.append)
    assert archs == "9.0a"
    assert len(lines) == 1


def test_arch_list_of_containers_is_refused() -> None:
    """As NVIDIA's PyTorch images export it; what is too old is passed over, as a visible GPU would be."""
    archs = sources.architectures({"TORCH_CUDA_ARCH_LIST": "7.5 8.0 8.6 9.0 10.0 12.0+PTX"}, [(9, 0)], lambda _: None)
    assert archs == "8.0;8.6;9.0a;10.0;12.0+PTX"


@pytest.mark.parametrize(
    ("name", "given"),
    [("softmax", ()), ("cross_entropy", ()), ("dropout_add", ()), ("sum", ()), ("layer_norm", ("layer_norm",))],
)
@pytest.mark.usefixtures("on_cpu")
def test_auto_takes_cuda_where_the_extension_was_not_built_for_the_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, given: tuple[str, ...]
) -> None:
    """Steps of compute capability 8.0 do not run on an 8.9 where the extension has none but 9.0a's code."""
    from kernel_twins.functional import backends
    from kernel_twins.harness.load import extension

    module = importlib.import_module(f"kernel_twins.functional.{kernel_twins._MODULES[name]}")
    monkeypatch.setattr(backends, "_runs_on", backends._runs_on.__wrapped__)  # what is made up is not to be kept
    monkeypatch.setattr(extension(), "architectures", "9.0a")
    for capability, runs in (((8, 9), False), ((9, 0), True)):
        monkeypatch.setattr(backends, "_capability", lambda _, capability=capability: capability)
        assert module._runs(*given, "cuda", 0) == runs

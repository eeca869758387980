"""Launches that are kept: who hooks launches sees them all the same."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

plans = importlib.import_module("kernel_twins._triton.lib.plans")


class Kernel:
    """Stands for a compiled kernel, and notes by which of two ways it is launched."""

    function, packed_metadata = 1, ()

    def __init__(self) -> None:
        self.seen: list[str] = []

    def run(self, *arguments: Any) -> None:
        self.seen.append("directly")

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.seen.append("with hooks")


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_kept_launch_is_seen_by_whoever_hooks_launches(name, monkeypatch) -> None:
    """A hook is added to the chain, or put in its place; None in its place is nobody."""
    stream = SimpleNamespace(get_current_stream=lambda device: 0)
    monkeypatch.setattr(plans, "driver", SimpleNamespace(active=stream))
    chain = type(getattr(triton.knobs.runtime, name))()
    chain.add(print)
    for hook, way in ((None, "directly"), (print, "with hooks"), (chain, "with hooks"), (type(chain)(), "directly")):
        kernel = Kernel()
        with triton.knobs.runtime.scope():
            setattr(triton.knobs.runtime, name, hook)
            plans.Plan(kernel, (1, 1, 1), ())(torch.zeros(1))
        assert kernel.seen == [way], hook

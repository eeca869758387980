"""How a caller may have kept what a differentiable call saves, and go on with it: none may leave memory behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.autograd.graph import save_on_cpu, saved_tensors_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

Call = Callable[[Any], Any]


def passed(call: Call, x: Any) -> None:
    call(x).square().sum().backward()


def hooked(call: Call, x: Any, pack: Any) -> None:
    with saved_tensors_hooks(pack, lambda kept: kept):
        out = call(x)
    out.square().sum().backward()


def offloaded(call: Call, x: Any) -> None:
    with save_on_cpu():
        out = call(x)
    out.square().sum().backward()


def recomputed(call: Call, x: Any, reentrant: bool) -> None:
    checkpoint(call, x, use_reentrant=reentrant).square().sum().backward()


def passed_twice(call: Call, x: Any) -> None:
    loss = call(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def differentiated_twice(call: Call, x: Any) -> None:
    (dx,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    if dx.requires_grad:
        torch.autograd.grad(dx.square().sum(), x)


OF_SAVING: dict[str, Callable[[Call, Any], Any]] = {
    "dropped": lambda call, x: call(x),
    "passed": passed,
    "passed twice": passed_twice,
    "differentiated twice": differentiated_twice,
    "checkpoint": partial(recomputed, reentrant=False),
    "reentrant checkpoint": partial(recomputed, reentrant=True),
    "save_on_cpu": offloaded,
    "detaching hooks": partial(hooked, pack=lambda tensor: tensor.detach()),
    "cloning hooks": partial(hooked, pack=lambda tensor: tensor.clone()),
}

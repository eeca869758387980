"""Tensors that calls kept alive, or wanted unchanged, though no gradient needs them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.autograd.graph import save_on_cpu, saved_tensors_hooks  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import kernel_twins as kt  # noqa: E402


def values(*shape: int, requires_grad: bool = False) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_(requires_grad)


def is_let_go(call: Callable[[Any], Any], x: Any) -> bool:
    """Whether what is made of x for a call alone is gone while its result is there and can be differentiated."""
    given = x * 1
    memory = StorageWeakRef(given.untyped_storage())
    out = call(given)
    del given
    gone = memory.expired()
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape
    return gone


def test_batched_matmul_keeps_activations_for_a_frozen_matrix(products: str) -> None:
    """As every layer of a frozen body has them under LoRA."""
    x, b = values(2, 8, 32, requires_grad=True), values(32, 16)
    assert is_let_go(lambda a: torch.matmul(a, b), x)
    assert is_let_go(lambda a: kt.matmul(a, b, backend=products), x)


def test_gelu_linear_keeps_its_input_for_a_frozen_weight(products: str) -> None:
    """What gelu was applied to is enough, whatever second derivatives would need."""
    x, weight, bias = values(2, 8, 32, requires_grad=True), values(16, 32), values(16)
    assert is_let_go(lambda h: kt.linear(h, weight, bias, "gelu", backend=products), x)


@pytest.mark.parametrize("shape", [(2, 3, 64), (6, 64)], ids=["batch", "matrix"])
def test_weight_updated_before_backward_of_a_first_layer(products: str, shape: tuple[int, ...]) -> None:
    """The gradient of b is x.T @ dout, whatever b has become."""
    x, b = values(*shape), values(64, 32, requires_grad=True)
    expected = torch.autograd.grad(torch.matmul(x, b).sum(), b)
    out = kt.matmul(x, b, backend=products)
    with torch.no_grad():
        b.add_(1)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), b), expected)


def checkpointed(call: Callable[[Any], Any], x: Any) -> Any:
    return checkpoint(call, x, use_reentrant=False)


def offloaded(call: Callable[[Any], Any], x: Any) -> Any:
    with save_on_cpu():
        return call(x)


def hooked(call: Callable[[Any], Any], x: Any) -> Any:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return call(x)


@pytest.mark.parametrize("way", [checkpointed, offloaded, hooked])
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.usefixtures("on_cpu")
def test_a_result_that_is_saved_under_hooks_is_never_freed(
    function: str, way: Callable[[Callable[[Any], Any], Any], Any]
) -> None:
    """Its own node would keep it alive, and it its node, call after call."""
    x, made = values(16, 32, requires_grad=True), []

    def call(x: Any) -> Any:
        y = getattr(kt, function)(x, -1, backend="cuda")
        made.append(StorageWeakRef(y.untyped_storage()))
        return y

    way(call, x).sum().backward()
    gc.collect()  # cycles of Python's are its own matter
    assert made
    assert all(memory.expired() for memory in made)

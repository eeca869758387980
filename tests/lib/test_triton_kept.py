"""What Triton's matmul and linear keep for a backward pass: no operand that no wanted gradient needs.

On the CPU, by PyTorch in the place of kernels.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins.ops.activations import ACTIVATIONS  # noqa: E402
from tests.sides import as_interpreted  # noqa: E402

SHAPES = [
    ((4, 5), (5, 3)),
    ((2, 4, 5), (5, 3)),
    ((2, 4, 5), (2, 5, 3)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((2, 1, 4, 5), (3, 5, 2)),
]
BY_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
BY_WAY = pytest.mark.parametrize("way", ["function", "operator"])


def values(*shape: int, wants: bool = False, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(wants)


@pytest.fixture(autouse=True)
def pytorch_in_the_place_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    as_interpreted(monkeypatch)
    side = importlib.import_module("kernel_twins.functional.matmul.triton_matmul")
    monkeypatch.setattr(side, "triton_launcher", lambda *_: lambda a, b, *, out: out.copy_(a @ b))


def matmul(way: str, a: Any, b: Any) -> Any:
    if way == "operator":
        return torch.ops.kernel_twins.matmul_triton(a, b)
    return kernel_twins.matmul(a, b, backend="triton")


def linear(way: str, x: Any, weight: Any, bias: Any, activation: str) -> Any:
    if way == "operator":  # what the function calls where it is traced
        importlib.import_module("kernel_twins.functional.matmul.triton_linear")
        if activation in ("none", "relu"):
            return torch.ops.kernel_twins.linear_triton(x, weight, bias, activation)
        return torch.ops.kernel_twins.linear_saving_triton(x, weight, bias, activation)[0]
    return kernel_twins.linear(x, weight, bias, activation, backend="triton")


def three() -> list[Any]:
    """x, weight and bias, of all of which gradients are wanted."""
    return [values(*shape, wants=True, seed=i) for i, shape in enumerate(((4, 5), (3, 5), (3,)))]


def kept(call: Callable[[], Any], given: list[Any]) -> tuple[Any, list[Any]]:
    """The call's result, and those of the given tensors that it has saved."""
    saved: list[int] = []

    def pack(tensor: Any) -> Any:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    return out, [each for each in given if each.data_ptr() in saved]


def same(found: list[Any], right: list[Any]) -> bool:
    return len(found) == len(right) and all(one is other for one, other in zip(found, right, strict=True))


@BY_WAY
@pytest.mark.parametrize(("a_shape", "b_shape"), SHAPES, ids=str)
@pytest.mark.parametrize("wants", [(True, False), (False, True), (True, True)], ids=str)
def test_a_product_keeps_what_the_others_gradient_needs(way, a_shape, b_shape, wants) -> None:
    a, b = values(*a_shape, wants=wants[0]), values(*b_shape, wants=wants[1], seed=1)
    out, saved = kept(lambda: matmul(way, a, b), [a, b])
    assert same(saved, [each for each, needed in ((a, wants[1]), (b, wants[0])) if needed])
    wanted = [each for each in (a, b) if each.requires_grad]
    dout = values(*out.shape, seed=2)
    gradients = [torch.autograd.grad(each, wanted, dout, create_graph=True) for each in (out, torch.matmul(a, b))]
    torch.testing.assert_close(*gradients)
    if all(wants):  # of one alone the gradient is linear
        second = [torch.autograd.grad(sum(g.square().sum() for g in each), wanted) for each in gradients]
        torch.testing.assert_close(*second)


@BY_WAY
@BY_ACTIVATION
@pytest.mark.parametrize("wants", [each for each in itertools.product((True, False), repeat=3) if any(each)], ids=str)
def test_a_layer_keeps_what_a_wanted_gradient_needs(way, activation, wants) -> None:
    shapes = (2, 4, 5), (3, 5), (3,)
    given: list[Any] = [values(*shape, wants=w, seed=i) for i, (shape, w) in enumerate(zip(shapes, wants, strict=True))]
    x, weight, bias = given
    out, saved = kept(lambda: linear(way, x, weight, bias, activation), given)
    assert same(saved, [each for each, needed in ((x, wants[1]), (weight, wants[0])) if needed])
    wanted = [each for each in given if each.requires_grad]
    right = ACTIVATIONS[activation](torch.nn.functional.linear(x, weight, bias))
    dout = values(*out.shape, seed=4, wants=True)
    torch.testing.assert_close(
        *(torch.autograd.grad(each, wanted, dout.detach(), retain_graph=True) for each in (out, right))
    )
    # Gradients of gradients, of all that was given and of dout.
    firsts = [torch.autograd.grad(each, wanted, dout, create_graph=True) for each in (out, right)]
    wanted.append(dout)
    seconds = [
        torch.autograd.grad(sum(g.square().sum() for g in each), wanted, allow_unused=True, materialize_grads=True)
        for each in firsts
    ]
    torch.testing.assert_close(*seconds)


@BY_ACTIVATION
def test_third_derivatives_of_a_layer(activation) -> None:
    x, weight, bias = given = three()
    right = ACTIVATIONS[activation](torch.nn.functional.linear(x, weight, bias))
    derivatives = []
    for out in (linear("function", x, weight, bias, activation), right):
        for _ in range(3):
            out = sum(
                each.square().sum()
                for each in torch.autograd.grad(out.square().sum(), given, create_graph=True, materialize_grads=True)
            )
        derivatives.append(out)
    torch.testing.assert_close(*derivatives, rtol=1e-4, atol=1e-4)


def test_what_an_activation_is_applied_to_has_a_gradient_of_its_own() -> None:
    importlib.import_module("kernel_twins.functional.matmul.triton_linear")
    x, weight, bias = given = three()
    out, pre = torch.ops.kernel_twins.linear_saving_triton(x, weight, bias, "gelu")
    right_pre = torch.nn.functional.linear(x, weight, bias)
    right = torch.nn.functional.gelu(right_pre)
    for mine, theirs in ((pre, right_pre), (out * pre, right * right_pre), (out, right)):
        gradients = (torch.autograd.grad(each.sum(), given, retain_graph=True) for each in (mine, theirs))
        torch.testing.assert_close(*gradients)


@BY_WAY
@pytest.mark.parametrize(("a_shape", "b_shape"), SHAPES, ids=str)
def test_an_operand_may_change_where_its_values_are_not_needed(way, a_shape, b_shape) -> None:
    """As under PyTorch: db = a.mT @ dout needs no b."""
    a, b = values(*a_shape), values(*b_shape, wants=True, seed=1)
    right, out = torch.autograd.grad(torch.matmul(a, b).sum(), b)[0], matmul(way, a, b)
    with torch.no_grad():
        b.add_(1)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), b)[0], right)
    out = matmul(way, a, b)
    with torch.no_grad():
        a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), b)


@BY_WAY
@BY_ACTIVATION
def test_a_layers_bias_and_a_first_layers_weight_may_change(way, activation) -> None:
    x, weight, bias = values(2, 4, 5), values(3, 5, wants=True, seed=1), values(3, wants=True, seed=2)
    gradients = []
    for call in (
        lambda: linear(way, x, weight, bias, activation),
        lambda: ACTIVATIONS[activation](torch.nn.functional.linear(x, weight, bias)),
    ):
        out = call()
        with torch.no_grad():
            weight.add_(1)
            bias.add_(1)
        gradients.append(torch.autograd.grad(out.sum(), (weight, bias)))
        with torch.no_grad():
            weight.sub_(1)
            bias.sub_(1)
    torch.testing.assert_close(*gradients)

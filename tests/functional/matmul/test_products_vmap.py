"""Products under torch.func.vmap: one launch for all examples, by PyTorch in the place of kernels."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import kernel_twins  # noqa: E402
from kernel_twins.ops.activations import ACTIVATIONS  # noqa: E402
from tests.sides import cuda_takes_the_cpu, triton_multiplies_on_the_cpu  # noqa: E402

EXAMPLES = 5
LINEAR: Any = kernel_twins.linear
SHAPES = [
    ((3, 8), (8, 4)),
    ((8,), (8, 4)),
    ((3, 8), (8,)),
    ((8,), (8,)),
    ((2, 3, 8), (8, 4)),
    ((2, 3, 8), (8,)),
    ((2, 3, 8), (2, 8, 4)),
    ((3, 8), (2, 8, 4)),
    ((8,), (2, 8, 4)),
    ((6, 1, 3, 8), (2, 8, 4)),
    ((0, 8), (8, 4)),
    ((3, 0), (0, 4)),
]
BY_SHAPE = pytest.mark.parametrize(("a_shape", "b_shape"), SHAPES, ids=str)
BY_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
OPERANDS = [some for some in itertools.product((False, True), repeat=3) if any(some)]
BY_BATCHED = pytest.mark.parametrize(
    "batched", OPERANDS, ids=lambda batched: "+".join(itertools.compress(("x", "weight", "bias"), batched))
)


class Launches(TorchDispatchMode):
    """Counts the calls of operators that multiply."""

    number = 0
    names = ("matmul", "matmul_triton", "linear", "linear_triton", "linear_saving", "linear_saving_triton")

    def __torch_dispatch__(self, operator: Any, _: Any, given: Any = (), options: Any = None) -> Any:
        self.number += operator.__name__.partition(".")[0] in (*self.names, "mm", "bmm", "addmm", "baddbmm")
        return operator(*given, **(options or {}))


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    {"cuda": cuda_takes_the_cpu, "triton": triton_multiplies_on_the_cpu}[request.param](monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*performance drop.*batching rule.*")
        yield request.param


def made(shape: tuple[int, ...], at: int | None, seed: int) -> Any:
    shape = shape if at is None else (*shape[:at], EXAMPLES, *shape[at:])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def places(shape: tuple[int, ...]) -> Iterator[int | None]:
    yield from (None, *range(len(shape) + 1))


def assert_alike(ours: Callable[..., Any], pytorchs: Callable[..., Any], in_dims: tuple[Any, ...], *given: Any) -> None:
    with Launches() as launches:
        found = torch.func.vmap(ours, in_dims)(*given)
    assert launches.number == 1
    torch.testing.assert_close(found, torch.func.vmap(pytorchs, in_dims)(*given))


@BY_SHAPE
def test_examples_of_matmul_are_one_product(backend, a_shape, b_shape) -> None:
    for in_dims in itertools.product(places(a_shape), places(b_shape)):
        if in_dims != (None, None):
            given = made(a_shape, in_dims[0], 0), made(b_shape, in_dims[1], 1)
            assert_alike(lambda a, b: kernel_twins.matmul(a, b, backend=backend), torch.matmul, in_dims, *given)


def test_examples_of_stored_columns_are_read_where_they_lie(backend) -> None:
    a, weights = torch.randn(3, 8), torch.randn(EXAMPLES, 4, 8)
    assert_alike(
        lambda a, w: kernel_twins.matmul(a, w.mT, backend=backend), lambda a, w: a @ w.mT, (None, 0), a, weights
    )


@BY_BATCHED
@BY_ACTIVATION
@pytest.mark.parametrize("x_shape", [(3, 8), (8,), (2, 3, 8), (0, 8)], ids=str)
def test_examples_of_linear_are_one_product(backend, activation, x_shape, batched) -> None:
    def ours(*given: Any) -> Any:
        return LINEAR(*given, activation=activation, backend=backend)

    def pytorchs(*given: Any) -> Any:
        return ACTIVATIONS[activation](torch.nn.functional.linear(*given))

    shapes = x_shape, (4, 8), (4,)
    for ends in (False, True):
        in_dims = tuple(
            (len(shape) if ends else 0) if has else None for shape, has in zip(shapes, batched, strict=True)
        )
        given = [made(shape, at, seed) for seed, (shape, at) in enumerate(zip(shapes, in_dims, strict=True))]
        assert_alike(ours, pytorchs, in_dims, *given)
        if any(in_dims[:2]) or 0 in in_dims[:2]:
            assert_alike(ours, pytorchs, in_dims[:2], *given[:2])


@BY_BATCHED
@BY_ACTIVATION
def test_gradients_of_examples_are_pytorchs(backend, activation, batched) -> None:
    shapes = (3, 8), (4, 8), (4,)
    in_dims = tuple(0 if has else None for has in batched)
    given = [made(shape, at, seed) for seed, (shape, at) in enumerate(zip(shapes, in_dims, strict=True))]
    given = [each.requires_grad_() for each in given]

    def gradients(call: Callable[..., Any]) -> Any:
        return torch.autograd.grad(torch.func.vmap(call, in_dims)(*given).square().sum(), given)

    found = gradients(lambda *given: LINEAR(*given, activation=activation, backend=backend))
    right = gradients(lambda *given: ACTIVATIONS[activation](torch.nn.functional.linear(*given)))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@BY_ACTIVATION
@pytest.mark.parametrize("x_shape", [(3, 8), (8,), (2, 3, 8)], ids=str)
def test_many_gradients_of_linear_are_three_launches(backend, activation, x_shape) -> None:
    """As in a Jacobian: of x and weight a product each, and dz."""
    given = [made(shape, None, seed).requires_grad_() for seed, shape in enumerate((x_shape, (4, 8), (4,)))]
    douts = torch.randn(EXAMPLES, *x_shape[:-1], 4)
    out = LINEAR(*given, activation=activation, backend=backend)

    def gradients(of: Any) -> Any:
        return torch.func.vmap(lambda dout: torch.autograd.grad(of, given, dout, retain_graph=True))(douts)

    with Launches() as launches:
        found = gradients(out)
    assert launches.number == 2
    torch.testing.assert_close(found, gradients(ACTIVATIONS[activation](torch.nn.functional.linear(*given))))


@BY_SHAPE
def test_many_gradients_of_matmul_are_two_launches(backend, a_shape, b_shape) -> None:
    given = made(a_shape, None, 0).requires_grad_(), made(b_shape, None, 1).requires_grad_()
    out, right = kernel_twins.matmul(*given, backend=backend), torch.matmul(*given)
    douts = torch.randn(EXAMPLES, *out.shape)

    def gradients(of: Any) -> Any:
        return torch.func.vmap(lambda dout: torch.autograd.grad(of, given, dout, retain_graph=True))(douts)

    with Launches() as launches:
        found = gradients(out)
    assert launches.number == 2
    torch.testing.assert_close(found, gradients(right))


def test_vmap_in_vmap(backend) -> None:
    x, weights = torch.randn(EXAMPLES, 2, 3, 8), torch.randn(2, 4, 8)

    def pairs(call: Callable[..., Any]) -> Any:
        return torch.func.vmap(torch.func.vmap(call), (0, None))(x, weights)

    with Launches() as launches:
        found = pairs(lambda x, weight: kernel_twins.linear(x, weight, activation="gelu", backend=backend))
    assert launches.number == 1
    right = pairs(lambda x, weight: torch.nn.functional.gelu(torch.nn.functional.linear(x, weight)))
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("function", ["matmul", "linear"])
def test_vmap_goes_into_one_graph(backend, function) -> None:
    def call(x: Any, weight: Any) -> Any:
        if function == "matmul":
            return kernel_twins.matmul(x, weight.mT, backend=backend)
        return kernel_twins.linear(x, weight, backend=backend)

    torch.compiler.reset()
    x, weight = torch.randn(EXAMPLES, 3, 8), torch.randn(4, 8)
    compiled = torch.compile(torch.func.vmap(call, (0, None)), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), x @ weight.mT)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (((3, 8), (7, 4)), r"^b has shape \(7, 4\), must have 8 rows, as many as a, of shape \(3, 8\), has columns"),
        (((2, 3, 8), (4, 8, 4)), r"^b has leading dimensions \(4,\), must broadcast with a's, \(2,\)"),
        (((), (8, 4)), r"^a has 0 dimensions, must have 1 or more"),
        (((3, 8), ()), r"^b has 0 dimensions, must have 1 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_told_of_one_example(backend, shapes, said) -> None:
    a, b = (torch.randn(EXAMPLES, *shape) for shape in shapes)
    with pytest.raises(ValueError, match=said):
        torch.func.vmap(lambda a, b: kernel_twins.matmul(a, b, backend=backend))(a, b)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (((3, 8), (4, 7), (4,)), r"^weight has shape \(4, 7\), must have 8 columns, as many as x, of shape \(3, 8\)"),
        (((3, 8), (4,), (4,)), r"^weight has 1 dimensions, must have 2"),
        (((3, 8), (4, 8), (3,)), r"^bias has shape \(3,\), must have \(4,\)"),
        (((), (4, 8), (4,)), r"^x has 0 dimensions, must have 1 or more"),
    ],
)
def test_layers_that_do_not_fit_are_told_of_one_example(backend, shapes, said) -> None:
    given = [torch.randn(EXAMPLES, *shape) for shape in shapes]
    with pytest.raises(ValueError, match=said):
        torch.func.vmap(lambda *given: LINEAR(*given, backend=backend))(*given)

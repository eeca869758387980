"""Products under autocast, and float32 weights without it, by PyTorch in the place of kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins.ops.activations import ACTIVATIONS  # noqa: E402
from tests.sides import cuda_takes_the_cpu, triton_multiplies_on_the_cpu  # noqa: E402

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALF)
BY_COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.fixture(params=["auto", "cuda", "triton", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda":
        cuda_takes_the_cpu(monkeypatch)
    elif request.param == "triton":
        triton_multiplies_on_the_cpu(monkeypatch)
    name: str = request.param
    return name


def made(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).requires_grad_()


def assert_alike(found: Any, right: Any, leaves: Any) -> None:
    assert found.dtype == right.dtype
    torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)
    gradients = [torch.autograd.grad(each.float().sum(), leaves) for each in (found, right)]
    assert [each.dtype for each in gradients[0]] == [each.dtype for each in leaves]
    torch.testing.assert_close(*gradients, rtol=5e-2, atol=5e-2)


def in_graph(call: Any, compiled: bool) -> Any:
    torch.compiler.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call


@BY_COMPILED
def test_matmul_under_autocast_is_pytorchs(backend, compiled) -> None:
    call = in_graph(lambda a, b: kernel_twins.matmul(a, b, backend=backend), compiled)
    pairs = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)]
    for of_a, of_b in pairs if compiled else itertools.product(FLOATS, repeat=2):
        a, b = made(3, 8, dtype=of_a), made(8, 4, dtype=of_b, seed=1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_alike(call(a, b), torch.matmul(a, b), (a, b))


@BY_COMPILED
def test_without_autocast_float32_stays_true_fp32(backend, compiled) -> None:
    a, b = made(3, 8), made(8, 4, seed=1)
    call = in_graph(lambda a, b: kernel_twins.matmul(a, b, backend=backend, autocast=False), compiled)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(a, b)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.matmul(a, b))


def test_the_result_of_what_autocast_casts_may_be_float32(backend) -> None:
    a, b = made(3, 8), made(8, 4, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = kernel_twins.matmul(a, b, backend=backend, out_dtype=torch.float32)
    right = a.bfloat16().float() @ b.bfloat16().float()
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, right)
    assert [each.dtype for each in torch.autograd.grad(out.sum(), (a, b))] == [torch.float32] * 2


@BY_COMPILED
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_under_autocast_is_pytorchs(backend, activation, compiled) -> None:
    call = in_graph(lambda x, weight, bias: kernel_twins.linear(x, weight, bias, activation, backend), compiled)
    for dtypes in [(torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.float32), (torch.float16,) * 3]:
        shapes = ((3, 8), (4, 8), (4,))
        given = [made(*each, dtype=dtype, seed=i) for i, (each, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            right = ACTIVATIONS[activation](torch.nn.functional.linear(*given))
            assert_alike(call(*given), right, given)


@BY_COMPILED
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_float32_weights_are_read_in_the_dtype_of_x(backend, dtype, compiled) -> None:
    call = in_graph(lambda x, weight, bias: kernel_twins.linear(x, weight, bias, "relu", backend), compiled)
    for of_weight, of_bias in [(torch.float32, torch.float32), (torch.float32, dtype), (dtype, torch.float32)]:
        x, weight, bias = given = made(3, 8, dtype=dtype), made(4, 8, dtype=of_weight, seed=1), made(4, dtype=of_bias)
        right = torch.relu(torch.nn.functional.linear(x, weight.to(dtype), bias.to(dtype)))
        assert_alike(call(*given), right, given)


def test_half_weights_of_a_float32_x_are_refused(backend) -> None:
    with pytest.raises(
        (TypeError, RuntimeError), match=r"^weight is torch.bfloat16, must be torch.float32 like x|dtype"
    ):
        kernel_twins.linear(made(3, 8), made(4, 8, dtype=torch.bfloat16), backend=backend)

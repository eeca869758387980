"""What calls leave of torch's memory on a GPU, whatever is done with them: nothing, for every function and backend."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import kernel_twins as kt  # noqa: E402
from tests import ways  # noqa: E402

pytestmark = pytest.mark.gpu

Call = Callable[[Any, str], Any]
M, N = 256, 1024
CALLS = 50


def classes(x: Any) -> Any:
    return torch.arange(M, device=x.device)


DIFFERENTIABLE: dict[str, Call] = {
    "softmax": lambda x, backend: kt.softmax(x, -1, backend=backend),
    "log_softmax": lambda x, backend: kt.log_softmax(x, -1, backend=backend),
    "layer_norm": lambda x, backend: kt.layer_norm(x, (N,), x[0], x[1], backend=backend),
    "layer_norm with a residual": lambda x, backend: kt.layer_norm(
        x, (N,), x[0], x[1], residual=x * 2, backend=backend
    )[0],
    "layer_norm of frozen values": lambda x, backend: kt.layer_norm(x.detach(), (N,), x[0], x[1], backend=backend),
    "rms_norm": lambda x, backend: kt.rms_norm(x, (N,), x[0], backend=backend),
    "rms_norm with a residual": lambda x, backend: kt.rms_norm(x, (N,), x[0], residual=x * 2, backend=backend)[0],
    "cross_entropy": lambda x, backend: kt.cross_entropy(x, classes(x), backend=backend),
    "dropout_add": lambda x, backend: kt.dropout_add(x, x * 2, 0.3, bias=x[0], activation="gelu", backend=backend),
    "dropout_add of frozen values": lambda x, backend: kt.dropout_add(
        x.detach(), None, 0.3, bias=x[0], activation="gelu", backend=backend
    ),
    "sum": lambda x, backend: kt.sum(x, 1, backend=backend),
    "mean": lambda x, backend: kt.mean(x, 0, backend=backend),
    "amax": lambda x, backend: kt.amax(x, 1, backend=backend),
    "matmul": lambda x, backend: kt.matmul(x, x.mT, backend=backend),
    "matmul of a batch": lambda x, backend: kt.matmul(x.view(4, M // 4, N), x.mT, backend=backend),
    "linear": lambda x, backend: kt.linear(x, x, x[:, 0], backend=backend),
    "linear with relu": lambda x, backend: kt.linear(x, x, x[:, 0], "relu", backend=backend),
    "linear with gelu": lambda x, backend: kt.linear(x, x, x[:, 0], "gelu", backend=backend),
    "linear with frozen weights": lambda x, backend: kt.linear(x, x.detach(), None, "silu", backend=backend),
}
OTHERS: dict[str, Call] = {"argmax": lambda x, backend: kt.argmax(x, 1, backend=backend)}
BY_BACKEND = pytest.mark.parametrize("backend", ["cuda", "triton"])
BY_CALL = pytest.mark.parametrize("name", DIFFERENTIABLE)


def values() -> Any:
    random = torch.Generator("cuda").manual_seed(0)
    return torch.randn(M, N, generator=random, dtype=torch.bfloat16, device="cuda", requires_grad=True)


def allocated() -> int:
    gc.collect()  # cycles of Python's are its own matter
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def assert_nothing_is_left(run: Callable[[], Any], calls: int = CALLS) -> None:
    for _ in range(3):  # the first calls may keep what all later ones use
        run()
    before = allocated()
    for _ in range(calls):
        run()
    assert allocated() <= before


def refused(call: Callable[[Any], Any], x: Any) -> None:
    def pack(_: Any) -> None:
        raise InterruptedError

    with suppress(InterruptedError), saved_tensors_hooks(pack, lambda kept: kept):
        call(x)


WAYS = ways.OF_SAVING | {"refusing hooks": refused}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@BY_CALL
@BY_BACKEND
def test_calls_leave_nothing(backend, name, way) -> None:
    x = values()

    def run() -> None:
        way(lambda x: DIFFERENTIABLE[name](x, backend), x)
        x.grad = None

    assert_nothing_is_left(run)


@pytest.mark.parametrize("name", DIFFERENTIABLE | OTHERS)
@BY_BACKEND
def test_calls_without_a_gradient_leave_nothing(backend, name) -> None:
    x, call = values().detach(), (DIFFERENTIABLE | OTHERS)[name]
    assert_nothing_is_left(lambda: call(x, backend))


@BY_CALL
@BY_BACKEND
def test_compiled_calls_leave_nothing(backend, name) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: DIFFERENTIABLE[name](x, backend), backend="aot_eager")
    x = values()

    def run() -> None:
        for way in (ways.passed, partial(ways.recomputed, reentrant=False), ways.offloaded):
            way(compiled, x)
            x.grad = None

    assert_nothing_is_left(run, 10)


@pytest.mark.parametrize("name", ["log_softmax", "rms_norm with a residual", "linear with gelu"])
@BY_BACKEND
def test_calls_that_inductor_compiles_leave_nothing(backend, name) -> None:
    torch.compiler.reset()

    @torch.compile
    def compiled(x):
        return checkpoint(lambda x: DIFFERENTIABLE[name](x, backend) * 2, x, use_reentrant=False)

    x = values()

    def run() -> None:
        ways.passed(compiled, x)
        x.grad = None

    assert_nothing_is_left(run, 10)


@BY_CALL
def test_passes_of_compiled_autograd_leave_nothing(name) -> None:
    torch.compiler.reset()
    x = values()
    with torch._dynamo.config.patch(compiled_autograd=True):
        step = torch.compile(lambda: ways.passed(lambda x: DIFFERENTIABLE[name](x, "cuda"), x), backend="eager")

        def run() -> None:
            step()
            x.grad = None

        assert_nothing_is_left(run, 10)


@pytest.mark.parametrize("name", DIFFERENTIABLE | OTHERS)
@BY_BACKEND
def test_captured_graphs_leave_nothing(backend, name) -> None:
    """Nor do their pools, once the graphs are gone."""
    x, call = values(), (DIFFERENTIABLE | OTHERS)[name]

    def step() -> Any:
        out = call(x, backend)
        return out if name in OTHERS else torch.autograd.grad(out.square().sum(), x)

    def run() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = step()
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        del made, graph

    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    for _ in range(3):  # before it is captured, what is called must be compiled
        step()
    for _ in range(2):
        run()
    before = allocated(), reserved()
    for _ in range(5):
        run()
    assert allocated() <= before[0]
    assert reserved() <= before[1]

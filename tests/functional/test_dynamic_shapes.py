"""torch.compile with dynamic shapes: one graph serves every number of rows, and nothing is warned of.

Without a GPU the Triton side is traced and run in Triton's interpreter, which is decided for a whole
process (forks.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins.ops.activations import ACTIVATIONS  # noqa: E402
from tests import forks  # noqa: E402

N, K = 8, 16  # of a weight


def parameter(*shape: int, device: str, dtype: Any, wants: bool = True, seed: int = 0) -> Any:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(device, dtype).requires_grad_(wants)


def functions(backend: str, device: str, dtype: Any) -> dict[str, Callable[[Any], Any]]:
    """Of x: [rows, K]."""
    where: dict[str, Any] = {"device": device, "dtype": dtype}
    b, b3 = parameter(K, N, **where), parameter(2, K, N, **where)
    weight, frozen = parameter(N, K, **where), parameter(N, K, wants=False, **where)
    bias, row, shift = parameter(N, **where), parameter(K, **where), parameter(K, seed=1, **where)
    kt: Any = kernel_twins

    def classes(x: Any) -> Any:
        return torch.zeros(x.shape[:1], dtype=torch.int64, device=x.device)

    def pairs(x: Any) -> Any:
        return torch.stack([x, x])

    def in_place(x: Any) -> Any:
        with torch.no_grad():
            return kt.cross_entropy_gradient_(x.detach().clone(), classes(x), backend=backend)

    def linear(matrix: Any, activation: str, x: Any) -> Any:
        return kt.linear(pairs(x), matrix, bias, activation, backend=backend)

    found: dict[str, Callable[[Any], Any]] = {
        "matmul": lambda x: kt.matmul(x, b, backend=backend),
        "matmul of rows": lambda x: kt.matmul(pairs(x), b, backend=backend),
        "matmul of a batch": lambda x: kt.matmul(pairs(x), b3, backend=backend),
        "matmul by a vector": lambda x: kt.matmul(x, b[:, 0], backend=backend),
        "matmul of the weight": lambda x: kt.matmul(weight, x.mT, backend=backend),
        "softmax": lambda x: kt.softmax(x, backend=backend),
        "softmax of columns": lambda x: kt.softmax(pairs(x), 1, backend=backend),
        "log_softmax": lambda x: kt.log_softmax(pairs(x), backend=backend),
        "layer_norm": lambda x: kt.layer_norm(pairs(x), (K,), row, shift, backend=backend),
        "layer_norm with residual": lambda x: kt.layer_norm(x, (K,), row, shift, residual=2 * x, backend=backend)[0],
        "rms_norm": lambda x: kt.rms_norm(x, (K,), row, backend=backend),
        "rms_norm with residual": lambda x: kt.rms_norm(pairs(x), (K,), row, residual=pairs(2 * x), backend=backend)[1],
        "layer_norm of what is fixed": lambda x: kt.layer_norm(x.detach(), (K,), row, shift, backend=backend),
        "cross_entropy": lambda x: kt.cross_entropy(x, classes(x), backend=backend),
        "cross_entropy of rows": lambda x: kt.cross_entropy(x, classes(x), reduction="none", backend=backend),
        "cross_entropy of maps": lambda x: kt.cross_entropy(
            torch.stack([x, x], 2), torch.stack([classes(x)] * 2, 1), reduction="sum", backend=backend
        ),
        "cross_entropy_gradient_": in_place,
        "dropout_add": lambda x: kt.dropout_add(x, p=0.3, backend=backend),
        "dropout_add with all": lambda x: kt.dropout_add(
            pairs(x), pairs(x), 0.3, bias=row, activation="gelu", backend=backend
        ),
        "dropout_add of what is fixed": lambda x: kt.dropout_add(x.detach(), p=0.3, bias=row, backend=backend),
        "sum": lambda x: kt.sum(x, backend=backend),
        "sum of columns": lambda x: kt.sum(pairs(x), (0, 1), backend=backend),
        "mean": lambda x: kt.mean(x, 0, True, backend=backend),
        "mean of rows": lambda x: kt.mean(pairs(x), -1, backend=backend),
        "amax": lambda x: kt.amax(x, 0, backend=backend),
        "argmax": lambda x: kt.argmax(x, 0, backend=backend),
    }
    for activation in ACTIVATIONS:
        for name, matrix in (("linear", weight), ("frozen linear", frozen)):
            found[f"{name} {activation}"] = partial(linear, matrix, activation)
    return found


NAMES = list(functions("auto", "cpu", torch.float32))


def compile_once(function: Callable[[Any], Any], rows: tuple[int, ...], compiler: str, device: str, dtype: Any) -> None:
    """With gradients and without; a second graph is an error, and a warning of ours is one."""
    for wants in (True, False):
        torch.compiler.reset()
        torch._dynamo.utils.warn_once_cache.clear()
        compiled = torch.compile(function, backend=compiler, dynamic=True, fullgraph=True)
        with warnings.catch_warnings(record=True) as told, torch._dynamo.config.patch(error_on_recompile=True):
            warnings.simplefilter("always")
            for m in rows:
                x = parameter(m, K, device=device, dtype=dtype, wants=wants)
                with torch.set_grad_enabled(wants):
                    y = compiled(x)
                if y.requires_grad:
                    y.sum().backward()
        said = [str(each.message) for each in told]
        assert not [each for each in said if "lru_cache" in each or "kernel_twins" in each], said


def test_a_graph_of_tritons_serves_every_number_of_rows_when_interpreted() -> None:
    forks.interpreted("tests.functional.test_dynamic_shapes", "interpret")


def interpret() -> None:
    for name, function in functions("triton", "cpu", torch.float32).items():
        print(name)
        compile_once(function, (7, 12), "aot_eager", "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "cuda", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_serves_every_number_of_rows(name, backend) -> None:
    function = functions(backend, "cuda", torch.bfloat16)[name]
    compile_once(function, (7, 12, 33, 64, 100, 129, 1000), "inductor", "cuda", torch.bfloat16)

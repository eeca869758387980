"""Products under torch.compile and torch.func.vmap."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import kernel_twins as kt  # noqa: E402

PRODUCTS = {"matmul", "matmul_triton", "linear", "linear_triton", "mm", "bmm", "addmm", "baddbmm"}
BY_FUNCTION = pytest.mark.parametrize("function", ["matmul", "linear"])


def product(function: str, backend: str, x: Any, weight: Any) -> Any:
    """Of x: [..., 8] and weight: [4, 8]."""
    if function == "matmul":
        return kt.matmul(x, weight.mT, backend=backend)
    return kt.linear(x, weight, backend=backend)


@BY_FUNCTION
def test_a_graph_for_every_number_of_rows(products: str, function: str) -> None:
    """Of operands with leading dimensions, whose weight wants a gradient; nor is anything warned of."""
    weight = torch.randn(4, 8, requires_grad=True)
    torch.compiler.reset()
    torch._dynamo.utils.warn_once_cache.clear()
    compiled = torch.compile(
        lambda x: product(function, products, x, weight), backend="aot_eager", dynamic=True, fullgraph=True
    )
    with torch._dynamo.config.patch(error_on_recompile=True), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for m in (3, 7, 12):
            x = torch.randn(2, m, 8)
            out = compiled(x)
            torch.testing.assert_close(out, x @ weight.mT)
            torch.autograd.grad(out.sum(), weight)
    assert [str(each.message) for each in told if "lru_cache" in str(each.message)] == []


@BY_FUNCTION
def test_vmap_runs_products_example_by_example(products: str, function: str) -> None:
    class Calls(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, operator, _, given=(), options=None):
            self.number += operator.__name__.partition(".")[0] in PRODUCTS
            return operator(*given, **(options or {}))

    x, weight = torch.randn(5, 3, 8), torch.randn(4, 8)
    with Calls() as calls, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = torch.func.vmap(lambda x: product(function, products, x, weight))(x)
    assert calls.number == 1
    torch.testing.assert_close(out, x @ weight.mT)

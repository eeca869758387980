"""Operands on a GPU, their layouts, and what is near, for the GPU tests of attention and of its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.attention_reference import KINDS

OURS = pytest.mark.parametrize("backend", ["cuda", "triton"])
ALL = pytest.mark.parametrize("backend", ["auto", "cuda", "triton", "torch"])
DTYPES = [torch.bfloat16, torch.float16]
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
BY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
STARTS, KEY_STARTS = [3, 130, 130, 131, 260, 400], [0, 200, 333, 333, 400, 401]  # unused tokens, empty sequences

LAYOUTS: dict[str, Any] = {
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "packed": lambda x: torch.stack([x.transpose(1, 2)] * 3, 2)[:, :, 1].transpose(1, 2),
    "pitched": lambda x: functional.pad(x, (0, 8))[..., :-8],
    "expanded": lambda x: x[:1, :, :, :].expand(x.shape),
}
COPIED: dict[str, Any] = {
    "odd pitch": lambda x: functional.pad(x, (0, 3))[..., :-3],
    "offset": lambda x: functional.pad(x, (1, 7))[..., 1:-7],
    "spread": lambda x: x.repeat_interleave(2, 3)[..., ::2],
    "transposed": lambda x: x.mT.contiguous().mT,
}


def values(*shape: int, dtype: Any = torch.bfloat16, requires_grad: bool = False, seed: int = 0) -> Any:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=dtype, device="cuda", requires_grad=requires_grad)


def operands(
    queries: int = 130, keys: int = 259, *, batch: int = 2, heads: int = 4, kv_heads: int = 2, d: int = 64, **more: Any
) -> Any:
    shapes = (batch, heads, queries, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, d)
    return tuple(values(*shape, seed=seed, **more) for seed, shape in enumerate(shapes))


def sequences(d: int = 64, **more: Any) -> Any:
    q, k, v = values(410, 4, d, **more), values(450, 2, d, seed=1, **more), values(450, 2, d, seed=2, **more)
    return q, k, v, *(starts_of(each) for each in (STARTS, KEY_STARTS))


def starts_of(starts: list[int]) -> Any:
    return torch.tensor(starts, dtype=torch.int32, device="cuda")


def assert_near(found: Any, right: Any) -> None:
    """Within four roundings to the result's dtype of its largest number: what a kernel's own rounding of P makes.

    lse counts as if rounded at 1e-4. A gradient that is exactly 0, as over a single key, is a difference of numbers
    about 1, which fp32 leaves a remainder of.
    """
    for each, exact in zip(found, (known.double() for known in right), strict=True):
        assert each.shape == exact.shape
        eps = max(1e-4, torch.finfo(each.dtype).eps)
        finite = exact.isfinite()
        assert torch.equal(each.isfinite(), finite)
        largest = exact[finite].abs().max().item() if finite.any() else 0.0
        torch.testing.assert_close(
            each[finite].double(), exact[finite], rtol=2 * eps, atol=max(4 * eps * largest, 1e-5)
        )


def with_gradients(call: Any, given: Any, *, of_lse: bool = False) -> Any:
    """The results and the gradients of q, k and v; a gradient of lse is taken only where that is asked for."""
    out, lse = call(*given)
    results, douts = ((out, lse), douts_of(out, lse)) if of_lse else ((out,), douts_of(out))
    return out.detach(), lse.detach(), *torch.autograd.grad(results, given, douts)


def douts_of(out: Any, *lse: Any) -> Any:
    """Random gradients of the results; lse's is 0 where that is -inf."""
    return (
        values(*out.shape, seed=5).to(out.dtype),
        *(values(*each.shape, seed=6).to(each.dtype).masked_fill(each.isinf(), 0) for each in lse),
    )

"""A few rows, each longer than a cluster holds: split over blocks, since one block for each leaves most SMs idle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins as kt  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone")]

ROWS = 16
SHAPE = (64, 256, 256)  # of an image's features
BY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def median_ms(call: Callable[[], Any]) -> float:
    """Of the GPU's time."""
    times = []
    for turn in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if turn >= 3:  # warm
            times.append(start.elapsed_time(end))
    return float(sorted(times)[len(times) // 2])


@pytest.mark.parametrize(("n", "dtype"), [(2**20, torch.float32), (2**22, torch.bfloat16)], ids=str)
def test_softmax_of_rows_beyond_a_cluster(n: int, dtype: Any) -> None:
    """No multiple of PyTorch's time, which has a block for each row as well. So long are rows of 3.3 MB and more."""
    x = torch.randn(ROWS, n, device="cuda", dtype=dtype)
    assert median_ms(lambda: kt.softmax(x)) <= 2 * median_ms(lambda: torch.softmax(x, -1))


@BY_DTYPE
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_norms_of_rows_beyond_a_cluster(way: str, dtype: Any) -> None:
    """No multiple of the time that a copy takes. So long are rows of 3.3 MB, and of 512 KiB in the backward pass."""
    x = torch.randn(ROWS, *SHAPE, device="cuda", dtype=dtype)
    affine = torch.ones(2, *SHAPE, device="cuda", dtype=dtype).unbind()
    if way == "forward":
        found = median_ms(lambda: kt.layer_norm(x, SHAPE, *affine))
    else:
        wanted = [each.requires_grad_() for each in (x, *affine)]
        y, dout = kt.layer_norm(x, SHAPE, *affine), torch.randn_like(x)
        found = median_ms(lambda: torch.autograd.grad(y, wanted, dout, retain_graph=True))
    assert found <= 10 * median_ms(x.detach().clone)

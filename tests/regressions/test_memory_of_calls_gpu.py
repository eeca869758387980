"""Memory that calls took of the GPU for nobody, or for ever."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import kernel_twins as kt  # noqa: E402
from tests.gpu_memory import held_bytes  # noqa: E402

pytestmark = pytest.mark.gpu

OURS = pytest.mark.parametrize("backend", ["cuda", "triton"])


@OURS
def test_norm_backward_computes_dx_for_nobody(backend: str) -> None:
    """x wants no gradient, weight and bias do: nothing as large as x is allocated."""
    x = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(2, 8192, device="cuda", dtype=torch.bfloat16).unbind()
    wanted = [each.requires_grad_() for each in (weight, bias)]
    for _ in range(2):  # the first call may keep what later ones use
        y = kt.layer_norm(x, 8192, weight, bias, backend=backend)
        dout = torch.ones_like(y)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(y, wanted, dout)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < x.nbytes / 2


@OURS
def test_captured_triton_calls_leak(backend: str) -> None:
    """What a graph has for rows that several programs share comes back when the graph is gone."""
    x = torch.randn(8, 262_144, device="cuda", dtype=torch.bfloat16)
    right = kt.softmax(x, backend=backend)
    torch.cuda.synchronize()

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kt.softmax(x, backend=backend)
        graph.replay()
        assert torch.equal(y, right)

    def held_after(times: int) -> int:
        for _ in range(times):
            capture()
        return held_bytes()

    before = held_after(40)
    assert held_after(320) - before <= 4 * 2**20

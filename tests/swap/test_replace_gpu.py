"""Models that are replaced learn on a GPU what they learn with PyTorch's modules."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from kernel_twins.nn import replace_, restore_  # noqa: E402
from tests.swap.models import MODELS, lost, model_of  # noqa: E402

pytestmark = pytest.mark.gpu

BY_MODEL = pytest.mark.parametrize("name", MODELS)
STEPS = 12


def learned(name: str, backend: str, way: str) -> list[float]:
    """The losses of STEPS steps; without a backend PyTorch's."""
    dtype = torch.float32 if way == "autocast" else torch.bfloat16
    model = model_of(name).to("cuda", dtype)
    if backend:
        table = replace_(model, backend=backend)
        assert {"norm", "linear"} <= {row.kind for row in table.swapped}
    if way == "checkpointed" and name == "vit":
        model.set_grad_checkpointing()
    elif way == "checkpointed":
        model.gradient_checkpointing_enable()
    called = torch.compile(model) if way == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        with torch.autocast("cuda", torch.bfloat16) if way == "autocast" else contextlib.nullcontext():
            loss = lost(called, name, "cuda", dtype)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("way", ["eager", "autocast", "compiled", "checkpointed"])
@BY_MODEL
def test_a_replaced_model_learns_as_before(name, way) -> None:
    right = learned(name, "", way)
    assert right[-1] < right[0]
    assert learned(name, "auto", way) == pytest.approx(right, rel=0.03)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@BY_MODEL
def test_a_named_backend_learns_in_half_precision(name, backend) -> None:
    assert learned(name, backend, "eager") == pytest.approx(learned(name, "", "eager"), rel=0.03)


def network(dtype: Any) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.RMSNorm(96), nn.Linear(96, 64)).to(
        "cuda", dtype
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_network_computes_the_same_and_is_restored(dtype) -> None:
    model, x = network(dtype), torch.randn(32, 64, device="cuda", dtype=dtype)
    right = model(x)
    table = replace_(model)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(model(x), right, **near)
    assert len(restore_(model)) == len(table) == 5
    assert torch.equal(model(x), right)


def test_a_fused_activation_goes_through_the_kernel() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("linear has kernels for a compute capability of 9.0")
    model, x = network(torch.bfloat16), torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    replace_(model, backend="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(x)
    names = {event.name for event in profile.events()}
    assert any(name.startswith("kernel_twins::linear") for name in names) and "aten::gelu" not in names


def test_it_goes_into_a_cuda_graph() -> None:
    model, x = network(torch.bfloat16), torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    replace_(model)
    right = model(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = model(x)
    graph.replay()
    assert torch.equal(found, right)

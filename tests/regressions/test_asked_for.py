"""What users of such libraries ask for, and the kernels refuse by name: PyTorch computes it, and is what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor  # noqa: E402
from torch.distributed.tensor.experimental import implicit_replication  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import kernel_twins as kt  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_cpu")

TARGET = torch.tensor([0, 3, 7, 1])


def values(*shape: int, dtype: Any = torch.bfloat16, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def missing(raises: type[Exception], reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, raises=raises, reason=reason)


def assert_near(found: Any, right: Any) -> None:
    torch.testing.assert_close(found.double(), right.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_float32_weights_for_half_precision_in_norms(name: str) -> None:
    x, weight = values(4, 8), values(8, dtype=torch.float32, seed=1)
    found = getattr(kt, name)(x, (8,), weight, backend="cuda")
    assert_near(found, getattr(functional, name)(x.float(), (8,), weight))


def test_float32_weights_for_half_precision_in_linear() -> None:
    x, weight = values(4, 8), values(6, 8, dtype=torch.float32, seed=1)
    assert_near(kt.linear(x, weight, backend="cuda"), functional.linear(x.float(), weight))


def test_class_weights_in_cross_entropy() -> None:
    x, weight = values(4, 8, dtype=torch.float32), values(8, dtype=torch.float32, seed=1).abs()
    assert_near(kt.cross_entropy(x, TARGET, weight, backend="cuda"), functional.cross_entropy(x, TARGET, weight))


@missing(TypeError, "cross_entropy's kernels take classes alone: targets that are probabilities are to be taken")
def test_soft_targets_in_cross_entropy() -> None:
    x, target = values(4, 8, dtype=torch.float32), torch.softmax(values(4, 8, dtype=torch.float32, seed=1), 1)
    assert_near(kt.cross_entropy(x, target, backend="cuda"), functional.cross_entropy(x, target))


def test_int32_targets_in_cross_entropy() -> None:
    x = values(4, 8, dtype=torch.float32)
    assert_near(kt.cross_entropy(x, TARGET.int(), backend="cuda"), functional.cross_entropy(x, TARGET))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "sum"])
def test_dtype_of_the_result(name: str) -> None:
    x = values(4, 8)
    found = getattr(kt, name)(x, -1, dtype=torch.float32, backend="cuda")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, getattr(torch, name)(x, -1, dtype=torch.float32))


def test_rms_norm_with_weight_plus_one() -> None:
    x, weight = values(4, 8), values(8, seed=1)
    assert_near(kt.rms_norm(x, (8,), weight, offset=1.0, backend="cuda"), functional.rms_norm(x, (8,), weight + 1))


CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "softmax": (lambda x: kt.softmax(x, backend="cuda"), lambda x: torch.softmax(x, -1)),
    "sum": (lambda x: kt.sum(x, 1, backend="cuda"), lambda x: torch.sum(x, 1)),
    "layer_norm": (lambda x: kt.layer_norm(x, 8, backend="cuda"), lambda x: functional.layer_norm(x, (8,))),
    "cross_entropy": (
        lambda x: kt.cross_entropy(x, TARGET, backend="cuda"),
        lambda x: functional.cross_entropy(x, TARGET),
    ),
    "dropout_add": (lambda x: kt.dropout_add(x, p=0.0, backend="cuda"), lambda x: x),
    "matmul": (lambda x: kt.matmul(x, x.mT, backend="cuda"), lambda x: x @ x.mT),
    "linear": (lambda x: kt.linear(x, x, backend="cuda"), lambda x: x @ x.mT),
}
BY_CALL = pytest.mark.parametrize(("ours", "pytorchs"), CALLS.values(), ids=CALLS)


@missing(NotImplementedError, "no function has a derivative for torch.func.grad, which its own autograd function has")
@BY_CALL
def test_derivatives_of_torch_func_grad(ours: Callable[[Any], Any], pytorchs: Callable[[Any], Any]) -> None:
    x = values(4, 8, dtype=torch.float32)
    found, right = (torch.func.grad(lambda x, call=call: call(x).square().sum())(x) for call in (ours, pytorchs))
    torch.testing.assert_close(found, right)


@missing(NotImplementedError, "no function has a forward-mode derivative: each is to have one")
@BY_CALL
def test_derivatives_of_torch_func_jvp(ours: Callable[[Any], Any], pytorchs: Callable[[Any], Any]) -> None:
    x, tangent = values(4, 8, dtype=torch.float32), values(4, 8, dtype=torch.float32, seed=1)
    found, right = (torch.func.jvp(call, (x,), (tangent,))[1] for call in (ours, pytorchs))
    torch.testing.assert_close(found, right)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """One process, which is all that a rule for sharded tensors needs."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@missing(NotImplementedError, "no operator knows how tensors of several GPUs are sharded: each is to have its rules")
@BY_CALL
def test_distributed_tensors(mesh: Any, ours: Callable[[Any], Any], pytorchs: Callable[[Any], Any]) -> None:
    x = values(4, 8, dtype=torch.float32)
    with implicit_replication():  # of targets, too
        found = ours(distribute_tensor(x, mesh, [Replicate()]))
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), pytorchs(x))

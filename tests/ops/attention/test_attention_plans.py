"""The launch cache of attention's steps in Gluon: a repeated call launches what a first one would."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import pytest

from kernel_twins.compiler import aot

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

IN_GLUON = ("v11_skip_rescale", "v13_late_search")
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokens first": {"heads_first": False},
    "causal": {"band": (-(2**31), 0), "from_end": True},
    "window": {"band": (-7, 9)},
    "negative scale": {"scale": -0.5},
    "wide": {"d": 128},
    "fp16": {"dtype": torch.float16},
    "one query": {"queries": 1},
}


def step(name: str) -> Any:
    return importlib.import_module(f"kernel_twins._triton.attention.attention.{name}")


def operands(*, heads_first: bool = True, d: int = 64, dtype: Any = torch.bfloat16, queries: int = 129) -> Any:
    """q, k, v, out and lse."""

    def heads(count: int, rows: int) -> Any:
        if heads_first:
            return torch.empty(2, count, rows, d, dtype=dtype)
        return torch.empty(2, rows, count, d, dtype=dtype).transpose(1, 2)

    return heads(4, queries), heads(2, 300), heads(2, 300), heads(4, queries), torch.empty(2, 4, queries)


def call(tensors: Any, **options: Any) -> None:
    q, k, v, *out = tensors
    step("v14_dispatch").attention_v14_dispatch(q, k, v, out=out, **options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """On what seems a GPU of 9.0: each launch's kernel, and what Triton's launcher gets of its arguments."""
    from triton.backends.nvidia.driver import make_tensordesc_arg
    from triton.compiler import CompiledKernel
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    taken: list[Any] = []

    def numbers(argument: Any) -> Any:
        if isinstance(argument, TensorDescriptor):
            return [numbers(each) for each in make_tensordesc_arg(argument, None)]
        return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument

    def run(kernel: Any) -> Any:
        def noted(x: int, y: int, z: int, stream: int, *given: Any) -> None:
            taken.append((kernel.hash, x, y, z, [numbers(each) for each in given[5:]]))

        return noted

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(triton.runtime.driver, "_active", aot._Driver(90))
    monkeypatch.setattr(CompiledKernel, "run", property(run))
    monkeypatch.setattr(CompiledKernel, "launch_metadata", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    counters = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(step("described"), "counter", lambda device: counters)
    for name in (*IN_GLUON, "v14_dispatch"):
        monkeypatch.setattr(step(name), "_plans", {})
    return taken


def test_a_repeated_call_launches_what_a_first_one_would(launches: list[Any]) -> None:
    """Other tensors of the same kind, whose first call would otherwise come after the cache is emptied."""
    plans = step("v14_dispatch")._plans
    of_kinds = []
    for options in CALLS.values():
        shaped = {name: options[name] for name in options.keys() & {"heads_first", "d", "dtype", "queries"}}
        of_kinds.append((operands(**shaped), {name: options[name] for name in options.keys() - shaped.keys()}))
        call(operands(**shaped), **of_kinds[-1][1])
    assert len(plans) == len(CALLS)
    launches.clear()
    for tensors, options in of_kinds:
        call(tensors, **options)
    assert len(plans) == len(CALLS)
    plans.clear()
    for tensors, options in of_kinds:
        call(tensors, **options)
    repeated, first = launches[: len(CALLS)], launches[len(CALLS) :]
    assert repeated == first
    assert all(each != other for i, each in enumerate(first) for other in first[:i])


@pytest.mark.parametrize("name", IN_GLUON)
def test_the_step_alone_keeps_its_launches_too(launches: list[Any], name: str) -> None:
    module = step(name)
    for q, k, v, *out in (operands(), operands()):
        getattr(module, f"attention_{name}")(q, k, v, out=tuple(out), scale=0.5, band=(-3, 3))
        module.first_launch(q, k, v, *out, 0.5, (-3, 3))
    assert len(module._plans) == 1
    assert launches[0] == launches[1]
    assert launches[2] == launches[3]


@pytest.mark.usefixtures("launches")
def test_a_kept_launch_holds_no_tensor() -> None:
    held = []
    for _ in range(2):
        tensors = operands()
        call(tensors)
        held += [weakref.ref(each) for each in tensors]
        del tensors
    assert len(step("v14_dispatch")._plans) == 1
    assert [each() for each in held] == [None] * 10


@pytest.mark.parametrize("name", IN_GLUON)
def test_a_tensor_that_starts_elsewhere_is_refused_though_a_plan_is_kept(launches: list[Any], name: str) -> None:
    attend = getattr(step(name), f"attention_{name}")
    q, k, v, *out = operands()
    attend(q, k, v, out=tuple(out))
    moved = torch.empty(q.numel() + 8, dtype=q.dtype)[4:-4].view(q.shape)
    assert moved.data_ptr() % 16
    with pytest.raises(ValueError, match=r"^q has strides .* call q.contiguous\(\)"):
        attend(moved, k, v, out=tuple(out))
    assert len(launches) == 1

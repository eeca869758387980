"""Every step in both languages, on a GPU: right on every case, on any stream, in a graph, and on nothing it refuses."""

from __future__ import annotations

import fcntl
import inspect
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS, load, load_baseline  # noqa: E402
from kernel_twins._load import UnavailableError  # noqa: E402
from kernel_twins.check import check, compare, generator  # noqa: E402
from kernel_twins.spec import Backend, Case, Op, Step  # noqa: E402
from kernel_twins.tensors import DTYPE  # noqa: E402

pytestmark = pytest.mark.gpu

CELLS = [
    pytest.param(op, step, backend, id=f"{op.name}-{step.name}-{backend}")
    for op in OPS.values()
    for step in op.steps
    for backend in step.backends
]
CASES = [
    pytest.param(op, step, backend, case, id=f"{op.name}-{step.name}-{backend}-{case.slug}")
    for op in OPS.values()
    for step in op.steps
    for backend in step.backends
    for case in op.test_cases
    if op.serves(step, case)
]
HUGE = [
    pytest.param(op, step, backend, case, id=f"{op.name}-{step.name}-{backend}-{case.slug}")
    for op in OPS.values()
    for step in op.steps
    for backend in step.backends
    for case in op.huge_cases
    if op.serves(step, case)
]
BASELINES = [
    pytest.param(op, name, case, id=f"{op.name}-{name}-{case.slug}")
    for op in OPS.values()
    for name in op.baselines
    for case in op.test_cases
]
LESS_ACCURATE = {("softmax_backward", "liger"): "Liger rounds dout * y to half precision before it sums"}


def loaded(op: Op, step: Step, backend: Backend) -> Callable[..., None]:
    if not step.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{step.name} needs compute capability {step.arch}")
    return load(op.name, step.name, backend)


def ordinary(op: Op, step: Step) -> Case:
    """The largest problem among the step's tests, without special values."""
    return max((case for case in op.test_cases if not case.variant and op.serves(step, case)), key=op.bytes)


@pytest.mark.parametrize(("op", "step", "backend", "case"), CASES)
def test_step_is_right(op: Op, step: Step, backend: Backend, case: Case) -> None:
    verdict = check(op, loaded(op, step, backend), case)
    assert verdict.ok, verdict.reason


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One test at a time of those that need a good part of the GPU's memory, however many processes run tests."""
    with (tmp_path_factory.getbasetemp().parent / "alone").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("op", "step", "backend", "case"), HUGE)
def test_step_is_right_past_two_to_the_31_elements(op: Op, step: Step, backend: Backend, case: Case) -> None:
    call = loaded(op, step, backend)
    verdict = check(op, call, case)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("op", "name", "case"), BASELINES)
def test_baseline_is_right(op: Op, name: str, case: Case) -> None:
    try:
        verdict = check(op, load_baseline(op.name, name), case)
    except UnavailableError as error:
        pytest.skip(str(error))
    if (reason := LESS_ACCURATE.get((op.name, name))) and case.dtype != "fp32":
        pytest.skip(reason)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("op", "step", "backend"), CELLS)
def test_step_runs_on_the_current_stream(op: Op, step: Step, backend: Backend) -> None:
    """Its inputs are still being written, on that stream, when it is called."""
    call, case = loaded(op, step, backend), ordinary(op, step)
    source = op.inputs(case, generator(case, "cuda", seed=1))
    late = tuple(torch.zeros_like(tensor) for tensor in source)
    out = torch.empty(op.outputs(case)[0].shape, dtype=DTYPE[op.outputs(case)[0].dtype], device="cuda")
    call(*late, out=out)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)  # about 10 ms of the GPU's time, so that another stream would run ahead
        for tensor, values in zip(late, source, strict=True):
            tensor.copy_(values)
        call(*late, out=out)
    torch.cuda.synchronize()
    verdict = compare(op, case, source, (out,))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("op", "step", "backend"), CELLS)
def test_step_replays_from_a_graph_on_new_values(op: Op, step: Step, backend: Backend) -> None:
    call, case = loaded(op, step, backend), ordinary(op, step)
    inputs = op.inputs(case, generator(case, "cuda", seed=1))
    out = torch.empty(op.outputs(case)[0].shape, dtype=DTYPE[op.outputs(case)[0].dtype], device="cuda")
    call(*inputs, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*inputs, out=out)
    fresh = op.inputs(case, generator(case, "cuda", seed=2))
    for tensor, values in zip(inputs, fresh, strict=True):
        tensor.copy_(values)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        verdict = compare(op, case, fresh, (out,))
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("op", "step", "backend"), CELLS)
def test_step_gives_the_same_bits_every_time(op: Op, step: Step, backend: Backend) -> None:
    if not step.deterministic:
        pytest.skip(f"{step.name} gives other last bits in every run, as its spec says")
    call, case = loaded(op, step, backend), ordinary(op, step)
    inputs = op.inputs(case, generator(case, "cuda"))
    outs = [
        torch.full(op.outputs(case)[0].shape, float("nan"), dtype=DTYPE[op.outputs(case)[0].dtype], device="cuda")
        for _ in range(20)
    ]
    for out in outs:
        call(*inputs, out=out)
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize(("op", "step", "backend"), CELLS)
def test_step_refuses_what_it_cannot_serve(op: Op, step: Step, backend: Backend) -> None:
    call, case = loaded(op, step, backend), ordinary(op, step)
    inputs = op.inputs(case, generator(case, "cuda"))
    first, *rest = inputs
    out = torch.empty(op.outputs(case)[0].shape, dtype=DTYPE[op.outputs(case)[0].dtype], device="cuda")
    name = next(iter(inspect.signature(op.check).parameters))
    with pytest.raises(TypeError, match=rf"\b{name}\b.*float64"):
        call(first.double(), *rest, out=out)
    with pytest.raises((TypeError, ValueError), match=r"\bout\b"):
        call(*inputs, out=out.double())
    with pytest.raises(ValueError, match=r"\bout\b"):
        call(*inputs, out=torch.empty((3, *out.shape), dtype=out.dtype, device="cuda"))
    with pytest.raises(ValueError, match=r"\b(cpu|device)\b"):
        call(first.cpu(), *rest, out=out)
    with pytest.raises(ValueError, match=r"\bout\b"):
        call(*inputs, out=out.cpu())
    whole = torch.empty(first.numel() + out.numel(), dtype=first.dtype, device="cuda")
    if first.dtype == out.dtype:
        shifted = whole[: first.numel()].view(first.shape)
        with pytest.raises(ValueError, match="out overlaps"):
            call(shifted, *rest, out=whole[1 : 1 + out.numel()].view(out.shape))
    if out.dim():
        wide = torch.empty((*out.shape[:-1], 2 * out.shape[-1]), dtype=out.dtype, device="cuda")
        with pytest.raises(ValueError, match=r"\bout\b.*contiguous"):
            call(*inputs, out=wide[..., ::2])

"""Every step in both languages, on a GPU: right on every case, on any stream, in a graph, and on nothing it refuses."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS, load, load_baseline  # noqa: E402
from kernel_twins.errors import UnavailableError  # noqa: E402
from kernel_twins.harness.check import check, check_baseline, compare, generator  # noqa: E402
from kernel_twins.ops.tensors import empty_outputs  # noqa: E402
from kernel_twins.spec import Backend, Case, Op, Step  # noqa: E402

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
ROOT = Path(__file__).parents[2]
SEARCHED = [  # but for products, whose long lists take minutes to compile
    pytest.param(op, step, id=f"{op.name}-{step.name}")
    for op in OPS.values()
    for step in op.steps
    if "triton" in step.backends
    and "@triton.autotune" in (source := (ROOT / op.file(step.name, "triton")).read_text())
    and "BLOCK_K" not in source
]

BASELINES = [
    pytest.param(
        op,
        name,
        case,
        marks=[
            pytest.mark.xfail(
                reason=reason, raises=Exception if "launch fails" in reason else AssertionError, strict=True
            )
        ]
        if (reason := op.differs(name, case))
        else [],
        id=f"{op.name}-{name}-{case.slug}",
    )
    for op in OPS.values()
    for name in op.baselines
    if name not in op.baseline_cases  # of which none is a test's
    # Every case is compiled anew, which takes a second.
    for case in (op.test_cases[::6] if name == "compile" else op.test_cases)
]


def loaded(op: Op, step: Step, backend: Backend) -> Callable[..., None]:
    if not step.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{step.name} needs compute capability {step.arch}")
    return load(op.name, step.name, backend)


def each_of(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


def ordinary(op: Op, step: Step) -> Case:
    """The largest problem among the step's tests, without special values."""
    return max((case for case in op.test_cases if not case.variant and op.serves(step, case)), key=op.bytes)


@pytest.mark.parametrize(("op", "step", "backend", "case"), CASES)
def test_step_is_right(op: Op, step: Step, backend: Backend, case: Case) -> None:
    verdict = check(op, loaded(op, step, backend), case)
    assert verdict.ok, verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize(("op", "step"), SEARCHED)
def test_every_configuration_is_right(op: Op, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that a search may choose on another GPU, or for a problem of which no winner is committed."""
    call = loaded(op, step, "triton")
    module = importlib.import_module(op.module(step.name))
    served = [case for case in op.test_cases if op.serves(step, case) and op.bytes(case) > 0]
    cases = [ordinary(op, step)]
    for dtype in ("fp32", "bf16"):
        of_dtype = (case for case in served if case.dtype == dtype)
        cases += sorted(of_dtype, key=lambda case: len(case.variant))[-1:]
    for config in module.CONFIGS:
        chosen = lambda kernel, *_, config=config: (kernel.fn, config.all_kwargs())  # noqa: E731
        monkeypatch.setattr(module.tuning, "choose", chosen)
        if hasattr(module, "_plans"):
            monkeypatch.setattr(module, "_plans", {})
        for case in cases:
            verdict = check(op, call, case)
            assert verdict.ok, f"{config} at {case.slug}: {verdict.reason}"


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("op", "step", "backend", "case"), HUGE)
def test_step_is_right_past_two_to_the_31_elements(op: Op, step: Step, backend: Backend, case: Case) -> None:
    call = loaded(op, step, backend)
    verdict = check(op, call, case)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("op", "name", "case"), BASELINES)
def test_baseline_is_right(op: Op, name: str, case: Case) -> None:
    judged = op.judged_cases(case) if name == next(iter(op.baselines)) else (case,)  # steps are judged by PyTorch's
    for each in judged:
        try:
            verdict = check_baseline(op, load_baseline(op.name, name), each)
        except UnavailableError as error:
            pytest.skip(str(error))
        assert verdict.ok, f"{each.slug}: {verdict.reason}"


@pytest.mark.parametrize(("op", "step", "backend"), CELLS)
def test_step_runs_on_the_current_stream(op: Op, step: Step, backend: Backend) -> None:
    """Its inputs are still being written, on that stream, when it is called."""
    call, case = loaded(op, step, backend), ordinary(op, step)
    source = op.inputs(case, generator(case, "cuda", seed=1))
    late = tuple(torch.zeros_like(tensor) for tensor in source)
    out = empty_outputs(op, case, "cuda")
    call(*late, out=out)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)  # about 10 ms of the GPU's time, so that another stream would run ahead
        for tensor, values in zip(late, source, strict=True):
            tensor.copy_(values)
        call(*late, out=out)
    torch.cuda.synchronize()
    verdict = compare(op, case, source, each_of(out))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("op", "step", "backend"), CELLS)
def test_step_replays_from_a_graph_on_new_values(op: Op, step: Step, backend: Backend) -> None:
    call, case = loaded(op, step, backend), ordinary(op, step)
    inputs = op.inputs(case, generator(case, "cuda", seed=1))
    out = empty_outputs(op, case, "cuda")
    call(*inputs, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(*inputs, out=out)
    fresh = op.inputs(case, generator(case, "cuda", seed=2))
    for tensor, values in zip(inputs, fresh, strict=True):
        tensor.copy_(values)
    for _ in range(2):
        for each in each_of(out):
            each.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        verdict = compare(op, case, fresh, each_of(out))
        assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("op", "step", "backend"), CELLS)
def test_step_gives_the_same_bits_every_time(op: Op, step: Step, backend: Backend) -> None:
    if not step.deterministic:
        pytest.skip(f"{step.name} gives other last bits in every run, as its spec says")
    call, case = loaded(op, step, backend), ordinary(op, step)
    inputs = op.inputs(case, generator(case, "cuda"))
    outs = [empty_outputs(op, case, "cuda") for _ in range(20)]
    for out in outs:
        for each in each_of(out):
            each.fill_(float("nan"))
        call(*inputs, out=out)
    for others in zip(*map(each_of, outs), strict=True):
        assert all(torch.equal(each, others[0]) for each in others)


@pytest.mark.parametrize(("op", "step", "backend"), CELLS)
def test_step_refuses_what_it_cannot_serve(op: Op, step: Step, backend: Backend) -> None:
    call, case = loaded(op, step, backend), ordinary(op, step)
    inputs = op.inputs(case, generator(case, "cuda"))
    first, *rest = inputs
    out, *others = each_of(empty_outputs(op, case, "cuda"))

    def with_first(first_out: Any) -> Any:
        return (first_out, *others) if others else first_out

    name = next(iter(inspect.signature(op.check).parameters))
    with pytest.raises(TypeError, match=rf"\b{name}\b.*float64"):
        call(first.double(), *rest, out=with_first(out))
    with pytest.raises((TypeError, ValueError), match=r"\bout\b"):
        call(*inputs, out=with_first(out.double()))
    with pytest.raises(ValueError, match=r"\bout\b"):
        call(*inputs, out=with_first(torch.empty((3, *out.shape), dtype=out.dtype, device="cuda")))
    with pytest.raises(ValueError, match=r"\b(cpu|device)\b"):
        call(first.cpu(), *rest, out=with_first(out))
    with pytest.raises(ValueError, match=r"\bout\b"):
        call(*inputs, out=with_first(out.cpu()))
    whole = torch.empty(first.numel() + out.numel(), dtype=first.dtype, device="cuda")
    if first.dtype == out.dtype:
        shifted = whole[: first.numel()].view(first.shape)
        with pytest.raises(ValueError, match="out overlaps"):
            call(shifted, *rest, out=with_first(whole[1 : 1 + out.numel()].view(out.shape)))
    if out.dim():
        wide = torch.empty((*out.shape[:-1], 2 * out.shape[-1]), dtype=out.dtype, device="cuda")
        with pytest.raises(ValueError, match=r"\bout\b.*contiguous"):
            call(*inputs, out=with_first(wide[..., ::2]))
    if others:
        with pytest.raises(TypeError, match=rf"out is a Tensor, must be a tuple of {1 + len(others)} tensors"):
            call(*inputs, out=out)
        with pytest.raises(ValueError, match=rf"out has 1 tensors, must have {1 + len(others)}"):
            call(*inputs, out=(out,))
        with pytest.raises(TypeError, match=r"out\[1\] is torch.float64"):
            call(*inputs, out=(out, others[0].double(), *others[1:]))

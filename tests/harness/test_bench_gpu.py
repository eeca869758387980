"""The bench on a GPU: what its graphs write, and what is timed under which condition."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS, load_baseline  # noqa: E402
from kernel_twins.harness import bench  # noqa: E402
from kernel_twins.harness.check import check_baseline  # noqa: E402
from kernel_twins.harness.load import load_named  # noqa: E402
from kernel_twins.harness.sensors import identity  # noqa: E402
from kernel_twins.spec import BACKENDS, Case, Name  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from kernel_twins.harness.load import Call

pytestmark = pytest.mark.gpu


def test_results_that_a_call_allocates_rotate_as_out_does() -> None:
    """Else they stay in L2, and the call looks faster than one that writes as many bytes into ``out``."""
    places: list[int] = []

    def call(x: Tensor, *, out: Tensor) -> tuple[Tensor, Tensor]:
        results = x.clone(), x[:1].clone()
        places.append(results[0].data_ptr())
        return results

    x = torch.ones(2**20, device="cuda")
    sets: list[bench.CallSet] = [((x,), torch.empty_like(x)) for _ in range(3)]
    bench._capture(call, sets, 9)
    assert all(len(set(places[first : first + 3])) == 3 for first in range(7))
    assert len(set(places)) == 3  # and no more memory is taken than that


def test_the_kernel_behind_a_call_of_a_chain_runs_once_a_call() -> None:
    def call(x: Tensor, *, out: Tensor) -> None:
        torch.add(x, 1, out=out)

    both = bench._before_another(call)
    (memory,) = (each for each in inspect.getclosurevars(both).nonlocals.values() if isinstance(each, torch.Tensor))
    before = memory.clone()
    x = torch.ones(2**20, device="cuda")
    outs = [torch.empty_like(x) for _ in range(3)]
    sets: list[bench.CallSet] = [((x,), out) for out in outs]
    bench._capture(both, sets, 9).replay()
    torch.cuda.synchronize()
    assert memory.equal(before + 9)
    assert all(out.equal(x + 1) for out in outs)
    assert bench._before_another(lambda x, *, out: x)(x, out=x) is x  # a result that is returned stays one


def test_a_product_is_timed_sustained_rested_and_in_a_chain() -> None:
    case = Case.parse("1024x1024x1024-bf16")
    op = dataclasses.replace(OPS["matmul_bf16"], headline_cases=(case,))
    lasts = [op.last_step(backend, case) for backend in BACKENDS]
    steps = tuple(step for step in lasts if step and step.runs_on(torch.cuda.get_device_capability()))
    if not steps:
        pytest.skip("the last steps need compute capability 9.0")
    timed = bench.bench(op, case, steps)
    assert all(timing.status == "ok" for timing in timed)
    by_contest: dict[str, list[bench.Timing]] = {}
    for timing in timed:
        by_contest.setdefault(timing.contest, []).append(timing)
    rested, chain = by_contest["rested"], by_contest["chain"]
    fast = {timing.name for timing in by_contest["fast"]}
    assert {Name(baseline) for baseline in op.baselines_at(case)} <= fast
    assert [timing.name for timing in rested] == [timing.name for timing in chain]
    assert {timing.name.step for timing in rested} == {"", *(step.name for step in steps)}
    for timing in rested + chain:
        assert len(timing.times_us) == bench.CONDITION_ROUNDS
        assert min(timing.times_us) > 0
        assert timing.error is not None
    assert all(len(timing.times_us) == bench.ROUNDS for timing in by_contest["fast"])


def test_a_rested_sample_is_read_while_it_runs() -> None:
    pytest.importorskip("pynvml")
    name = Name("torch")

    def call(x: Tensor, *, out: Tensor) -> None:
        torch.mm(x, x, out=out)

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    sets: list[bench.CallSet] = [((x,), torch.empty_like(x))]
    call(x, out=x.clone())
    ((timed, times, sensors),) = bench._interleave({name: call}, {name: 0.2}, sets, 3, "rested")
    assert (timed, len(times)) == (name, 3)
    clock, highest = sensors["sm_clock_mhz"], identity()["sm_clock_max_mhz"]
    assert isinstance(clock, int | float) and 0 < clock <= highest
    assert sensors["power_w"]


def test_a_baseline_that_is_judged_elsewhere_is_called_where_it_is_timed_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else what it compiles for the case would be taken for its time."""
    op, case = OPS["dropout_add"], Case.parse("1024x1024-bf16-p.50")
    probabilities: list[float] = []
    before_timing: list[list[float]] = []
    once = bench._once

    def load(op: str, name: Name) -> Call:
        call = load_named(op, name)

        def noted(*inputs: Tensor, p: float, **rest: Any) -> object:
            probabilities.append(p)
            return call(*inputs, p=p, **rest)

        return noted

    def timed(call: Call, sets: list[bench.CallSet]) -> tuple[float, int]:
        before_timing.append(list(probabilities))
        return once(call, sets)

    monkeypatch.setattr(bench, "load_named", load)
    monkeypatch.setattr(bench, "_once", timed)
    (timing,) = bench.bench(dataclasses.replace(op, baselines={"torch": op.baselines["torch"]}), case, ())
    assert timing.status == "ok"
    ((*judged, last),) = before_timing
    assert set(judged) == {0.0}  # where no random number has a say
    assert last == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("slug", ["256x256x256-bf16", "255x257x1024-bf16-b.col"])
@pytest.mark.parametrize("name", ["compile", "max_autotune"])
def test_torch_compile_is_right_and_prints_no_tables(name: str, slug: str, capfd: pytest.CaptureFixture[str]) -> None:
    op = OPS["matmul_bf16"]
    verdict = check_baseline(op, load_baseline(op.name, name), Case.parse(slug))
    assert verdict.ok, verdict.reason
    assert "AUTOTUNE" not in "".join(capfd.readouterr())

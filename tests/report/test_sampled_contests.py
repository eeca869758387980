"""A public function at one sampled case: what is called, and what a result must be, on PyTorch's side of each."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernel_twins import OPS  # noqa: E402
from kernel_twins.errors import UnavailableError  # noqa: E402
from kernel_twins.functional.matmul import contest_judge  # noqa: E402
from kernel_twins.functional.sampled import Forward  # noqa: E402
from kernel_twins.functional.softmax.contest import _OfResult  # noqa: E402
from kernel_twins.ops.attention.reference import visible  # noqa: E402
from kernel_twins.report.calls import sampled_contests, sampled_timing  # noqa: E402
from kernel_twins.report.calls.functions import FUNCTIONS  # noqa: E402
from kernel_twins.report.calls.sampled_cases import CONTESTS  # noqa: E402
from kernel_twins.report.calls.sampled_contests import Problem, contest  # noqa: E402
from kernel_twins.report.calls.sampled_timing import LostGpuError, Times  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

SMALL = {
    "matmul": ["33x40x72-bf16-b.col", "16x24x40-fp32-a.col", "9x33x65-fp16-pitch.8"],
    "linear": ["33x40x72-bf16-act.gelu", "16x24x40-fp16-act.none-w.col", "300x64x64-bf16-act.relu"],
    "softmax": ["33x257-bf16-x.pitched", "7x64-fp32"],
    "log_softmax": ["33x257-fp16-log.yes-x.spaced", "7x64-fp32-log.yes"],
    "layer_norm": ["33x257-bf16-residual.yes-x.pitched", "65x64-fp32", "9x72-fp16-affine.none"],
    "rms_norm": ["33x257-bf16-residual.yes-x.spaced", "65x64-fp32", "9x72-fp16-affine.none"],
    "cross_entropy": ["33x257-bf16-logits.pitched-target.ignored", "65x64-fp32-smoothing.tenth", "9x72-fp16"],
    "cross_entropy_gradient_": ["33x257-bf16-logits.pitched-target.ignored", "65x64-fp32-smoothing.tenth"],
    "dropout_add": [
        *("33x257-bf16-bias.yes-p.0-residual.yes-x.pitched", "65x64-fp32-act.silu-p.0", "9x72-fp16-p.0-residual.yes"),
        "33x72-fp32-act.gelu-bias.yes-p.0-residual.yes",
    ],
    "sum": ["33x257-bf16-axes.1-kind.sum-x.permuted", "3x5x64-fp32-axes.02-kind.sum"],
    "mean": [
        *("33x257-bf16-axes.0-kind.mean-x.pitched", "3x5x2x64-fp16-axes.023-kind.mean"),
        "9x8-fp32-axes.01-kind.mean",
    ],
    "amax": ["33x257-bf16-axes.0-kind.max-x.permuted", "3x5x64-fp16-axes.1-kind.max", "9x8-fp32-axes.01-kind.max"],
    "argmax": [
        *("33x257-bf16-axes.0-kind.argmax-x.permuted", "3x5x64-fp16-axes.1-kind.argmax"),
        "9x8-fp32-axes.01-kind.argmax",
    ],
    "attention": ["2x4x33x16-bf16-keys.47-kv.2", "1x2x40x24-fp16-mask.causal", "2x2x17x8-bf16"],
    "scaled_dot_product_attention": ["2x4x33x16-fp16-keys.47-kv.2", "1x2x40x24-bf16-mask.causal"],
}
"""Of other functions, cases that their operation is tested on are small enough."""
MOST_ELEMENTS = 2**12


def small(function: str) -> list[Case]:
    if function in SMALL:
        return [Case.parse(slug) for slug in SMALL[function]]
    tested = OPS[FUNCTIONS[function].drawn[0]].test_cases
    return [case for case in tested if 1 < math.prod(case.shape) <= MOST_ELEMENTS and not case.get("values")]


CELLS = [
    pytest.param(function, direction, case, id=f"{function}-{direction}-{case.slug}")
    for function, direction in CONTESTS
    for case in small(function)
]
BY_CELL = pytest.mark.parametrize(("function", "direction", "case"), CELLS)


def douts_of(problem, out):
    """Gradients of the results, the same every time."""
    source = torch.Generator().manual_seed(1)
    if problem.function == "cross_entropy":
        return tuple(torch.ones_like(each) for each in out)
    return tuple(torch.randn(each.shape, generator=source).to(each.dtype) for each in out)


def exact(problem, direction):
    """Results or gradients in float64, rounded once."""
    operands, dtype = problem.operands[0], problem.operands[0][0].dtype
    if problem.op.name == "softmax" and direction == "backward":  # from results as they are rounded
        (y,) = exact(problem, "forward")
        backward = problem.calls.backward
        return (backward.op.reference(backward.case, (*douts_of(problem, (y,)), y), slice(0, len(y)))[0].to(dtype),)
    if problem.function.endswith("_norm") and problem.case.get("residual"):  # the sum is rounded before
        *others, residual = operands
        operands = (others[0] + residual, *others[1:], torch.zeros_like(residual))
    leaves = problem.calls.leaves if direction == "backward" else ()
    wide = tuple(each.double() if each.is_floating_point() else each for each in operands)
    wide = tuple(each.requires_grad_() if index in leaves else each for index, each in enumerate(wide))
    out = sampled_contests._tuple(problem.calls.eager(*wide))
    if direction == "backward":
        douts = douts_of(problem, tuple(each.detach().to(dtype) for each in out))
        out = torch.autograd.grad(out, [wide[index] for index in leaves], [each.double() for each in douts])
    found = tuple(each.detach().to(dtype) if each.is_floating_point() else each for each in out)
    if problem.op.name == "cross_entropy" and direction == "forward":  # and the rows' losses
        rows = problem.op.reference(problem.case, problem.operands[0], slice(0, problem.case.shape[0]))[0]
        return (*found, rows.float())
    return found


def judge(problem, direction):
    """What tells a fault of results or gradients."""
    calls, operands = problem.calls, problem.operands[0]
    if direction == "forward":
        return calls.forward(operands).fault
    out = exact(problem, "forward")
    douts = douts_of(problem, out)
    given = partial(calls.backward.inputs, operands, douts) if calls.backward else None
    return partial(calls.gradients(operands, douts, given), out)


@BY_CELL
def test_what_is_right_passes_and_what_is_off_in_one_element_does_not(function, direction, case) -> None:
    problem = Problem(function, case, 1, device="cpu", sets=1)
    found, fault = exact(problem, direction), judge(problem, direction)
    assert fault(found) == ""
    for index, each in enumerate(found):
        wrong = each.clone()
        last = (-1,) * each.dim()
        wrong[last] = wrong[last] + 1 if not each.is_floating_point() else 3 * each.abs().max() + 1
        assert fault((*found[:index], wrong, *found[index + 1 :])) != ""
    assert fault(found) == ""  # still


@BY_CELL
def test_no_infinity_or_nan_passes(function, direction, case) -> None:
    problem = Problem(function, case, 1, device="cpu", sets=1)
    found, fault = exact(problem, direction), judge(problem, direction)
    for index, each in enumerate(found):
        for value in (math.nan, math.inf) if each.is_floating_point() else ():
            wrong = each.clone()
            wrong[(-1,) * each.dim()] = value
            assert fault((*found[:index], wrong, *found[index + 1 :])) != ""


@BY_CELL
def test_ours_take_what_the_case_holds(function, direction, case) -> None:
    """With PyTorch for a backend; the very calls that are timed."""
    problem = Problem(function, case, 1, device="cpu", sets=1)
    right = sampled_contests._tuple(problem.calls.eager(*problem.operands[0]))
    found = sampled_contests._tuple(problem.calls.ours(*problem.operands[0], backend="torch"))
    assert len(found) == len(right)
    torch.testing.assert_close(found, right)
    assert problem.chosen("forward") == "torch"  # off the GPU


@BY_CELL
def test_a_backward_call_gives_a_gradient_for_each_leaf(function, direction, case) -> None:
    if direction == "backward":
        problem = Problem(function, case, 1, device="cpu", sets=1)
        call = problem.entrant("torch", direction, 0).call
        for _ in range(2):  # again and again, as in a graph
            found = call()
            leaves = [problem.operands[0][index] for index in problem.calls.leaves]
            assert [each.shape for each in found] == [each.shape for each in leaves]


def test_every_backward_pass_is_of_a_function_with_leaves() -> None:
    for function, direction in CONTESTS:
        if direction == "backward":
            assert Problem(function, small(function)[0], 1, "cpu", 1).calls.leaves
    assert {*SMALL} <= {*FUNCTIONS}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_libraries_kernels_are_given_what_their_operation_takes(direction, monkeypatch) -> None:
    """PyTorch's baseline under another name, whose results are judged like any library's."""
    for function in ("softmax", "layer_norm", "rms_norm", "cross_entropy"):
        for slug in SMALL[function]:
            problem = Problem(function, Case.parse(slug), 1, device="cpu", sets=1)
            op = problem.op
            if direction == "backward":
                assert problem.calls.backward is not None
                op = problem.calls.backward.op
            monkeypatch.setitem(op.baselines, "liger", op.baselines["torch"])
            entrant = problem.entrant("liger", direction, 0)
            assert sampled_contests.judged(entrant, sampled_contests._tuple(entrant.trial())) == "ok", slug
            entrant.call()


@pytest.mark.parametrize("function", ["attention", "scaled_dot_product_attention"])
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_flash4_is_given_attention_and_both_its_results_are_judged(function, factor, monkeypatch) -> None:
    asked, torchs = [], OPS["attention"].baselines["torch"]
    assert torchs is not None

    def flash4(q, k, v, *, out, scale, band, **options):
        asked.append((q, k, v))
        results, _ = torchs(q, k, v, out=out, scale=scale, band=band)
        scores = scale * q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
        hidden = ~visible(band, q.shape[2], k.shape[2], q.device)
        return results, factor * scores.masked_fill(hidden, -math.inf).logsumexp(-1)

    monkeypatch.setitem(OPS["attention"].baselines, "flash4", flash4)
    for slug in SMALL[function]:
        problem = Problem(function, Case.parse(slug), 1, device="cpu", sets=1)
        assert "flash4" in problem.names("forward")
        entrant = problem.entrant("flash4", "forward", 0)
        told = sampled_contests.judged(entrant, entrant.trial())
        assert told == "ok" if factor == 1 else told.startswith("wrong: out[1]: "), told
        entrant.call()
        assert all(map(torch.equal, asked.pop(), problem.operands[0]))


def test_flash4_takes_no_part_in_gradients_that_no_operation_computes() -> None:
    problem = Problem("attention", Case.parse(SMALL["attention"][0]), 1, "cpu", 1)
    assert problem.names("backward") == ["torch", "cuda", "triton", "auto"]
    assert "liger" in Problem("softmax", Case.parse(SMALL["softmax"][0]), 1, "cpu", 1).names("backward")


def test_a_kernel_that_a_library_does_not_have_is_skipped() -> None:
    problem = Problem("cross_entropy", Case.parse(SMALL["cross_entropy"][0]), 1, "cpu", 1)
    with pytest.raises(UnavailableError, match=r"^liger has no cross_entropy_backward$"):
        problem.entrant("liger", "backward", 0)


@pytest.fixture
def timed_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Contests without a GPU; the names of those that were timed."""
    names: list[str] = []

    def timed(calls):
        names.extend(calls)
        return {name: Times(times_us=[2.0, 1.0, 3.0, 2.0]) for name in calls}, {"power_w": 700.0}

    monkeypatch.setattr(sampled_timing, "timed", timed)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return names


def with_ours(problem: Problem, monkeypatch: pytest.MonkeyPatch, **ours) -> Problem:
    calls = dataclasses.replace(
        problem.calls, ours=lambda x, backend: ours.get(backend, torch.softmax)(x, -1), chosen=lambda x: "triton"
    )
    monkeypatch.setattr(problem, "calls", calls)
    return problem


def test_a_wrong_call_gets_no_time_nor_auto_where_it_chooses_that(timed_on_cpu, monkeypatch) -> None:
    def refuse(x, dim):
        raise ValueError("no such rows")

    def off(x, dim):
        return torch.softmax(x, dim) * 1.1

    problem = Problem("softmax", Case.parse("33x257-bf16"), 1, device="cpu", sets=2)
    rows = contest(with_ours(problem, monkeypatch, cuda=refuse, triton=off), "forward", {"quack": "wrong: lost"})
    statuses = {row["backend"]: row["status"] for row in rows}
    assert statuses["torch"] == "ok"
    assert statuses["liger"].startswith("skipped: ")
    assert statuses["quack"] == "wrong: lost"
    assert statuses["cuda"] == "wrong: raised no such rows"
    assert statuses["triton"].startswith("wrong: ")
    assert statuses["auto"] == statuses["triton"]
    assert timed_on_cpu == ["torch"]
    (torchs,) = [row for row in rows if row["backend"] == "torch"]
    assert (torchs["us"], torchs["spread_pct"], torchs["power_w"]) == ("2", "12", "700")
    assert {row["backend"]: row["chosen"] for row in rows if row["chosen"]} == {"auto": "triton"}


def test_flash4_is_skipped_where_it_is_unavailable(timed_on_cpu, monkeypatch) -> None:
    problem = Problem("attention", Case.parse(SMALL["attention"][0]), 1, device="cpu", sets=1)
    eager = problem.calls.eager
    ours = lambda *operands, backend: eager(*operands)  # noqa: E731
    monkeypatch.setattr(problem, "calls", dataclasses.replace(problem.calls, ours=ours, chosen=lambda *_: "torch"))
    statuses = {row["backend"]: row["status"] for row in contest(problem, "forward", {})}
    assert statuses == {
        **dict.fromkeys(("torch", "cuda", "triton", "auto"), "ok"),
        "flash4": "skipped: FlashAttention-4 is for tensors on a GPU",
    }
    assert timed_on_cpu == ["torch", "cuda", "triton", "auto"]


def test_a_gpu_that_is_lost_is_told_with_the_call_that_lost_it(timed_on_cpu, monkeypatch) -> None:
    gone = []

    def destroy(x, dim):
        gone.append(True)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    def synchronize() -> None:
        if gone:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    problem = Problem("softmax", Case.parse("33x257-bf16"), 1, device="cpu", sets=1)
    with pytest.raises(LostGpuError) as error:
        contest(with_ours(problem, monkeypatch, cuda=destroy), "forward", {})
    assert (error.value.backend, error.value.status) == (
        "cuda", "wrong: raised CUDA error: an illegal memory access was encountered",
    )  # fmt: skip


def test_a_backend_that_is_missing_ends_the_recording(timed_on_cpu, monkeypatch) -> None:
    def missing(x, dim):
        raise UnavailableError("the CUDA side is missing")

    problem = Problem("softmax", Case.parse("33x257-bf16"), 1, device="cpu", sets=1)
    with pytest.raises(UnavailableError, match=r"^the CUDA side is missing$"):
        contest(with_ours(problem, monkeypatch, cuda=missing), "forward", {})


def test_every_third_case_is_compiled_too() -> None:
    names = [Problem("matmul", Case.parse("8x8x8-bf16"), index, "cpu", 1).names("forward") for index in range(3)]
    assert ["compile" in each for each in names] == [True, False, False]
    assert names[1] == ["torch", "cuda", "triton", "auto"]
    softmax = Problem("softmax", Case.parse("8x8-bf16"), 0, "cpu", 1).names("forward")
    assert softmax[:4] == ["torch", "compile", "liger", "quack"]
    assert OPS["softmax"].baselines.keys() >= {"liger", "quack"}


@pytest.mark.parametrize("function", ["layer_norm", "rms_norm"])
def test_a_norms_gradient_may_err_as_the_forward_passs_statistics_do(function) -> None:
    problem = Problem(function, Case.parse("2x1048576-fp32"), 1, device="cpu", sets=1)
    (dx, dweight, *dbias), fault = exact(problem, "backward"), judge(problem, "backward")
    for found in ((dx * (1 + 3e-6), dweight, *dbias), (dx, dweight * (1 + 3e-6), *dbias)):
        assert fault(found) == ""
    for found in ((dx * (1 + 3e-5), dweight, *dbias), (dx, dweight * (1 + 3e-5), *dbias)):
        assert fault(found) != ""
    if dbias:  # in which they have no part
        assert fault((dx, dweight, dbias[0] * (1 + 3e-6))) != ""


@pytest.mark.parametrize(
    ("call_ms", "sets", "captures", "is_short"),
    [(0.01, 3, [3, 100], True), (0.01, 200, [32, 200], True), (0.9, 3, [3], True), (7.0, 3, [3], False),
     (30.0, 1, [1], False), (30.0, 3, [3, 1], False)],
)  # fmt: skip
def test_a_sample_is_as_long_as_the_gpus_own_time_asks(call_ms, sets, captures, is_short, monkeypatch) -> None:
    """And what is shorter than a while has an untimed one before it, however long the host takes."""
    counts: list[int] = []

    def captured(calls, count, pool):
        counts.append(count)
        return count

    monkeypatch.setattr(sampled_timing, "captured", captured)
    monkeypatch.setattr(sampled_timing, "warm_ms", lambda count: count * call_ms)
    sample = sampled_timing._sample("cuda", [lambda: None] * sets, None)
    assert (counts, sample.calls, sample.is_short) == (captures, captures[-1], is_short)


def test_a_result_of_another_number_shape_or_dtype_is_wrong(timed_on_cpu, monkeypatch) -> None:
    def half(x, dim):
        return torch.softmax(x, dim)[:20]

    def wide(x, dim):
        return torch.softmax(x, dim).float()

    def both(x, dim):
        return torch.softmax(x, dim), x

    problem = Problem("softmax", Case.parse("33x257-bf16"), 1, device="cpu", sets=1)
    told = []
    for ours in (half, wide, both):
        rows = contest(with_ours(problem, monkeypatch, cuda=ours), "forward", {})
        told += [row["status"] for row in rows if row["backend"] == "cuda"]
    assert told == [
        "wrong: result 0 is (20, 257) of torch.bfloat16, must be (33, 257) of torch.bfloat16",
        "wrong: result 0 is (33, 257) of torch.float32, must be (33, 257) of torch.bfloat16",
        "wrong: returned 2 results, must be 1",
    ]


@pytest.mark.parametrize(("function", "kind"), [("softmax", Forward), ("softmax", _OfResult)])
def test_memory_that_the_judge_lacks_is_nobodys_fault(function, kind, timed_on_cpu, monkeypatch) -> None:
    def fault(*_: object, **__: object) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 GiB")

    monkeypatch.setattr(kind, "fault", fault)
    problem = Problem(function, Case.parse("33x257-bf16"), 1, device="cpu", sets=1)
    rows = contest(with_ours(problem, monkeypatch), "forward" if kind is Forward else "backward", {})
    statuses = {row["backend"]: row["status"] for row in rows}
    assert statuses["torch"] == "ok"
    assert {statuses[name] for name in ("cuda", "triton", "auto")} == {"not judged: the judge ran out of memory"}
    assert timed_on_cpu == ["torch"]


def test_memory_that_a_call_lacks_is_its_own_fault(timed_on_cpu, monkeypatch) -> None:
    def greedy(x, dim):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 GiB")

    problem = Problem("softmax", Case.parse("33x257-bf16"), 1, device="cpu", sets=1)
    rows = contest(with_ours(problem, monkeypatch, cuda=greedy), "forward", {})
    (status,) = [row["status"] for row in rows if row["backend"] == "cuda"]
    assert status == "wrong: raised CUDA out of memory. Tried to allocate 60.00 GiB"


def test_what_float64_makes_of_a_case_serves_all_of_ours(timed_on_cpu, monkeypatch) -> None:
    asked = []
    right = OPS["softmax"].reference

    def reference(case, inputs, rows):
        asked.append(rows)
        return right(case, inputs, rows)

    monkeypatch.setitem(OPS, "softmax", dataclasses.replace(OPS["softmax"], reference=reference))
    problem = Problem("softmax", Case.parse("33x257-bf16"), 1, device="cpu", sets=2)
    rows = contest(with_ours(problem, monkeypatch), "forward", {})
    assert [row["status"] for row in rows if row["backend"] in ("cuda", "triton")] == ["ok", "ok"]
    assert asked == [slice(0, 33)]


def test_everybody_is_given_the_same_gradients_of_results() -> None:
    problem = Problem("layer_norm", Case.parse("33x257-bf16-residual.yes"), 1, device="cpu", sets=2)

    def given(number):
        call = problem.entrant("torch", "backward", number).call
        assert isinstance(call, partial)
        return call.args[2]

    first, again = ([given(number) for number in (0, 1)] for _ in range(2))
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], first[1][0])


def test_a_library_that_normalises_a_sum_before_it_is_rounded_is_judged_where_that_makes_no_difference(
    monkeypatch,
) -> None:
    def unrounded(x, weight, residual, *, out, eps):
        added = x.float() + residual.float()
        rstd = (added.square().mean(1, keepdim=True) + eps).rsqrt()
        y = (added * rstd * weight.float()).to(x.dtype)
        return y, rstd[:, 0], added.to(x.dtype)

    problem = Problem("rms_norm", Case.parse("33x257-bf16-residual.yes-x.spaced"), 1, device="cpu", sets=1)
    monkeypatch.setitem(problem.op.baselines, "liger", unrounded)
    entrant = problem.entrant("liger", "forward", 0)
    assert sampled_contests.judged(entrant, entrant.trial()) == "ok"
    assert entrant.fault is not None
    assert entrant.fault(entrant.call()) != ""  # at the case itself, which is timed


def test_the_mean_of_no_loss_at_all_is_nan() -> None:
    problem = Problem("cross_entropy", Case.parse("1x257-bf16-target.ignored"), 1, device="cpu", sets=1)
    fault, of_rows = judge(problem, "forward"), torch.zeros(1)
    right = problem.calls.eager(*problem.operands[0])
    assert right.isnan()
    assert fault((right, of_rows)) == ""
    assert fault((torch.zeros_like(right), of_rows)) != ""
    assert judge(problem, "backward")((torch.zeros_like(problem.operands[0][0]),)) == ""


LINEAR = [
    *("1x512x512-bf16-act.silu", "1x4096x16-fp16-act.gelu", "333x16x40-bf16-act.gelu_tanh", "257x130x66-fp16-act.relu"),
    *("64x2048x16-bf16-act.relu", "1024x24x24-fp16-act.none", "17x40x2048-bf16-act.gelu-w.col"),
]


@pytest.mark.parametrize("slug", LINEAR)
def test_linears_gradients_are_those_of_pytorch_and_off_in_no_element(slug) -> None:
    """By a few times what is rounded on the way: far less than the row's norm would tell."""
    problem = Problem("linear", Case.parse(slug), 1, device="cpu", sets=1)
    found, operands, douts = problem.entrant("torch", "backward", 0).call(), problem.operands[0], problem.douts(0, ())
    out = (problem.calls.eager(*operands),)
    assert problem.calls.gradients is not None
    fault = partial(problem.calls.gradients(operands, douts, lambda out: out), out)
    assert fault(found) == ""
    for index, each in enumerate(found):
        wrong = each.clone().float()
        wrong[(-1,) * each.dim()] += 0.25 * wrong.square().mean().sqrt() + 0.05 * wrong[(-1,) * each.dim()].abs()
        assert fault((*found[:index], wrong.to(each.dtype), *found[index + 1 :])) != ""
        biased = (each.float() * 1.04).to(each.dtype)
        assert fault((*found[:index], biased, *found[index + 1 :])) != ""


def test_a_gradient_of_relu_is_on_the_side_of_0_that_the_result_is() -> None:
    """On either, where fp32 cannot tell the sum from 0."""
    problem = Problem("linear", Case.parse("64x16x32-bf16-act.relu"), 1, device="cpu", sets=1)
    x, weight, bias = problem.operands[0]
    x[:, 0], x[:, 1] = 1, -1
    weight[3, :2], weight[3, 2:], bias[3] = 1, 0, 0  # 1 - 1
    right = problem.calls.eager(x, weight, bias)
    (dout,) = problem.douts(0, (right,))
    assert problem.calls.gradients is not None
    fault = problem.calls.gradients((x, weight, bias), (dout,), lambda out: out)

    def gradients(out):
        dz = dout.float() * (out > 0)
        found = (dz @ weight.float(), dz.t() @ x.float(), dz.sum(0))
        return tuple(each.to(x.dtype) for each in found)

    above = right.clone()
    above[:, 3] = 4e-7
    for out, other in ((right, above), (above, right)):
        assert fault((out,), gradients(out)) == ""
        assert "gradient: " in fault((out,), gradients(other))
    stale = right.masked_fill(right == 0, math.nan)  # which is not above 0
    assert fault((stale,), gradients(stale)) == ""
    assert "gradient: " in fault((stale,), gradients(torch.ones_like(right)))
    everywhere = right.clamp_min(4e-7)  # as if nothing were masked, and the result as good as 0
    assert fault((everywhere,), gradients(everywhere)) == "the result is on the other side of 0 than its sum"


def test_a_result_of_relu_may_be_on_the_side_that_pytorchs_sum_is_on(monkeypatch) -> None:
    """Tensor cores cut off what their sums have no places for, in PyTorch's products as in ours."""
    case = Case.parse("64x16x32-bf16-act.relu")
    x, weight, bias = operands = Problem("linear", case, 1, device="cpu", sets=1).operands[0]
    x[:, 0], x[:, 1] = 1, -1
    weight[3, :2], weight[3, 2:], bias[3] = 1, 0, 1e-4
    out = torch.relu(torch.nn.functional.linear(*operands))
    assert contest_judge.side_fault(case, operands, out) == ""
    out[:, 3] = 0
    assert contest_judge.side_fault(case, operands, out) != ""

    def cut_off(*given):
        found = torch.nn.functional.linear(*given)
        found[:, 3] -= 2e-4
        return found

    monkeypatch.setattr(contest_judge, "functional", SimpleNamespace(linear=cut_off))
    assert contest_judge.side_fault(case, operands, out) == ""
    assert contest_judge.side_fault(case, operands, torch.zeros_like(out)) != ""


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_a_gradient_of_linear_is_held_to_fp32_sums_where_nothing_is_rounded_before(activation) -> None:
    """Sums of what was rounded once more, as a smooth activation's gradient is, are refused."""
    problem = Problem("linear", Case.parse(f"64x512x32-bf16-act.{activation}"), 1, device="cpu", sets=1)
    x, weight, bias = problem.operands[0]
    out = problem.calls.eager(x, weight, bias)
    (dout,) = problem.douts(0, (out,))
    assert problem.calls.gradients is not None
    fault = problem.calls.gradients((x, weight, bias), (dout,), lambda out: out)
    right = problem.entrant("torch", "backward", 0).call()
    assert fault((out,), right) == ""
    dz = dout.double() if activation == "none" else dout.double() * (out > 0)
    scattered = dz * (1 + 2**-9 * torch.randn(dz.shape, generator=torch.Generator().manual_seed(0)))
    dx = (scattered @ weight.double()).to(x.dtype)
    assert fault((out,), (dx, *right[1:])) != ""


def test_as_many_shapes_are_compiled_as_there_are() -> None:
    with sampled_contests.compiling():
        made = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True, dynamic=False)
        assert [len(made(torch.zeros(size))) for size in range(2, 20)] == [*range(2, 20)]


def test_rows_are_those_of_the_operands_before_a_call_in_place_writes_to_them() -> None:
    problem = Problem("cross_entropy_gradient_", Case.of(4, 8, dtype="fp32"), 0, device="cpu", sets=1)
    problem.calls = dataclasses.replace(
        problem.calls,
        ours=lambda logits, target, backend: (logits.zero_().sum(), logits),
        rows=lambda logits, target, backend: logits.sum(1),
    )
    *_, rows = problem.entrant("cuda", "forward", 0).trial()
    assert bool(rows.any())

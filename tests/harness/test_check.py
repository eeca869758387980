"""The checker finds every kind of wrong kernel, and does not mind right ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS, load_baseline  # noqa: E402
from kernel_twins.errors import UnavailableError  # noqa: E402
from kernel_twins.harness.bench import _gate  # noqa: E402
from kernel_twins.harness.check import Judge, check, check_baseline  # noqa: E402
from kernel_twins.spec import Case, Name  # noqa: E402
from tests import forks  # noqa: E402
from tests.cases import with_few_heads, with_fewer_rows  # noqa: E402

ADD = OPS["vector_add"]
MATMUL = OPS["matmul_fp32"]
NORM, NORM_BACKWARD = OPS["layer_norm"], OPS["layer_norm_backward"]
CASE = Case.of(1_003, dtype="fp32")
NORM_CASE = Case.of(37, 1_003, dtype="fp32")


def right(a, b, *, out):
    torch.add(a, b, out=out)


def zeros(a, b, *, out):
    out.zero_()


def stale(a, b, *, out):
    pass


def missed_tail(a, b, *, out):
    torch.add(a[:-3], b[:-3], out=out[:-3])


def one_element_off(a, b, *, out):
    right(a, b, out=out)
    out[500] += 1e-3


def one_nan(a, b, *, out):
    right(a, b, out=out)
    out[500] = math.nan


def low_precision(a, b, *, out):
    out.copy_((a.bfloat16() + b.bfloat16()).float())


def changed_input(a, b, *, out):
    right(a, b, out=out)
    a[7] = 0


def wrote_behind(a, b, *, out):
    right(a, b, out=out)
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).zero_()


def wrote_before(a, b, *, out):
    right(a, b, out=out)
    torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).zero_()


@pytest.mark.parametrize("wrong", [zeros, stale, missed_tail, one_element_off, one_nan, low_precision])
def test_wrong_values_are_found(wrong: Callable[..., None]) -> None:
    verdict = check(ADD, wrong, CASE, device="cpu")
    assert not verdict.ok
    assert "element" in verdict.reason


@pytest.mark.parametrize(
    ("wrong", "reason"), [(changed_input, "input 0"), (wrote_behind, "outside"), (wrote_before, "outside")]
)
def test_side_effects_are_found(wrong: Callable[..., None], reason: str) -> None:
    verdict = check(ADD, wrong, CASE, device="cpu")
    assert not verdict.ok
    assert reason in verdict.reason


@pytest.mark.parametrize("values", ["inf", "nan"])
def test_lost_infinities_and_nans_are_found(values: str) -> None:
    def finite(a, b, *, out):
        out.copy_((a + b).nan_to_num(nan=0.0, posinf=3.0))

    case = Case.of(1_003, dtype="fp32", values=values)
    assert check(ADD, right, case, device="cpu").ok
    assert not check(ADD, finite, case, device="cpu").ok


def test_low_precision_products_are_found() -> None:
    def bf16(a, b, *, out):
        out.copy_(a.bfloat16() @ b.bfloat16())

    assert not check(MATMUL, bf16, Case.of(64, 64, 64, dtype="fp32"), device="cpu").ok


@pytest.mark.parametrize("size", [1_003, 1_000_003])
def test_a_sum_that_misses_its_tail_is_found(size: int) -> None:
    def missed(x, *, out):
        torch.sum(x[:-1], dim=0, out=out)

    def twice(x, *, out):
        torch.sum(torch.cat([x, x[-1:]]), dim=0, out=out)

    case = Case.of(size, dtype="fp32", values="tail")
    assert not check(OPS["reduction"], missed, case, device="cpu").ok
    assert not check(OPS["reduction"], twice, case, device="cpu").ok


# ----------------------------------------------------------------------------------------------------------------------
# Several outputs
# ----------------------------------------------------------------------------------------------------------------------


def normalised(x, weight, bias, *, eps):
    mean = x.mean(dim=1, keepdim=True)
    rstd = ((x - mean).square().mean(dim=1, keepdim=True) + eps).rsqrt()
    return (x - mean) * rstd * weight + bias, mean[:, 0], rstd[:, 0]


def gradients(dout, x, mean, rstd, weight):
    xhat, g = (x - mean[:, None]) * rstd[:, None], dout * weight
    dx = g - g.mean(dim=1, keepdim=True) - xhat * (g * xhat).mean(dim=1, keepdim=True)
    return dx * rstd[:, None], (dout * xhat).sum(dim=0), dout.sum(dim=0)


def written(function: Callable[..., Any], wrong: Callable[..., Any] = lambda outs: None) -> Callable[..., None]:
    """A call that writes what a function returns, and then does something wrong to it."""

    def call(*inputs: Any, out: Any, **options: Any) -> None:
        for each, values in zip(out, function(*inputs, **options), strict=True):
            each.copy_(values)
        wrong(out)

    return call


def test_each_of_several_outputs_may_be_right() -> None:
    assert check(NORM, written(normalised), NORM_CASE, device="cpu").ok
    assert check(NORM_BACKWARD, written(gradients), NORM_CASE, device="cpu").ok


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize(
    "wrong",
    [
        lambda out: out.fill_(math.nan),  # as it was found: nothing was written
        lambda out: out.mul_(1.01),
        lambda out: out[-1:].zero_(),
        lambda out: out[out.shape[0] // 2].fill_(math.nan),
        lambda out: out.copy_(out.bfloat16()),
    ],
    ids=["stale", "one percent off", "missed tail", "one NaN", "low precision"],
)
@pytest.mark.parametrize(("op", "function"), [(NORM, normalised), (NORM_BACKWARD, gradients)], ids=["forward", "back"])
def test_a_wrong_one_of_several_outputs_is_found_and_named(op, function, wrong, index: int) -> None:
    verdict = check(op, written(function, lambda outs: wrong(outs[index])), NORM_CASE, device="cpu")
    assert not verdict.ok
    assert verdict.reason.startswith(f"out[{index}]: element (")


def test_writing_behind_a_later_output_is_found() -> None:
    def wrong(outs):
        torch.as_strided(outs[2], (1,), (1,), outs[2].storage_offset() + outs[2].numel()).zero_()

    assert "outside" in check(NORM, written(normalised, wrong), NORM_CASE, device="cpu").reason


def test_results_that_are_returned_are_judged_instead() -> None:
    def unwritten(*inputs, out, eps):
        return normalised(*inputs, eps=eps)

    def stale(*inputs, out, eps):
        y, mean, rstd = normalised(*inputs, eps=eps)
        return y, mean, rstd + 1

    def transposed(*inputs, out, eps):
        y, mean, rstd = normalised(*inputs, eps=eps)
        return y, mean[None], rstd

    assert check(NORM, unwritten, NORM_CASE, device="cpu").ok
    assert check(NORM, stale, NORM_CASE, device="cpu").reason.startswith("out[2]: ")
    assert "returned (1, 37) of torch.float32, must be (37,)" in check(NORM, transposed, NORM_CASE, device="cpu").reason
    assert check(ADD, lambda a, b, *, out: a + b, CASE, device="cpu").ok


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_every_output_of_every_case_has_a_reference(op) -> None:
    cases = (*op.test_cases, *op.huge_cases, *op.timed_cases, op.profile_case)
    assert max(len(op.outputs(case)) for case in cases) == 1 + len(op.more_references)


@pytest.mark.parametrize("op", OPS)
def test_pytorch_passes_on_every_case(op: str) -> None:
    """Of many rows on some: a bound is of an element."""
    assert forks.call("tests.harness.test_check", "misjudged", op) == []


def misjudged(name: str) -> list[str]:
    op, call = OPS[name], load_baseline(name, "torch")
    wrong = []
    cases = dict.fromkeys(with_few_heads(with_fewer_rows(case, 2**16)) for case in op.test_cases)
    for case in (judged for each in cases for judged in op.judged_cases(each)):
        if math.prod(case.shape) > 2**26 or case.get("scale") == "neg":
            continue  # seconds without a GPU; PyTorch's attention makes NaN of a negative scale
        # oneDNN's gelu, which some processors get, makes infinity NaN: pytorch/pytorch#185770.
        with torch.backends.mkldnn.flags(enabled=case.get("values") != "inf"):
            try:
                verdict = check_baseline(op, call, case, device="cpu")
            except UnavailableError:  # PyTorch has no softcap, and no packed sequences
                continue
        wrong += [] if verdict.ok else [f"{case.slug}: {verdict.reason}"]
    return wrong


def test_a_call_that_changed_its_inputs_spoils_no_other() -> None:
    judge = Judge(ADD, CASE, device="cpu")

    def change_and_raise(a, b, *, out):
        a.zero_()
        raise RuntimeError("no more memory")

    assert judge(right).ok
    assert not judge(changed_input).ok
    assert judge(right).ok
    with pytest.raises(RuntimeError, match="no more memory"):
        judge(change_and_raise)
    assert judge(right).ok


def test_what_pytorch_rounds_on_the_way_is_forgiven_baselines_alone() -> None:
    op, case = OPS["cross_entropy"], Case.of(9, 1_003, dtype="bf16")
    assert check_baseline(op, load_baseline("cross_entropy", "torch"), case, device="cpu").ok
    assert not check(op, load_baseline("cross_entropy", "torch"), case, device="cpu").ok


def test_baselines_need_not_be_right_on_hostile_inputs() -> None:
    """As people use them who have no such inputs, and their time is what ours is compared with."""
    op, case = OPS["softmax"], Case.of(9, 1_003, dtype="fp32")

    def without_maximum(x, *, out, log):
        powers = x.exp()
        out.copy_(powers / powers.sum(1, keepdim=True))

    assert check_baseline(op, without_maximum, case, device="cpu").ok
    assert check(op, without_maximum, case, device="cpu").reason.startswith("values.hostile: ")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_baselines_may_normalise_a_sum_before_it_is_rounded(dtype: str) -> None:
    """As torch.compile's kernel does; a step may not, and a baseline must still be right."""
    op, case = OPS["layer_norm"], Case.of(37, 1_003, dtype=dtype, residual="yes")

    def unrounded(x, weight, bias, residual, *, out, eps, factor=1.0):
        wide = x.double() + residual.double()
        deviation = wide - wide.mean(1, keepdim=True)
        rstd = (deviation.square().mean(1, keepdim=True) + eps).rsqrt()
        y = factor * deviation * rstd * weight.double() + bias.double()
        for each, value in zip(out, (y, wide.mean(1), rstd[:, 0], wide), strict=True):
            each.copy_(value)

    assert check_baseline(op, unrounded, case, device="cpu").ok
    assert check(op, unrounded, case, device="cpu").ok is (dtype == "fp32")
    assert not check_baseline(op, partial(unrounded, factor=1.02), case, device="cpu").ok


NOT_JUDGED = "not judged: the judge ran out of memory"


def test_memory_that_the_judge_lacks_is_no_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 60.00 GiB")

    def greedy(*_: object, **__: object) -> None:
        lacking()

    op, case, right = OPS["vector_add"], CASE, load_baseline("vector_add", "torch")
    without_memory = Judge(dataclasses.replace(op, reference=lacking), case, device="cpu")
    step = Name("cuda", op.steps[0].name)
    assert _gate(without_memory, step, right).status == NOT_JUDGED
    cannot_draw = Judge(dataclasses.replace(op, inputs=lacking), case, device="cpu")
    assert _gate(cannot_draw, step, right).status == NOT_JUDGED
    for needed in ("GuardedOutput", "_same_bits"):  # before the call, and after it
        with monkeypatch.context() as context:
            context.setattr(f"kernel_twins.harness.check.{needed}", lacking)
            assert _gate(Judge(op, case, device="cpu"), step, right).status == NOT_JUDGED
    assert _gate(Judge(op, case, device="cpu"), step, greedy).status.startswith("wrong: raised CUDA out of memory")
    assert _gate(Judge(op, case, device="cpu"), step, right).status == "ok"

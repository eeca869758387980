"""The checker finds every kind of wrong kernel, and does not mind right ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS, load_baseline  # noqa: E402
from kernel_twins.check import check  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

ADD = OPS["vector_add"]
MATMUL = OPS["matmul_fp32"]
CASE = Case.of(1_003, dtype="fp32")


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


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_pytorch_passes_on_every_case(op) -> None:
    call = load_baseline(op.name, "torch")
    for case in op.test_cases:
        if math.prod(case.shape) > 2**26:
            continue  # seconds without a GPU
        verdict = check(op, call, case, device="cpu")
        assert verdict.ok, f"{case.slug}: {verdict.reason}"

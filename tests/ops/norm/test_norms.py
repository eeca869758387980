"""The specs of layer_norm and rms_norm without a GPU: what they compute, what their rule finds, what they refuse."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS, load_baseline  # noqa: E402
from kernel_twins.harness.check import check, generator  # noqa: E402
from kernel_twins.ops import in_parts  # noqa: E402
from kernel_twins.ops.norm import shared  # noqa: E402
from kernel_twins.ops.tensors import empty_outputs  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

functional = torch.nn.functional
NAMES = ("layer_norm", "rms_norm")
VARIANTS: list[dict[str, str]] = [
    {},
    {"affine": "none"},
    {"residual": "yes"},
    {"values": "outliers"},
    {"values": "shifted"},
    {"x": "pitched"},
    {"x": "expanded", "dout": "expanded"},
    {"offset": "1"},
]
BY_NAME = pytest.mark.parametrize("name", NAMES)
BY_VARIANT = pytest.mark.parametrize("variant", VARIANTS, ids=lambda each: Case.of(1, dtype="fp32", **each).slug[7:])


def inputs_of(op: Any, case: Case) -> tuple[Any, ...]:
    return op.inputs(case, generator(case, "cpu"))


def pytorchs(name: str, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    if name == "layer_norm":
        return functional.layer_norm(x, x.shape[1:], weight, bias, eps)
    return functional.rms_norm(x, x.shape[1:], weight, eps)


def whole(op: Any, case: Case, inputs: tuple[Any, ...]) -> list[Any]:
    """What all references say of all elements, without the terms."""
    references = (op.reference, *op.more_references)
    return [
        reference(case, inputs, slice(0, output.shape[0]))[0]
        for reference, output in zip(references, op.outputs(case), strict=False)
    ]


# ----------------------------------------------------------------------------------------------------------------------
# References
# ----------------------------------------------------------------------------------------------------------------------


@BY_NAME
@BY_VARIANT
def test_forward_references_are_pytorchs(name, variant) -> None:
    op = OPS[name]
    case = Case.of(7, 1_003, dtype="bf16", **variant)
    inputs = inputs_of(op, case)
    given: list[Any] = [*inputs, None, None, None]
    x, weight, bias, residual = given[:4] if name == "layer_norm" else (*given[:2], None, given[2])
    assert (residual is not None) == (variant.get("residual") == "yes")
    row = (x if residual is None else x + residual).double()
    weight, bias = (None if each is None else each.double() for each in (weight, bias))
    y, *statistics = whole(op, case, inputs)
    torch.testing.assert_close(y, pytorchs(name, row, weight, bias, op.options(case)["eps"]))
    if residual is not None:
        torch.testing.assert_close(statistics.pop(), x.double() + residual.double())
    mean, rstd = statistics if name == "layer_norm" else (torch.zeros(()), statistics[0])
    torch.testing.assert_close((row - mean[..., None]) * rstd[:, None], pytorchs(name, row, None, None, norm(name).eps))


def norm(name: str) -> shared.Norm:
    return shared.LAYER if name == "layer_norm" else shared.RMS


@BY_NAME
@BY_VARIANT
def test_backward_references_are_autograds(name, variant) -> None:
    """Statistics are given, in fp32, which limits how near they are to those of float64."""
    op = OPS[f"{name}_backward"]
    case = Case.of(7, 1_003, dtype="bf16", **variant)
    inputs = inputs_of(op, case)
    given: list[Any] = [*inputs, None, None]
    dout, x, weight, dadded = (given[i] for i in ((0, 1, 4, 5) if name == "layer_norm" else (0, 1, 3, 4)))
    leaves = [x.double().contiguous().requires_grad_()]
    if weight is not None:
        leaves.append(weight.double().requires_grad_())
        if name == "layer_norm":
            leaves.append(torch.zeros(case.shape[1], dtype=torch.float64, requires_grad=True))
    operands: list[Any] = [*leaves, None, None]
    x64, weight64, bias64 = operands[:3]
    y = pytorchs(name, x64, weight64, bias64, norm(name).eps)
    total = (y * dout.double()).sum()
    if dadded is not None:
        total = total + (x64 * dadded.double()).sum()
    expected = torch.autograd.grad(total, leaves)
    shifted = variant.get("values") == "shifted"  # x and dout are about 1000, of which mean is rounded
    for ours, theirs in zip(whole(op, case, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1.0 if shifted else 1e-5)


@pytest.mark.parametrize("name", [each + way for each in NAMES for way in ("", "_backward")])
def test_references_are_the_same_in_pieces(name, monkeypatch) -> None:
    """Of an output's rows, and of the rows that they look at themselves."""
    op = OPS[name]
    case = Case.of(40, 33, dtype="fp32", residual="yes")
    inputs = inputs_of(op, case)
    references = (op.reference, *op.more_references)
    before = [
        reference(case, inputs, slice(0, output.shape[0]))
        for reference, output in zip(references, op.outputs(case), strict=True)
    ]
    monkeypatch.setattr(in_parts, "_CHUNK", 100)
    for reference, output, both in zip(references, op.outputs(case), before, strict=True):
        pieces = [slice(start, min(start + 7, output.shape[0])) for start in range(0, output.shape[0], 7)]
        for index in range(2):
            found = torch.cat([reference(case, inputs, piece)[index] for piece in pieces])
            torch.testing.assert_close(found, both[index])


@pytest.mark.filterwarnings("ignore:var_mean")  # PyTorch's, of nothing
@BY_NAME
@pytest.mark.parametrize("variant", [{}, {"affine": "none"}, {"residual": "yes"}], ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (3, 1)], ids=str)
def test_of_nothing_statistics_are_nan_and_sums_are_zero(name, shape, variant) -> None:
    case = Case.of(*shape, dtype="fp32", **variant)
    op, backward = OPS[name], OPS[f"{name}_backward"]
    rstd = whole(op, case, inputs_of(op, case))[2 if name == "layer_norm" else 1]
    assert rstd.shape == shape[:1] and bool(rstd.isnan().all()) == (shape[1] == 0 or shape[0] == 0)
    _, *sums = whole(backward, case, inputs_of(backward, case))
    assert all(each.shape == shape[1:] for each in sums)
    assert shape[0] > 0 or all(bool((each == 0).all()) for each in sums)
    for each in (op, backward):
        assert check(each, load_baseline(each.name, "torch"), case, device="cpu").ok


# ----------------------------------------------------------------------------------------------------------------------
# The accuracy rule
# ----------------------------------------------------------------------------------------------------------------------


def by(statistics: Any) -> Any:
    """layer_norm in fp32 with the mean and the variance that a function finds."""

    def call(x: Any, weight: Any = 1.0, bias: Any = 0.0, residual: Any = None, *, out: Any, eps: float) -> None:
        row = (x if residual is None else x + residual).float()
        mean, variance = statistics(row)
        rstd = (variance + eps).rsqrt()
        out[0].copy_((row - mean[:, None]) * rstd[:, None] * weight + bias)
        out[1].copy_(mean)
        out[2].copy_(rstd)
        if residual is not None:
            out[3].copy_(x + residual)

    return call


def two_passes(x: Any) -> tuple[Any, Any]:
    mean = x.mean(dim=1)
    return mean, (x - mean[:, None]).square().mean(dim=1)


def welford(x: Any) -> tuple[Any, Any]:
    """By 64 threads, each of which goes along every 64th element."""
    counts, means, squares = torch.zeros(64), torch.zeros(x.shape[0], 64), torch.zeros(x.shape[0], 64)
    for part in x.split(64, dim=1):
        some = slice(0, part.shape[1])
        counts[some] += 1
        distance = part - means[:, some]
        means[:, some] += distance / counts[some]
        squares[:, some] += distance * (part - means[:, some])
    return merged(counts, means, squares)


def merged(counts: Any, means: Any, squares: Any) -> tuple[Any, Any]:
    """Mean and variance of all parts, by Chan's formula."""
    count, mean, total = counts[0], means[:, 0], squares[:, 0]
    for size, its_mean, its_squares in zip(counts[1:], means.T[1:], squares.T[1:], strict=True):
        distance, share = its_mean - mean, size / (count + size)
        mean, total = mean + distance * share, total + its_squares + distance.square() * count * share
        count = count + size
    return mean, total / count


def by_chan(x: Any) -> tuple[Any, Any]:
    """Of 8 parts, merged."""
    parts = x.chunk(8, dim=1)
    counts = torch.tensor([float(part.shape[1]) for part in parts])
    means, variances = (torch.stack(each, dim=1) for each in zip(*map(two_passes, parts), strict=True))
    return merged(counts, means, variances * counts)


def moments(x: Any) -> tuple[Any, Any]:
    mean = x.mean(dim=1)
    return mean, (x.square().mean(dim=1) - mean.square()).clamp_min(0.0)


def without_its_tail(x: Any) -> tuple[Any, Any]:
    return two_passes(x[:, : x.shape[1] // 8 * 8])


def unbiased(x: Any) -> tuple[Any, Any]:
    return x.mean(dim=1), x.var(dim=1)


ORDINARY = [Case.of(9, 5_003, dtype=dtype) for dtype in ("fp32", "bf16")]
OUTLIERS = [Case.of(9, 5_003, dtype=dtype, values="outliers") for dtype in ("fp32", "bf16")]
SHIFTED = [Case.of(9, 5_003, dtype=dtype, values="shifted") for dtype in ("fp32", "bf16")]


@pytest.mark.parametrize("case", [*ORDINARY, *OUTLIERS, *SHIFTED], ids=lambda case: case.slug)
@pytest.mark.parametrize("statistics", [two_passes, welford, by_chan])
def test_any_sound_way_to_the_statistics_is_right(statistics, case) -> None:
    verdict = check(OPS["layer_norm"], by(statistics), case, device="cpu")
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("statistics", [two_passes, welford, by_chan])
def test_rows_of_one_value_are_no_fault_of_a_kernel(statistics, dtype) -> None:
    """The mean of equal values is rounded, and the deviation is as small as that."""
    op = OPS["layer_norm"]
    case = Case.of(9, 1_003, dtype=dtype)
    equal = torch.full(case.shape, 1000.3).to(inputs_of(op, case)[0].dtype)
    rows_of_one_value = dataclasses.replace(op, inputs=lambda case, generator: (equal.clone(),))
    verdict = check(rows_of_one_value, by(statistics), case, device="cpu")
    assert verdict.ok, verdict.reason


def test_a_variance_that_cancels_is_found_where_the_mean_is_large() -> None:
    for case in SHIFTED:
        assert not check(OPS["layer_norm"], by(moments), case, device="cpu").ok


@pytest.mark.parametrize("case", [*ORDINARY, *OUTLIERS], ids=lambda case: case.slug)
@pytest.mark.parametrize("statistics", [without_its_tail, unbiased, lambda x: (x.mean(dim=1).bfloat16(), x.var(dim=1))])
def test_wrong_statistics_are_found(statistics, case) -> None:
    assert not check(OPS["layer_norm"], by(statistics), case, device="cpu").ok


def gradients(dout: Any, x: Any, mean: Any, rstd: Any, weight: Any, *, out: Any, wrong: str = "") -> None:
    """In fp32, in the ways that a kernel may."""
    dout, x, weight = (each.float() for each in (dout, x, weight))
    xhat = (x - mean[:, None]) * rstd[:, None]
    if wrong == "xhat in bf16":
        xhat = xhat.bfloat16().float()
    rows = slice(0, -1) if wrong == "a row is missed" else slice(None)
    last = -3 if wrong == "a row's tail is missed" else None
    g = dout * weight
    c1, c2 = ((each[:, :last]).sum(dim=1, keepdim=True) / x.shape[1] for each in (g * xhat, g))
    out[0].copy_(rstd[:, None] * (g - c2 - xhat * c1))
    out[1].copy_((dout * xhat)[rows].sum(dim=0))
    out[2].copy_(dout[rows].sum(dim=0))


BACKWARD = [
    Case.of(300, 1_003, dtype=dtype, **variant)
    for dtype, variant in itertools.product(("fp32", "bf16"), ({}, {"values": "outliers"}, {"values": "shifted"}))
]


@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: case.slug)
def test_gradients_in_fp32_are_right(case) -> None:
    verdict = check(OPS["layer_norm_backward"], gradients, case, device="cpu")
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("wrong", ["a row is missed", "a row's tail is missed", "xhat in bf16"])
@pytest.mark.parametrize("case", [case for case in BACKWARD if not case.variant], ids=lambda case: case.slug)
def test_wrong_gradients_are_found(case, wrong) -> None:
    if wrong == "xhat in bf16" and case.dtype == "bf16":
        pytest.skip("it errs by as much as the rounding of the results")

    def call(*inputs: Any, out: Any) -> None:
        gradients(*inputs, out=out, wrong=wrong)

    assert not check(OPS["layer_norm_backward"], call, case, device="cpu").ok


# ----------------------------------------------------------------------------------------------------------------------
# Cases
# ----------------------------------------------------------------------------------------------------------------------


@BY_NAME
def test_cases_cover_what_an_input_may_be(name) -> None:
    backward = OPS[f"{name}_backward"]
    for op in (OPS[name], backward):
        layout = "dout" if op is backward else "x"
        for wanted in (
            {layout: "pitched"},
            {layout: "expanded"},
            {"residual": "yes"},
            {"residual": "yes", layout: "pitched"},
            {"affine": "none"},
            {"offset": "1"},
            {"values": "outliers"},
            {"values": "shifted"},
        ):
            assert any(wanted.items() <= dict(case.variant).items() for case in op.test_cases), wanted
        assert {0, 1, 2**20} <= {case.shape[1] for case in op.test_cases}
        assert max(math.prod(case.shape) for case in op.huge_cases) > 2**31
        for case in op.test_cases:
            if math.prod(case.shape) < 2**16:
                op.check(*inputs_of(op, case), out=empty_outputs(op, case, "cpu"), **op.options(case))


def test_least_traffic_counts_the_residual() -> None:
    for name, matrices in (("layer_norm", 2), ("layer_norm_backward", 3), ("rms_norm", 2), ("rms_norm_backward", 3)):
        op = OPS[name]
        assert op.bytes(Case.of(8, 16, dtype="bf16")) == matrices * 8 * 16 * 2
        assert op.bytes(Case.of(8, 16, dtype="bf16", residual="yes")) == 4 * 8 * 16 * 2


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def x(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.zeros(*shape, dtype=dtype)


FORWARD = {"x": x(3, 8), "weight": x(8), "residual": x(3, 8)}
FORWARD_REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": x(3, 8).double()}, TypeError, "x is torch.float64, must be torch.float32 or"),
    ({"x": x(8)}, ValueError, "x has 1 dimensions, must have 2"),
    ({"x": x(8, 3).t()}, ValueError, r"x has strides .*, must have contiguous rows: call x.contiguous\(\)"),
    ({"weight": x(8).half()}, TypeError, "weight is torch.float16, must be torch.float32 like x"),
    ({"weight": x(3)}, ValueError, r"weight has shape \(3,\), must have \(8,\): one element for each column of x"),
    ({"weight": x(8, 2)[:, 0]}, ValueError, "weight has strides .*, must be contiguous"),
    ({"weight": [1.0]}, TypeError, "weight is a list, must be a torch.Tensor"),
    ({"residual": x(2, 8)}, ValueError, r"residual has shape \(2, 8\), must have \(3, 8\): one element for each of x"),
    ({"residual": x(3, 16)[:, ::2]}, ValueError, "residual has strides .*, must have contiguous rows"),
    ({"residual": x(3, 8, dtype=torch.bfloat16)}, TypeError, "residual is torch.bfloat16, must be .* like x"),
]


def outs_of(name: str, rows: int = 3, n: int = 8, residual: bool = True) -> tuple[Any, ...]:
    statistics = (x(rows), x(rows)) if name == "layer_norm" else (x(rows),)
    return (x(rows, n), *statistics, *((x(rows, n),) if residual else ()))


@BY_NAME
@pytest.mark.parametrize(("changed", "error", "message"), FORWARD_REFUSALS, ids=lambda each: str(each)[:40])
def test_wrong_inputs_are_refused_by_name(name, changed, error, message) -> None:
    with pytest.raises(error, match=message):
        OPS[name].check(**(FORWARD | changed), out=outs_of(name))


@BY_NAME
def test_wrong_outs_are_refused_by_their_place(name) -> None:
    refuses = OPS[name].check
    out, last = outs_of(name), len(outs_of(name)) - 1
    names = "y, mean, rstd, added" if name == "layer_norm" else "y, rstd, added"
    refuses(**FORWARD, out=out)
    with pytest.raises(TypeError, match=f"out is a Tensor, must be a tuple of {last + 1} tensors: {names}"):
        refuses(**FORWARD, out=out[0])
    with pytest.raises(ValueError, match=f"out has {last} tensors, must have {last + 1}: {names}"):
        refuses(**FORWARD, out=out[:-1])
    with pytest.raises(TypeError, match=r"out\[1\] is torch.bfloat16, must be torch.float32"):
        refuses(**FORWARD, out=(out[0], out[1].bfloat16(), *out[2:]))
    with pytest.raises(ValueError, match=r"out\[1\] has shape \(4,\), must have \(3,\): one number for each row of x"):
        refuses(**FORWARD, out=(out[0], x(4), *out[2:]))
    with pytest.raises(ValueError, match=r"out\[0\] has strides .*, must be contiguous: allocate it so with"):
        refuses(**FORWARD, out=(x(3, 16)[:, :8], *out[1:]))
    with pytest.raises(ValueError, match="out overlaps x in memory"):
        refuses(**FORWARD, out=(FORWARD["x"], *out[1:]))
    with pytest.raises(ValueError, match=r"out overlaps out\[0\] in memory"):
        refuses(**FORWARD, out=(*out[:-1], out[0]))


@BY_NAME
def test_wrong_gradients_and_statistics_are_refused_by_name(name) -> None:
    refuses = OPS[f"{name}_backward"].check
    is_layer = name == "layer_norm"
    given = {"dout": x(3, 8), "x": x(3, 8), "rstd": x(3), "weight": x(8)} | ({"mean": x(3)} if is_layer else {})
    out = (x(3, 8), x(8), x(8))[: 3 if is_layer else 2]
    refuses(**given, out=out)
    refuses(**(given | {"weight": None}), out=out[0])
    for changed, error, message in (
        ({"dout": x(3, 8).double()}, TypeError, "dout is torch.float64"),
        ({"x": x(3, 9)}, ValueError, r"x has shape \(3, 9\), must have \(3, 8\): one element for each of dout"),
        ({"x": x(3, 8).half()}, TypeError, "x is torch.float16, must be torch.float32 like dout"),
        ({"rstd": x(3, 1)}, ValueError, r"rstd has shape \(3, 1\), must have \(3,\): one number for each row of dout"),
        ({"rstd": x(3).bfloat16()}, TypeError, "rstd is torch.bfloat16, must be torch.float32"),
        ({"dadded": x(3, 9)}, ValueError, r"dadded has shape \(3, 9\)"),
    ):
        with pytest.raises(error, match=message):
            refuses(**(given | changed), out=out)
    names = "dx, dweight, dbias" if is_layer else "dx, dweight"
    with pytest.raises(TypeError, match=f"out is a Tensor, must be a tuple of {len(out)} tensors: {names}"):
        refuses(**given, out=out[0])
    with pytest.raises(TypeError, match="out is a tuple, must be one tensor: dx"):
        refuses(**(given | {"weight": None}), out=out)
    with pytest.raises(ValueError, match=r"out\[1\] has shape \(7,\), must have \(8,\): one element for each column"):
        refuses(**given, out=(out[0], x(7), *out[2:]))
    with pytest.raises(ValueError, match="out overlaps rstd in memory"):
        refuses(**(given | {"rstd": out[1][:3]}), out=out)

"""layer_norm and rms_norm without a GPU: layouts, gradients, tracing, batching, and what is refused.

The CUDA backend's operators compute on the CPU by PyTorch's own. The Triton backend's are given PyTorch in the place of
their kernels, which other tests run.
"""

from __future__ import annotations

import importlib
import itertools
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import kernel_twins  # noqa: E402
from kernel_twins import OPS  # noqa: E402
from kernel_twins.errors import UnavailableError  # noqa: E402
from kernel_twins.functional import backends  # noqa: E402
from kernel_twins.functional.expected import Problem, rows  # noqa: E402
from kernel_twins.functional.norm import norm  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402
from tests.sides import as_interpreted, cuda_library, cuda_takes_the_cpu  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
EPS = 1e-3  # large enough to be missed
NAMES = ("layer_norm", "rms_norm")
BY_NAME = pytest.mark.parametrize("name", NAMES)
BY_RESIDUAL = pytest.mark.parametrize("adds", [False, True], ids=["plain", "residual"])
SHAPES = [
    ((5,), 1),
    ((1,), 1),
    ((3, 5), 1),
    ((3, 5), 2),
    ((2, 3, 5), 1),
    ((2, 3, 5), 2),
    ((2, 2, 3, 5), 3),
    ((3, 1), 1),
]
EMPTY = [((0, 5), 1), ((3, 0), 1), ((0, 0), 1), ((2, 0, 5), 1), ((2, 0, 5), 2), ((0, 2, 5), 2)]
KINDS = ["none", "weight", "both", "bias"]
VMAPS = [((4, 3, 5), 0), ((3, 4, 5), 1), ((3, 5, 4), 2), ((2, 4, 3, 5), 1), ((4, 5), 0), ((5, 4), 1)]


def values(shape, dtype=torch.float32, requires_grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return made.requires_grad_(requires_grad)


def weights(name, shape, kind="both", dtype=torch.float32, requires_grad=False):
    """weight and bias of that kind, where the norm has them."""
    weight = values(shape, dtype, requires_grad, seed=2) if kind in ("weight", "both") else None
    bias = values(shape, dtype, requires_grad, seed=3) if kind in ("bias", "both") else None
    return (weight, bias) if name == "layer_norm" else (weight,)


def pytorchs(name, x, shape, affine=(), residual=None, eps: float | None = EPS):
    """y, or with a residual y and the sum, as the public functions return them."""
    added = x if residual is None else x + residual
    y = getattr(torch.nn.functional, name)(added, shape, *affine, eps=eps)
    return y if residual is None else (y, added)


def ours(name, x, shape, affine=(), residual=None, backend="auto", eps=EPS):
    return getattr(kernel_twins, name)(x, shape, *affine, eps=eps, residual=residual, backend=backend)


def tensors(result):
    return result if isinstance(result, tuple) else (result,)


def present(*given):
    return [each for each in given if each is not None]


def replaced(op: str, device: int | None) -> Any:
    """A launcher by PyTorch, which insists on what a kernel is promised."""
    name = op.removesuffix("_backward")

    def check(shape: Any, matrices: Any, vectors: Any, statistics: Any, dtype: Any) -> None:
        m, n = shape
        assert all(each.shape == (m, n) and (n == 1 or each.stride(1) == 1) for each in present(*matrices))
        assert all(each.shape == (n,) and each.is_contiguous() for each in present(*vectors))
        assert all(each.shape == (m,) and each.is_contiguous() for each in present(*statistics))
        assert {each.dtype for each in present(*matrices, *vectors)} == {dtype}
        assert {each.dtype for each in present(*statistics)} == {torch.float32}

    def forward(x: Any, *others: Any, eps: float, out: Any) -> None:
        *affine, residual = others
        y, *statistics = out
        added = statistics.pop() if residual is not None else None
        assert len(affine) == len(statistics) == 1 + (name == "layer_norm")
        check(x.shape, (x, residual, y, added), affine, statistics, x.dtype)
        assert all(each.is_contiguous() for each in present(y, added))
        if added is not None:
            x = added.copy_(x + residual)
        y.copy_(pytorchs(name, x, x.shape[1:], affine, eps=eps))
        mean = x.float().mean(1) if name == "layer_norm" else torch.zeros(len(x))
        statistics[-1].copy_(((x.float() - mean[:, None]).square().mean(1) + eps).rsqrt())
        if name == "layer_norm":
            statistics[0].copy_(mean)

    def backward(dout: Any, x: Any, *others: Any, out: Any) -> None:
        *statistics, weight, dadded = others
        dx, *sums = out if isinstance(out, tuple) else (out,)
        assert len(statistics) == 1 + (name == "layer_norm")
        assert len(sums) == (0 if weight is None else len(statistics))
        check(x.shape, (dout, x, dadded, dx), (weight, *sums), statistics, x.dtype)
        assert dx.is_contiguous()
        rstd = statistics[-1][:, None]
        xhat = (x - statistics[0][:, None] if name == "layer_norm" else x) * rstd
        g = dout.float() if weight is None else dout.float() * weight
        result = g - xhat * (g * xhat).mean(1, keepdim=True)
        if name == "layer_norm":
            result = result - g.mean(1, keepdim=True)
        dx.copy_(result * rstd if dadded is None else result * rstd + dadded)
        for each, right in zip(sums, ((dout * xhat).sum(0), dout.float().sum(0)), strict=False):
            each.copy_(right)

    return backward if op.endswith("_backward") else forward


def replaced_weights(dout: Any, x: Any, mean: Any, rstd: Any, dweight: Any, dbias: Any) -> None:
    """The sums over all rows alone, by PyTorch, which insists on the same."""
    present_ones = present(dweight, dbias)
    assert present_ones and all(each.shape == (x.shape[1],) and each.is_contiguous() for each in present_ones)
    assert all(each.shape == x.shape and (x.shape[1] == 1 or each.stride(1) == 1) for each in (dout, x))
    if dweight is not None:
        centered = x.float() if mean is None else x.float() - mean[:, None]
        dweight.copy_((dout.float() * (centered * rstd[:, None])).sum(0))
    if dbias is not None:
        dbias.copy_(dout.float().sum(0))


class Operators:
    """A backend's operators, called alike."""

    def __init__(self, backend: str, library: Any, wide: Any) -> None:
        self.backend, self.library, self.wide = backend, library, wide

    def __call__(self, name, x, shape, affine=(), residual=None, eps=EPS):
        """What the operator returns: y, the sum where there is a residual, and the statistics."""
        return self._call(name, "", x, shape, affine, residual, eps)

    def results(self, name, x, shape, affine=(), residual=None, eps=EPS):
        """Those that the public function returns, by what it calls."""
        if self.backend == "cuda":
            return tensors(self._call(name, "_result", x, shape, affine, residual, eps))
        return self(name, x, shape, affine, residual, eps)[: 1 if residual is None else 2]

    def _call(self, name, suffix, x, shape, affine, residual, eps):
        given = (x,) if residual is None else (x, residual)
        operator = self.library[f"{'' if residual is None else 'add_'}{name}{suffix}"]
        affine = (*affine, None, None)[: 1 + (name == "layer_norm")]
        return operator(*given, list(shape), *affine, eps)

    def backward(self, name, *given, x_grad=True):
        """``given`` ends with the other flags."""
        flags = 1 + (name == "layer_norm")
        return self.library[f"{name}_backward"](*given[:-flags], x_grad, *given[-flags:])


@pytest.fixture(params=["cuda", "triton"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Operators:
    names = [operator for name in NAMES for operator in (name, f"add_{name}", f"{name}_backward")]
    if request.param == "cuda":
        found = cuda_library("layer_norm_result")
        names += [f"{operator}_result" for operator in names if not operator.endswith("_backward")]
        library = {name: getattr(found, name).default for name in names}
        return Operators("cuda", library, torch.float64)
    as_interpreted(monkeypatch)
    side = importlib.import_module("kernel_twins.functional.norm.triton_norm")
    monkeypatch.setattr(side, "triton_launcher", replaced)
    sums = importlib.import_module("kernel_twins._triton.norm.layer_norm_backward.weights")
    monkeypatch.setattr(sums, "norm_weights", replaced_weights)
    return Operators("triton", side.OPERATORS, torch.float32)


# ----------------------------------------------------------------------------------------------------------------------
# Values and layouts
# ----------------------------------------------------------------------------------------------------------------------


@BY_NAME
@BY_RESIDUAL
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_off_the_gpu_it_is_pytorchs(name, adds, backend) -> None:
    for shape, dims in SHAPES + EMPTY:
        x, residual = values(shape), values(shape, seed=1) if adds else None
        row = x.shape[-dims:]
        for kind in KINDS:
            got = ours(name, x, row, weights(name, row, kind), residual, backend)
            torch.testing.assert_close(got, pytorchs(name, x, row, weights(name, row, kind), residual), rtol=0, atol=0)
    x = values((3, 5), torch.float64)
    for row in (5, [5], (5,), torch.Size([5])):
        assert torch.equal(ours(name, x, row, backend=backend), pytorchs(name, x, (5,)))
    assert torch.equal(getattr(kernel_twins, name)(x, 5), getattr(torch.nn.functional, name)(x, (5,)))


@BY_NAME
@BY_RESIDUAL
@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)
def test_values_gradients_and_layouts(operators, name, adds, shape, dims) -> None:
    row = shape[-dims:]
    for kind in KINDS if name == "layer_norm" else KINDS[:2]:
        x, residual = values(shape, requires_grad=True), values(shape, requires_grad=True, seed=1) if adds else None
        affine = weights(name, row, kind, requires_grad=True)
        out = operators(name, x, row, affine, residual)
        *results, rstd = out
        results, means = results[: 1 + adds], results[1 + adds :]
        right = tensors(pytorchs(name, x, row, affine, residual))
        torch.testing.assert_close(tuple(results), right)
        along = tuple(range(-dims, 0))
        centered = right[-1] if adds else x
        if name == "layer_norm":
            torch.testing.assert_close(means, [centered.mean(along)])
            centered = centered - centered.mean(along, keepdim=True)
        torch.testing.assert_close(rstd, (centered.square().mean(along) + EPS).rsqrt())
        assert all(each.is_contiguous() for each in out)
        assert all(each.requires_grad for each in results) and not any(e.requires_grad for e in (*means, rstd))
        douts = [values(shape, seed=4 + i) for i in range(len(right))]
        wanted = present(x, residual, *affine)
        gradients = torch.autograd.grad(results, wanted, douts)
        torch.testing.assert_close(gradients, torch.autograd.grad(right, wanted, douts))

        def to_meta(tensor):
            return None if tensor is None else tensor.detach().to("meta")

        meta = operators(name, to_meta(x), row, [to_meta(each) for each in affine], to_meta(residual))
        for each, real in zip(meta, out, strict=True):
            assert each.is_meta and (each.shape, each.stride(), each.dtype) == (real.shape, real.stride(), real.dtype)


@BY_NAME
@BY_RESIDUAL
@pytest.mark.parametrize(("shape", "dims"), EMPTY, ids=str)
def test_nothing_at_all(operators, name, adds, shape, dims) -> None:
    row = shape[-dims:]
    x, residual = values(shape, requires_grad=True), values(shape, seed=1) if adds else None
    affine = weights(name, row, requires_grad=True)
    *results, rstd = operators(name, x, row, affine, residual)
    assert results[0].shape == shape and rstd.shape == shape[:-dims] and bool(rstd.isnan().all())
    dx, *sums = torch.autograd.grad(results[0].sum(), (x, *affine))
    assert dx.shape == shape and all(each.shape == row and not each.any() for each in sums)


@BY_NAME
def test_any_strides(operators, name) -> None:
    x, other = values((6, 4, 10)), values((6, 4, 10), seed=1)
    for of, dims in itertools.product(
        (
            lambda x: x.transpose(0, 1),
            lambda x: x.permute(2, 0, 1),
            lambda x: x[:, :, ::2],
            lambda x: x[:, :, :7],
            lambda x: x[:, 1:3],
            lambda x: x[:1].expand(5, 4, 10),
            lambda x: x[:1, :1].expand(6, 4, 10),
            lambda x: x[..., :1],
            lambda x: x[0, 0].expand(6, 4, 10),
        ),
        (1, 2, 3),
    ):
        given, residual = (of(each).detach().requires_grad_() for each in (x, other))
        row = given.shape[-dims:]
        weight = values(row[::-1], seed=2).permute(*range(dims)[::-1]).requires_grad_()  # not contiguous
        results = operators.results(name, given, row, (weight,), residual)
        right = pytorchs(name, given, row, (weight,), residual)
        torch.testing.assert_close(tuple(results), right)
        for dout in (of(values((6, 4, 10), seed=4)), values((), seed=1).expand(given.shape)):
            wanted = (given, residual, weight)
            gradients = [
                torch.autograd.grad(each, wanted, (dout, dout), retain_graph=True) for each in (results, right)
            ]
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@BY_NAME
def test_signs_that_are_yet_to_be_changed(operators, name) -> None:
    x = torch.view_as_complex(values((3, 4, 2))).conj().imag
    assert x.is_neg()
    y, *_ = operators(name, x, (4,), residual=x)
    torch.testing.assert_close(y, pytorchs(name, x + x, (4,)))
    if operators.backend == "triton":
        torch.testing.assert_close(ours(name, x, (4,), backend="triton"), pytorchs(name, x, (4,)))


@BY_NAME
@BY_RESIDUAL
def test_past_the_operator_a_call_is_the_same(operators, name, adds) -> None:
    if operators.backend == "cuda":
        pytest.skip("the CUDA side has no other way than its operator")
    for shape, dims in SHAPES:
        row = shape[-dims:]
        x, residual = values(shape, requires_grad=True), values(shape, requires_grad=True, seed=1) if adds else None
        for kind in KINDS if name == "layer_norm" else KINDS[:2]:
            affine = weights(name, row, kind, requires_grad=True)
            wanted = present(x, residual, *affine)
            out = ours(name, x, row, affine, residual, "triton")
            right = pytorchs(name, x, row, affine, residual)
            assert "_Norm" in type(tensors(out)[0].grad_fn).__name__
            torch.testing.assert_close(out, right)
            douts = [values(shape, seed=4 + i) for i in range(1 + adds)]
            gradients = [torch.autograd.grad(tensors(each), wanted, douts) for each in (out, right)]
            torch.testing.assert_close(*gradients)
            with torch.no_grad():
                out = ours(name, x, row, affine, residual, "triton")
            assert not tensors(out)[0].requires_grad
            torch.testing.assert_close(out, right)


def test_rms_norms_epsilon_is_float32s_where_there_is_none(operators) -> None:
    x = values((3, 8)) * 1e-4
    for dtype in (torch.float32, torch.bfloat16):
        given, right = x.to(dtype), torch.nn.functional.rms_norm(x.to(dtype), (8,))
        assert torch.equal(kernel_twins.rms_norm(given, 8), right)
        if operators.backend == "triton":
            torch.testing.assert_close(kernel_twins.rms_norm(given, 8, backend="triton"), right)


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives
# ----------------------------------------------------------------------------------------------------------------------


@BY_NAME
@BY_RESIDUAL
@pytest.mark.parametrize(("shape", "dims"), [((2, 3), 1), ((2, 2, 2), 2), ((3,), 1)], ids=str)
def test_first_and_second_derivatives(operators, name, adds, shape, dims) -> None:
    row = shape[-dims:]
    for kind in KINDS if name == "layer_norm" else KINDS[:2]:
        x = values(shape, operators.wide, requires_grad=True)
        residual = values(shape, operators.wide, requires_grad=True, seed=1) if adds else None
        affine = weights(name, row, kind, operators.wide, requires_grad=True)
        wanted = present(x, residual, *affine)
        if operators.wide == torch.float64:

            def call(*_, x=x, residual=residual, affine=affine):
                return tuple(operators.results(name, x, row, affine, residual))

            assert torch.autograd.gradcheck(call, wanted)
            assert torch.autograd.gradgradcheck(call, wanted, fast_mode=True)
            continue
        douts = [values(shape, requires_grad=True, seed=4 + i) for i in range(1 + adds)]
        seconds = []
        for function in (operators.results, by_definition):
            firsts = torch.autograd.grad(function(name, x, row, affine, residual), wanted, douts, create_graph=True)
            summed = sum(each.square().sum() for each in firsts)
            # The second derivative of bias is 0.
            seconds.append(torch.autograd.grad(summed, (*wanted, *douts), allow_unused=True, materialize_grads=True))
        torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-4)


def by_definition(name, x, shape, affine, residual):
    """In operations with any number of derivatives; PyTorch's layer_norm has no second ones of a bias alone."""
    added = x if residual is None else x + residual
    along = tuple(range(-len(shape), 0))
    y = added - added.mean(along, keepdim=True) if name == "layer_norm" else added
    y = y * (y.square().mean(along, keepdim=True) + EPS).rsqrt()
    weight, bias = (*affine, None)[:2]
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return (y,) if residual is None else (y, added)


@BY_NAME
@BY_RESIDUAL
def test_only_gradients_that_somebody_asks_for(operators, name, adds) -> None:
    dy = values((3, 5), seed=4)
    for asked in itertools.product((False, True), repeat=4):
        x, residual = values((3, 5)), values((3, 5), seed=1) if adds else None
        affine = weights(name, (5,))
        given = present(x, residual, *affine)
        for tensor, learns in zip(given, asked, strict=False):
            tensor.requires_grad_(learns)
        wanted = [tensor for tensor in given if tensor.requires_grad]
        y = operators.results(name, x, (5,), affine, residual)[0]
        assert y.requires_grad == bool(wanted)
        if wanted:
            y.backward(dy)
            right = torch.autograd.grad(tensors(pytorchs(name, x, (5,), affine, residual))[0], wanted, dy)
            assert all((tensor.grad is not None) == tensor.requires_grad for tensor in given)
            torch.testing.assert_close([tensor.grad for tensor in wanted], list(right))


@BY_NAME
def test_the_sum_learns_where_its_terms_do(operators, name) -> None:
    """And not where a weight alone does, as PyTorch's: y's gradient is the weight's all the same."""
    functions = [operators.results]
    if operators.backend == "triton":
        functions.append(partial(ours, backend="triton"))
    dy = values((3, 5), seed=4)
    for function, asked in itertools.product(functions, itertools.product((False, True), repeat=4)):
        x, residual, affine = values((3, 5)), values((3, 5), seed=1), weights(name, (5,))
        given = [x, residual, *affine]
        for tensor, learns in zip(given, asked, strict=False):
            tensor.requires_grad_(learns)
        wanted = [tensor for tensor in given if tensor.requires_grad]
        y, added = function(name, x, (5,), affine, residual)
        assert (y.requires_grad, added.requires_grad) == (bool(wanted), x.requires_grad or residual.requires_grad)
        if wanted:
            right = pytorchs(name, x, (5,), affine, residual)[0]
            gradients = [torch.autograd.grad(each, wanted, dy, create_graph=True) for each in (y, right)]
            torch.testing.assert_close(*gradients)


@BY_NAME
def test_a_backward_pass_computes_no_sums_that_nobody_asks_for(operators, name) -> None:
    x, weight, dout = values((3, 5)), values((5,), seed=2), values((3, 5), seed=4)
    *_, rstd = operators(name, x, (5,), (weight,))
    statistics = (x.mean(1), rstd) if name == "layer_norm" else (rstd,)
    for asked in itertools.product((False, True), repeat=len(statistics)):
        _, *sums = operators.backward(name, dout, x, *statistics, weight, None, *asked)
        assert [each.shape for each in sums] == [(5,) if each else (0,) for each in asked]


@BY_NAME
def test_a_backward_pass_computes_no_dx_that_nobody_asks_for(operators, name) -> None:
    backward = operators.library[f"{name}_backward"]
    x, weight, dout = values((3, 5)), values((5,), seed=2), values((3, 5), seed=4)
    *_, rstd = operators(name, x, (5,), (weight,))
    given = (dout, x, *((x.mean(1), rstd) if name == "layer_norm" else (rstd,)), weight, dout)
    for asked in itertools.product((False, True), repeat=len(given) - 4):
        dx, *sums = backward(*given, False, *asked)
        assert dx.shape == (0,)
        torch.testing.assert_close(sums, backward(*given, True, *asked)[1:], rtol=0, atol=0)
        torch.library.opcheck(backward, (*given, False, *asked))


@BY_NAME
@BY_RESIDUAL
@pytest.mark.parametrize("create_graph", [False, True])
def test_no_dx_is_computed_for_an_x_that_wants_none(operators, name, adds, create_graph) -> None:
    """Nor, by the CUDA backend, of an x that wants one, where a pass asks for the weights' gradients alone."""

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, operator, _, given=(), options=None):
            results = operator(*given, **(options or {}))
            if operator.namespace == "kernel_twins":  # others look at what is there already
                self.size = max(self.size, *(each.numel() for each in results))
            return results

    dout = values((7, 3, 5), seed=4)
    for wants, row, kind in itertools.product((False, True), ((5,), (3, 5)), ("weight", "bias", "both")):
        x, residual = (values(dout.shape, requires_grad=wants, seed=seed) for seed in (0, 1))
        affine = weights(name, row, kind, requires_grad=True)
        wanted = present(*affine)
        if not wanted:  # rms_norm has no bias
            continue
        y = operators.results(name, x, row, affine, residual if adds else None)[0]
        right = pytorchs(name, x, row, affine, residual if adds else None)
        with Largest() as largest:
            found = torch.autograd.grad(y, wanted, dout, create_graph=create_graph)
        torch.testing.assert_close(found, torch.autograd.grad(tensors(right)[0], wanted, dout))
        # A function in Python is told what wants gradients, not what asks.
        if not create_graph and not (wants and operators.backend == "triton"):
            assert largest.size == math.prod(row)


@BY_NAME
def test_either_result_may_be_left_alone(operators, name) -> None:
    x, residual = (values((3, 5), requires_grad=True, seed=seed) for seed in (0, 1))
    affine = weights(name, (5,), requires_grad=True)
    for index, create_graph in itertools.product((0, 1), (False, True)):
        results = operators.results(name, x, (5,), affine, residual)
        right = pytorchs(name, x, (5,), affine, residual)
        gradients = [
            torch.autograd.grad(
                each[index].square().sum(), (x, residual, *affine), allow_unused=True, create_graph=create_graph
            )
            for each in (results, right)
        ]
        assert [each is None for each in gradients[0]] == [each is None for each in gradients[1]]
        torch.testing.assert_close(present(*gradients[0]), present(*gradients[1]))


@BY_NAME
def test_a_changed_sum_is_noticed(operators, name) -> None:
    x = values((3, 5), requires_grad=True)
    y, added = operators.results(name, x, (5,), (), values((3, 5), seed=1))
    added.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x)


@BY_NAME
def test_other_derivatives_are_refused_and_not_lost(operators, name) -> None:
    x = values((3, 4))

    def call(x):
        if operators.backend == "cuda":
            return operators.results(name, x, (4,))[0]
        return ours(name, x, (4,), backend="triton")

    with pytest.raises(RuntimeError, match=r"functorch transforms|autograd.Function"):
        torch.func.grad(lambda x: operators.results(name, x, (4,))[0].sum())(x)
    with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative: pass backend='torch'$"):
        torch.func.jvp(call, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative: pass backend='torch'$"):
            call(dual)
        torch.testing.assert_close(call(x), pytorchs(name, x, (4,)))


@BY_NAME
def test_tangents_of_gradients_are_refused_and_not_lost(operators, name) -> None:
    x = values((3, 4), requires_grad=True)
    y = operators.results(name, x, (4,), weights(name, (4,)))[0]
    with torch.autograd.forward_ad.dual_level():
        dout = torch.autograd.forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative: pass backend='torch'$"):
            torch.autograd.grad(y, x, dout)


@BY_NAME
def test_what_is_registered_is_what_pytorch_expects(operators, name) -> None:
    library, shape = operators.library, (2, 3, 5)
    for dims, dtype, kind in ((1, torch.float32, "both"), (2, torch.bfloat16, "weight"), (1, torch.float16, "none")):
        row = list(shape[-dims:])
        x, residual = (values(shape, dtype, requires_grad=True, seed=seed) for seed in (0, 1))
        affine = weights(name, row, kind, dtype, requires_grad=True)
        for suffix in ("", "_result") if operators.backend == "cuda" else ("",):
            torch.library.opcheck(library[f"{name}{suffix}"], (x, row, *affine, EPS))
            torch.library.opcheck(library[f"add_{name}{suffix}"], (x, residual, row, *affine, EPS))
        statistics = [torch.ones(shape[:-dims]) for _ in affine]
        asked = [kind == "both" for _ in affine]
        given = (
            *(each.detach() for each in (x, residual)),
            *statistics,
            *(each.detach() for each in affine[:1] if each is not None),
        )
        if affine[0] is None:
            given = (*given, None)
        backward = library[f"{name}_backward"]
        for dadded, x_grad in itertools.product((None, values(shape, dtype, seed=4)), (False, True)):
            torch.library.opcheck(backward, (*given, dadded, x_grad, *asked))


# ----------------------------------------------------------------------------------------------------------------------
# Tracing, batching, autocast
# ----------------------------------------------------------------------------------------------------------------------


@BY_NAME
@BY_RESIDUAL
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(operators, name, adds, dynamic) -> None:
    torch.compiler.reset()
    affine = weights(name, (5,), requires_grad=True)
    calls = [
        lambda x, residual: operators.results(name, x, x.shape[-1:], affine, residual),
        lambda x, residual: ours(name, x, (5,), affine, residual),
    ]
    if operators.backend == "triton":
        calls.append(lambda x, residual: ours(name, x, x.shape[-1], affine, residual, "triton"))

    def product(results):
        first, *others = tensors(results)
        return first.sin() * others[0] if others else first.sin()

    for call in calls:
        compiled = torch.compile(
            lambda x, residual, call=call: product(call(x, residual)),
            fullgraph=True,
            backend="aot_eager",
            dynamic=dynamic,
        )
        for m in (3, 7):
            x, residual = values((2, m, 5), requires_grad=True), values((2, m, 5), seed=1) if adds else None
            out, right = compiled(x, residual), product(pytorchs(name, x, (5,), affine, residual))
            torch.testing.assert_close(out, right)
            gradients = (torch.autograd.grad(each.sum(), (x, *affine)) for each in (out, right))
            torch.testing.assert_close(*gradients)


@BY_NAME
@BY_RESIDUAL
@pytest.mark.parametrize(("shape", "in_dim"), VMAPS, ids=str)
def test_batched(operators, name, adds, shape, in_dim) -> None:
    affine = weights(name, (5,), requires_grad=True)
    x, residual = (values(shape, requires_grad=True, seed=seed) for seed in (0, 1))
    one = values([size for dim, size in enumerate(shape) if dim != in_dim], requires_grad=True, seed=5)

    for given, in_dims in (
        ((x, residual if adds else None), (in_dim, in_dim if adds else None)),
        *((((x, one), (in_dim, None)), ((one, residual), (None, in_dim))) if adds else ()),
    ):

        def batched(function, in_dims=in_dims, given=given):
            return torch.func.vmap(
                lambda x, residual: tuple(tensors(function(name, x, (5,), affine, residual))), in_dims=in_dims
            )(*given)

        out, right = batched(operators.results), batched(pytorchs)
        torch.testing.assert_close(out, right)
        douts = [values(each.shape, seed=6) for each in right]
        wanted = present(*given, *affine)
        torch.testing.assert_close(*(torch.autograd.grad(each, wanted, douts) for each in (out, right)))


@BY_NAME
@pytest.mark.parametrize("kind", KINDS)
def test_batched_weights(operators, name, kind) -> None:
    """As of an ensemble of models."""
    if name == "rms_norm" and kind not in ("none", "weight"):
        pytest.skip("rms_norm has no bias")
    ensemble = weights(name, (4, 5), kind, requires_grad=True)
    one = weights(name, (5,), kind, requires_grad=True)
    x = values((4, 2, 3, 5), requires_grad=True)
    for x_dim, affine, dims in (
        (0, ensemble, 0),
        (1, ensemble, 0),
        (None, ensemble, 0),
        (1, one, None),
        (0, (*ensemble[:1], *one[1:]), (0, None)),
    ):
        given = x.transpose(0, x_dim) if x_dim is not None else x[0]
        every = dims if isinstance(dims, tuple) else (dims,) * len(affine)
        places = [None if tensor is None else place for tensor, place in zip(affine, every, strict=False)]
        if x_dim is None and not any(place == 0 for place in places):
            continue

        def batched(function, given=given, affine=affine, in_dims=(x_dim, *places)):
            return torch.func.vmap(lambda x, *affine: tensors(function(name, x, (5,), affine))[0], in_dims=in_dims)(
                given, *affine
            )

        out, right = batched(operators.results), batched(pytorchs)
        torch.testing.assert_close(out, right)
        wanted, dout = present(x, *affine), values(right.shape, seed=6)
        torch.testing.assert_close(*(torch.autograd.grad(each, wanted, dout) for each in (out, right)))


@BY_NAME
def test_gradients_are_batched(operators, name) -> None:
    x, residual = (values((3, 5), requires_grad=True, seed=seed) for seed in (0, 1))
    affine = weights(name, (5,), requires_grad=True)
    douts = [values((4, 3, 5), seed=seed) for seed in (6, 7)]
    functions = [operators.results, pytorchs]
    if operators.backend == "triton":
        functions.append(partial(ours, backend="triton"))
    got = [
        torch.autograd.grad(
            function(name, x, (5,), affine, residual), (x, residual, *affine), douts, is_grads_batched=True
        )
        for function in functions
    ]
    for each in got:
        torch.testing.assert_close(each, got[1])


@BY_NAME
def test_batches_within_batches_and_traced(operators, name) -> None:
    x = values((3, 4, 5))

    def call(x):
        return operators.results(name, x, (5,))[0]

    nested = torch.func.vmap(torch.func.vmap(call), in_dims=1)
    torch.testing.assert_close(nested(x), pytorchs(name, x.transpose(0, 1), (5,)))
    torch.compiler.reset()
    traced = torch.compile(lambda x: torch.func.vmap(call)(x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(x), pytorchs(name, x, (5,)))
    with pytest.raises(ValueError, match=r"^normalized_shape is \(3, 4, 5\), must hold .*: x has shape \(4, 5\)$"):
        torch.func.vmap(lambda x: operators(name, x, (3, 4, 5)))(x)


@BY_NAME
def test_autocast_of_the_cpu_changes_no_dtype_as_pytorchs(operators, name) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = values((3, 5), dtype)
            found = {operators(name, x, (5,))[0].dtype, ours(name, x, 5).dtype, pytorchs(name, x, (5,)).dtype}
            assert found == {dtype}


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


@BY_NAME
def test_what_is_refused_is_named(operators, name) -> None:
    x, row = values((3, 5)), values((5,))
    remedy = r"call {0}.to\({1}.dtype\), or pass backend='torch'$"
    wrong = [
        (TypeError, r"^x is torch.int32, must be torch.float32 or .* call x.to", {"x": x.int()}),
        (ValueError, r"^normalized_shape is \(\), must hold 1 or more sizes", {"shape": ()}),
        (
            ValueError,
            r"^normalized_shape is \(3,\), must hold .* last dimensions: x has shape \(3, 5\)$",
            {"shape": (3,)},
        ),
        (ValueError, r"^normalized_shape is \(1, 3, 5\), must hold the sizes", {"shape": (1, 3, 5)}),
        (
            TypeError,
            r"^weight is torch.bfloat16, must be torch.float32 like x: " + remedy.format("weight", "x"),
            {"affine": (row.bfloat16(),)},
        ),
        (ValueError, r"^weight has shape \(3,\), must have that of normalized_shape, \(5,\)$", {"affine": (row[:3],)}),
        (
            ValueError,
            r"^weight is on meta, must be on cpu like x: call weight.to\(x.device\)$",
            {"affine": (row.to("meta"),)},
        ),
        (
            TypeError,
            r"^residual is torch.float16, must be torch.float32 like x: " + remedy.format("residual", "x"),
            {"residual": x.half()},
        ),
        (ValueError, r"^residual has shape \(5,\), must have that of x, \(3, 5\)$", {"residual": row}),
    ]
    if name == "layer_norm":
        wrong += [
            (TypeError, r"^bias is torch.float64, must be torch.float32 like x: ", {"affine": (row, row.double())}),
            (
                ValueError,
                r"^bias has shape \(1, 5\), must have that of normalized_shape, \(5,\)$",
                {"affine": (None, row[None])},
            ),
        ]
    for error, told, changes in wrong:
        with pytest.raises(error, match=told):
            operators(name, **({"x": x, "shape": (5,)} | changes))


@BY_NAME
def test_what_is_no_tensor_is_named(operators, monkeypatch, name) -> None:
    monkeypatch.setattr(norm, "require_gpu", lambda *_: None)  # of CUDA's
    x, row = values((3, 5)), values((5,))
    no_tensor: Any = [1.0] * 5
    remedy = r"call torch.as_tensor\({0}, dtype=x.dtype, device=x.device\)$"
    wrong = [("weight", {"affine": (no_tensor,)}), ("residual", {"residual": no_tensor})]
    if name == "layer_norm":
        wrong.append(("bias", {"affine": (row, no_tensor)}))
    for named, changes in wrong:
        told = rf"^{named} is a list, must be a torch.Tensor or None: " + remedy.format(named)
        with pytest.raises(TypeError, match=told):
            ours(name, x, (5,), backend=operators.backend, **changes)


@BY_NAME
def test_what_stands_for_tensors_on_a_gpu_is_as_narrow_as_they_are(operators, name) -> None:
    """A trace takes no float64 that a kernel would refuse; one for the CPU takes what PyTorch takes there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, statistic = torch.empty((3, 5), dtype=torch.float64), torch.empty(3, dtype=torch.float64)
        if operators.backend == "cuda":
            assert operators(name, x, (5,), residual=x)[1].dtype == torch.float64
        statistics = (statistic,) * (1 + (name == "layer_norm"))
        given = [each.to("cuda:0") for each in (x, x, *statistics)]
        for residual in (None, given[0]):
            with pytest.raises(TypeError, match=r"^x is torch.float64, must be torch.float32 or "):
                operators(name, given[0], (5,), residual=residual)
        with pytest.raises(TypeError, match=r"^dout is torch.float64, must be torch.float32 or "):
            operators.backward(name, *given, None, None, *(False for _ in statistics))
        assert operators(name, given[0].float(), (5,))[0].dtype == torch.float32


@BY_NAME
def test_what_a_backward_pass_refuses_is_named(operators, name) -> None:
    x, row, statistic = values((3, 5)), values((5,)), torch.ones(3)
    wrong = [
        (TypeError, r"^dout is torch.int32, must be torch.float32 or ", {"dout": x.int()}),
        (TypeError, r"^x is torch.float16, must be torch.float32 like dout: ", {"x": x.half()}),
        (ValueError, r"^x has shape \(5, 3\), must have that of dout, \(3, 5\)$", {"x": x.t()}),
        (ValueError, r"^rstd has shape \(5,\), must hold the sizes of x's first dimensions: x has ", {"rstd": row}),
        (ValueError, r"^rstd has shape \(3, 5\), must hold the sizes of x's first dimensions: x has ", {"rstd": x}),
        (TypeError, r"^rstd is torch.bfloat16, must be torch.float32: call rstd.to", {"rstd": statistic.bfloat16()}),
        (
            ValueError,
            r"^rstd is on meta, must be on cpu like x: call rstd.to\(x.device\)$",
            {"rstd": statistic.to("meta")},
        ),
        (ValueError, r"^weight has shape \(3,\), must have that of a row of x, \(5,\)$", {"weight": statistic}),
        (ValueError, r"^dadded has shape \(5,\), must have that of x, \(3, 5\)$", {"dadded": row}),
    ]
    if name == "layer_norm":
        wrong.append((ValueError, r"^mean has shape \(5,\), must have that of rstd, \(3,\)$", {"mean": row}))
    for error, told, changes in wrong:
        given: dict[str, Any] = {
            "dout": x,
            "x": x,
            "mean": statistic,
            "rstd": statistic,
            "weight": None,
            "dadded": None,
        }
        given |= changes
        if name == "rms_norm":
            del given["mean"]
        with pytest.raises(error, match=told):
            operators.backward(name, *given.values(), *(True for _ in range(1 + (name == "layer_norm"))))


@BY_NAME
def test_devices_backends_and_others_than_tensors_are_refused(name) -> None:
    x, function = values((3, 5)), getattr(kernel_twins, name)
    no_tensor: Any = [1.0]
    with pytest.raises(ValueError, match=r"^backend is 'cublas', must be one of auto, cuda, triton, torch$"):
        function(x, 5, backend="cublas")
    with pytest.raises((ValueError, UnavailableError), match=r"backend='torch'"):
        function(x, 5, backend="cuda")
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"^x is on cpu, must be on a CUDA device for backend='triton': call x.cuda"):
        function(x, 5, backend="triton")
    with pytest.raises(TypeError, match=r"^x is a list, must be a torch.Tensor: call torch.as_tensor\(x\)$"):
        function(no_tensor, 5, backend="triton")
    for wrong in (lambda: function(no_tensor, 5), lambda: function(x, 4), lambda: function(x, ())):
        with pytest.raises((TypeError, RuntimeError)):  # in PyTorch's words
            wrong()


# ----------------------------------------------------------------------------------------------------------------------
# Weights of another dtype, or with an offset
# ----------------------------------------------------------------------------------------------------------------------

BACKENDS = pytest.mark.parametrize("backend", ["named", "torch", "auto"])
BY_COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def in_graph(call, compiled):
    torch.compiler.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call


def named(operators, monkeypatch, backend):
    if operators.backend == "cuda":
        cuda_takes_the_cpu(monkeypatch)
    return operators.backend if backend == "named" else backend


@BACKENDS
@BY_COMPILED
@BY_RESIDUAL
@BY_NAME
def test_float32_weights_of_a_half_precision_x(operators, monkeypatch, name, adds, compiled, backend) -> None:
    """They are read in x's dtype (by PyTorch on a CPU as they are), and their gradients are float32."""
    backend = named(operators, monkeypatch, backend)
    x = values((3, 5), torch.bfloat16, requires_grad=True)
    residual = values((3, 5), torch.bfloat16, requires_grad=True, seed=1) if adds else None
    affine = weights(name, (5,), requires_grad=True)

    def call(x, residual, *affine):
        return getattr(kernel_twins, name)(x, 5, *affine, eps=EPS, residual=residual, backend=backend)

    out = tensors(in_graph(call, compiled)(x, residual, *affine))
    right = tensors(pytorchs(name, x, (5,), affine, residual))
    assert [each.dtype for each in out] == [each.dtype for each in right]
    torch.testing.assert_close(out, right, rtol=2e-2, atol=2e-2)
    wanted = present(x, residual, *affine)
    got, expected = (torch.autograd.grad(each[0].float().square().sum(), wanted) for each in (out, right))
    assert [each.dtype for each in got] == [each.dtype for each in wanted]
    torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)


@BACKENDS
@BY_COMPILED
def test_an_offset_is_added_to_the_weight_of_rms_norm(operators, monkeypatch, compiled, backend) -> None:
    backend = named(operators, monkeypatch, backend)

    def call(x, weight):
        return kernel_twins.rms_norm(x, 5, weight, EPS, offset=1.0, backend=backend)

    call = in_graph(call, compiled)
    for dtype, of_weight in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, None)):
        x = values((3, 5), dtype, requires_grad=True)
        weight = values((5,), of_weight or torch.float32, requires_grad=True, seed=2)
        y, right = call(x, weight), torch.nn.functional.rms_norm(x, (5,), (weight + 1).to(dtype), EPS)
        assert y.dtype == dtype
        near = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(y, right, **near)
        got, expected = (torch.autograd.grad(each.float().square().sum(), (x, weight)) for each in (y, right))
        assert [each.dtype for each in got] == [x.dtype, weight.dtype]
        torch.testing.assert_close(got, expected, **({"rtol": 5e-2, "atol": 5e-2} if near else {}))


def test_an_offset_needs_a_weight() -> None:
    with pytest.raises(ValueError, match=r"^offset is 1.0, must be 0.0 without a weight: pass one, such as zeros$"):
        kernel_twins.rms_norm(values((3, 5)), 5, offset=1.0)
    with pytest.raises(ValueError, match=r"^offset is 1.0, must be 0.0 without a weight: pass elementwise_affine=Tr"):
        kernel_twins.nn.RMSNorm(5, elementwise_affine=False, offset=1.0)


def test_a_module_with_an_offset_begins_as_one_without() -> None:
    module, x = kernel_twins.nn.RMSNorm(5, offset=1.0), values((3, 5))
    assert module.weight.tolist() == [0.0] * 5
    torch.testing.assert_close(module(x), torch.nn.RMSNorm(5)(x))
    torch.nn.init.normal_(module.weight)
    module.reset_parameters()
    assert module.weight.tolist() == [0.0] * 5
    assert repr(module) == "RMSNorm((5,), eps=None, elementwise_affine=True, offset=1.0, backend='auto')"


# ----------------------------------------------------------------------------------------------------------------------
# Modules
# ----------------------------------------------------------------------------------------------------------------------


MODULES = pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LayerNorm", {}),
        ("LayerNorm", {"bias": False, "eps": 0.1}),
        ("LayerNorm", {"elementwise_affine": False}),
        ("RMSNorm", {}),
        ("RMSNorm", {"eps": 0.1, "dtype": torch.bfloat16}),
        ("RMSNorm", {"elementwise_affine": False}),
    ],
    ids=str,
)


@MODULES
@pytest.mark.parametrize("shape", [5, (3, 5)], ids=str)
def test_the_modules_are_torch_nns_twins(name, options, shape) -> None:
    ours_, right = getattr(kernel_twins.nn, name)(shape, **options), getattr(torch.nn, name)(shape, **options)
    assert isinstance(ours_, type(right)) and not hasattr(right, "backend")
    dtype = options.get("dtype", torch.float32)
    x, residual = (values((2, 3, 5), dtype, requires_grad=True, seed=seed) for seed in (0, 1))
    for parameter in right.parameters():
        torch.nn.init.normal_(parameter)
    for source, target in ((right, ours_), (ours_, right)):
        target.load_state_dict(source.state_dict())
        assert torch.equal(ours_(x), right(x))
    y, added = ours_(x, residual)
    assert torch.equal(added, x + residual) and torch.equal(y, right(x + residual))
    ours_(x, residual=residual)[0].sum().backward()
    assert all(each.grad is not None for each in (x, residual, *ours_.parameters()))
    assert repr(ours_) == f"{repr(right)[:-1]}, backend='auto')"


def test_modules_know_their_backend() -> None:
    for name in ("LayerNorm", "RMSNorm"):
        module = getattr(kernel_twins.nn, name)
        assert module(5, backend="torch")(values((3, 5))).shape == (3, 5)
        with pytest.raises(ValueError, match=r"^backend is 'cublas', must be one of auto, cuda, triton, torch$"):
            module(5, backend="cublas")
        with pytest.raises((ValueError, UnavailableError), match="backend='torch'"):
            module(5, backend="cuda")(values((3, 5)))


def test_functions_and_modules_are_found_lazily() -> None:
    script = (
        "import sys, kernel_twins as k; assert not {'torch', 'triton'} & sys.modules.keys(); k.nn.LayerNorm; "
        "k.layer_norm; k.rms_norm; assert 'torch' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


# ----------------------------------------------------------------------------------------------------------------------
# backend="auto"
# ----------------------------------------------------------------------------------------------------------------------


def test_every_backend_names_steps_that_there_are() -> None:
    for op in (*NAMES, *(f"{name}_backward" for name in NAMES)):
        for backend, names in OPS[op].behind.items():
            assert all(backend in OPS[op].step(name).backends for name in names)
            # Whatever the GPU and the rows' length, one of them takes it.
            assert OPS[op].step(names[-1]).accepts(Case.of(3, 2**20, dtype="fp32")) == ""


def test_the_operators_pass_over_steps_where_their_rows_are_too_long() -> None:
    for op, file, constant in (
        ("layer_norm", "torch_forward.cpp", "ROW_IN_REGISTERS"),
        ("layer_norm_backward", "torch_backward.cpp", "PAIR_IN_REGISTERS"),
    ):
        source = (ROOT / "cuda-kernels" / "norm" / file).read_text()
        (kib,) = re.findall(rf"{constant} = (\d+) \* 1024;", source)
        longest, (_, second, last) = int(kib) * 1024 // 2, OPS[op].behind["cuda"]
        for n, taken in ((longest, True), (longest + 1, False)):
            assert (OPS[op].step(second).accepts(Case.of(1, n, dtype="bf16")) == "") == taken
        assert OPS[op].step(last).accepts(Case.of(1, 2**20, dtype="fp32")) == ""


@BY_NAME
def test_auto_asks_for_what_it_was_given(monkeypatch, name) -> None:
    asked: list[tuple[str, Problem, bool]] = []
    best = ["cuda"]

    def ordered(gpu: str, function: str, problem: Problem, differentiated: bool, *_: bool) -> list[str]:
        asked.append((function, problem, differentiated))
        return best

    monkeypatch.setattr(norm, "is_on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    monkeypatch.setattr("kernel_twins.functional.backends.measured_gpu", lambda device: "GPU")
    monkeypatch.setattr(norm, "_runs", lambda *_: True)
    monkeypatch.setattr(backends, "ordered", ordered)

    def chosen(x, shape=(16,), affine=(), residual=None):
        return norm._choose(name, x, shape, affine, residual)

    x = torch.empty(2, 3, 16, dtype=torch.bfloat16)
    row = torch.empty(16, dtype=torch.bfloat16)
    for given, shape in ((x, (16,)), (x, [3, 16]), (x[..., :5], (5,)), (x.transpose(0, 1), (16,)), (x[0, 0], (16,))):
        assert chosen(given, shape, (row.new_empty(shape), None)) == "cuda"
    assert chosen(x.requires_grad_(), residual=x) == "cuda"
    x = x.detach()
    sizes = [(6, 16, 16), (2, 48, 48), (6, 5, 16), (6, 16, 16), (1, 16, 16)]
    without = ("affine.none", "residual.yes")
    assert asked == [*((name, rows(*each, 2), False) for each in sizes), (name, rows(6, 16, 16, 2, without), True)]

    wrong = ((x[:0], (16,)), (x.double(), (16,)), (x.int(), (16,)), (x, (3,)), (x, ()), (x, (1, 2, 3, 16)))
    assert all(chosen(given, shape) == "torch" for given, shape in wrong)
    assert chosen(x, affine=(row.float(), None)) == chosen(x, affine=(row, row.to("meta"))) == "torch"
    assert chosen(x, residual=row) == chosen(x, residual=x.float()) == "torch"
    for best, last in ((["torch"], "torch"), (["triton"], "triton"), ([], "cuda")):  # noqa: B007  # read by ordered
        assert chosen(x) == last
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert chosen(x) == ("torch" if name == "layer_norm" else "cuda")
        assert chosen(x.float()) == "cuda"
    seen = []

    def seeing(x):
        seen.append(chosen(x))
        return x.sum()

    torch.func.vmap(seeing)(x)
    torch.func.grad(seeing)(x)
    torch.func.vmap(torch.func.grad(seeing))(x)
    assert seen == ["cuda", "torch", "torch"]


@BY_NAME
@pytest.mark.parametrize("dynamic", [False, True])
def test_auto_is_traced_to_the_operator(operators, monkeypatch, name, dynamic) -> None:
    if operators.backend == "triton":
        pytest.skip("auto traces no Triton operator")
    monkeypatch.setattr("kernel_twins.functional.backends.measured_gpu", lambda device: "GPU")
    monkeypatch.setattr(norm, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(norm, "require_gpu", lambda *_: None)
    monkeypatch.setattr(norm, "_runs", lambda *_: True)
    x, residual = (values((3, 4), torch.bfloat16, seed=seed) for seed in (0, 1))
    for given in ((x,), (x, residual)):
        torch.compiler.reset()
        targets: list[str] = []

        def record(module, _, targets=targets):
            targets.extend(str(node.target) for node in module.graph.nodes if "kernel_twins" in str(node.target))
            return module

        def call(x, residual=None):
            return ours(name, x, (4,), residual=residual)

        traced = torch.compile(call, fullgraph=True, backend=record, dynamic=dynamic)
        torch.testing.assert_close(
            traced(*given), pytorchs(name, x, (4,), residual=given[1] if len(given) > 1 else None)
        )
        assert targets == [f"kernel_twins.{'add_' * (len(given) - 1)}{name}_result.default"]


def test_what_stands_behind_a_residual_under_autocast(monkeypatch) -> None:
    """The sum keeps its dtype, and the norm is float32, as PyTorch's."""
    monkeypatch.setattr(norm, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    calls: list[SimpleNamespace] = []

    def triton_norm(name, x, residual, shape, affine, eps):
        calls.append(SimpleNamespace(name=name, x=x, residual=residual))
        return x if residual is None else (x, x + residual)

    monkeypatch.setattr(norm, "_by_triton", lambda: triton_norm)
    x, residual = (values((3, 5), torch.bfloat16, seed=seed) for seed in (0, 1))
    for name in NAMES:
        _, added = ours(name, x, 5, residual=residual, backend="triton")
        assert torch.equal(added, x + residual)
    assert [each.residual is None for each in calls] == [True, False]
    assert torch.equal(calls[0].x, x + residual)

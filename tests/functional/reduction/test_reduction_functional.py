"""sum, mean, amax and argmax without a GPU: layouts, gradients, tracing, batching, and what is refused.

The CUDA backend's operator computes on the CPU by PyTorch's own. The Triton backend's is given PyTorch in the place of
its kernel, which other tests run.
"""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins import OPS  # noqa: E402
from kernel_twins.errors import UnavailableError  # noqa: E402
from kernel_twins.functional.reduction import reduction  # noqa: E402
from kernel_twins.functional.reduction.shared import shared  # noqa: E402
from tests.sides import as_interpreted, cuda_library, cuda_takes_the_cpu  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
PYTORCHS: dict[str, Any] = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "argmax": torch.argmax}
OURS: dict[str, Any] = {
    "sum": kernel_twins.sum, "mean": kernel_twins.mean, "max": kernel_twins.amax, "argmax": kernel_twins.argmax,
}  # fmt: skip
BY_KIND = pytest.mark.parametrize("kind", list(PYTORCHS))
DIFFERENTIABLE = pytest.mark.parametrize("kind", ["sum", "mean", "max"])
REDUCED = [
    ((5,), (0,)),
    ((), ()),
    ((), (-1,)),
    ((3, 5), (0,)),
    ((3, 5), (-1,)),
    ((3, 5), ()),
    ((2, 3, 5), (1,)),
    ((2, 3, 5), (2, 0)),
    ((2, 1, 5), (1,)),
    ((2, 3, 4, 2, 3), (0, 2, 3, 4)),
    ((2, 3, 4, 2, 3), (-4, 3)),
]
VIEWS = {
    "transposed": lambda x: x.transpose(0, 1),
    "permuted": lambda x: x.permute(2, 0, 1),
    "spread": lambda x: x[..., ::2],
    "pitched": lambda x: x[..., :-1],
    "expanded": lambda x: x[:1].expand(x.shape),
    "one": lambda x: x[:1, :1, :1].expand(x.shape),
}


def values(shape, dtype=torch.float32, requires_grad=False, seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (made.round() if ties else made).to(dtype).requires_grad_(requires_grad)


def pytorchs(x, dims, keepdim, kind):
    if kind != "argmax":
        return PYTORCHS[kind](x, dims, keepdim)
    axes = sorted(dim % x.dim() for dim in dims) if x.dim() else []
    axes = axes or list(range(x.dim()))
    kept = [axis for axis in range(x.dim()) if axis not in axes]
    place = x.permute([*kept, *axes]).reshape(*(x.shape[axis] for axis in kept), -1).argmax(-1)
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    return place.view(shape) if keepdim else place


def replaced(op: str, device: int | None) -> Any:
    """A launcher by PyTorch, which insists on what a kernel is promised."""

    def call(x: Any, *, out: Any, dims: Any, kind: str) -> None:
        OPS[op].check(x, out=out, dims=dims, kind=kind)
        out.copy_(pytorchs(x, dims, False, kind))

    return call


def replaced_gradient(dout: Any, x: Any, out: Any, *, dx: Any, dims: Any) -> None:
    assert dout.is_contiguous() and out.is_contiguous() and dx.shape == x.shape
    dx.copy_(shared(dout, out == x, dims))


@pytest.fixture(params=["cuda", "triton"])
def operator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "cuda":
        return cuda_library("reduction_nd").reduction_nd.default
    as_interpreted(monkeypatch)
    side = importlib.import_module("kernel_twins.functional.reduction.triton_reduction")
    monkeypatch.setattr(side, "triton_launcher", replaced)
    monkeypatch.setattr(side, "amax_backward", replaced_gradient)
    return torch.ops.kernel_twins.reduction_nd_triton.default


def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU pass for a GPU's, of which the CUDA operator computes by PyTorch's own."""
    for name, answer in (("is_on_gpu", True), ("require_gpu", None), ("_runs", True)):
        constant = torch.compiler.assume_constant_result(lambda *_, answer=answer: answer)
        monkeypatch.setattr(reduction, name, constant)


def is_triton(operator: Any) -> bool:
    return "triton" in str(operator)


def gradient_operator(operator: Any) -> Any:
    """That of maxima."""
    if is_triton(operator):
        return torch.ops.kernel_twins.amax_backward_triton.default
    return cuda_library("amax_backward").amax_backward.default


# ----------------------------------------------------------------------------------------------------------------------
# Values and layouts
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_off_the_gpu_it_is_pytorchs(backend) -> None:
    x = values((3, 4, 5))
    for dim, keepdim in itertools.product((None, 0, -1, (0, 2), [1], ()), (False, True)):
        assert torch.equal(kernel_twins.sum(x, dim, keepdim, backend=backend), torch.sum(x, dim, keepdim))
        assert torch.equal(kernel_twins.mean(x, dim, keepdim, backend=backend), torch.mean(x, dim, keepdim))
        if dim is not None:
            assert torch.equal(kernel_twins.amax(x, dim, keepdim, backend=backend), torch.amax(x, dim, keepdim))
        if dim is None or isinstance(dim, int):
            assert torch.equal(kernel_twins.argmax(x, dim, keepdim, backend=backend), torch.argmax(x, dim, keepdim))
    assert torch.equal(kernel_twins.amax(x), torch.amax(x))
    for dtype in (torch.int32, torch.float64, torch.complex64):
        other = x.to(dtype)
        assert torch.equal(kernel_twins.sum(other, 1, backend=backend), torch.sum(other, 1))


@BY_KIND
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "dims"), REDUCED, ids=str)
def test_values_and_shapes(operator, kind, keepdim, shape, dims) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = values(shape, dtype, ties=kind == "argmax")
        out, right = operator(x, dims, keepdim, kind), pytorchs(x, dims, keepdim, kind)
        assert (out.shape, out.dtype) == (right.shape, right.dtype) and out.is_contiguous()
        torch.testing.assert_close(out, right)
        meta = operator(x.to("meta"), dims, keepdim, kind)
        assert meta.is_meta and (meta.shape, meta.stride(), meta.dtype) == (out.shape, out.stride(), out.dtype)


@BY_KIND
def test_any_strides(operator, kind) -> None:
    for of in VIEWS.values():
        x = of(values((4, 6, 10)))
        for dims in ((0,), (1,), (2,), (0, 2), (1, 2), ()):
            torch.testing.assert_close(operator(x, dims, False, kind), pytorchs(x, dims, False, kind))


@BY_KIND
def test_of_nothing(operator, kind) -> None:
    assert operator(torch.zeros(0, 3), (1,), False, kind).shape == (0,)
    for shape, dims in (((0, 3), (0,)), ((3, 0), (1,)), ((0,), ()), ((2, 0, 3), (1, 2)), ((0, 0), (1,))):
        x = torch.zeros(shape)
        if kind in ("max", "argmax"):
            with pytest.raises(IndexError, match=rf"x has shape .*, must have elements along dims for {kind}"):
                operator(x, dims, False, kind)
        elif not is_triton(operator) or x.shape != (0, 0):
            right = PYTORCHS[kind](x, dims)
            torch.testing.assert_close(operator(x, dims, False, kind), right, equal_nan=True)


@DIFFERENTIABLE
@pytest.mark.parametrize(("shape", "dims"), REDUCED, ids=str)
def test_gradients(operator, kind, shape, dims) -> None:
    for keepdim, ties in itertools.product((False, True), (False, True)):
        x = values(shape, requires_grad=True, ties=ties)
        out, right = operator(x, dims, keepdim, kind), PYTORCHS[kind](x, dims, keepdim)
        dout = values(out.shape, seed=1)
        (ours,), (theirs,) = (torch.autograd.grad(each, x, dout) for each in (out, right))
        torch.testing.assert_close(ours, theirs)


def gradients(operator: Any, kind: str, x: Any, dims: Any, dout: Any) -> tuple[Any, Any]:
    """Ours and PyTorch's."""
    x = x.detach().requires_grad_()
    outs = operator(x, dims, False, kind), PYTORCHS[kind](x, dims, False)
    ours, theirs = (torch.autograd.grad(out, x, dout)[0] for out in outs)
    return ours, theirs


@DIFFERENTIABLE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_have_pytorchs_bits(operator, kind, dtype) -> None:
    for shape, dims in (((7, 33), (1,)), ((7, 33), (0,)), ((3, 5, 7), (0, 2)), ((6,), ())):
        x = values(shape, dtype, ties=True)
        ours, theirs = gradients(operator, kind, x, dims, values(operator(x, dims, False, kind).shape, dtype, seed=1))
        assert torch.equal(ours, theirs) and ours.dtype == dtype


def test_a_means_gradient_takes_no_memory_until_a_leaf_keeps_it(operator) -> None:
    x = values((64, 256), torch.bfloat16, requires_grad=True)
    out = operator(x, (1,), False, "mean")
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
    assert dx.untyped_storage().nbytes() == 64 * x.element_size()
    out.sum().backward()
    assert x.grad.is_contiguous() and torch.equal(x.grad, dx)
    x.grad.mul_(2)


def test_maxima_that_nothing_is_equal_to_have_no_gradient(operator) -> None:
    x = values((4, 5))
    x[1, 2], x[2] = float("nan"), -float("inf")
    ours, theirs = gradients(operator, "max", x, (1,), values((4,), seed=1))
    assert ours[1].isnan().all()
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize(("dtype", "ties"), [(torch.bfloat16, 300), (torch.float16, 70_000)], ids=str)
def test_so_many_maxima_are_counted_that_the_dtype_has_no_number_for_them(operator, dtype, ties) -> None:
    dout = torch.full((2,), 1_000.0, dtype=dtype)
    ours, _ = gradients(operator, "max", torch.zeros(2, ties, dtype=dtype), (1,), dout)
    assert torch.equal(ours, torch.full((2, ties), 1_000 / ties, dtype=dtype))


@DIFFERENTIABLE
@pytest.mark.parametrize(("shape", "dims"), [((2, 3), (1,)), ((2, 3), ()), ((2, 3, 2), (0, 2))], ids=str)
def test_first_and_second_derivatives(operator, kind, shape, dims) -> None:
    if is_triton(operator):  # takes no float64
        x = values(shape, requires_grad=True)
        dout = values(operator(x, dims, True, kind).shape, requires_grad=True, seed=1)
        found = []
        for out in (operator(x, dims, True, kind), PYTORCHS[kind](x, dims, True)):
            (dx,) = torch.autograd.grad(out, x, dout, create_graph=True)
            found += torch.autograd.grad(dx.square().sum(), dout)
        torch.testing.assert_close(*found)
        return
    x = values(shape, torch.float64, requires_grad=True)
    for keepdim in (False, True):
        torch.autograd.gradcheck(lambda x, keepdim=keepdim: operator(x, dims, keepdim, kind), x)
        torch.autograd.gradgradcheck(lambda x, keepdim=keepdim: operator(x, dims, keepdim, kind), x)


def test_a_place_has_no_gradient(operator) -> None:
    assert not operator(values((3, 5), requires_grad=True), (1,), False, "argmax").requires_grad


def test_past_the_operator_a_call_is_the_same(operator) -> None:
    if not is_triton(operator):
        pytest.skip("the CUDA side has no other way than its operator")
    for (shape, dims), keepdim in itertools.product(REDUCED, (False, True)):
        x = values(shape, requires_grad=True)
        for kind in ("sum", "mean", "max"):
            out = OURS[kind](x, dims, keepdim, backend="triton")
            right = PYTORCHS[kind](x, dims, keepdim)
            assert "_Reduction" in type(out.grad_fn).__name__
            torch.testing.assert_close(out, right)
            dout = values(out.shape, seed=1)
            torch.testing.assert_close(*(torch.autograd.grad(each, x, dout) for each in (out, right)))
    x = values((3, 5), requires_grad=True)
    assert torch.equal(kernel_twins.argmax(x, 1, backend="triton"), x.argmax(1))
    assert torch.equal(kernel_twins.argmax(x, backend="triton"), x.argmax())


# ----------------------------------------------------------------------------------------------------------------------
# Tracing and batching
# ----------------------------------------------------------------------------------------------------------------------


@BY_KIND
def test_opcheck(operator, kind) -> None:
    for shape, dims, keepdim in (((3, 5), (1,), False), ((2, 3, 4), (0, 2), True), ((2, 3), (), False)):
        x = values(shape, requires_grad=kind != "argmax")
        torch.library.opcheck(operator, (x, list(dims), keepdim, kind))


def test_opcheck_of_the_gradient_of_maxima(operator) -> None:
    backward = gradient_operator(operator)
    for of in (lambda x: x, *VIEWS.values()):
        x = of(values((4, 6, 10), ties=True))
        for dims in ((1,), (0, 2), (0, 1, 2)):
            out = x.amax(dims, keepdim=True)
            arguments = values(out.shape, seed=1), x, out, list(dims)
            torch.library.opcheck(backward, arguments)
            dx = backward(*arguments)
            assert dx.shape == x.shape and not torch._debug_has_internal_overlap(dx)


def test_what_is_wrong_with_the_gradient_of_maxima_is_named(operator) -> None:
    backward, x = gradient_operator(operator), values((3, 5))
    out = x.amax(1, keepdim=True)
    for given, error, message in (
        ((out[:, 0], x, out, (1,)), ValueError, r"dout has shape \(3,?\), must have that of x with reduced axes of 1"),
        ((out, x, out[:2], (1,)), ValueError, r"out has shape \(2, 1\), must have that of .*, \(3, 1\)"),
        ((out.half(), x, out, (1,)), TypeError, "dout is torch.float16, must be torch.float32 like x"),
        ((out, x, out, (2,)), IndexError, r"dims is \(2,\), each must be from -2 to 1"),
    ):
        with pytest.raises(error, match=message):
            backward(*given)


def test_gradients_of_many_losses_at_once(operator) -> None:
    x = values((3, 4, 5), requires_grad=True, ties=True)
    for dims in ((1,), (0, 2), ()):
        outs = operator(x, dims, False, "max"), x.amax(dims)
        douts = values((6, *outs[0].shape), seed=1)
        found, right = (torch.autograd.grad(out, x, douts, is_grads_batched=True)[0] for out in outs)
        torch.testing.assert_close(found, right)


@BY_KIND
def test_a_compiled_call_is_one_graph(operator, kind) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def function(x: Any) -> Any:
        return operator(x * 2, (0, -1), False, kind)

    for shape in ((2, 3, 5), (4, 6, 2)):
        x = values(shape, requires_grad=kind != "argmax")
        out, right = function(x), pytorchs(x * 2, (0, -1), False, kind)
        torch.testing.assert_close(out, right)
        if kind != "argmax":
            torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x) for each in (out, right)))


@BY_KIND
def test_batches_are_one_call(operator, kind) -> None:
    x = values((2, 3, 4, 5))
    for at, dims, keepdim in itertools.product(range(4), ((0,), (-1,), (0, 2), ()), (False, True)):
        found = torch.func.vmap(lambda x, d=dims, k=keepdim: operator(x, d, k, kind), in_dims=at)(x)
        right = torch.stack([pytorchs(each, dims, keepdim, kind) for each in x.unbind(at)])
        torch.testing.assert_close(found, right)
    found = torch.func.vmap(lambda x: operator(x, (0,), False, kind))(values((5,)))
    torch.testing.assert_close(found, torch.zeros(5, dtype=torch.int64) if kind == "argmax" else values((5,)))


def test_auto_takes_a_batch_of_as_many_axes_as_there_may_be(operator, monkeypatch) -> None:
    if is_triton(operator):
        pytest.skip("auto takes no Triton step")
    as_on_gpu(monkeypatch)
    monkeypatch.setattr("kernel_twins.functional.backends.measured_gpu", lambda device: "GPU")
    chosen: list[str] = []

    def batched(x: Any) -> Any:
        chosen.append(reduction._choose(x, "sum", 0))
        return kernel_twins.sum(x, 0)

    x = values((2, 3, 2, 3, 2, 3))
    once, twice = torch.func.vmap(batched), torch.func.vmap(torch.func.vmap(batched))
    for call, given, axis, backend in (
        (once, x, 1, "torch"),
        (once, x[0], 1, "cuda"),
        (twice, x, 2, "torch"),
        (twice, x[0], 2, "cuda"),
    ):
        torch.testing.assert_close(call(given), given.sum(axis))
        assert chosen.pop() == backend
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: torch.func.vmap(lambda x: kernel_twins.sum(x, 0))(x), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x), x.sum(1))
    torch.testing.assert_close(compiled(x[0]), x[0].sum(1))


@BY_KIND
def test_the_number_of_elements_may_be_known_to_values_alone(operator, kind) -> None:
    """As of those that a mask selects; there may be none, which is an error of the call and not of the trace."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
        def function(x: Any, mask: Any) -> Any:
            return operator(x[mask.nonzero().squeeze(1)], (0,), False, kind)

        x, mask = values((6, 5)), torch.tensor([1, 0, 1, 1, 0, 1], dtype=torch.bool)
        torch.testing.assert_close(function(x, mask), pytorchs(x[mask], (0,), False, kind))
        if kind in ("max", "argmax"):
            with pytest.raises(IndexError, match=rf"x has shape \(0, 5\), must have elements along dims for {kind}"):
                function(x, torch.zeros_like(mask))


def test_a_place_has_no_tangent(operator, monkeypatch) -> None:
    as_on_gpu(monkeypatch)
    x = values((3, 5))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        place = kernel_twins.argmax(dual, 1, backend="triton" if is_triton(operator) else "cuda")
    assert torch.equal(place, x.argmax(1))


def test_gradients_of_transforms_are_refused_with_a_remedy(operator, monkeypatch) -> None:
    as_on_gpu(monkeypatch)
    backend = "triton" if is_triton(operator) else "cuda"
    x = values((3, 5))
    for kind in ("sum", "mean", "max"):
        said = rf"{PYTORCHS[kind].__name__} has no derivative for torch.func's grad and vjp: pass backend='torch'$"
        for batched in (lambda function: function, torch.func.vmap):
            function = batched(lambda x, ours=OURS[kind]: ours(x, 0, backend=backend))
            with pytest.raises(NotImplementedError, match=said):
                torch.func.grad(lambda x, function=function: function(x).sum())(x)
    beside = torch.func.grad(lambda x: x[0, kernel_twins.argmax(x[0], backend=backend).detach()])  # it has none
    assert torch.equal(beside(x).nonzero(), torch.stack([torch.tensor(0), x[0].argmax()])[None])


def test_forward_derivatives_are_refused(operator) -> None:
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(values((3, 5)), values((3, 5), seed=1))
        if is_triton(operator):
            with pytest.raises(NotImplementedError, match="no forward-mode derivative: pass backend='torch'"):
                kernel_twins.sum(x, 1, backend="triton")
        else:
            with pytest.raises(NotImplementedError, match="no forward-mode derivative: pass backend='torch'"):
                operator(x, (1,), False, "sum")


# ----------------------------------------------------------------------------------------------------------------------
# Refusals and choices
# ----------------------------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_named(operator) -> None:
    x = values((3, 5))
    for given, dims, kind, error, message in (
        (x.int(), (1,), "sum", TypeError, "x is torch.int32, must be torch.float32 or torch.bfloat16 or torch.float16"),
        (x.to(torch.complex64), (1,), "sum", TypeError, "x is torch.complex64"),
        (x[None, None, None, None], (1,), "sum", ValueError, "x has 6 dimensions, must have up to 5: pass backend="),
        (x, (2,), "sum", IndexError, r"dims is \(2,\), each must be from -2 to 1: x has 2 dimensions"),
        (x, (1, -1), "mean", ValueError, r"dims is \(1, -1\), must name no axis twice"),
        (x, (1,), "min", ValueError, "kind is 'min', must be one of sum, mean, max, argmax"),
    ):
        with pytest.raises(error, match=message):
            operator(given, dims, False, kind)


def test_integers_of_any_class_are_dimensions(operator, monkeypatch) -> None:
    as_on_gpu(monkeypatch)
    backend = "triton" if is_triton(operator) else "cuda"
    x = values((3, 5))
    dim: Any
    for dim in (np.int64(1), np.int32(-1), (np.int64(0),), [np.int64(0), 1], torch.tensor(1)):
        torch.testing.assert_close(kernel_twins.sum(x, dim, backend=backend), x.sum(dim))
    dim = np.int64(1)
    assert torch.equal(kernel_twins.argmax(x, dim, backend=backend), x.argmax(1))


def test_what_is_no_dimension_is_named(operator, monkeypatch) -> None:
    as_on_gpu(monkeypatch)
    backend = "triton" if is_triton(operator) else "cuda"
    x = values((3, 5))
    dims: Any
    for dims in ((0, 1), [0], ()):
        said = rf"^dim is {re.escape(repr(dims))}, must be an int or None for argmax: make several one, with x.flatten"
        for given in (backend, "auto"):
            with pytest.raises(TypeError, match=said):
                kernel_twins.argmax(x, dims, backend=given)
        with pytest.raises(TypeError):
            kernel_twins.argmax(x, dims, backend="torch")
    no_dim: Any
    for no_dim in (1.0, [1.5], "ab"):
        said = rf"^dim is {re.escape(repr(no_dim))}, must be an int, a tuple of them or None: pass -1 for the last"
        with pytest.raises(TypeError, match=said):
            kernel_twins.sum(x, no_dim, backend=backend)


def test_what_is_no_tensor_is_named() -> None:
    pytest.importorskip("triton")
    for kind in OURS:
        with pytest.raises(TypeError, match=r"^x is a list, must be a torch.Tensor: call torch.as_tensor\(x\)$"):
            OURS[kind]([1.0, 2.0], backend="triton")


def test_backends_are_named() -> None:
    x = values((3, 5))
    with pytest.raises(ValueError, match="backend is 'cutlass', must be one of auto, cuda, triton, torch"):
        kernel_twins.sum(x, backend="cutlass")
    for backend in ("cuda", "triton"):
        with pytest.raises((ValueError, UnavailableError), match=r"on cpu, must be on a CUDA device|is missing"):
            kernel_twins.mean(x, 1, backend=backend)


def test_auto_leaves_to_pytorch_what_the_others_do_not_take(monkeypatch) -> None:
    def on_gpu(shape: Any, dtype: Any = torch.bfloat16) -> Any:
        x = torch.empty(shape, dtype=dtype, device="meta")
        told = {"dim": x.dim, "numel": x.numel, "shape": x.shape, "stride": x.stride, "requires_grad": False}
        return SimpleNamespace(dtype=dtype, device=SimpleNamespace(index=0), **told)

    monkeypatch.setattr("kernel_twins.functional.backends.measured_gpu", lambda device: "GPU")
    monkeypatch.setattr(reduction, "is_on_gpu", lambda x: isinstance(x, SimpleNamespace))
    monkeypatch.setattr(reduction, "_runs", lambda backend, device: True)
    assert reduction._choose(on_gpu((3, 5)), "sum") == "cuda"
    assert reduction._choose(on_gpu((3, 0)), "sum") == "torch"
    assert reduction._choose(on_gpu((1,) * 6), "sum") == "torch"
    assert reduction._choose(on_gpu((3, 5), torch.float64), "sum") == "torch"
    assert reduction._choose(values((3, 5)), "sum") == "torch"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert reduction._choose(on_gpu((3, 5)), "sum") == "torch"
        assert reduction._choose(on_gpu((3, 5)), "max") == "cuda"
    assert reduction._choose(on_gpu((3, 5)), "sum", None, torch.float32) == "torch"
    assert reduction._choose(on_gpu((3, 5), torch.float64), "sum", None, torch.float32) == "cuda"
    assert reduction._choose(on_gpu((3, 5)), "sum", None, torch.float64) == "torch"
    monkeypatch.setattr(reduction, "_runs", lambda backend, device: False)
    assert reduction._choose(on_gpu((3, 5)), "max") == "torch"


@pytest.mark.parametrize("backend", ["named", "torch", "auto"])
def test_dtype_of_a_sum_is_pytorchs(operator, monkeypatch, backend) -> None:
    """x is cast first, also under autocast and in a graph; its gradient has its own dtype."""
    if not is_triton(operator):
        cuda_takes_the_cpu(monkeypatch)
    backend = ("triton" if is_triton(operator) else "cuda") if backend == "named" else backend

    def call(x: Any, dtype: Any) -> Any:
        return kernel_twins.sum(x, 1, True, backend=backend, dtype=dtype)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    dtypes = torch.float32, torch.bfloat16, torch.float16
    for of, dtype in itertools.product(dtypes, repeat=2):
        x = values((3, 5), of, requires_grad=True)
        right = torch.sum(x, 1, True, dtype=dtype)
        for each in (call, compiled) if torch.float32 in (of, dtype) else (call,):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = each(x, dtype)
            assert out.dtype == dtype
            torch.testing.assert_close(out, right)
            (found,) = torch.autograd.grad(out.sum(), x)
            assert found.dtype == of and bool((found == 1).all())
    assert call(torch.arange(6).view(2, 3), torch.float32).tolist() == [[3.0], [12.0]]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_dtypes_that_the_kernel_lacks_are_refused(backend) -> None:
    with pytest.raises(TypeError, match=r"^dtype is torch.int64, must be None or one of torch.float32, .* pass backen"):
        kernel_twins.sum(values((3, 5)), backend=backend, dtype=torch.int64)


def test_neither_torch_nor_triton_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, kernel_twins as k; assert 'torch' not in sys.modules; k.sum; "
        "assert not any(name.startswith('kernel_twins._triton') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

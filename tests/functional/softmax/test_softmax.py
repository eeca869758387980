"""softmax and log_softmax without a GPU: layouts, gradients, tracing, batching, and what is refused.

The CUDA backend's operators compute on the CPU by PyTorch's own. The Triton backend's are given PyTorch in the place of
their kernels, which other tests run.
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
import pandas
import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins import OPS  # noqa: E402
from kernel_twins.errors import UnavailableError  # noqa: E402
from kernel_twins.functional import backends  # noqa: E402
from kernel_twins.functional.backends import cuda_operator  # noqa: E402
from kernel_twins.functional.expected import Problem, rows  # noqa: E402
from kernel_twins.report.calls import fastest  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402
from tests.sides import as_interpreted, cuda_library, cuda_takes_the_cpu  # noqa: E402

softmax = importlib.import_module("kernel_twins.functional.softmax.softmax")  # the module, which a function hides
ROOT = Path(__file__).resolve().parents[3]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BY_LOG = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
SHAPES: list[tuple[int, ...]] = [(), (5,), (3, 5), (2, 3, 5), (2, 3, 4, 5), (0, 5), (3, 0), (3, 1), (1, 1)]
EVERY_DIM = [(shape, dim) for shape in SHAPES for dim in range(-max(len(shape), 1), max(len(shape), 1))]
BY_DIM = pytest.mark.parametrize(("shape", "dim"), EVERY_DIM, ids=str)
VMAPS = [((5,), 0, 0), ((5, 3), 1, -1), ((2, 5, 3), 1, 1), ((2, 5, 3), 2, 0), ((2, 5, 3), 0, -1), ((4, 2, 5, 3), 2, -2)]


def pytorchs(log: bool) -> Any:
    return torch.log_softmax if log else torch.softmax


def ours(log: bool) -> Any:
    return kernel_twins.log_softmax if log else kernel_twins.softmax


def values(shape, dtype=torch.float32, requires_grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return made.requires_grad_(requires_grad)


def replaced(op: str, device: int | None) -> Any:
    """A launcher by PyTorch, which insists on what a kernel is promised."""

    def launch(*inputs: Any, out: Any, log: bool) -> None:
        m, n = out.shape
        assert out.is_contiguous()
        assert all(each.shape == (m, n) and (n == 1 or each.stride(1) == 1) for each in inputs)
        if op == "softmax":
            out.copy_(pytorchs(log)(inputs[0], 1))
        else:
            aten = torch._log_softmax_backward_data if log else torch._softmax_backward_data
            out.copy_(aten(*inputs, 1, out.dtype))

    return launch


@pytest.fixture(params=["cuda", "triton"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``forward`` and ``backward`` of a backend, and its ``wide``-est dtype."""
    if request.param == "cuda":
        library = cuda_library("softmax")
        found = SimpleNamespace(forward=library.softmax.default, backward=library.softmax_backward.default)
        found.wide = torch.float64
    else:
        as_interpreted(monkeypatch)
        side = importlib.import_module("kernel_twins.functional.softmax.triton_softmax")
        monkeypatch.setattr(side, "triton_launcher", replaced)
        found = SimpleNamespace(forward=side.operator, backward=side.backward_operator, wide=torch.float32)
    found.name = request.param
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Values and layouts
# ----------------------------------------------------------------------------------------------------------------------


@BY_LOG
@BY_DIM
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_off_the_gpu_it_is_pytorchs(shape, dim, log, backend) -> None:
    x = values(shape)
    assert torch.equal(ours(log)(x, dim, backend), pytorchs(log)(x, dim))
    assert torch.equal(ours(log)(x.double(), dim=dim), pytorchs(log)(x.double(), dim))


@BY_LOG
@BY_DIM
def test_values_gradients_and_layouts(operators, shape, dim, log) -> None:
    x = values(shape, requires_grad=True)
    out = operators.forward(x, dim, log)
    right = pytorchs(log)(x, dim)
    torch.testing.assert_close(out, right)
    assert (out.movedim(dim, -1) if shape else out).is_contiguous()
    dout = values(shape, seed=1)
    (dx,) = torch.autograd.grad(out, x, dout)
    torch.testing.assert_close(dx, torch.autograd.grad(right, x, dout)[0])
    assert (dx.movedim(dim, -1) if shape else dx).is_contiguous()
    meta = operators.forward(x.detach().to("meta"), dim, log)
    assert meta.is_meta and (meta.shape, meta.stride(), meta.dtype) == (out.shape, out.stride(), out.dtype)
    meta = operators.backward(dout.to("meta"), out.detach().to("meta"), dim, log)
    assert meta.is_meta and (meta.shape, meta.stride()) == (dx.shape, dx.stride())


@BY_LOG
def test_any_strides(operators, log) -> None:
    x = values((6, 4, 10))
    for given, dim in itertools.product(
        (x.transpose(0, 1), x.permute(2, 0, 1), x[:, :, ::2], x[:, :, :7], x[:1].expand(5, 4, 10), x[..., :1]), range(3)
    ):
        out = operators.forward(given, dim, log)
        torch.testing.assert_close(out, pytorchs(log)(given, dim))
        dout = values((), seed=1).expand(given.shape)
        dx = operators.backward(dout, out, dim, log)
        leaf = given.detach().requires_grad_()
        torch.testing.assert_close(dx, torch.autograd.grad(pytorchs(log)(leaf, dim), leaf, dout)[0])


def test_signs_that_are_yet_to_be_changed(operators) -> None:
    x = torch.view_as_complex(values((3, 4, 2))).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(operators.forward(x), torch.softmax(x, -1))
    if operators.name == "triton":
        torch.testing.assert_close(kernel_twins.softmax(x, backend="triton"), torch.softmax(x, -1))


def test_past_the_operator_a_call_is_the_same(operators) -> None:
    if operators.name == "cuda":
        pytest.skip("the CUDA side has no other way than its operator")
    x, dout = values((3, 4, 5), requires_grad=True), values((3, 4, 5), seed=1)
    for log, dim in itertools.product((False, True), (0, -1)):
        out = ours(log)(x, dim, "triton")
        right = pytorchs(log)(x, dim)
        assert "_Softmax" in type(out.grad_fn).__name__
        torch.testing.assert_close(out, right)
        torch.testing.assert_close(torch.autograd.grad(out, x, dout), torch.autograd.grad(right, x, dout))
        assert not ours(log)(x.detach(), dim, "triton").requires_grad


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives
# ----------------------------------------------------------------------------------------------------------------------


@BY_LOG
@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((5,), 0), ((3, 4), 0), ((2, 3, 4), 1), ((2, 3, 4), -1)], ids=str)
def test_first_and_second_derivatives(operators, shape, dim, log) -> None:
    x = values(shape, operators.wide, requires_grad=True)
    if operators.wide == torch.float64:
        assert torch.autograd.gradcheck(lambda x: operators.forward(x, dim, log), (x,))
        assert torch.autograd.gradgradcheck(lambda x: operators.forward(x, dim, log), (x,))
        return
    dout = values(shape, requires_grad=True, seed=1)
    seconds = []
    for function in (lambda x: operators.forward(x, dim, log), lambda x: pytorchs(log)(x, dim)):
        (dx,) = torch.autograd.grad(function(x), x, dout, create_graph=True)
        seconds.append(torch.autograd.grad(dx.square().sum(), (x, dout)))
    torch.testing.assert_close(*seconds)


def test_a_changed_result_is_noticed(operators) -> None:
    x = values((3, 4), requires_grad=True)
    out = operators.forward(x)
    out.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x)


def test_other_derivatives_are_refused_and_not_lost(operators) -> None:
    x = values((3, 4))
    with pytest.raises(RuntimeError, match=r"functorch transforms|autograd.Function"):
        torch.func.grad(lambda x: operators.forward(x).sum())(x)
    call = operators.forward if operators.name == "cuda" else lambda x: kernel_twins.softmax(x, backend="triton")
    with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative: pass backend='torch'$"):
        torch.func.jvp(call, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative: pass backend='torch'$"):
            call(dual)
        torch.testing.assert_close(call(x), torch.softmax(x, -1))


def test_tangents_of_gradients_are_refused_and_not_lost(operators) -> None:
    x = values((3, 4), requires_grad=True)
    y = operators.forward(x)
    with torch.autograd.forward_ad.dual_level():
        dout = torch.autograd.forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative: pass backend='torch'$"):
            torch.autograd.grad(y, x, dout)


def test_gradients_of_transforms_are_refused_with_a_remedy(operators, monkeypatch) -> None:
    monkeypatch.setattr(softmax, "require_gpu", lambda *_: None)
    x = values((3, 4))
    for log, batched in itertools.product((False, True), (lambda function: function, torch.func.vmap)):
        function = batched(lambda x, log=log: ours(log)(x, -1, operators.name))
        with pytest.raises(
            NotImplementedError, match=r"softmax has no derivative for torch.func's grad and vjp: pass b"
        ):
            torch.func.grad(lambda x, function=function: function(x).sum())(x)
        beside = torch.func.grad(lambda other, function=function: function(x).sum() * other)(torch.ones(()))
        torch.testing.assert_close(beside, function(x).sum())  # of what no transform follows


@BY_LOG
def test_what_is_registered_is_what_pytorch_expects(operators, log) -> None:
    for shape, dim, dtype in (((3, 5), -1, torch.float32), ((2, 3, 5), 1, torch.bfloat16), ((), 0, torch.float16)):
        torch.library.opcheck(operators.forward, (values(shape, dtype, requires_grad=True), dim, log))
        y = pytorchs(log)(values(shape, dtype), dim)
        torch.library.opcheck(operators.backward, (values(shape, dtype, seed=1), y, dim, log))
    torch.library.opcheck(operators.forward, (values((3, 5)),))


# ----------------------------------------------------------------------------------------------------------------------
# Tracing, batching, autocast
# ----------------------------------------------------------------------------------------------------------------------


@BY_LOG
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
def test_compiled_without_a_break(operators, log, dynamic, dim) -> None:
    torch.compiler.reset()
    calls = [lambda x: operators.forward(x, dim, log).sin(), lambda x: ours(log)(x, dim).sin()]
    if operators.name == "triton":
        calls.append(lambda x: ours(log)(x, dim, backend="triton").sin())
    for call in calls:
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for m in (3, 7):
            x = values((2, m, 5), requires_grad=True)
            out, right = compiled(x), pytorchs(log)(x, dim).sin()
            torch.testing.assert_close(out, right)
            gradients = (torch.autograd.grad(each.sum(), x) for each in (out, right))
            torch.testing.assert_close(*gradients)


@BY_LOG
@pytest.mark.parametrize(("shape", "in_dim", "dim"), VMAPS, ids=str)
def test_batched(operators, shape, in_dim, dim, log) -> None:
    def batched(function):
        return torch.func.vmap(lambda x: function(x, dim, log), in_dims=in_dim)

    def right(x, dim, log):
        return pytorchs(log)(x, dim)

    x = values(shape, requires_grad=True)
    out, expected = batched(operators.forward)(x), batched(right)(x)
    torch.testing.assert_close(out, expected)
    dout = values(out.shape, seed=1)
    torch.testing.assert_close(torch.autograd.grad(out, x, dout), torch.autograd.grad(expected, x, dout))


@BY_LOG
def test_gradients_are_batched(operators, log) -> None:
    x = values((3, 4), requires_grad=True)
    for out_of in (operators.forward, lambda x, dim, log: pytorchs(log)(x, dim)):
        out = out_of(x, 0, log)
        douts = values((5, 3, 4), seed=1)
        (dx,) = torch.autograd.grad(out, x, douts, is_grads_batched=True)
        torch.testing.assert_close(dx, torch.stack([torch.autograd.grad(out_of(x, 0, log), x, d)[0] for d in douts]))
    dout, y = values((4, 3, 5), seed=1), values((3, 4, 5))
    for in_dims in ((0, 1), (None, 1), (0, None)):
        given = [tensor if at is not None else tensor[0] for tensor, at in zip((dout, y), in_dims, strict=True)]
        given = [each if each.dim() == 3 else each.reshape(-1)[:15].view(3, 5) for each in given]
        got = torch.func.vmap(lambda dout, y: operators.backward(dout, y, -1, log), in_dims=in_dims)(*given)
        one_by_one = [
            operators.backward(
                *(g if at is None else g.select(at, i) for g, at in zip(given, in_dims, strict=True)), -1, log
            )
            for i in range(4)
        ]
        torch.testing.assert_close(got, torch.stack(one_by_one))
    scalars = torch.func.vmap(lambda dout, y: operators.backward(dout, y, 0, log))(values((3,)), values((3,), seed=1))
    assert scalars.shape == (3,)


def test_batches_within_batches_and_traced(operators) -> None:
    x = values((3, 4, 5))
    nested = torch.func.vmap(torch.func.vmap(lambda x: operators.forward(x, 0)), in_dims=1)
    torch.testing.assert_close(nested(x), torch.softmax(x.transpose(0, 1), -1))
    torch.compiler.reset()
    traced = torch.compile(lambda x: torch.func.vmap(operators.forward)(x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(x), torch.softmax(x, -1))
    with pytest.raises(IndexError, match=r"^dim is 2, must be from -2 to 1: x has 2 dimensions"):
        torch.func.vmap(lambda x: operators.forward(x, 2))(x)


def test_autocast_of_the_cpu_changes_no_dtype_as_pytorchs(operators) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = values((3, 5), dtype)
            assert operators.forward(x).dtype == kernel_twins.softmax(x).dtype == torch.softmax(x, -1).dtype == dtype


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


def test_what_is_refused_is_named(operators) -> None:
    x = values((3, 5))
    with pytest.raises(IndexError, match=r"^dim is 2, must be from -2 to 1: x has 2 dimensions$"):
        operators.forward(x, 2)
    with pytest.raises(IndexError, match=r"^dim is -2, must be from -1 to 0: x has 0 dimensions$"):
        operators.forward(x[0, 0], -2)
    with pytest.raises(TypeError, match=r"^x is torch.int32, must be torch.float32 or .* call x.to"):
        operators.forward(x.int())
    with pytest.raises(TypeError, match=r"^dout is torch.int32, must be torch.float32 or "):
        operators.backward(x.int(), x, -1)
    with pytest.raises(
        TypeError, match=r"^y is torch.float16, must be torch.float32 like dout: call y.to\(dout.dtype\)$"
    ):
        operators.backward(x, x.half(), -1)
    with pytest.raises(ValueError, match=r"^y has shape \(5, 3\), must have that of dout, \(3, 5\)$"):
        operators.backward(x, x.t(), -1)
    with pytest.raises(ValueError, match=r"^y is on meta, must be on cpu like dout: call y.to\(dout.device\)$"):
        operators.backward(x, x.to("meta"), -1)
    with pytest.raises(IndexError, match=r"^dim is -3, must be from -2 to 1: dout has 2 dimensions$"):
        operators.backward(x, x, -3)


def test_devices_backends_and_others_than_tensors_are_refused() -> None:
    x = values((3, 5))
    no_tensor: Any = [1.0]
    with pytest.raises(ValueError, match=r"^backend is 'cublas', must be one of auto, cuda, triton, torch$"):
        kernel_twins.softmax(x, backend="cublas")
    with pytest.raises((ValueError, UnavailableError), match=r"backend='torch'"):
        kernel_twins.softmax(x, backend="cuda")
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"^x is on cpu, must be on a CUDA device for backend='triton': call x.cuda"):
        kernel_twins.log_softmax(x, backend="triton")
    with pytest.raises(TypeError, match=r"^x is a list, must be a torch.Tensor: call torch.as_tensor\(x\)$"):
        kernel_twins.softmax(no_tensor, backend="triton")
    for wrong in (lambda: kernel_twins.softmax(no_tensor), lambda: kernel_twins.log_softmax(x, 2)):
        with pytest.raises((TypeError, IndexError)):  # in PyTorch's words
            wrong()


@pytest.mark.parametrize("dim", [None, 1.0, "1", (1,)], ids=str)
def test_what_is_no_dimension_is_named(operators, dim) -> None:
    if operators.name == "cuda":
        pytest.skip("the CUDA side's dispatcher says so")
    with pytest.raises(TypeError, match=rf"^dim is {re.escape(repr(dim))}, must be an int: pass -1 for the last dim"):
        kernel_twins.softmax(values((3, 5)), dim, "triton")
    numpys: Any = np.int64(1)
    assert kernel_twins.softmax(values((3, 5)), numpys, "triton").shape == (3, 5)


def test_a_stale_extension_says_so() -> None:
    cuda_library()
    operator, why = cuda_operator("no_such_operator")
    assert operator is None and "build it again" in why


# ----------------------------------------------------------------------------------------------------------------------
# Modules
# ----------------------------------------------------------------------------------------------------------------------


def test_the_modules_are_torch_nns_twins() -> None:
    x = values((2, 3, 5))
    nn = kernel_twins.nn
    for ours_, right in ((nn.Softmax, torch.nn.Softmax), (nn.LogSoftmax, torch.nn.LogSoftmax)):
        assert torch.equal(ours_()(x), right(-1)(x))
        assert torch.equal(ours_(dim=1, backend="torch")(x), right(dim=1)(x))
        assert torch.equal(ours_()(input=x), right(-1)(input=x))
        assert not ours_().state_dict()
        with pytest.raises(ValueError, match=r"^backend is 'cublas', must be one of auto, cuda, triton, torch$"):
            ours_(backend="cublas")
    assert repr(nn.Softmax(1)) == "Softmax(dim=1, backend='auto')"
    assert repr(nn.LogSoftmax(backend="cuda")) == "LogSoftmax(dim=-1, backend='cuda')"


def test_functions_and_modules_are_found_lazily() -> None:
    script = (
        "import sys, kernel_twins as k; assert not {'torch', 'triton'} & sys.modules.keys(); k.nn.Softmax; "
        "k.softmax; k.log_softmax; assert 'torch' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


# ----------------------------------------------------------------------------------------------------------------------
# backend="auto"
# ----------------------------------------------------------------------------------------------------------------------


def test_every_backend_names_steps_that_there_are() -> None:
    for op in ("softmax", "softmax_backward"):
        for backend, names in OPS[op].behind.items():
            assert all(backend in OPS[op].step(name).backends for name in names)


def test_the_operators_pass_over_steps_where_their_rows_are_too_long() -> None:
    source = (ROOT / "cuda-kernels" / "softmax" / "torch.cpp").read_text()
    for op, constant in (("softmax", "ROW_IN_REGISTERS"), ("softmax_backward", "PAIR_IN_REGISTERS")):
        (kib,) = re.findall(rf"{constant} = (\d+) \* 1024;", source)
        longest, (_, second, last) = int(kib) * 1024 // 2, OPS[op].behind["cuda"]
        for n, taken in ((longest, True), (longest + 1, False)):
            assert (OPS[op].step(second).accepts(Case.of(1, n, dtype="bf16")) == "") == taken
        assert OPS[op].step(last).accepts(Case.of(1, 2**20, dtype="fp32")) == ""


def test_auto_asks_for_what_it_was_given(monkeypatch) -> None:
    asked: list[tuple[str, Problem, bool]] = []
    best = ["cuda"]

    def ordered(gpu: str, function: str, problem: Problem, differentiated: bool, *_: bool) -> list[str]:
        asked.append((function, problem, differentiated))
        return best

    monkeypatch.setattr(softmax, "is_on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    monkeypatch.setattr("kernel_twins.functional.backends.measured_gpu", lambda device: "GPU")
    monkeypatch.setattr(softmax, "_runs", lambda *_: True)
    monkeypatch.setattr(backends, "ordered", ordered)

    def chosen(x, dim=-1):
        return softmax._choose(x, dim)

    x = torch.empty(2, 3, 16, dtype=torch.bfloat16)
    for given, dim in ((x, -1), (x[..., :5], 2), (x.transpose(0, 1), 2), (x.permute(2, 0, 1), 0), (x[0, 0, 0], 0)):
        assert chosen(given, dim) == "cuda"
    right = [rows(6, 16, 16, 2), rows(6, 5, 16, 2), rows(6, 16, 16, 2), rows(6, 16, 16, 2), rows(1, 1, 1, 2)]
    assert asked == [("softmax", each, False) for each in right]
    assert chosen(x.requires_grad_()) == "cuda"
    assert asked[-1] == ("softmax", rows(6, 16, 16, 2), True)
    x = x.detach()
    best = ["triton", "torch", "cuda"]
    monkeypatch.setattr(softmax, "_runs", lambda backend, device: backend == "cuda")
    assert chosen(x) == "torch"
    monkeypatch.setattr(softmax, "_runs", lambda *_: True)
    for given, dim in ((x, 0), (x, 1), (x, 3), (x[:0], -1), (x.double(), -1), (x.int(), -1), (x.permute(1, 2, 0), 1)):
        assert chosen(given, dim) == "torch"
    for best, last in ((["torch", "cuda"], "torch"), (["triton", "torch"], "triton"), ([], "cuda")):  # noqa: B007  # read by ordered
        assert chosen(x) == last
        assert chosen(x.permute(2, 0, 1), 0) == ("cuda" if last == "torch" else last)
    with monkeypatch.context() as patch:
        patch.setattr(softmax.torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert chosen(x) == "torch"
        assert chosen(x.float()) == "cuda"
    for given, wanted, last in (
        (x, torch.float32, "cuda"),  # bfloat16, which PyTorch casts first
        (x.half(), torch.float32, "torch"),
        (x, torch.float64, "torch"),
        (x.double(), torch.bfloat16, "cuda"),
    ):
        assert softmax._choose(given, -1, wanted) == last
    seen = []

    def seeing(x):
        seen.append(chosen(x))
        return x.sum()

    torch.func.vmap(seeing)(x)
    torch.func.grad(seeing)(x)
    torch.func.vmap(torch.func.grad(seeing))(x)
    assert seen == ["cuda", "torch", "torch"]


@BY_LOG
@pytest.mark.parametrize("backend", ["named", "torch", "auto"])
def test_dtype_of_the_result_is_pytorchs(operators, monkeypatch, backend, log) -> None:
    """x is cast first, also under autocast and in a graph; its gradient has its own dtype."""
    if operators.name == "cuda":
        cuda_takes_the_cpu(monkeypatch)
    backend = operators.name if backend == "named" else backend

    def call(x: Any, dtype: Any) -> Any:
        return ours(log)(x, 1, backend, dtype=dtype)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for of, dtype in itertools.product(DTYPES, repeat=2):
        x = values((3, 5), of, requires_grad=True)
        right = pytorchs(log)(x, 1, dtype=dtype)
        (dx,) = torch.autograd.grad(right.square().sum(), x)
        for each in (call, compiled) if torch.float32 in (of, dtype) else (call,):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = each(x, dtype)
            assert y.dtype == dtype
            torch.testing.assert_close(y, right)
            (found,) = torch.autograd.grad(y.square().sum(), x)
            assert found.dtype == of
            torch.testing.assert_close(found, dx)
    integers = torch.arange(6).view(2, 3)
    torch.testing.assert_close(call(integers, torch.float32), pytorchs(log)(integers, 1, dtype=torch.float32))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_dtypes_that_the_kernels_lack_are_refused(backend) -> None:
    with pytest.raises(TypeError, match=r"^dtype is torch.float64, must be None or one of torch.float32, .* pass back"):
        kernel_twins.softmax(values((3, 5)), backend=backend, dtype=torch.float64)


@pytest.mark.parametrize("best", ["cuda", "torch"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_auto_is_traced_to_what_is_expected_to_be_faster_than_inductor(operators, monkeypatch, dynamic, best) -> None:
    if operators.name == "triton":
        pytest.skip("one language is enough")
    asked = []

    def ordered(gpu: str, function: str, problem: Problem | None, *flags: bool) -> list[str]:
        asked.append((problem is None, flags))
        return [best]

    monkeypatch.setattr(softmax, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(softmax, "require_gpu", lambda *_: None)
    monkeypatch.setattr(softmax, "_runs", lambda *_: True)
    monkeypatch.setattr(backends, "measured_gpu", lambda device: "GPU")
    monkeypatch.setattr(backends, "ordered", ordered)
    for dim in (-1, 1):
        torch.compiler.reset()
        targets: list[str] = []

        def record(module, _, targets=targets):
            targets.extend(str(node.target) for node in module.graph.nodes if node.op.startswith("call"))
            return module

        traced = torch.compile(
            lambda x, dim=dim: kernel_twins.softmax(x, dim), fullgraph=True, backend=record, dynamic=dynamic
        )
        x = values((3, 4), torch.bfloat16)
        torch.testing.assert_close(traced(x), torch.softmax(x, dim))
        assert len(targets) == 1 and ("kernel_twins" in targets[0]) == (best == "cuda")
    assert asked == [(dynamic, (False, True, False))] * 2  # problem and gradient are known, and it is traced


def test_a_step_that_was_not_timed_yet_is_judged_by_the_last_one_that_was() -> None:
    """Or a new step would send all calls to PyTorch until it is measured."""
    steps = [("v07_cluster", "cuda"), ("v10_cluster_registers", "cuda"), ("v08_cooperative", "triton")]
    timings = pandas.DataFrame(steps, columns=["step", "backend"])
    assert fastest.measured_steps("softmax", timings) == {"cuda": "v10_cluster_registers", "triton": "v08_cooperative"}
    newest = {backend: names[0] for backend, names in OPS["softmax"].behind.items()}
    timed = pandas.DataFrame(
        [*steps, *((step, backend) for backend, step in newest.items())], columns=["step", "backend"]
    )
    assert fastest.measured_steps("softmax", timed) == newest


# ----------------------------------------------------------------------------------------------------------------------
# Triton's last step
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("wide", [False, True])
def test_parts_and_pieces_are_the_row_without_its_edges(itemsize, wide) -> None:
    """Wherever the row starts in its first vector; of programs that share it, a whole piece needs no mask in any."""
    pytest.importorskip("triton")
    step = importlib.import_module("kernel_twins._triton.softmax.softmax.v08_cooperative")
    lengths = (1, 100, 1_000, 4_096, 5_003, 5_120, 8_191, 12_288, 16_385, 50_257, 65_536, 70_001, 262_147, 2**20)
    for config, n in itertools.product(step.CONFIGS, lengths):
        made = SimpleNamespace(**step.divided(n, itemsize, wide, config.all_kwargs()))
        share = -(-(n // made.VECTOR) // made.PARTS)
        if made.ROWS > 1:
            assert made.PARTS == made.PIECES == 1 and n // made.BLOCK_N == made.WHOLE and not made.EDGES
        for head in range(made.VECTOR if made.EDGES else 1):
            vectors = (n - head) // made.VECTOR
            ends = [min((part + 1) * share, vectors) for part in range(made.PARTS)]
            sizes = [max(0, end - part * share) * made.VECTOR for part, end in enumerate(ends)]
            assert sum(sizes) == vectors * made.VECTOR and vectors * made.VECTOR > n - head - made.VECTOR
            assert max(sizes) <= made.PIECES * made.BLOCK_N and min(sizes) >= made.WHOLE * made.BLOCK_N


def test_a_choice_is_kept_for_each_of_the_two(monkeypatch) -> None:
    """A capture takes what was chosen before, of which Triton has the kernel: that of softmax is not log_softmax's."""
    asked = []
    assert softmax._kept is not softmax._kept_log

    def choose(name: str) -> str:
        asked.append(name)
        return "torch"

    for name in ("_kept", "_kept_log"):
        monkeypatch.setattr(softmax, name, lambda *_, name=name: choose(name))
    for function in (kernel_twins.softmax, kernel_twins.log_softmax):
        function(torch.zeros(2, 3))
    assert asked == ["_kept", "_kept_log"]

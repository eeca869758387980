"""The public functions without a GPU: shapes, gradients, tracing, and what is refused."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import kernel_twins  # noqa: E402
from kernel_twins import OPS  # noqa: E402
from kernel_twins.errors import UnavailableError  # noqa: E402
from kernel_twins.functional import backends, expected  # noqa: E402
from kernel_twins.functional.backends import cuda_operator, is_on_gpu, is_plain  # noqa: E402
from kernel_twins.functional.expected import Problem, product  # noqa: E402
from kernel_twins.functional.matmul import linear  # noqa: E402
from kernel_twins.harness.load import extension  # noqa: E402
from kernel_twins.report.calls import fastest  # noqa: E402
from kernel_twins.report.calls.functions import FUNCTIONS  # noqa: E402
from kernel_twins.report.rows import store  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402
from tests.sides import as_interpreted, cuda_library  # noqa: E402

matmul = importlib.import_module("kernel_twins.functional.matmul.matmul")  # the module, which a function hides
ROOT = Path(__file__).resolve().parents[2]
SHAPES = [
    ((3, 5), (5, 4)),
    ((5,), (5, 4)),
    ((3, 5), (5,)),
    ((5,), (5,)),
    ((2, 3, 5), (5, 4)),
    ((2, 3, 5), (5,)),
    ((3, 5), (2, 5, 4)),
    ((5,), (2, 5, 4)),
    ((2, 3, 5), (2, 5, 4)),
    ((2, 1, 3, 5), (6, 5, 4)),
    ((1, 3, 5), (1, 5, 4)),
    ((0, 5), (5, 4)),
    ((3, 0), (0, 4)),
    ((0, 3, 5), (5, 4)),
    ((2, 3, 0), (2, 0, 4)),
]
BY_SHAPES = pytest.mark.parametrize(("a_shape", "b_shape"), SHAPES, ids=lambda shape: "x".join(map(str, shape)) or "-")


@pytest.fixture
def operator():
    """The CUDA backend's operator, which computes on the CPU with PyTorch's own product."""
    return cuda_library("matmul").matmul.default


def operands(a_shape, b_shape, dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    make = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in (a_shape, b_shape))
    return tuple(tensor.requires_grad_(requires_grad) for tensor in make)


def as_if_on_a_gpu(monkeypatch) -> None:
    """The rules of "auto" take tensors of the CPU for those of an H100 that has no kernel of ours."""
    for path in {*kernel_twins._MODULES.values()}:
        module = importlib.import_module(f"kernel_twins.functional.{path}")
        monkeypatch.setattr(module, "is_on_gpu", lambda tensor: isinstance(tensor, Tensor))
        monkeypatch.setattr(module, "_runs", backends.constant(lambda *_: False))
    monkeypatch.setattr(backends, "measured_gpu", lambda device: "h100-sxm")


@BY_SHAPES
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_off_the_gpu_the_product_is_pytorchs(a_shape, b_shape, backend) -> None:
    a, b = operands(a_shape, b_shape)
    assert torch.equal(kernel_twins.matmul(a, b, backend=backend), torch.matmul(a, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_operands_may_have_a_wider_result(dtype) -> None:
    a, b = operands((3, 5), (5, 4), dtype)
    out = kernel_twins.matmul(a, b, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, a.float() @ b.float())


@BY_SHAPES
def test_the_operators_traces_and_gradients_are_what_pytorch_expects(operator, a_shape, b_shape) -> None:
    a, b = operands(a_shape, b_shape, requires_grad=True)
    torch.library.opcheck(operator, (a, b))
    torch.library.opcheck(operator, (a.detach().bfloat16(), b.detach().bfloat16(), torch.float32))


@BY_SHAPES
def test_gradients_agree_with_finite_differences(operator, a_shape, b_shape) -> None:
    a, b = operands(a_shape, b_shape, torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(operator, (a, b))
    assert torch.autograd.gradgradcheck(operator, (a, b))
    assert torch.autograd.gradcheck(kernel_twins.matmul, (a, b))


@BY_SHAPES
def test_gradients_may_come_in_a_batch(operator, a_shape, b_shape) -> None:
    a, b = operands(a_shape, b_shape, requires_grad=True)
    found, right = (each(a, b) for each in (operator, torch.matmul))
    douts = torch.randn((3, *found.shape), generator=torch.Generator().manual_seed(1))
    found, right = (torch.autograd.grad(each, (a, b), douts, is_grads_batched=True) for each in (found, right))
    torch.testing.assert_close(found, right)


def test_one_operand_alone_may_want_a_gradient(operator) -> None:
    for a_wants, b_wants in itertools.product((False, True), repeat=2):
        a, b = operands((2, 3, 5), (5, 4))
        out = operator(a.requires_grad_(a_wants), b.requires_grad_(b_wants))
        assert out.requires_grad == (a_wants or b_wants)
        if out.requires_grad:
            out.sum().backward()
        assert (a.grad is not None, b.grad is not None) == (a_wants, b_wants)


def saved_bytes(call: Any, *given: Any) -> int:
    """Of all memory that is saved for a backward pass, counted once."""
    saved: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = call(*given)
    assert out.requires_grad
    return sum(saved.values())


@BY_SHAPES
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)], ids=str)
def test_no_more_is_kept_than_pytorch_keeps(operator, a_shape, b_shape, wanted) -> None:
    a, b = (each.requires_grad_(wants) for each, wants in zip(operands(a_shape, b_shape), wanted, strict=True))
    assert saved_bytes(operator, a, b) <= saved_bytes(torch.matmul, a, b)


@BY_SHAPES
@pytest.mark.parametrize("frozen", [0, 1])
def test_an_operand_may_change_where_its_gradient_does_not_need_it(operator, a_shape, b_shape, frozen) -> None:
    """Of a frozen operand the other's gradient needs all, of the other nothing is needed."""
    given = operands(a_shape, b_shape)
    other = given[1 - frozen].requires_grad_()
    (right,) = torch.autograd.grad(torch.matmul(*given).sum(), other)
    out = operator(*given)
    with torch.no_grad():
        other.add_(1)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), other)[0], right)


def test_gradients_of_half_operands_have_their_dtype(operator) -> None:
    a, b = operands((3, 5), (5, 4), torch.bfloat16, requires_grad=True)
    operator(a, b, torch.float32).sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "call",
    [kernel_twins.softmax, kernel_twins.sum, lambda x, dim: kernel_twins.sum(x, (dim, -2))],
    ids=["softmax", "sum", "sum_of_two"],
)
def test_a_dim_may_be_an_argument_of_a_compiled_function(monkeypatch, call, dynamic) -> None:
    as_if_on_a_gpu(monkeypatch)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, dim: call(x, dim), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    x = torch.randn(3, 4, 5, 6)
    for dim in (-1, 3, 1, 0):
        torch.testing.assert_close(compiled(x, dim), call(x, dim))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("traced", ["operator", "function"])
def test_compiled_without_a_break(operator, dynamic, traced) -> None:
    call = operator if traced == "operator" else kernel_twins.matmul
    compiled = torch.compile(lambda a, b: call(a, b).relu(), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (3, 7):
        a, b = operands((2, m, 5), (5, 4), requires_grad=True)
        out = compiled(a, b)
        torch.testing.assert_close(out, torch.matmul(a, b).relu())
        out.sum().backward()
        expected = torch.autograd.grad(torch.matmul(a, b).relu().sum(), (a, b))
        torch.testing.assert_close((a.grad, b.grad), expected)


def test_a_compiled_product_of_float32_is_one_graph(monkeypatch) -> None:
    as_if_on_a_gpu(monkeypatch)
    torch.compiler.reset()
    compiled = torch.compile(kernel_twins.matmul, fullgraph=True, backend="aot_eager")
    a, b = operands((3, 5), (5, 4))
    torch.testing.assert_close(compiled(a, b), a @ b)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("frozen", [0, 1])
def test_compiled_without_a_break_where_an_operand_is_frozen(operator, dynamic, frozen) -> None:
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (3, 7):
        given = operands((2, m, 5), (5, 4))
        learns = given[1 - frozen].requires_grad_()
        found, right = (torch.autograd.grad(call(*given).sum(), learns) for call in (compiled, torch.matmul))
        torch.testing.assert_close(found, right)


@BY_SHAPES
def test_meta_tensors_give_the_results_shape(operator, a_shape, b_shape) -> None:
    a, b = operands(a_shape, b_shape)
    out = operator(a.to("meta"), b.to("meta"))
    real = torch.matmul(a, b)
    assert out.is_meta and out.shape == real.shape and out.is_contiguous()


WRONG = [
    pytest.param((3, 5), (4, 6), {}, ValueError, r"^b has shape \(4, 6\), must have 5 rows", id="inner size"),
    pytest.param((3, 5), (4,), {}, ValueError, r"^b has shape \(4,\), must have 5 elements", id="vector"),
    pytest.param((), (4, 6), {}, ValueError, r"^a has 0 dimensions, must have 1 or more", id="scalar"),
    pytest.param((2, 3, 5), (3, 5, 4), {}, ValueError, r"^b has leading dimensions \(3,\), must .* \(2,\)", id="batch"),
    pytest.param(
        (3, 5),
        (5, 4),
        {"b": torch.bfloat16},
        TypeError,
        r"^b is torch.bfloat16, must .*: call b.to\(a.dtype\)$",
        id="b",
    ),
    pytest.param((3, 5), (5, 4), {"a": torch.int32}, TypeError, r"^a is torch.int32, must be .*\.to\(", id="dtype"),
    pytest.param((3, 5), (5, 4), {"out": torch.float16}, TypeError, r"^out_dtype is torch.float16, must", id="out"),
]


@pytest.mark.parametrize("side", ["operator", "triton"])
@pytest.mark.parametrize(("a_shape", "b_shape", "dtypes", "error", "said"), WRONG)
def test_what_is_refused_is_named(operator, monkeypatch, side, a_shape, b_shape, dtypes, error, said) -> None:
    if side == "triton":
        as_interpreted(monkeypatch)
        call = importlib.import_module("kernel_twins.functional.matmul.triton_matmul").matmul
    else:
        call = operator
    a = torch.ones(a_shape).to(dtypes.get("a", torch.float32))
    b = torch.ones(b_shape).to(dtypes.get("b", torch.float32))
    with pytest.raises(error, match=said):
        call(a, b, dtypes.get("out"))


def test_backends_are_refused_by_name() -> None:
    a, b = operands((3, 5), (5, 4))
    with pytest.raises(ValueError, match=r"^backend is 'cublas', must be one of auto, cuda, triton, torch"):
        kernel_twins.matmul(a, b, backend="cublas")
    with pytest.raises((ValueError, UnavailableError), match=r"backend='torch'"):
        kernel_twins.matmul(a, b, backend="cuda")
    with pytest.raises(TypeError, match=r"^out_dtype is torch.float16, must be torch.float32"):
        kernel_twins.matmul(a, b, out_dtype=torch.float16)


def test_the_public_functions_are_found_lazily() -> None:
    script = "import sys, kernel_twins as k; assert 'torch' not in sys.modules; k.matmul; assert 'torch' in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'matmull'"):
        kernel_twins.matmull  # noqa: B018


def test_the_times_are_those_of_the_committed_rows() -> None:
    assert json.loads(expected.FILE.read_text()) == fastest.derive(), f"stale: run python -m {fastest.__name__}"


def timings(case: str, times: dict[tuple[str, str, str], str]) -> pandas.DataFrame:
    """Rows of timings, by backend, step and contest."""
    return pandas.DataFrame(
        [
            {"case": case, "backend": backend, "step": step, "status": "ok", "contest": contest, "times_us": each}
            for (backend, step, contest), each in times.items()
        ]
    )


def test_auto_knows_the_times_of_two_languages_and_pytorchs_own_call_and_by_inductor() -> None:
    """Whatever else would be faster: other libraries are baselines in documents alone."""
    content = json.loads(expected.FILE.read_text()).values()
    told = [times for by_function in content for by_case in by_function.values() for times in by_case.values()]
    assert {backend for times in told for backend in times} == {"cuda", "triton", "torch", "compile"}
    times = {("torch", "", "fast"): "30", ("cuda", "c", "fast"): "20", ("compile", "", "slow"): "10"}
    times |= {("max_autotune", "", "fast"): "5", ("torch", "", "rested"): "1", ("compile", "", "chain"): "1"}
    times |= {("cuda", "before", "fast"): "1"}
    rows = timings("64x64x64-bf16", times)
    assert fastest.timed(rows, {"cuda": "c"}) == {"64x64x64-bf16": {"torch": 30, "cuda": 20, "compile": 10}}


def test_times_of_the_gpu_and_of_the_host_are_apart(monkeypatch) -> None:
    behind = {backend: OPS["linear"].behind[backend][0] for backend in ("cuda", "triton")}
    times = {("torch", "", "fast"): "15 16 17", ("compile", "", "fast"): "5", ("cuda", behind["cuda"], "fast"): "11"}
    rows = timings("64x64x64-bf16", times | {("triton", behind["triton"], "fast"): "90"})
    monkeypatch.setattr(store, "read_table", lambda folder, op, kind: rows)
    sampled = pandas.DataFrame(columns=["function", "status", "pass"])
    on_gpu = {"cuda": [11.0], "torch": [16.0], "triton": [90.0], "compile": [5.0]}
    assert fastest._times(ROOT, sampled, FUNCTIONS["linear"]) == {"64x64x64-bf16": on_gpu}

    host = {"cuda": 14.0, "torch": 18.0, "triton": 70.0}
    told = {backend: [us] for backend, us in host.items()}
    for known, right in (({2: host}, told), ({4: host}, told), ({2: {"cuda": 14.0, "torch": 18.0}}, None)):
        monkeypatch.setattr(fastest, "host_times", lambda calls, function, known=known: known)
        assert fastest._host(sampled, "linear") == (dict.fromkeys(expected.HOST.values(), right) if right else {})


def test_a_capture_does_not_take_triton_which_may_have_to_compile(monkeypatch) -> None:
    monkeypatch.setattr(backends, "measured_gpu", lambda device: "GPU")
    monkeypatch.setattr(backends, "ordered", lambda *_: ["triton", "cuda", "torch"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for captures, backend in ((False, "triton"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        taken = backends.expected("softmax", None, 0, lambda *_: True, differentiated=False)
        assert taken == backend
        assert backends.expected("softmax", None, 0, lambda *_: True, differentiated=False, traced=True) == "triton"


def test_a_gpu_without_rows_goes_by_one_of_its_compute_capability(monkeypatch) -> None:
    names = {0: ("NVIDIA H100 80GB HBM3", (9, 0)), 1: ("NVIDIA H200", (9, 0)), 2: ("NVIDIA A10G", (8, 6))}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device][0])
    monkeypatch.setattr(backends, "_capability", lambda device: names[device][1])
    assert [backends.measured_gpu(device) for device in names] == ["h100-sxm", "h100-sxm", "a10g"]


def test_every_backend_names_steps_that_there_are() -> None:
    for op in ("matmul_fp32", "matmul_bf16", "linear"):
        for backend, names in OPS[op].behind.items():
            assert all(backend in OPS[op].step(name).backends for name in names)


def test_auto_asks_for_the_problem_that_it_was_given(monkeypatch) -> None:
    asked = []

    def ordered(gpu: str, function: str, problem: Problem, differentiated: bool, *_: bool) -> list[str]:
        asked.append((problem, differentiated))
        return ["torch", "cuda"] if problem.itemsize == 4 else ["cuda"]

    monkeypatch.setattr(matmul, "is_on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    monkeypatch.setattr("kernel_twins.functional.backends.measured_gpu", lambda device: "GPU")
    monkeypatch.setattr(matmul, "_runs", lambda *_: True)
    monkeypatch.setattr(backends, "ordered", ordered)
    half = partial(torch.empty, dtype=torch.bfloat16)
    assert matmul._choose(half(2, 3, 16), half(16, 8), None) == "cuda"
    assert matmul._choose(half(6, 16), half(8, 16).t(), None) == "cuda"
    assert matmul._choose(half(6 * 16 + 3)[3:].view(6, 16), half(16, 8), None) == "cuda"
    assert matmul._choose(half(6, 16), half(16, 6), torch.float32) == "cuda"
    assert matmul._choose(half(6, 16).requires_grad_(), half(16, 8), None) == "cuda"
    assert matmul._choose(torch.empty(6, 16), torch.empty(16, 8), None) == "torch"
    assert asked == [
        (product(6, 8, 16, 2, copied=True, column_major=False), False),
        (product(6, 8, 16, 2, copied=True, column_major=True), False),
        (product(6, 8, 16, 2, copied=False, column_major=False), False),
        (product(6, 6, 16, 2, copied=False, column_major=False), False),
        (product(6, 8, 16, 2, copied=True, column_major=False), True),
        (product(6, 8, 16, 4, copied=True, column_major=False), False),
    ]
    assert asked[0][0] == expected.measured(Case.parse("6x8x16-bf16"))
    assert asked[1][0] == expected.measured(Case.parse("6x8x16-fp16-b.col"))
    for a, b in (((16,), (16, 8)), ((2, 3, 16), (2, 16, 8)), ((3, 16), (16,)), ((3, 16), (8, 4)), ((0, 16), (16, 8))):
        assert matmul._choose(half(*a), half(*b), None) == "torch"
    assert matmul._choose(torch.empty(4, 4).double(), torch.empty(4, 4).double(), None) == "torch"


def test_auto_asks_for_the_linear_layer_that_it_was_given(monkeypatch) -> None:
    asked = []

    def ordered(gpu: str, function: str, problem: Problem, differentiated: bool, *_: bool) -> list[str]:
        asked.append((problem, differentiated))
        return ["triton"]

    monkeypatch.setattr(linear, "is_on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    monkeypatch.setattr("kernel_twins.functional.backends.measured_gpu", lambda device: "GPU")
    monkeypatch.setattr(linear, "_runs", lambda *_: True)
    monkeypatch.setattr(backends, "ordered", ordered)
    x, weight, column_major, bias = (
        torch.empty(shape, dtype=torch.bfloat16) for shape in ((2, 3, 16), (8, 16), (16, 8), (8,))
    )
    bias.requires_grad_()
    assert linear._choose(x, weight, None, "none") == "triton"
    assert linear._choose(x, column_major.t(), bias, "gelu") == "triton"
    measured = [expected.measured(Case.parse(f"6x8x16-bf16-act.{each}")) for each in ("none", "relu-w.col")]
    assert asked == [(measured[0], False), (measured[1], True)]


def test_autocast_changes_no_dtype_of_the_operator(operator) -> None:
    """It is the public function that casts, so that gradients have their operands' dtype, wherever they are taken."""
    a = torch.ones(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert operator(a, a).dtype == torch.float32
        assert operator(a.bfloat16(), a.bfloat16(), out_dtype=torch.float32).dtype == torch.float32


def test_an_extension_that_lacks_an_operator_is_said_to_be_old(operator) -> None:
    found, problem = cuda_operator("layer_norm_of_tomorrow_result")
    assert found is None
    assert problem.startswith("the extension is older than kernel_twins.layer_norm_of_tomorrow: build it again with")


def test_forward_mode_is_refused_and_not_lost(operator) -> None:
    a = torch.ones(4, 4)
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(lambda given: operator(given, a), (a,), (a,))


def test_what_lies_with_other_signs_than_its_values_takes_the_operator() -> None:
    x = torch.ones(3)
    assert is_plain(x)
    assert not is_plain(x, torch._neg_view(x))


def test_what_outlived_a_transform_takes_the_operator_which_unwraps_it() -> None:
    kept = []

    def call(x: Any) -> Any:
        kept.append(x * 2)
        return x.sum()

    torch.func.grad(call)(torch.ones(3))
    assert not is_plain(*kept)


PUBLIC: dict[str, tuple[Any, Any]] = {
    "matmul": (kernel_twins.matmul, torch.matmul),
    "linear": (kernel_twins.linear, torch.nn.functional.linear),
    "softmax": (lambda x, _, **k: kernel_twins.softmax(x, **k), lambda x, _: torch.softmax(x, -1)),
}
"""Of two matrices: ours, and PyTorch's."""


class Foreign(Tensor):
    """Of a class that knows PyTorch's operators alone, as DTensor is; on a GPU that need not be there."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (16, 16), dtype=torch.bfloat16, device="cuda:0")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        raise RuntimeError(func.name())


@pytest.mark.parametrize("function", PUBLIC)
def test_auto_leaves_other_classes_of_tensors_to_pytorch(function) -> None:
    ours, _ = PUBLIC[function]
    with pytest.raises(RuntimeError, match=r"^aten::"):
        ours(Foreign(), Foreign())


def test_auto_knows_what_stands_for_a_tensor_while_a_graph_is_made(monkeypatch) -> None:
    monkeypatch.setattr(backends, "_capability", lambda device: (9, 0))
    mode = FakeTensorMode()
    fake = FakeTensor(mode, torch.empty(3, 4, device="meta"), torch.device("cuda:0"))
    assert is_on_gpu(fake)
    with FunctionalTensorMode():
        assert is_on_gpu(FunctionalTensor.to_functional(fake))
    assert not any(is_on_gpu(other) for other in (Foreign(), torch.empty(3, 4), [1.0]))


@pytest.mark.parametrize("function", PUBLIC)
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_auto_is_traced_to_the_operator_by_make_fx(operator, monkeypatch, function, tracing_mode) -> None:
    module = importlib.import_module(f"kernel_twins.functional.{kernel_twins._MODULES[function]}")
    for name, answer in (("is_on_gpu", True), ("require_gpu", None), ("_runs", True)):
        monkeypatch.setattr(module, name, lambda *_, answer=answer: answer)
    ours, pytorchs = PUBLIC[function]
    given = operands((4, 5), (5, 5), torch.bfloat16)
    traced = make_fx(lambda *tensors: ours(*tensors), tracing_mode=tracing_mode)(*given)
    assert f"kernel_twins.{function}.default" in {str(node.target) for node in traced.graph.nodes}
    torch.testing.assert_close(traced(*given), pytorchs(*given))


# ----------------------------------------------------------------------------------------------------------------------
# Every function: devices that are not there, and derivatives that our operators do not have
# ----------------------------------------------------------------------------------------------------------------------

CLASSES = torch.tensor([0, 1, 4, 2])
EVERY: dict[str, tuple[Any, Any]] = {
    **PUBLIC,
    "sum": (lambda x, _, **k: kernel_twins.sum(x, 1, **k), lambda x, _: torch.sum(x, 1)),
    "layer_norm": (
        lambda x, w, **k: kernel_twins.layer_norm(x, 5, w.select(0, 0), **k),
        lambda x, w: torch.nn.functional.layer_norm(x, (5,), w.select(0, 0)),
    ),
    "cross_entropy": (
        lambda x, _, **k: kernel_twins.cross_entropy(x, CLASSES.to(x.device), **k),
        lambda x, _: torch.nn.functional.cross_entropy(x, CLASSES.to(x.device)),
    ),
    "dropout_add": (
        lambda x, w, **k: kernel_twins.dropout_add(x, None, 0.0, bias=w.select(0, 0), **k),
        lambda x, w: x + w.select(0, 0),
    ),
}
"""Of x: [4, 5] and w: [5, 5]."""
BY_FUNCTION = pytest.mark.parametrize("function", EVERY)


def as_on_gpu(monkeypatch, function: str) -> None:
    """Tensors of the CPU pass for a GPU's, of which the operators compute by PyTorch's own."""
    module = importlib.import_module(f"kernel_twins.functional.{kernel_twins._MODULES[function]}")
    for name, answer in (("is_on_gpu", True), ("require_gpu", None), ("_runs", True)):
        constant = torch.compiler.assume_constant_result(lambda *_, answer=answer: answer)
        monkeypatch.setattr(module, name, constant)


@BY_FUNCTION
def test_auto_asks_no_driver_where_there_is_none(monkeypatch, function) -> None:
    monkeypatch.setattr(backends, "_capability", backends._capability.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not backends.runs("cuda", ("softmax",), 0)
    ours, pytorchs = EVERY[function]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        given = [torch.empty(shape, dtype=torch.bfloat16, device="cuda:0") for shape in ((4, 5), (5, 5))]
        inside, right = ours(*given), pytorchs(*given)
    for out in (inside, *([] if function == "cross_entropy" else [ours(*given)])):  # its classes are no FakeTensor
        assert isinstance(out, FakeTensor)
        assert (out.shape, out.dtype, out.device) == (right.shape, right.dtype, torch.device("cuda:0"))


ALL = frozenset(EVERY)
PRODUCTS = frozenset({"matmul", "linear"})  # of wgmma on 9.0a; linear's step is for that alone


@pytest.mark.parametrize(
    ("capability", "architectures", "served"),
    [
        ((8, 0), "8.0;9.0a", ALL - {"linear"}),
        ((8, 9), "8.0;9.0a", ALL - {"linear"}),
        ((8, 9), "9.0a", frozenset()),
        ((8, 6), "8.9", frozenset()),
        ((9, 0), "9.0a", ALL),
        ((9, 0), "9.0a;9.0+PTX", ALL),
        ((9, 0), "9.0", ALL - PRODUCTS),  # v05_grouped would run, which no measurement is of
        ((12, 0), "8.0;9.0a", frozenset()),
        ((12, 0), "9.0a+PTX", frozenset()),
        ((12, 0), "9.0a;9.0+PTX", ALL - {"linear"}),
    ],
)
@BY_FUNCTION
def test_auto_takes_the_extension_where_it_was_built_for_the_gpu(
    operator, monkeypatch, function, capability, architectures, served
) -> None:
    """Else it is PyTorch, and nothing is raised."""
    module = importlib.import_module(f"kernel_twins.functional.{kernel_twins._MODULES[function]}")
    monkeypatch.setattr(backends, "_capability", lambda device: capability)
    monkeypatch.setattr(backends, "_runs_on", backends._runs_on.__wrapped__)  # what is made up is not to be kept
    monkeypatch.setattr(extension(), "architectures", architectures)
    monkeypatch.setattr(backends, "measured_gpu", lambda device: "GPU")
    monkeypatch.setattr(module, "is_on_gpu", lambda tensor: True)
    ours, pytorchs = EVERY[function]
    x, w = operands((4, 5), (5, 5), torch.bfloat16)
    if function in served:
        with pytest.raises(ValueError, match=r" is on cpu, must be on a CUDA device for backend='cuda'"):
            ours(x, w)
    else:
        assert torch.equal(ours(x, w), pytorchs(x, w))


def test_auto_takes_triton_where_its_step_is_for_the_gpu(monkeypatch) -> None:
    pytest.importorskip("triton")
    for capability, products in (((8, 9), False), ((9, 0), True), ((12, 0), False)):
        monkeypatch.setattr(backends, "_capability", lambda device, capability=capability: capability)
        assert linear._runs("triton", 0) == matmul._runs("triton", "bf16", True, 0) == products
        assert importlib.import_module("kernel_twins.functional.softmax.softmax")._runs("triton", 0)


@BY_FUNCTION
def test_auto_leaves_derivatives_of_transforms_and_forward_mode_to_pytorch(monkeypatch, function) -> None:
    as_on_gpu(monkeypatch, function)
    ours, pytorchs = EVERY[function]
    (x, w), (tangent, _) = operands((4, 5), (5, 5)), operands((4, 5), (5, 5))

    def dual(call: Any) -> Any:
        with torch.autograd.forward_ad.dual_level():
            out = call(torch.autograd.forward_ad.make_dual(x, tangent), w)
            return torch.autograd.forward_ad.unpack_dual(out).tangent

    def forwards(call: Any) -> Any:
        return torch.func.jvp(lambda x: call(x, w), (x,), (tangent,))[1]

    def backwards(call: Any) -> Any:
        return torch.func.grad(lambda x: call(x, w).sum())(x)

    for derived in (dual, forwards, backwards):
        torch.testing.assert_close(derived(ours), derived(pytorchs))


@BY_FUNCTION
def test_auto_leaves_derivatives_in_a_graph_to_pytorch(operator, monkeypatch, function) -> None:
    as_on_gpu(monkeypatch, function)
    ours, pytorchs = EVERY[function]
    x, w = operands((4, 5), (5, 5))

    def of(call: Any) -> Any:
        def derived(x: Any) -> Any:
            dx = torch.func.grad(lambda x: call(x, w).sum())(x)
            if function == "layer_norm":  # PyTorch's own has no forward-mode derivative in a graph
                return dx
            return dx, torch.func.jvp(lambda x: call(x, w), (x,), (x,))

        return derived

    torch.compiler.reset()
    found = torch.compile(of(ours), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, of(pytorchs)(x))


OF_GRAD: dict[str, Any] = {
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "vjp": lambda call, x: torch.func.vjp(call, x)[1](call(x)),
    "jacrev": lambda call, x: torch.func.jacrev(call)(x),
    "grad of vmap": lambda call, x: torch.func.grad(lambda x: torch.func.vmap(call)(x).sum())(x[None]),
    "vmap of grad": lambda call, x: torch.func.vmap(torch.func.grad(lambda x: call(x).sum()))(x[None]),
    "outer grad": lambda call, x: torch.func.grad(
        lambda x: torch.func.grad(lambda other: call(x).sum() * other)(torch.ones(()))
    )(x),
}


@pytest.mark.parametrize("transform", OF_GRAD)
@BY_FUNCTION
def test_the_gradients_of_transforms_are_refused_with_a_remedy(operator, monkeypatch, function, transform) -> None:
    as_on_gpu(monkeypatch, function)
    ours, _ = EVERY[function]
    x, w = operands((4, 5), (5, 5))
    said = rf"^kernel_twins\.{function} has no derivative for torch.func's grad and vjp: pass backend='torch'$"
    with pytest.raises(NotImplementedError, match=said):
        OF_GRAD[transform](lambda x: ours(x, w, backend="cuda"), x)


@BY_FUNCTION
def test_what_no_transform_follows_is_not_refused(operator, monkeypatch, function) -> None:
    as_on_gpu(monkeypatch, function)
    ours, pytorchs = EVERY[function]
    x, w = operands((4, 5), (5, 5))
    right = pytorchs(x, w).sum()

    def beside(factor: Any) -> Any:
        return ours(x, w, backend="cuda").sum() * factor

    @torch.no_grad()
    def unrecorded(x: Any) -> Any:
        return ours(x, w, backend="cuda").sum()

    torch.testing.assert_close(torch.func.grad(beside)(torch.ones(())), right)
    torch.testing.assert_close(torch.func.grad(lambda x: unrecorded(x) * x[0, 0])(x)[0, 0], right)


@BY_FUNCTION
def test_what_stands_for_tensors_on_a_gpu_is_as_narrow_as_they_are(operator, function) -> None:
    ours, _ = EVERY[function]
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, w = (torch.empty(shape, dtype=torch.float64, device="cuda:0") for shape in ((4, 5), (5, 5)))
        with pytest.raises(TypeError, match=r"is torch.float64, must be torch.float32 or "):
            ours(x, w, backend="cuda")
        assert ours(x.float(), w.float(), backend="cuda").dtype == torch.float32


@pytest.mark.parametrize("setting", [torch.backends, torch.backends.cuda.matmul], ids=["all", "matmul"])
def test_auto_takes_pytorchs_newer_word_for_tf32(operator, monkeypatch, setting) -> None:
    as_on_gpu(monkeypatch, "matmul")
    a, b = operands((4, 5), (5, 3))
    before = setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        torch.testing.assert_close(kernel_twins.matmul(a, b), a @ b)
    finally:
        setting.fp32_precision = before


def test_products_of_meta_tensors_have_shapes() -> None:
    a, b = torch.empty(4, 5, device="meta"), torch.empty(5, 3, device="meta")
    for backend in ("auto", "torch"):
        assert kernel_twins.matmul(a, b, backend=backend).shape == (4, 3)


# ----------------------------------------------------------------------------------------------------------------------
# Every public name: what is said first
# ----------------------------------------------------------------------------------------------------------------------

NAMES: dict[str, Any] = {
    **{name: lambda x, _, name=name, **k: getattr(kernel_twins, name)(x, **k) for name in kernel_twins._MODULES},
    "matmul": lambda x, w, **k: kernel_twins.matmul(x, w, **k),
    "linear": lambda x, w, **k: kernel_twins.linear(x, w, **k),
    "layer_norm": lambda x, w, **k: kernel_twins.layer_norm(x, 5, w.select(0, 0), **k),
    "rms_norm": lambda x, w, **k: kernel_twins.rms_norm(x, 5, w.select(0, 0), residual=x, **k),
    "cross_entropy": lambda x, _, **k: kernel_twins.cross_entropy(x, CLASSES, **k),
    "cross_entropy_gradient_": lambda x, _, **k: kernel_twins.cross_entropy_gradient_(x, CLASSES, **k),
    "dropout_add": lambda x, _, **k: kernel_twins.dropout_add(x, x, 0.0, **k),
    "attention": lambda x, _, **k: kernel_twins.attention(x, x, x, **k),
    "scaled_dot_product_attention": lambda x, _, **k: kernel_twins.scaled_dot_product_attention(x, x, x, **k),
    **{
        name: lambda x, _, name=name, **k: getattr(kernel_twins, name)(x, 1, **k)
        for name in ("sum", "mean", "amax", "argmax")
    },
}
FIRST = {  # the tensor's name, or x
    "matmul": "a",
    "cross_entropy": "input",
    "cross_entropy_gradient_": "input",
    "attention": "q",
    "scaled_dot_product_attention": "query",
}
BY_NAME = pytest.mark.parametrize("name", NAMES)


def without(monkeypatch, name: str, backend: str) -> None:
    """As where the extension is not built, or Triton not installed."""
    module = importlib.import_module(f"kernel_twins.functional.{kernel_twins._MODULES[name]}")

    def missing() -> Any:
        raise UnavailableError("the Triton side is missing")

    if backend == "triton":
        monkeypatch.setattr(module, "_by_triton", missing)
    for held, nothing in (("_cuda_operator", None), ("_cuda_gradient", None), ("_CUDA", {})):
        if backend == "cuda" and hasattr(module, held):
            monkeypatch.setattr(module, held, nothing)
            monkeypatch.setattr(module, "_no_cuda", "the CUDA side is missing")


@pytest.mark.parametrize("wrong", ["device", "no tensor"])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@BY_NAME
def test_what_a_backend_lacks_is_said_before_what_its_tensors_lack(monkeypatch, name, backend, wrong) -> None:
    without(monkeypatch, name, backend)
    x, w = operands((4, 5), (5, 5))
    with pytest.raises(UnavailableError, match=rf"^the {'CUDA' if backend == 'cuda' else 'Triton'} side is missing$"):
        NAMES[name](x if wrong == "device" else [1.0], w, backend=backend)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@BY_NAME
def test_a_tensor_off_the_gpu_and_what_is_no_tensor_are_named_alike(operator, name, backend) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    x, w = operands((4, 5), (5, 5))
    first = FIRST.get(name, "x")
    said = (
        rf"^{first} is on cpu, must be on a CUDA device for backend='{backend}': call {first}.cuda\(\), or pass backen"
    )
    for off in (x, x.int()):  # whose dtype counts on a GPU alone
        with pytest.raises(ValueError, match=said):
            NAMES[name](off, w, backend=backend)
    if name != "dropout_add" and name != "rms_norm":  # of which it is the residual, too
        with pytest.raises(
            TypeError, match=rf"^{first} is a list, must be a torch.Tensor: call torch.as_tensor\({first}\)$"
        ):
            NAMES[name]([1.0], w, backend=backend)


@BY_NAME
def test_a_backend_that_nobody_knows_is_refused_by_name(name) -> None:
    x, w = operands((4, 5), (5, 5))
    with pytest.raises(ValueError, match=r"^backend is 'cublas', must be one of auto, cuda, triton, torch$"):
        NAMES[name](x, w, backend="cublas")


@pytest.mark.parametrize(("name", "second"), [("matmul", "b"), ("linear", "weight")])
def test_what_is_no_second_operand_is_named_alike(operator, monkeypatch, name, second) -> None:
    module = importlib.import_module(f"kernel_twins.functional.{kernel_twins._MODULES[name]}")
    real = module.require_gpu
    monkeypatch.setattr(module, "require_gpu", lambda given, x, _: None if isinstance(x, Tensor) else real(given, x, _))
    x, w = operands((4, 5), (5, 5))
    for wrong, kind in (([1.0], "list"), (None, "NoneType")):
        said = rf"^{second} is a {kind}, must be a torch.Tensor: call torch.as_tensor\({second}\)$"
        with pytest.raises(TypeError, match=said):
            NAMES[name](x, wrong, backend="cuda")
    if name == "linear":
        with pytest.raises(
            TypeError, match=r"^bias is a list, must be a torch.Tensor or None: call torch.as_tensor\(bi"
        ):
            kernel_twins.linear(x, w, [1.0], backend="cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["softmax", "nn"])
def test_where_torch_is_not_installed_a_public_name_says_what_it_needs(name) -> None:
    source = f"import sys; sys.modules['torch'] = None; import kernel_twins; kernel_twins.{name}"
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.endswith(f"ModuleNotFoundError: kernel_twins.{name} needs PyTorch: pip install torch\n")

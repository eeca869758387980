"""The public functions on a GPU: right for every operand, and at home in graphs, streams, devices and compilers."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins import OPS  # noqa: E402
from kernel_twins.functional import expected  # noqa: E402
from kernel_twins.functional.matmul.matmul import _choose  # noqa: E402
from kernel_twins.harness.check import compare, generator  # noqa: E402
from kernel_twins.ops.tensors import DTYPE  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

pytestmark = pytest.mark.gpu

OURS = pytest.mark.parametrize("backend", ["cuda", "triton"])
ALL = pytest.mark.parametrize("backend", ["auto", "cuda", "triton", "torch"])
CASES = [
    pytest.param(op, case, id=case.slug)
    for op in (OPS["matmul_fp32"], OPS["matmul_bf16"])
    for case in (*op.test_cases, *(case for case in op.timed_cases if max(case.shape) <= 4096))
]
BATCHES = [
    ((5,), (5, 4)),
    ((3, 5), (5,)),
    ((5,), (5,)),
    ((2, 3, 5), (5, 4)),
    ((2, 3, 5), (5,)),
    ((2, 8, 16), (16,)),  # a result that is a matrix, but not that of the product
    ((3, 5), (2, 5, 4)),
    ((5,), (2, 5, 4)),
    ((2, 3, 5), (2, 5, 4)),
    ((2, 1, 3, 5), (6, 5, 4)),
    ((0, 3, 5), (5, 4)),
    ((2, 3, 0), (2, 0, 4)),
    ((2, 3, 0), (0, 4)),
    ((4, 128, 256), (256, 192)),
    ((2, 2048, 1024), (2, 1024, 4096)),  # a launch each
    ((2, 1, 2048, 1024), (2, 1024, 4096)),
]
SPLIT = (64, 4096), (4096, 4096)  # whose tiles are split along K, and need zeroed memory


def operands(a_shape, b_shape, dtype=torch.bfloat16, requires_grad=False, device="cuda"):
    random = torch.Generator(device).manual_seed(0)
    return tuple(
        torch.randn(shape, generator=random, dtype=dtype, device=device, requires_grad=requires_grad)
        for shape in (a_shape, b_shape)
    )


def assert_right(out, a, b) -> None:
    expected = torch.matmul(a.double(), b.double())
    scale = torch.matmul(a.double().abs(), b.double().abs())
    assert out.shape == expected.shape and out.is_contiguous()
    eps = torch.finfo(out.dtype).eps
    assert bool(((out.double() - expected).abs() <= 2 * eps * expected.abs() + 1e-6 * scale).all())


@ALL
@pytest.mark.parametrize(("op", "case"), CASES)
def test_every_case_of_the_ladders_is_right(backend, op, case) -> None:
    inputs = op.inputs(case, generator(case, "cuda"))
    out = kernel_twins.matmul(*inputs, backend=backend, out_dtype=DTYPE[op.outputs(case)[0].dtype])
    verdict = compare(op, case, inputs, (out,))
    assert verdict.ok, verdict.reason


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("a_shape", "b_shape"), BATCHES, ids=lambda shape: "x".join(map(str, shape)))
def test_batches_are_read_as_pytorch_reads_them(backend, dtype, a_shape, b_shape) -> None:
    a, b = operands(a_shape, b_shape, dtype)
    assert_right(kernel_twins.matmul(a, b, backend=backend), a, b)


@OURS
def test_any_strides_of_a_batch(backend) -> None:
    a, b = operands((64, 3, 2, 128), (2, 96, 128, 3))
    left, right = a.permute(2, 1, 0, 3), b.permute(0, 3, 2, 1)
    assert_right(kernel_twins.matmul(left, right, backend=backend), left, right)
    assert_right(
        kernel_twins.matmul(left[..., ::2], right[..., ::2, :], backend=backend), left[..., ::2], right[..., ::2, :]
    )
    one = right[0, 0]
    assert_right(kernel_twins.matmul(left, one, backend=backend), left, one)


@OURS
@pytest.mark.parametrize(("a_shape", "b_shape"), [*BATCHES[:12], ((130, 70), (70, 40))])
def test_gradients_are_pytorchs(backend, a_shape, b_shape) -> None:
    a, b = operands(a_shape, b_shape, torch.float32, requires_grad=True)
    out = kernel_twins.matmul(a, b, backend=backend)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(torch.matmul(a, b), (a, b), dout)
    torch.testing.assert_close(torch.autograd.grad(out, (a, b), dout), expected, rtol=1e-4, atol=1e-4)


def test_the_operators_are_what_pytorch_expects() -> None:
    kernel_twins.matmul(*operands((8, 8), (8, 8)), backend="triton")
    for operator in (torch.ops.kernel_twins.matmul.default, torch.ops.kernel_twins.matmul_triton.default):
        for a_shape, b_shape in (((64, 40), (40, 32)), ((2, 16, 40), (40, 32)), ((2, 16, 40), (2, 40, 32))):
            torch.library.opcheck(operator, operands(a_shape, b_shape, torch.float32, requires_grad=True))
            torch.library.opcheck(operator, (*operands(a_shape, b_shape), torch.float32))


@ALL
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(backend, dynamic) -> None:
    def function(a, b):
        return kernel_twins.matmul(a, b, backend=backend).relu()

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for m in (64, 130):
        a, b = operands((m, 256), (256, 96), requires_grad=True)
        out = compiled(a, b)
        torch.testing.assert_close(out, function(a, b))
        torch.testing.assert_close(
            torch.autograd.grad(out.sum(), (a, b)), torch.autograd.grad(function(a, b).sum(), (a, b))
        )


@OURS
@pytest.mark.parametrize("warm", [False, True], ids=["first", "after eager calls"])
def test_graph_trees_take_splits_of_k(backend, warm) -> None:
    """Memory that a call keeps from torch's allocator, graph trees refuse, or hand out again."""
    a, b = operands(*SPLIT)
    if warm:
        kernel_twins.matmul(a, b, backend=backend)
    torch.compiler.reset()

    def function(x):
        for _ in range(3):
            x = kernel_twins.matmul(x, b, backend=backend) / 64
        return x

    compiled = torch.compile(function, mode="reduce-overhead", fullgraph=True)
    other = torch.compile(lambda x: function(x) + 1, mode="reduce-overhead", fullgraph=True)
    expected = None
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(a).clone()
        expected = function(a) if expected is None else expected
        assert torch.equal(out, expected)
        torch.testing.assert_close(other(a).clone(), expected + 1)
        assert torch.equal(function(a), expected)  # eager, between replays
    memory = torch.cuda.memory_allocated()
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(a)
    assert torch.cuda.memory_allocated() <= memory


@OURS
def test_captured_replayed_and_captured_again(backend) -> None:
    a, b = operands(*SPLIT)
    expected = kernel_twins.matmul(a, b, backend=backend)
    for _ in range(20):  # each capture's zeroed memory is its own, and comes back when the graph is gone
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [kernel_twins.matmul(a, b, backend=backend) for _ in range(3)]
        for _ in range(3):
            for out in outs:
                out.zero_()
            graph.replay()
            assert torch.equal(kernel_twins.matmul(a, b, backend=backend), expected)
            assert all(torch.equal(out, expected) for out in outs)
        del graph, outs


@OURS
def test_streams_run_at_once(backend) -> None:
    pairs = [tuple(tensor * factor for tensor in operands(*SPLIT)) for factor in (1, 2)]
    expected = [kernel_twins.matmul(a, b, backend=backend) for a, b in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    torch.cuda.synchronize()
    for _ in range(100):
        outs = []
        for stream, (a, b) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                outs.append(kernel_twins.matmul(a, b, backend=backend))
        torch.cuda.synchronize()
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


@ALL
def test_the_current_device_need_not_be_the_operands(backend) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU alone")
    a, b = operands(*SPLIT, device="cuda:1")
    with torch.cuda.device(0):
        assert_right(kernel_twins.matmul(a, b, backend=backend), a, b)
        with pytest.raises((ValueError, RuntimeError), match=r"device|is on"):
            kernel_twins.matmul(a, b.to("cuda:0"), backend=backend)


@OURS
def test_tensors_off_the_gpu_are_refused(backend) -> None:
    a, b = operands((3, 5), (5, 4))
    with pytest.raises(ValueError, match=r"^a is on cpu, must be on a CUDA device .* call a.cuda\(\)"):
        kernel_twins.matmul(a.cpu(), b.cpu(), backend=backend)


def test_auto_takes_what_was_measured() -> None:
    if torch.cuda.get_device_name() != "NVIDIA H100 80GB HBM3":
        pytest.skip("no measurements are committed for this GPU")
    for slug in json.loads(expected.FILE.read_text())["h100-sxm"]["matmul"]:
        case = Case.parse(slug)
        op = OPS["matmul_fp32" if case.dtype == "fp32" else "matmul_bf16"]
        if max(case.shape) <= 8192:
            a, b = op.inputs(case, generator(case, "cuda"))
            best = expected.ordered("h100-sxm", "matmul", expected.measured(case), differentiated=False)[0]
            assert _choose(a, b, None) == best, slug
    a, b = operands((2, 3, 5), (2, 5, 4))
    assert _choose(a, b, None) == "torch"


@OURS
def test_gradients_of_transforms_are_refused_with_a_remedy(backend) -> None:
    a, b = operands((64, 40), (40, 32))
    for name, call in (
        ("matmul", lambda a: kernel_twins.matmul(a, b, backend=backend)),
        ("linear", lambda a: kernel_twins.linear(a, b.t().contiguous(), backend=backend)),
    ):
        with pytest.raises(NotImplementedError, match=rf"{name} has no derivative for torch.func's grad and vjp: pass"):
            torch.func.grad(lambda a, call=call: call(a).sum())(a)

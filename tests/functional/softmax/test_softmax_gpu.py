"""softmax and log_softmax on a GPU: right for every layout, and at home in graphs, streams and compilers."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins import OPS  # noqa: E402
from kernel_twins.functional.softmax.softmax import _choose  # noqa: E402
from kernel_twins.harness.check import compare, generator  # noqa: E402
from kernel_twins.ops.tensors import name_of  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

pytestmark = pytest.mark.gpu

OURS = pytest.mark.parametrize("backend", ["cuda", "triton"])
ALL = pytest.mark.parametrize("backend", ["auto", "cuda", "triton", "torch"])
BY_LOG = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FORWARD, BACKWARD = OPS["softmax"], OPS["softmax_backward"]
SHAPES = [
    ((), 0),
    ((1,), 0),
    ((7,), -1),
    ((300, 1), -1),
    ((1, 300), 0),
    ((33, 257), 1),
    ((33, 257), 0),
    ((4, 5, 64), -1),
    ((4, 64, 5), 1),
    ((64, 4, 5), 0),
    ((2, 3, 4, 1000), -1),
    ((2, 17, 5, 9), 1),
    ((3, 70_000), -1),
    ((70_001, 2), 0),
]
EMPTY = [((0, 5), -1), ((0, 5), 0), ((5, 0), -1), ((5, 0), 0), ((2, 0, 3), 1), ((0,), 0)]
LAYOUTS = {
    "pitched": (lambda x: x[..., :-3], -1),
    "offset": (lambda x: x[..., 1:], -1),
    "expanded": (lambda x: x[:1, :1].expand(x.shape), -1),
    "transposed": (lambda x: x.flatten(0, 1).t(), 0),
    "moved": (lambda x: x.permute(2, 0, 1), 0),
    "first": (lambda x: x[0, 0], 0),
}
"""Whose rows lie as they are read, and the dimension of these."""
COPIED = {
    "middle": (lambda x: x, 1),
    "spread": (lambda x: x[..., ::2], -1),
    "crossed": (lambda x: x.transpose(0, 1), -1),
    "batches": (lambda x: x[:1].expand(x.shape), -1),
    "column": (lambda x: x[0, :, 0], 0),
    "short": (lambda x: x[..., :1], -1),
}
SLACK = 2**20  # bytes: torch's allocator rounds up


def values(*shape: int, dtype: Any = torch.bfloat16, requires_grad: bool = False, seed: int = 0) -> Any:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=dtype, device="cuda", requires_grad=requires_grad)


def function(log: bool, backend: str, dim: int = -1) -> Any:
    return lambda x: (kernel_twins.log_softmax if log else kernel_twins.softmax)(x, dim, backend)


def pytorchs(log: bool, x: Any, dim: int) -> Any:
    return (torch.log_softmax if log else torch.softmax)(x, dim)


def rows(tensor: Any, dim: int) -> Any:
    return tensor.movedim(dim, -1).reshape(-1, tensor.shape[dim]) if tensor.dim() else tensor.reshape(1, 1)


def assert_right(op: Any, out: Any, inputs: tuple[Any, ...], dim: int, log: bool) -> None:
    """By the one rule of accuracy, which NaN does not pass (see kernel_twins/harness/check.py)."""
    assert out.shape == inputs[0].shape and out.dtype == inputs[0].dtype
    matrices = tuple(rows(tensor.detach(), dim) for tensor in inputs)
    case = Case.of(*matrices[0].shape, dtype=name_of(out.dtype), **({"log": "yes"} if log else {}))
    verdict = compare(op, case, matrices, (rows(out.detach(), dim).contiguous(),))
    assert verdict.ok, verdict.reason


def assert_both_right(backend: str, x: Any, dim: int, log: bool, dout: Any) -> None:
    """The result, and the gradient from what the forward pass returned."""
    x = x.detach().requires_grad_()
    out = function(log, backend, dim)(x)
    assert_right(FORWARD, out, (x,), dim, log)
    (dx,) = torch.autograd.grad(out, x, dout)
    assert_right(BACKWARD, dx, (dout, out), dim, log)


# ----------------------------------------------------------------------------------------------------------------------
# Values
# ----------------------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("case", FORWARD.test_cases, ids=lambda case: case.slug)
def test_every_case_of_the_ladder_is_right(backend, case) -> None:
    (x,) = FORWARD.inputs(case, generator(case, "cuda"))
    out = function(case.get("log") == "yes", backend)(x)
    verdict = compare(FORWARD, case, (x,), (out,))
    assert verdict.ok, verdict.reason


@OURS
@pytest.mark.parametrize("case", BACKWARD.test_cases, ids=lambda case: case.slug)
def test_every_case_of_the_backward_ladder_is_right(backend, case) -> None:
    dout, y = BACKWARD.inputs(case, generator(case, "cuda"))
    function(False, backend)(values(1, 1))  # registers the operators
    library = torch.ops.kernel_twins
    operator = library.softmax_backward if backend == "cuda" else library.softmax_backward_triton
    verdict = compare(BACKWARD, case, (dout, y), (operator(dout, y, -1, case.get("log") == "yes"),))
    assert verdict.ok, verdict.reason


@OURS
@BY_LOG
@BY_DTYPE
@pytest.mark.parametrize("n", [1, 4, 8, 20, 24, 36, 40, 72, 88, 100, 136, 168, 192, 200, 250])
def test_many_short_rows(backend, log, dtype, n) -> None:
    """Of every number of packs that lanes of a warp have; alike in all matrices, and of another skew in each."""
    m = 70_001
    x, dout = (values(m, n + 3, dtype=dtype, seed=seed)[:, :n] for seed in (0, 1))
    assert_both_right(backend, x, -1, log, dout.contiguous())
    assert_both_right(backend, x.contiguous(), -1, log, dout)


@OURS
@BY_LOG
@BY_DTYPE
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_any_dimension_of_any_shape(backend, log, dtype, shape, dim) -> None:
    x, dout = values(*shape, dtype=dtype), values(*shape, dtype=dtype, seed=1)
    assert_both_right(backend, x, dim, log, dout)
    assert_near_pytorchs(function(log, "auto", dim)(x), pytorchs(log, x, dim))


@OURS
@BY_LOG
@BY_DTYPE
@pytest.mark.parametrize("shape", [(1, 40_640), (26, 120_768), (150, 40_641), (70, 225_344)], ids=str)
def test_rows_of_few_waves_of_clusters(backend, log, dtype, shape) -> None:
    x, dout = values(*shape, dtype=dtype), values(*shape, dtype=dtype, seed=1)
    assert_both_right(backend, x, -1, log, dout)


@OURS
@BY_LOG
@BY_DTYPE
@pytest.mark.parametrize("shape", [(1, 2**22), (5, 1_703_937), (33, 1_000_001)], ids=str)
def test_few_rows_that_no_cluster_holds(backend, log, dtype, shape) -> None:
    """Rows of every skew, and other ones in x than in the result."""
    x, dout = (values(shape[0], shape[1] + 3, dtype=dtype, seed=seed)[:, :-3] for seed in (0, 1))
    assert_both_right(backend, x, -1, log, dout)


def assert_near_pytorchs(out: Any, right: Any) -> None:
    """PyTorch's own sums along other dimensions than the last may err by more than our rule allows."""
    assert out.dtype == right.dtype
    torch.testing.assert_close(out, right, rtol=1e-4 if out.dtype == torch.float32 else 1e-2, atol=1e-6, equal_nan=True)


@OURS
@BY_LOG
@pytest.mark.parametrize("layout", [*LAYOUTS, *COPIED])
def test_any_strides(backend, log, layout) -> None:
    of, dim = (LAYOUTS | COPIED)[layout]
    for dtype, n in itertools.product((torch.float32, torch.bfloat16), (40, 1029)):
        x = of(values(6, 5, n, dtype=dtype))
        assert_both_right(backend, x, dim, log, of(values(6, 5, n, dtype=dtype, seed=1)))
        assert_both_right(backend, x, dim, log, values(*x.shape, dtype=dtype, seed=1))


@ALL
@BY_LOG
def test_expanded_gradients(backend, log) -> None:
    """Of .sum() and .mean(), whose gradient is one number seen many times: the commonest fault of such libraries."""
    for shape, dim in (((33, 1000), -1), ((4, 5, 64), 1), ((), 0)):
        x = values(*shape, dtype=torch.float32, requires_grad=True)
        weight = values(1, dtype=torch.float32, seed=1)
        for of in (lambda y: y.sum(), lambda y: (y * y).mean(), lambda y, w=weight: (y * w).sum()):
            (dx,) = torch.autograd.grad(of(function(log, backend, dim)(x)), x)
            wide = x.detach().double().requires_grad_()
            (right,) = torch.autograd.grad(of(pytorchs(log, wide, dim)), wide)
            torch.testing.assert_close(dx.double(), right, rtol=1e-4, atol=1e-5)
    x = values(37, 1024, dtype=torch.float32, requires_grad=True)
    function(log, backend)(x).sum().backward()
    right = 1 - 1024 * torch.softmax(x.detach(), -1) if log else torch.zeros_like(x)
    torch.testing.assert_close(x.grad, right, rtol=1e-4, atol=1e-4)


@OURS
@BY_LOG
@pytest.mark.parametrize(("shape", "dim"), EMPTY, ids=str)
def test_nothing_at_all(backend, log, shape, dim) -> None:
    x = values(*shape, requires_grad=True)
    out = function(log, backend, dim)(x)
    assert out.shape == shape and out.stride() == torch.empty_like(out).stride()
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert dx.shape == shape


@ALL
@BY_LOG
def test_rows_of_special_values_give_what_pytorch_gives(backend, log) -> None:
    inf, nan = math.inf, math.nan
    special = [
        [-inf] * 4,
        [-inf, 0, 1, -inf],
        [inf, 0, 1, 2],
        [inf, -inf, 0, inf],
        [nan, 0, 1, 2],
        [-inf, nan, -inf, 0],
    ]
    special += [[3e38, 3e38, -3e38, 0], [0.0] * 4, [-3e38] * 4, [88.0, 89.0, 1e4, -1e4]]
    for dtype, n in itertools.product((torch.float32, torch.bfloat16), (1, 9, 300, 5003)):
        x = torch.tensor(special, device="cuda").to(dtype).repeat_interleave(n, 1)
        assert_near_pytorchs(function(log, backend)(x), pytorchs(log, x, -1))


@ALL
def test_other_dtypes_are_pytorchs_or_refused(backend) -> None:
    double, whole = values(3, 5, dtype=torch.float64), torch.ones(3, 5, dtype=torch.int32, device="cuda")
    if backend in ("auto", "torch"):
        assert torch.equal(kernel_twins.softmax(double, backend=backend), torch.softmax(double, -1))
        with pytest.raises(RuntimeError, match="not implemented"):
            kernel_twins.softmax(whole, backend=backend)
        return
    for x in (double, whole):
        with pytest.raises(TypeError, match=rf"^x is {x.dtype}, must be torch.float32 or .* call x.to"):
            kernel_twins.softmax(x, backend=backend)


# ----------------------------------------------------------------------------------------------------------------------
# Layouts and memory
# ----------------------------------------------------------------------------------------------------------------------


@OURS
def test_results_are_contiguous_or_their_rows_are(backend) -> None:
    x = values(4, 5, 64)
    assert all(kernel_twins.softmax(given, -1, backend).is_contiguous() for given in (x, x.transpose(0, 1), x[:, ::2]))
    for dim in range(2):
        out = kernel_twins.softmax(x, dim, backend)
        assert out.movedim(dim, -1).is_contiguous() and not out.is_contiguous()


@OURS
@BY_LOG
@pytest.mark.parametrize("of_sum", [False, True], ids=["dout", "sum"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "first"])
def test_nothing_is_copied_where_strides_allow(backend, log, layout, of_sum) -> None:
    of, dim = LAYOUTS[layout]
    x = of(values(64, 32, 2051)).detach().requires_grad_()
    dout = torch.ones((), dtype=x.dtype, device="cuda").expand(x.shape) if of_sum else of(values(64, 32, 2051))
    bytes_of_one = x.numel() * x.itemsize
    for turn in range(2):  # the first compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = function(log, backend, dim)(x)
        if turn:
            assert torch.cuda.max_memory_allocated() - before <= bytes_of_one + SLACK
        (dx,) = torch.autograd.grad(out, x, dout)
        if turn:
            assert torch.cuda.max_memory_allocated() - before <= 2 * bytes_of_one + SLACK
        del out, dx


@ALL
@BY_LOG
def test_the_host_waits_for_nothing(backend, log) -> None:
    x = values(64, 300, requires_grad=True)
    y = values(5, 64, 6, requires_grad=True)
    dout = values(64, 300, seed=1)

    def step():
        out = function(log, backend)(x)
        torch.autograd.grad(out, x, dout)
        torch.autograd.grad(function(log, backend, 1)(y).sum(), y)
        with torch.no_grad():
            function(log, backend)(x)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ----------------------------------------------------------------------------------------------------------------------
# Registrations, derivatives, transforms
# ----------------------------------------------------------------------------------------------------------------------


@BY_LOG
def test_the_operators_are_what_pytorch_expects(log) -> None:
    kernel_twins.softmax(values(1, 1), backend="triton")  # registers them
    library = torch.ops.kernel_twins
    for forward, backward in (
        (library.softmax.default, library.softmax_backward.default),
        (library.softmax_triton.default, library.softmax_backward_triton.default),
    ):
        for shape, dim, dtype in (
            ((64, 40), -1, torch.float32),
            ((4, 5, 6), 1, torch.bfloat16),
            ((), 0, torch.float16),
        ):
            torch.library.opcheck(forward, (values(*shape, dtype=dtype, requires_grad=True), dim, log))
            y = pytorchs(log, values(*shape, dtype=dtype), dim)
            torch.library.opcheck(backward, (values(*shape, dtype=dtype, seed=1), y, dim, log))


@OURS
@BY_LOG
def test_second_derivatives(backend, log) -> None:
    for shape, dim in (((9, 33), -1), ((3, 20, 4), 1)):
        x = values(*shape, dtype=torch.float32, requires_grad=True)
        dout = values(*shape, dtype=torch.float32, requires_grad=True, seed=1)
        wide, wide_dout = (each.detach().double().requires_grad_() for each in (x, dout))
        (dx,) = torch.autograd.grad(function(log, backend, dim)(x), x, dout, create_graph=True)
        (right,) = torch.autograd.grad(pytorchs(log, wide, dim), wide, wide_dout, create_graph=True)
        torch.testing.assert_close(dx.double(), right, rtol=1e-4, atol=1e-5)
        got = torch.autograd.grad(dx.square().sum(), (x, dout))
        expected = torch.autograd.grad(right.square().sum(), (wide, wide_dout))
        torch.testing.assert_close([each.double() for each in got], list(expected), rtol=1e-4, atol=1e-5)


@ALL
@BY_LOG
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dim", [0, -1])
def test_compiled_without_a_break(backend, log, dynamic, dim) -> None:
    torch.compiler.reset()
    call = function(log, backend, dim)
    compiled = torch.compile(lambda x: call(x * 2).relu(), fullgraph=True, dynamic=dynamic)
    for shape in ((64, 96), (130, 57), (70, 300)):
        x = values(*shape, dtype=torch.float32, requires_grad=True)
        out, right = compiled(x), pytorchs(log, x * 2, dim).relu()
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-6)
        gradients = (torch.autograd.grad(each.square().sum(), x)[0] for each in (out, right))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@OURS
@BY_LOG
def test_graph_trees(backend, log) -> None:
    torch.compiler.reset()
    x = values(72, 4096)
    call = function(log, backend)
    compiled = torch.compile(lambda x: call(call(x)), fullgraph=True, mode="reduce-overhead")
    right = call(call(x))
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(x).clone(), right)


@ALL
@BY_LOG
@pytest.mark.parametrize("shape", [(64, 256), (37, 5003), (8, 65_536), (3, 262_147), (9, 2_000_003)], ids=str)
def test_captured_and_replayed_with_gradients(backend, log, shape) -> None:
    x, dout = values(*shape, requires_grad=True), values(*shape, seed=1)

    def step():
        out = function(log, backend)(x)
        return out.detach(), *torch.autograd.grad(out, x, dout)

    right = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(3):
        for result in results:
            result.zero_()
        graph.replay()
        assert all(torch.equal(result, each) for result, each in zip(results, right, strict=True))


@ALL
@BY_LOG
def test_autocast_widens_half_precision_as_pytorchs_does(backend, log) -> None:
    for dtype in (*DTYPES, torch.float64) if backend in ("auto", "torch") else DTYPES:
        x = values(33, 257, dtype=dtype, requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out, right = function(log, backend)(x), pytorchs(log, x, -1)
        assert out.dtype == right.dtype
        torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-6)
        (dx,) = torch.autograd.grad(out.square().sum(), x)
        assert dx.dtype == dtype
        torch.testing.assert_close(dx, torch.autograd.grad(right.square().sum(), x)[0], rtol=1e-2, atol=1e-5)
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            assert function(log, backend)(x).dtype == right.dtype


@ALL
@BY_LOG
@pytest.mark.parametrize("autocast", [False, True])
def test_dtype_of_the_result_is_pytorchs(backend, log, autocast) -> None:
    call = kernel_twins.log_softmax if log else kernel_twins.softmax
    for of, dtype in itertools.product(DTYPES, repeat=2):
        x = values(33, 257, dtype=of, requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            out = call(x, -1, backend, dtype=dtype)
            right = (torch.log_softmax if log else torch.softmax)(x, -1, dtype=dtype)
        assert out.dtype == right.dtype == dtype
        torch.testing.assert_close(out, right)
        (dx,) = torch.autograd.grad(out.square().sum(), x)
        assert dx.dtype == of
        torch.testing.assert_close(dx, torch.autograd.grad(right.square().sum(), x)[0], rtol=2e-2, atol=1e-2)


@ALL
@BY_LOG
@pytest.mark.parametrize(
    ("shape", "in_dim", "dim"),
    [((9,), 0, 0), ((9, 33), 0, -1), ((33, 9), 1, 0), ((4, 33, 9), 1, -1), ((4, 5, 6, 7), 2, 1)],
)
def test_batched(backend, log, shape, in_dim, dim) -> None:
    x = values(*shape, dtype=torch.float32, requires_grad=True)
    out = torch.func.vmap(function(log, backend, dim), in_dims=in_dim)(x)
    right = torch.func.vmap(lambda x: pytorchs(log, x, dim), in_dims=in_dim)(x)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-6)
    gradients = (torch.autograd.grad(each.square().sum(), x)[0] for each in (out, right))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@BY_LOG
def test_derivatives_of_torch_func_are_pytorchs_by_auto(log) -> None:
    x = values(9, 33, dtype=torch.float32)
    call, right = function(log, "auto"), lambda x: pytorchs(log, x, -1)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(call)(x), transform(right)(x))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, values(9, 33, dtype=torch.float32, seed=1))
        tangents = (torch.autograd.forward_ad.unpack_dual(each(dual)).tangent for each in (call, right))
        torch.testing.assert_close(*tangents)


@OURS
@BY_LOG
def test_derivatives_of_torch_func_are_refused_and_not_lost(backend, log) -> None:
    x, call = values(9, 33, dtype=torch.float32), function(log, backend)
    with pytest.raises(NotImplementedError, match=r"no derivative for torch.func's grad and vjp: pass backend='torch'"):
        torch.func.grad(lambda x: call(x).sum())(x)
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(call, (x,), (x,))


# ----------------------------------------------------------------------------------------------------------------------
# Streams, devices, the choice
# ----------------------------------------------------------------------------------------------------------------------


@OURS
@pytest.mark.parametrize("shape", [(512, 4096), (3, 262_144), (9, 2_000_003)], ids=str)
def test_streams_run_at_once(backend, shape) -> None:
    given = [values(*shape, seed=seed) for seed in range(2)]
    expected = [kernel_twins.softmax(x, backend=backend) for x in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    for _ in range(50):
        outs = []
        for stream, x in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                outs.append(kernel_twins.softmax(x, backend=backend))
        torch.cuda.synchronize()
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


def test_threads_take_no_shared_memory_from_each_other() -> None:
    """Their rows need more or less of it, for the same kernels: what one call allows must do for another's launch."""
    torch.cuda.synchronize()

    def work(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = values(2, n, dtype=torch.float32)
            for _ in range(300):
                y = kernel_twins.softmax(x, backend="cuda")
                dx = torch.ops.kernel_twins.softmax_backward(x, y, -1, False)
            assert_right(FORWARD, y, (x,), -1, False)
            assert_right(BACKWARD, dx, (x, y), -1, False)

    lengths = (10_000, 20_000, 30_000, 100_000, 262_144, 700_000)
    with ThreadPoolExecutor(len(lengths)) as pool:
        list(pool.map(work, lengths))


@ALL
def test_the_current_device_need_not_be_xs(backend) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU alone")
    x = values(33, 257).to("cuda:1").requires_grad_()
    with torch.cuda.device(0):
        out = kernel_twins.softmax(x, backend=backend)
        assert_right(FORWARD, out, (x,), -1, False)
        assert torch.autograd.grad(out, x, torch.ones_like(out))[0].device == x.device


@OURS
def test_signs_that_are_yet_to_be_changed(backend) -> None:
    x = torch.view_as_complex(values(33, 40, 2, dtype=torch.float32)).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(kernel_twins.softmax(x, backend=backend), torch.softmax(x, -1))


@OURS
def test_tensors_off_the_gpu_are_refused(backend) -> None:
    with pytest.raises(ValueError, match=r"^x is on cpu, must be on a CUDA device .* call x.cuda\(\)"):
        kernel_twins.softmax(torch.ones(3, 5), backend=backend)


@OURS
def test_calls_keep_no_tensor_alive(backend) -> None:
    memory = []
    for _ in range(3):
        x = values(56, 4096, requires_grad=True)
        kernel_twins.softmax(x, backend=backend).sum().backward()
        del x
        memory.append(torch.cuda.memory_allocated())
    assert memory[2] <= memory[0]  # the first call may keep what all later ones use


def test_auto_takes_what_was_measured() -> None:
    if torch.cuda.get_device_name() != "NVIDIA H100 80GB HBM3":
        pytest.skip("no measurements are committed for this GPU")
    from kernel_twins.functional import expected

    for m, n in ((4096, 1024), (300, 1000), (16, 2**20)):
        best = expected.ordered("h100-sxm", "softmax", expected.rows(m, n, n, 2), False)[0]
        assert _choose(values(m, n), -1) == best
    assert _choose(values(4, 5, 6), 1) == "torch"

"""sum, mean, amax and argmax on a GPU: right for every layout, without a copy, and at home in graphs and compilers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins import OPS  # noqa: E402
from kernel_twins.harness.check import compare, generator  # noqa: E402

pytestmark = pytest.mark.gpu

OP = OPS["reduction_nd"]
OURS = pytest.mark.parametrize("backend", ["cuda", "triton"])
ALL = pytest.mark.parametrize("backend", ["auto", "cuda", "triton", "torch"])
BY_KIND = pytest.mark.parametrize("kind", ["sum", "mean", "max", "argmax"])
FUNCTIONS: dict[str, Any] = {
    "sum": (kernel_twins.sum, torch.sum),
    "mean": (kernel_twins.mean, torch.mean),
    "max": (kernel_twins.amax, torch.amax),
    "argmax": (kernel_twins.argmax, torch.argmax),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Shapes around the places where the ladder's last step takes another way, and what of them is reduced.
PROBLEMS = [
    ((7,), 0),
    ((2_000_003,), 0),
    ((3, 2), 1),
    ((100_000, 7), 1),
    ((100_000, 16), 1),
    ((5_000, 1_030), 1),
    ((9, 50_257), 1),
    ((2, 1_000_000), 0),
    ((3, 1_000_008), 0),
    ((50_000, 8), 0),
    ((50_000, 24), 0),
    ((4_099, 1_000), 0),
    ((33, 65, 49), 1),
    ((33, 64, 49), (0, 2)),
    ((16, 64, 56), (0, 2)),
    ((8, 16, 5, 14, 14), (0, 2, 3, 4)),
    ((8, 16, 5, 14, 14), (1, 3)),
    ((40, 500, 64), 1),
    ((40, 130, 67), 1),
    ((7, 3, 1_001), 1),
    ((600, 1_027), 0),
    ((300_001, 7), 0),
    ((40_001, 100), 0),
    ((400_003, 5), 0),
    ((40, 3_001, 30), 1),
    ((30_001, 8, 35), 1),
    ((3, 20_001, 69), 1),
    ((3, 30_001), 1),
    ((9_001, 8, 35), 1),  # many outputs of few elements
    ((5, 70_001, 17), 0),
    ((300_001, 7), 1),
    ((70_001, 3, 5), (0, 2)),
    ((90_001, 24), 0),  # few columns
    ((300_001, 10), 0),
    ((20_003, 131), 0),  # columns whose rows start anywhere
    ((3, 1_301, 333), 1),
    ((777, 4_003), 1),  # rows that start anywhere, and runs
    ((3, 1_000_003), 1),
    ((117, 23, 117), (0, 2)),
    ((70_001, 67), 1),  # short rows that start anywhere
    ((40_001, 507), 1),
    ((20_001, 1_088), 1),  # a warp a row
    ((60_001, 5, 32), 1),  # columns whose rows are a line at most
    ((30, 450_001), 0),  # few rows that start anywhere
    ((90, 420_001), 0),
    ((4_001, 37, 5), (0, 2)),  # runs of less than a pack, or two
]
VIEWS = {
    "transposed": lambda x: x.transpose(0, 1),
    "permuted": lambda x: x.permute(2, 0, 1),
    "turned": lambda x: x.permute(2, 1, 0),
    "spread": lambda x: x[..., ::2],
    "pitched": lambda x: x[..., :-3],
    "offset": lambda x: x[..., 1:],
    "sliced": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:1].expand(x.shape),
    "one": lambda x: x[:1, :1, :1].expand(x.shape),
}


def values(*shape: int, dtype: Any = torch.bfloat16, requires_grad: bool = False, seed: int = 0) -> Any:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=dtype, device="cuda", requires_grad=requires_grad)


def assert_right(kind: str, backend: str, x: Any, dim: Any, keepdim: bool = False) -> None:
    ours, pytorchs = FUNCTIONS[kind]
    found = ours(x, dim, keepdim, backend=backend)
    if kind in ("max", "argmax"):
        assert torch.equal(found, pytorchs(x, dim, keepdim))
        return
    right = pytorchs(x.double(), dim, keepdim)
    terms = pytorchs(x.double().abs(), dim, keepdim)
    error = (found.double() - right).abs()
    assert found.dtype == x.dtype and found.shape == right.shape
    assert bool((error <= torch.finfo(x.dtype).eps * right.abs() + 4 * torch.finfo(torch.float32).eps * terms).all())


# ----------------------------------------------------------------------------------------------------------------------
# Values
# ----------------------------------------------------------------------------------------------------------------------


@OURS
@pytest.mark.parametrize("case", [case for case in OP.test_cases if case.dtype == "bf16"], ids=lambda case: case.slug)
def test_every_case_of_the_ladder_is_right(backend, case) -> None:
    (x,) = OP.inputs(case, generator(case, "cuda"))
    kernel_twins.sum(values(1), backend=backend)  # registers the operator
    name = "reduction_nd" if backend == "cuda" else "reduction_nd_triton"
    options = OP.options(case)
    out = getattr(torch.ops.kernel_twins, name)(x, options["dims"], False, options["kind"])
    verdict = compare(OP, case, (x,), (out,))
    assert verdict.ok, verdict.reason


@OURS
@BY_KIND
@pytest.mark.parametrize(("shape", "dim"), PROBLEMS, ids=str)
def test_any_axes_of_any_shape(backend, kind, shape, dim) -> None:
    if kind == "argmax" and isinstance(dim, tuple):
        dim = None
    for dtype, keepdim in itertools.product(DTYPES, (False, True)):
        assert_right(kind, backend, values(*shape, dtype=dtype), dim, keepdim)


@OURS
@BY_KIND
@pytest.mark.parametrize("shape", [(64, 256), (3, 1_000_000)], ids=str)
def test_a_call_as_before_has_its_own_values_and_addresses(backend, kind, shape) -> None:
    m, n = shape
    wide = values(m, n + 8)
    for x in (values(m, n), values(m, n, seed=1), wide[:, :n], wide[:, 1 : n + 1], values(m, n, seed=2)):
        for dim in (0, 1):
            assert_right(kind, backend, x, dim)


@OURS
@BY_KIND
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(backend, kind, view) -> None:
    for dtype, n in itertools.product((torch.float32, torch.bfloat16), (40, 1_029)):
        x = VIEWS[view](values(12, 33, n, dtype=dtype))
        for dim in (0, 1, 2) if kind == "argmax" else (0, 1, 2, (0, 2), (0, 1, 2)):
            assert_right(kind, backend, x, dim)
        if kind == "argmax":
            assert_right(kind, backend, x, None)


@OURS
def test_equals_and_nans(backend) -> None:
    for shape, dim in (((33, 5_000), 1), ((5_000, 40), 0), ((6, 700, 41), 1), ((300_000,), None)):
        x = values(*shape).round()
        assert_right("argmax", backend, x, dim)
        x.view(-1)[::97] = float("nan")
        assert_right("argmax", backend, x, dim)
        assert bool(kernel_twins.amax(x, () if dim is None else dim, backend=backend).isnan().any())
        x.fill_(-float("inf"))
        assert not kernel_twins.argmax(x, dim, backend=backend).any()


@OURS
def test_equals_and_nans_of_many_rows(backend) -> None:
    for dtype in DTYPES:
        x = values(30_000, 512, dtype=dtype).round()
        x[:, :40] = -float("inf")  # of some lanes all elements
        for each in (x, x[::2]):
            assert_right("argmax", backend, each, 1)
        assert_right("argmax", backend, x[:15_000].view(5, 3_000, 512).transpose(0, 1), 2)
        x.view(-1)[::397] = float("nan")
        assert_right("argmax", backend, x, 1)
        x.fill_(-float("inf"))
        assert not kernel_twins.argmax(x, 1, backend=backend).any()


@ALL
def test_nothing_at_all(backend) -> None:
    assert torch.equal(kernel_twins.sum(values(3, 0), 1, backend=backend), torch.zeros_like(values(3)))
    assert bool(kernel_twins.mean(values(3, 0), 1, backend=backend).isnan().all())
    assert kernel_twins.amax(values(0, 3), 1, backend=backend).shape == (0,)
    for function in (kernel_twins.amax, kernel_twins.argmax):
        with pytest.raises(IndexError):
            function(values(3, 0), 1, backend=backend)
    x = values(1)[0]
    assert torch.equal(kernel_twins.sum(x, backend=backend), x)
    assert torch.equal(kernel_twins.argmax(x, backend=backend), torch.argmax(x))


# ----------------------------------------------------------------------------------------------------------------------
# Gradients, memory, repetition
# ----------------------------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("kind", ["sum", "mean", "max"])
def test_gradients_are_pytorchs(backend, kind) -> None:
    for (shape, dim), keepdim in itertools.product((((33, 257), 1), ((4, 50, 64), (0, 2))), (False, True)):
        x = values(*shape, dtype=torch.float32).round().requires_grad_()
        ours, pytorchs = (FUNCTIONS[kind][0](x, dim, keepdim, backend=backend), FUNCTIONS[kind][1](x, dim, keepdim))
        dout = values(*ours.shape, dtype=torch.float32, seed=1)
        torch.testing.assert_close(*(torch.autograd.grad(each, x, dout) for each in (ours, pytorchs)))


def assert_gradient_of_maxima_is_right(backend: str, x: Any, dim: Any) -> None:
    """PyTorch's in fp64, rounded."""
    leaf, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    out, right = kernel_twins.amax(leaf, dim, backend=backend), torch.amax(wide, dim)
    dout = values(*out.shape, dtype=x.dtype, seed=1)
    (ours,) = torch.autograd.grad(out, leaf, dout)
    (exact,) = torch.autograd.grad(right, wide, dout.double())
    rtol = torch.finfo(x.dtype).eps
    assert ours.dtype == x.dtype
    torch.testing.assert_close(ours.double(), exact, rtol=rtol, atol=torch.finfo(x.dtype).tiny, equal_nan=True)


@OURS
@pytest.mark.parametrize(("shape", "dim"), PROBLEMS, ids=str)
def test_the_gradient_of_maxima_of_any_shape(backend, shape, dim) -> None:
    for dtype in DTYPES:
        x = values(*shape, dtype=dtype)
        for each in (x, x.round(), torch.zeros_like(x), x.round().index_fill_(0, torch.tensor([0]).cuda(), torch.nan)):
            assert_gradient_of_maxima_is_right(backend, each, dim)


@OURS
@pytest.mark.parametrize("view", VIEWS)
def test_the_gradient_of_maxima_of_any_strides(backend, view) -> None:
    for dtype, n in itertools.product((torch.float32, torch.bfloat16), (40, 1_029)):
        x = VIEWS[view](values(12, 33, n, dtype=dtype).round())
        for dim in (0, 1, 2, (0, 2), (0, 1, 2)):
            assert_gradient_of_maxima_is_right(backend, x, dim)


@OURS
@pytest.mark.parametrize("n", [9, 64, 67, 1_029])
def test_the_gradient_of_maxima_of_rows_with_gaps(backend, n) -> None:
    for dtype, gap in itertools.product(DTYPES, (3, 8)):
        for dim in (0, 1, 2, (0, 2), (1, 2)):
            assert_gradient_of_maxima_is_right(backend, values(11, 77, n + gap, dtype=dtype).round()[..., :n], dim)


@OURS
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((3, 700_001), 1),
        ((200_003, 25), 0),
        ((70, 731, 398), 1),
        ((70, 300, 616), (0, 2)),
        ((80, 45_563), 0),
        ((3, 5, 200_003), (0, 2)),
        ((3, 5, 200_000), (0, 2)),
        ((9_001, 61, 3), (0, 2)),
        ((4_001, 256, 4), (0, 2)),
        ((500, 301, 3), (0, 2)),
        ((100, 2, 3), (0, 2)),
    ],
    ids=[
        "few runs",
        "folded rows",
        "misaligned rows",
        "rows of several runs",
        "wide rows",
        "long runs",
        "long runs of whole packs",
        "folded runs as columns",
        "packs of runs as columns",
        "runs as columns",
        "few runs as columns",
    ],
)
def test_the_gradient_of_maxima_of_whole_and_of_split_reductions(backend, shape, dim) -> None:
    for dtype, offset in itertools.product(DTYPES, (0, 1)):
        x = values(math.prod(shape) + offset, dtype=dtype)[offset:].view(shape)
        assert_gradient_of_maxima_is_right(backend, x, dim)
        assert_gradient_of_maxima_is_right(backend, x.round(), dim)


@OURS
def test_the_gradient_of_maxima_takes_no_memory_beside_it(backend) -> None:
    x = values(4_096, 4_096, requires_grad=True)
    out = kernel_twins.amax(x, 1, backend=backend)
    dout = torch.ones_like(out)
    torch.autograd.grad(out, x, dout, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (dx,) = torch.autograd.grad(out, x, dout, retain_graph=True)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * dx.nbytes


@OURS
def test_a_graph_of_the_gradient_of_maxima_replays_on_new_values(backend) -> None:
    for shape, dim in (((2**22,), 0), ((20_000, 256), 0), ((300, 4_096), 1)):
        x = values(*shape, requires_grad=True)

        def gradient(x: Any = x, dim: int = dim) -> Any:
            out = kernel_twins.amax(x, dim, backend=backend)
            return torch.autograd.grad(out, x, torch.ones_like(out))[0]

        stream = torch.cuda.Stream()  # backward runs on the stream of its forward pass
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            gradient()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = gradient()
        for seed in (1, 2):
            with torch.no_grad():
                x.copy_(values(*shape, seed=seed))
            graph.replay()
            assert torch.equal(found, gradient())


@OURS
@BY_KIND
def test_no_copy_is_made(backend, kind) -> None:
    x = values(64, 512, 1_000).permute(2, 0, 1)[:, ::2]
    FUNCTIONS[kind][0](x, 0, backend=backend)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    FUNCTIONS[kind][0](x, 0, backend=backend)
    assert torch.cuda.max_memory_allocated() - before < x.nbytes / 2


@OURS
@BY_KIND
def test_every_call_gives_the_same_bits(backend, kind) -> None:
    for shape, dim in (((2**22,), 0), ((20_000, 256), 0), ((64, 70_000), 1)):
        x = values(*shape)
        first, *others = (FUNCTIONS[kind][0](x, dim, backend=backend) for _ in range(10))
        assert all(torch.equal(first, other) for other in others)


@OURS
@BY_KIND
def test_a_graph_replays_on_new_values(backend, kind) -> None:
    for shape, dim in (((2**22,), 0), ((20_000, 256), 0), ((300, 4_096), 1)):
        x = values(*shape)
        FUNCTIONS[kind][0](x, dim, backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = FUNCTIONS[kind][0](x, dim, backend=backend)
        for seed in (1, 2):
            x.copy_(values(*shape, seed=seed))
            graph.replay()
            assert torch.equal(found, FUNCTIONS[kind][0](x, dim, backend=backend))


@OURS
@BY_KIND
def test_a_compiled_call_is_one_graph(backend, kind) -> None:
    torch.compiler.reset()
    function = torch.compile(lambda x: FUNCTIONS[kind][0](x * 2, 1, backend=backend), fullgraph=True)
    for n in (257, 1_000):
        x = values(33, n)
        assert torch.equal(function(x), FUNCTIONS[kind][0](x * 2, 1, backend=backend))


@ALL
def test_autocast_is_pytorchs(backend) -> None:
    x = values(33, 1_000)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found, right = kernel_twins.sum(x, 1, backend=backend), torch.sum(x, 1)
        assert found.dtype == right.dtype == torch.float32
        torch.testing.assert_close(found, right)
        assert kernel_twins.mean(x, 1, backend=backend).dtype == torch.mean(x, 1).dtype


@ALL
@pytest.mark.parametrize("autocast", [False, True])
def test_dtype_of_a_sum_is_pytorchs(backend, autocast) -> None:
    dtypes = torch.float32, torch.bfloat16, torch.float16
    for of, dtype in itertools.product(dtypes, repeat=2):
        x = values(33, 1_000, dtype=of).requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            out, right = kernel_twins.sum(x, 1, backend=backend, dtype=dtype), torch.sum(x, 1, dtype=dtype)
        assert out.dtype == right.dtype == dtype
        torch.testing.assert_close(out, right, rtol=2e-2, atol=2e-2)
        assert torch.autograd.grad(out.sum(), x)[0].dtype == of


@OURS
def test_other_dtypes_are_refused_and_left_to_pytorch(backend) -> None:
    x = values(3, 5, dtype=torch.float64)
    assert torch.equal(kernel_twins.sum(x, 1), torch.sum(x, 1))
    assert torch.equal(kernel_twins.sum(x.int(), 1), torch.sum(x.int(), 1))
    with pytest.raises(TypeError, match=r"x is torch.float64, must be torch.float32 or"):
        kernel_twins.sum(x, 1, backend=backend)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_more_blocks_than_a_grid_has_are_refused() -> None:
    x = values(1, 20_000).expand(2**31 + 5, 20_000)
    with pytest.raises(RuntimeError, match=r"2147483653 blocks for this x, a grid has up to 2147483647: reduce a part"):
        kernel_twins.sum(x, 1, backend="cuda")


@OURS
@BY_KIND
def test_dimensions_are_pytorchs(backend, kind) -> None:
    x = values(33, 65)
    assert torch.equal(FUNCTIONS[kind][0](x, np.int64(1), backend=backend), FUNCTIONS[kind][0](x, 1, backend=backend))
    several: Any = (0, 1)
    for given in (backend, "auto"):
        with pytest.raises(TypeError, match=r"must be an int or None for argmax|must be int, not tuple"):
            kernel_twins.argmax(x, several, backend=given)


@BY_KIND
def test_auto_takes_transforms_as_pytorchs(kind) -> None:
    ours, pytorchs = FUNCTIONS[kind]
    x = values(2, 3, 2, 3, 2, 3, dtype=torch.float32)
    for batched in (torch.func.vmap, lambda function: torch.func.vmap(torch.func.vmap(function))):
        torch.testing.assert_close(*(batched(lambda x, each=each: each(x, 0))(x) for each in (ours, pytorchs)))
    if kind == "argmax":
        return
    tangent = values(33, 65, dtype=torch.float32, seed=1)
    x = values(33, 65, dtype=torch.float32)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found, right = (torch.autograd.forward_ad.unpack_dual(each(dual, 1)).tangent for each in (ours, pytorchs))
        torch.testing.assert_close(found, right)
    found, right = (torch.func.grad(lambda x, each=each: each(x, 1).sum())(x) for each in (ours, pytorchs))
    torch.testing.assert_close(found, right)
    for backend in ("cuda", "triton"):
        with pytest.raises(NotImplementedError, match=r"no derivative for torch.func's grad and vjp: pass backend='to"):
            torch.func.grad(lambda x, backend=backend: ours(x, 1, backend=backend).sum())(x)


@OURS
@pytest.mark.parametrize("kind", ["max", "argmax"])
def test_the_number_of_elements_may_be_known_to_values_alone(backend, kind) -> None:
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        function = torch.compile(
            lambda x, mask: FUNCTIONS[kind][0](x[mask.nonzero().squeeze(1)], 0, backend=backend), fullgraph=True
        )
        x = values(65, 33)
        mask = x[:, 0] > 0
        assert torch.equal(function(x, mask), FUNCTIONS[kind][1](x[mask], 0))

"""dropout_add on a GPU: the masks that were asked for, whatever the layout, and at home in graphs and compilers."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import kernel_twins  # noqa: E402
from kernel_twins import OPS, load  # noqa: E402
from kernel_twins.harness.check import generator  # noqa: E402
from kernel_twins.ops.activations import ACTIVATIONS  # noqa: E402
from kernel_twins.ops.dropout import shared  # noqa: E402
from kernel_twins.ops.tensors import empty_outputs  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

pytestmark = pytest.mark.gpu

FORWARD, BACKWARD = OPS["dropout_add"], OPS["dropout_add_backward"]
OURS = pytest.mark.parametrize("backend", ["cuda", "triton"])
ALL = pytest.mark.parametrize("backend", ["auto", "cuda", "triton", "torch"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
P = 0.3
SHAPES = [(1,), (7,), (300, 1), (33, 257), (4, 5, 64), (2, 3, 4, 1000), (3, 70_000), (1_000_003, 3)]
EMPTY = [(0,), (0, 5), (5, 0), (2, 0, 3)]
LAYOUTS = {
    "pitched": lambda x: x[..., :-3],
    "offset": lambda x: x[..., 1:],
    "expanded": lambda x: x[:1, :1].expand(x.shape),
    "every second": lambda x: x[::2],
    "spread": lambda x: x[..., ::2],
    "crossed": lambda x: x.transpose(0, 1),
    "turned": lambda x: x.transpose(1, 2),
}
SLACK = 2**20  # bytes: torch's allocator rounds up


def values(*shape: int, dtype: Any = torch.bfloat16, requires_grad: bool = False, seed: int = 0) -> Any:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=dtype, device="cuda", requires_grad=requires_grad)


def operands(*shape: int, dtype: Any = torch.bfloat16, requires_grad: bool = False) -> Any:
    """x, residual and bias."""
    x, residual = (values(*shape, dtype=dtype, requires_grad=requires_grad, seed=seed) for seed in (0, 1))
    return x, residual, values(shape[-1], dtype=dtype, requires_grad=requires_grad, seed=2)


def called(backend: str, x: Any, residual: Any = None, bias: Any = None, p: float = P, **options: Any) -> Any:
    return kernel_twins.dropout_add(x, residual, p, bias=bias, backend=backend, **options)


def mask_like(x: Any, p: float = P) -> Any:
    """What the next call draws: it takes the generator's seed and offset, and moves it on."""
    random = torch.cuda.default_generators[x.device.index]
    given = {"seed": random.initial_seed(), "offset": random.get_offset()}
    return shared.kept((1, x.numel()), slice(0, 1), x.device, p=p, **given).view(x.shape)


def by_definition(mask: Any, x: Any, residual: Any, bias: Any, *, activation: str = "none", p: float = P) -> Any:
    """In float64."""
    x, residual, bias = (None if each is None else each.double() for each in (x, residual, bias))
    y = ACTIVATIONS[activation](x if bias is None else x + bias)
    y = torch.where(mask, y * shared.scale(p), 0.0)
    return y if residual is None else y + residual


def assert_near(found: Any, right: Any) -> None:
    """Rounded once; a sum over many rows errs by more than its own last digits."""
    loose = 1e-5 if found.dtype == torch.float32 else 2 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found.double(), right, rtol=loose, atol=loose * max(1.0, float(right.abs().max())))


def operator(backend: str) -> Any:
    if backend == "triton":
        called(backend, values(1, 1))  # registers it
    return getattr(torch.ops.kernel_twins, "dropout_add" if backend == "cuda" else "dropout_add_triton").default


# ----------------------------------------------------------------------------------------------------------------------
# Masks
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 1000), (37, 5003), (3, 262_147), (100_003, 3)], ids=str)
def test_both_languages_and_all_steps_draw_the_same_mask(shape) -> None:
    x = torch.ones(shape, device="cuda")
    for seed, offset in ((0, 0), (1, 4), (2**63 + 11, 2**40 + 8)):
        kept = shared.kept(shape, slice(0, shape[0]), x.device, p=P, seed=seed, offset=offset)
        for step in FORWARD.steps:
            for language in step.backends:
                out = torch.empty_like(x)
                load(FORWARD.name, step.name, language)(x, out=out, p=P, seed=seed, offset=offset)
                assert torch.equal(out != 0, kept), (step.name, language)
        for step in BACKWARD.steps:
            for language in step.backends:
                out = torch.empty_like(x)
                load(BACKWARD.name, step.name, language)(x, out=out, p=P, seed=seed, offset=offset)
                assert torch.equal(out != 0, kept), (step.name, language)


@ALL
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_kept(backend, p) -> None:
    torch.manual_seed(5)
    x = torch.ones(4096, 1024, device="cuda")
    out = called(backend, x, p=p)
    assert abs(int((out == 0).sum()) - p * x.numel()) < 5 * math.sqrt(p * (1 - p) * x.numel())
    _, scaled = out.unique().tolist()
    assert math.isclose(scaled, 1 / (1 - p), rel_tol=1e-6)
    # Neighbours and rows know nothing of each other.
    kept = (out != 0).float() - (1 - p)
    for pairs in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1]), (kept[:, 4:], kept[:, :-4])):
        correlation = (pairs[0] * pairs[1]).mean() / (p * (1 - p))
        assert abs(float(correlation)) < 5 / math.sqrt(x.numel())


@ALL
def test_a_seed_repeats_what_calls_draw(backend) -> None:
    x = torch.ones(64, 1000, device="cuda")
    torch.manual_seed(3)
    first, second = (called(backend, x) for _ in range(2))
    drawn = torch.rand(5, device="cuda")
    torch.manual_seed(3)
    assert torch.equal(called(backend, x), first) and not torch.equal(first, second)
    assert torch.equal(called(backend, x), second) and torch.equal(torch.rand(5, device="cuda"), drawn)


def test_both_backends_draw_what_the_generator_says() -> None:
    """One call after the other: both move the generator on by as much."""
    x = values(33, 257)
    found = []
    for backend in ("cuda", "triton"):
        torch.manual_seed(2**63 + 5)  # all 64 bits count
        torch.rand(7, device="cuda")
        for _ in range(3):
            mask = mask_like(x)
            found.append(called(backend, x))
            assert torch.equal(found[-1] != 0, mask & (x != 0))
    assert all(map(torch.equal, found[:3], found[3:]))
    assert not torch.equal(found[0], found[1])


@OURS
def test_threads_draw_different_masks(backend) -> None:
    """Beside each other, and beside one that draws by PyTorch's kernels, whose numbers are new each time as well."""
    x = torch.ones(64, 64, device="cuda")
    called(backend, x)
    torch.cuda.synchronize()
    masks: list[bytes] = []
    numbers: list[bytes] = []

    def draw(call: Any, into: list[bytes]) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            mine = [call() for _ in range(300)]
            into.extend(each.cpu().numpy().tobytes() for each in mine)

    ours = [threading.Thread(target=draw, args=(lambda: called(backend, x) > 0, masks)) for _ in range(8)]
    pytorchs = [threading.Thread(target=draw, args=(lambda: torch.rand(64, device="cuda"), numbers)) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in (*ours, *pytorchs):
            thread.start()
        for thread in (*ours, *pytorchs):
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(masks) == len(set(masks)) == 8 * 300
    assert len(numbers) == len(set(numbers)) == 2 * 300


@OURS
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_the_gradient_of_a_bias_alone_needs_no_dx(backend, activation) -> None:
    x, residual, _ = operands(8192, 4096)
    bias = values(4096, requires_grad=True, seed=2)
    for _ in range(2):  # the first call may keep what later ones use
        mask = mask_like(x)
        out, dout = called(backend, x, residual, bias, activation=activation), values(8192, 4096, seed=4)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        (found,) = torch.autograd.grad(out, bias, dout)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < x.nbytes / 2
    wide = bias.detach().double().requires_grad_()
    right = by_definition(mask, x, residual, wide, activation=activation)
    assert_near(found, torch.autograd.grad(right, wide, dout.double())[0])


@OURS
def test_a_checkpoint_draws_its_masks_again(backend) -> None:
    x, residual, bias = operands(64, 1000, dtype=torch.float32, requires_grad=True)

    def block(x: Any) -> Any:
        return called(backend, called(backend, x, residual, bias, activation="gelu"), residual)

    torch.manual_seed(3)
    plain = torch.autograd.grad(block(x).square().sum(), (x, residual, bias))
    for use_reentrant in (False, True):
        torch.manual_seed(3)
        out = checkpoint(block, x, use_reentrant=use_reentrant)
        torch.manual_seed(11)  # what comes between forward and backward pass
        out.square().sum().backward()
        for each, right in zip((x, residual, bias), plain, strict=True):
            torch.testing.assert_close(each.grad, right)
            each.grad = None


@OURS
@pytest.mark.parametrize("training", [True, False])
def test_p_of_0_and_1_are_exact_and_draw_nothing(backend, training) -> None:
    x, residual, bias = operands(33, 257, dtype=torch.float32, requires_grad=True)
    before = torch.cuda.get_rng_state()
    for p in (0.0, 1.0) if training else (0.0, 0.5, 1.0):
        out = called(backend, x, residual, bias, p, training=training)
        assert torch.equal(out, residual if p == 1 and training else x + bias + residual)
        dx, dresidual, dbias = torch.autograd.grad(out.sum(), (x, residual, bias))
        expected = 0.0 if p == 1 and training else 1.0
        assert bool((dx == expected).all()) and bool((dresidual == 1).all()) and bool((dbias == 33 * expected).all())
    infinite = torch.full((33, 257), math.inf, device="cuda")
    assert not called(backend, infinite, p=1.0).any()
    assert torch.equal(torch.cuda.get_rng_state(), before)


@OURS
def test_what_is_dropped_is_nothing_whatever_it_was(backend) -> None:
    for value in (math.nan, math.inf):
        x = torch.full((33, 257), value, device="cuda", requires_grad=True)
        mask = mask_like(x)
        out = called(backend, x)
        assert bool((out[~mask] == 0).all()) and not bool(out[mask].isfinite().any())
        (dx,) = torch.autograd.grad(out, x, torch.full_like(x, math.inf))
        assert bool((dx[~mask] == 0).all()) and bool((dx[mask] == math.inf).all())


# ----------------------------------------------------------------------------------------------------------------------
# Values
# ----------------------------------------------------------------------------------------------------------------------


@OURS
@BY_DTYPE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_dimensions_of_any_shape(backend, dtype, shape) -> None:
    for activation, (adds, shifts) in itertools.product(("none", "gelu"), itertools.product((False, True), repeat=2)):
        x, residual, bias = operands(*shape, dtype=dtype, requires_grad=True)
        given = (x, residual if adds else None, bias if shifts else None)
        assert_right(backend, given, activation, values(*shape, dtype=dtype, seed=4))


def assert_right(backend: str, given: Any, activation: str, dout: Any) -> None:
    """The result and all gradients; where it is dropped, x's is exactly 0."""
    x = given[0]
    mask = mask_like(x)
    out = called(backend, *given, activation=activation)
    assert out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous()
    wide = [None if each is None else each.detach().double().requires_grad_() for each in given]
    right = by_definition(mask, *wide, activation=activation)
    assert_near(out, right)
    wanted = [(one, other) for one, other in zip(given, wide, strict=True) if one is not None]
    alone = () if given[2] is None else torch.autograd.grad(out, given[2], dout, retain_graph=True)
    found = torch.autograd.grad(out, [one for one, _ in wanted], dout)
    expected = torch.autograd.grad(right, [other for _, other in wanted], dout.double())
    assert not found[0][~mask].any()
    for each, other in (*zip(found, expected, strict=True), *zip(alone, expected[-1:], strict=False)):
        assert_near(each, other)


@OURS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(backend, activation) -> None:
    for dtype, n in itertools.product(DTYPES, (1000, 1003)):
        given = operands(64, n, dtype=dtype, requires_grad=True)
        assert_right(backend, given, activation, values(64, n, dtype=dtype, seed=4))


@BY_DTYPE
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("pitch", [0, 3, 8])
@pytest.mark.parametrize("shape", [(9, 850_003), (11, 1_700_002), (3, 3_300_001), (17, 400_000), (8, 700_000)], ids=str)
def test_few_long_rows(shape, pitch, activation, dtype) -> None:
    """Whose columns a block has in all rows; rows of every skew, and gradients that start differently from x."""
    m, n = shape
    x, dout = (values(m, n + more, dtype=dtype, seed=more)[:, :n].detach() for more in (pitch, 2 * pitch))
    bias = values(n, dtype=dtype, requires_grad=True, seed=2)
    assert_right("cuda", (x.requires_grad_(), None, bias), activation, dout)


@OURS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(backend, layout) -> None:
    of = LAYOUTS[layout]
    for dtype, n in itertools.product((torch.float32, torch.bfloat16), (40, 1029, 1035)):
        x, residual = (of(values(6, 5, n, dtype=dtype, seed=seed)).detach().requires_grad_() for seed in (0, 1))
        bias = values(x.shape[-1], 2, dtype=dtype, seed=2)[:, 0].requires_grad_()  # not contiguous
        for dout in (of(values(6, 5, n, dtype=dtype, seed=4)), values(1, dtype=dtype, seed=4).expand(x.shape)):
            assert_right(backend, (x, residual, bias), "silu", dout)
        dense = values(*x.shape, dtype=dtype, requires_grad=True, seed=3)
        assert_right(backend, (x, dense, None), "gelu", dense.detach())
        assert_right(backend, (dense, x, bias), "none", dense.detach())


@OURS
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_nothing_at_all(backend, shape) -> None:
    given = operands(*shape, requires_grad=True)
    out = called(backend, *given, activation="gelu")
    dx, _, dbias = torch.autograd.grad(out.sum(), given)
    assert out.shape == dx.shape == shape and dbias.shape == shape[-1:] and not dbias.any()
    assert called("auto", *given).shape == shape


@OURS
def test_a_bias_gradient_is_the_same_bits_every_time(backend) -> None:
    """Beside that of x and alone."""
    for shape in ((5_000, 257), (300, 4096), (64, 65_536)):
        x, _, bias = operands(*shape, requires_grad=True)
        out, dout = called(backend, x, None, bias), values(*shape, seed=4)
        for wanted in ((bias, x), (bias,)):
            first, *others = (torch.autograd.grad(out, wanted, dout, retain_graph=True)[0] for _ in range(4))
            assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("backend", ["cuda"])  # a function in Python is told what wants gradients, not what asks
def test_a_bias_gradient_alone_takes_no_memory_of_xs_size(backend, activation) -> None:
    x, _, bias = operands(4096, 4096, requires_grad=True)
    for given in (x, x.detach()):
        out, dout = called(backend, given, None, bias, activation=activation), values(4096, 4096, seed=4)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, bias, dout)
        assert torch.cuda.max_memory_allocated() - before <= x.nbytes / 2


@ALL
def test_no_mask_is_kept(backend) -> None:
    """Without an activation, nothing of x's size is: the backward pass needs the seed and the offset alone."""
    x, residual = (values(4096, 4096, requires_grad=True, seed=seed) for seed in (0, 1))
    called(backend, x, residual).sum().backward()  # the first call may keep what all later ones use
    before = torch.cuda.memory_allocated()
    out = called(backend, x, residual)
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    assert kept > x.numel() / 2 if backend == "torch" else kept <= SLACK


@OURS
def test_other_dtypes_are_pytorchs_or_refused(backend) -> None:
    x, residual, bias = operands(3, 5)
    double = x.double()
    assert called("auto", double, p=0.0).dtype == torch.float64
    assert called("auto", x, residual.float(), p=0.0).dtype == torch.float32
    assert called("auto", x, residual[0], p=0.0).shape == (3, 5)
    with pytest.raises(TypeError, match=r"^x is torch.float64, must be torch.float32 or .* call x.to"):
        called(backend, double)
    with pytest.raises(TypeError, match=r"^residual is torch.float32, must be torch.bfloat16 like x: call residual.to"):
        called(backend, x, residual.float())
    with pytest.raises(ValueError, match=r"^bias is on cpu, must be on cuda:0 like x: call bias.to\(x.device\)$"):
        called(backend, x, None, bias.cpu())


# ----------------------------------------------------------------------------------------------------------------------
# Graphs, streams, compilers
# ----------------------------------------------------------------------------------------------------------------------


@ALL
def test_replays_draw_new_masks_and_gradients_follow_them(backend) -> None:
    x, residual, bias = operands(64, 1000, dtype=torch.float32, requires_grad=True)
    called(backend, x, residual, bias, activation="gelu").sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = (called(backend, x, residual, bias, activation="gelu") for _ in range(2))
        dx, dbias = torch.autograd.grad(first.sum(), (x, bias))

    def replay():
        graph.replay()
        return [each.detach().clone() for each in (first, second, dx, dbias)]

    torch.manual_seed(3)
    runs = [replay() for _ in range(3)]
    masks = [(out - residual).abs() > 1e-6 for run in runs for out in run[:2]]
    assert all(not torch.equal(*pair) for pair in itertools.combinations(masks, 2))
    for run, mask in zip(runs, masks[::2], strict=True):
        wide = [each.detach().double().requires_grad_() for each in (x, residual, bias)]
        right = by_definition(mask, *wide, activation="gelu")
        assert_near(run[0], right)
        for found, expected in zip(run[2:], torch.autograd.grad(right.sum(), (wide[0], wide[2])), strict=True):
            assert_near(found, expected)
    torch.manual_seed(3)
    assert all(map(torch.equal, replay(), runs[0]))


def test_a_graph_draws_what_eager_calls_do() -> None:
    """CUDA's; PyTorch lets a graph's offsets begin where the generator stands at each replay."""
    x = values(64, 1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [called("cuda", x) for _ in range(3)]
    torch.manual_seed(7)
    graph.replay()
    torch.manual_seed(7)
    assert all(torch.equal(out, called("cuda", x)) for out in outs)


@ALL
def test_the_host_waits_for_nothing(backend) -> None:
    x, residual, bias = operands(64, 300, requires_grad=True)

    def step():
        called(backend, x, residual, bias, activation="gelu").sum().backward()
        with torch.no_grad():
            called(backend, x)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@OURS
def test_compiled_without_a_break(backend) -> None:
    """By Inductor, for any number of rows; the mask is found in what comes out."""
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, bias: called(backend, x * 2, None, bias, activation="gelu") + 0.0, fullgraph=True, dynamic=True
    )
    for shape in ((64, 96), (130, 96), (70, 300)):
        x, _, bias = operands(*shape, dtype=torch.float32, requires_grad=True)
        out = compiled(x, bias)
        wide = [each.detach().double().requires_grad_() for each in (x, bias)]
        right = by_definition(out != 0, wide[0] * 2, None, wide[1], activation="gelu")
        assert_near(out, right)
        for found, expected in zip(
            torch.autograd.grad(out.sum(), (x, bias)), torch.autograd.grad(right.sum(), wide), strict=True
        ):
            assert_near(found, expected)
        share = float((out == 0).double().mean())
        assert abs(share - P) < 5 * math.sqrt(P * (1 - P) / out.numel())


@OURS
def test_graph_trees(backend) -> None:
    torch.compiler.reset()
    x = torch.ones(72, 4096, device="cuda")
    compiled = torch.compile(lambda x: called(backend, x) + 0.0, fullgraph=True, mode="reduce-overhead")
    masks = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        masks.append((compiled(x) != 0).clone())
    assert all(not torch.equal(*pair) for pair in itertools.combinations(masks, 2))


@ALL
def test_recomputed_activations_have_the_same_mask(backend) -> None:
    from torch.utils.checkpoint import checkpoint

    x = values(64, 1000, dtype=torch.float32, requires_grad=True)
    out = checkpoint(lambda x: called(backend, x * 1).square(), x, use_reentrant=False)
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(dx != 0, out != 0)


@OURS
def test_the_operators_are_what_pytorch_expects(backend) -> None:
    for dtype, activation in ((torch.float32, "none"), (torch.bfloat16, "gelu")):
        given = operands(4, 5, 64, dtype=dtype, requires_grad=True)
        alike = ("test_schema", "test_autograd_registration", "test_faketensor")  # two calls are not alike
        torch.library.opcheck(operator(backend), (*given, P, activation), test_utils=alike)
        torch.library.opcheck(operator(backend), (*given, 0.0, activation))


@OURS
def test_second_derivatives(backend) -> None:
    given = operands(9, 33, dtype=torch.float32, requires_grad=True)
    dout = values(9, 33, dtype=torch.float32, requires_grad=True, seed=4)
    for activation in ACTIVATIONS:
        mask = mask_like(given[0])
        out = called(backend, *given, activation=activation)
        wide = [each.detach().double().requires_grad_() for each in (*given, dout)]
        right = by_definition(mask, *wide[:3], activation=activation)
        seconds = []
        for result, leaves in ((out, (*given, dout)), (right, wide)):
            firsts = torch.autograd.grad(result, leaves[:3], leaves[3], create_graph=True)
            summed = sum(each.square().sum() for each in firsts)
            seconds.append(torch.autograd.grad(summed, leaves, allow_unused=True, materialize_grads=True))
        for found, expected in zip(*seconds, strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


@OURS
def test_autocast_changes_nothing(backend) -> None:
    for dtype in DTYPES:
        x, residual, bias = operands(33, 257, dtype=dtype)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = called(backend, x, residual, bias, activation="gelu")
            right = torch.nn.functional.dropout(torch.nn.functional.gelu(x + bias), P) + residual
        assert out.dtype == right.dtype == dtype


@OURS
def test_batched(backend) -> None:
    x, residual, bias = operands(4, 33, 9, dtype=torch.float32)
    for p in (0.0, P):
        out = torch.func.vmap(lambda x, residual, p=p: called(backend, x, residual, bias, p), randomness="different")(
            x, residual
        )
        mask = (out - residual).abs() > 1e-6
        assert_near(out, by_definition(mask, x, residual, bias, p=p))
        assert p == 0 or not torch.equal(mask[0], mask[1])
    right = torch.func.vmap(lambda x: called("auto", x), randomness="same")(torch.ones_like(x))
    assert torch.equal(right[0], right[1])  # by PyTorch


@OURS
def test_streams_run_at_once(backend) -> None:
    given = [operands(512, 4096, requires_grad=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in given]

    def step(seed, x, residual, bias):
        torch.manual_seed(seed)
        out = called(backend, x, residual, bias)
        return out.detach(), *torch.autograd.grad(out.sum(), (x, bias))

    expected = [step(seed, *each) for seed, each in enumerate(given)]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for seed, (stream, each) in enumerate(zip(streams, given, strict=True)):
            with torch.cuda.stream(stream):
                found.append(step(seed, *each))
        torch.cuda.synchronize()
        assert all(map(torch.equal, itertools.chain(*found), itertools.chain(*expected)))


@ALL
def test_the_current_device_need_not_be_xs(backend) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU alone")
    x = values(33, 257).to("cuda:1").requires_grad_()
    with torch.cuda.device(0):
        out = called(backend, x, x)
        assert out.device == x.device
        assert torch.autograd.grad(out.sum(), x)[0].device == x.device


@OURS
def test_a_returned_state_is_what_a_step_draws_from(backend) -> None:
    case = Case.of(33, 5_003, dtype="bf16", residual="yes", bias="yes")
    inputs = FORWARD.inputs(case, generator(case, "cuda"))
    out, state = operator(backend)(*inputs, 0.1, "gelu")
    seed, offset = (int(number) % 2**64 for number in state)
    right = empty_outputs(FORWARD, case, "cuda")
    step = load(FORWARD.name, FORWARD.steps_of("cuda")[-1].name, "cuda")
    step(*inputs, out=right, p=0.1, activation="gelu", seed=seed, offset=offset // 4 * 4)
    torch.testing.assert_close(out, right)

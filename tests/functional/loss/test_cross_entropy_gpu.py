"""cross_entropy on a GPU: right for every layout, lean, and at home in graphs, streams and compilers."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins import OPS, load  # noqa: E402
from kernel_twins.functional.loss.shared import REDUCTIONS  # noqa: E402
from kernel_twins.harness.check import compare, generator  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[3]

OURS = pytest.mark.parametrize("backend", ["cuda", "triton"])
ALL = pytest.mark.parametrize("backend", ["auto", "cuda", "triton", "torch"])
BY_REDUCTION = pytest.mark.parametrize("reduction", list(REDUCTIONS))
BY_SMOOTHING = pytest.mark.parametrize("smoothing", [0.0, 0.1])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FORWARD, BACKWARD = OPS["cross_entropy"], OPS["cross_entropy_backward"]
STEPS = [
    pytest.param(op, step.name, backend, id=f"{op.name}-{step.name}-{backend}")
    for op in (FORWARD, BACKWARD)
    for step in op.steps
    for backend in step.backends
]
IGNORED = -100
SHAPES = [(7,), (300, 1), (1, 300), (33, 257), (64, 1024), (9, 5003), (3, 70_000), (600, 2), (4, 64, 5), (2, 17, 5, 9)]
# Three packs a lane, small blocks, rows that are split over the GPU or over clusters, means of many blocks.
SHAPES += [(50, 88), (33, 649), (33, 2051), (17, 4093), (1, 300_001), (40, 66_666), (130, 40_003), (70_001, 2)]
LAYOUTS = {
    "pitched": lambda x: x[:, :-3],
    "offset": lambda x: x[:, 1:],
    "expanded": lambda x: x[:1].expand(x.shape),
    "every other row": lambda x: x[::2],
}
SLACK = 2**21  # bytes: torch's allocator rounds up


def values(*shape: int, dtype: Any = torch.bfloat16, requires_grad: bool = False, seed: int = 0) -> Any:
    random = torch.Generator("cuda").manual_seed(seed)
    made = 2 * torch.randn(shape, generator=random, dtype=dtype, device="cuda")
    return made.requires_grad_(requires_grad)


def classes(x: Any, ignored: bool = True) -> Any:
    """Targets of logits, every seventh of them ignored."""
    dim = 0 if x.dim() == 1 else 1
    rows = (*x.shape[:dim], *x.shape[dim + 1 :])
    made = torch.randint(0, x.shape[dim], rows, generator=torch.Generator().manual_seed(1))
    if ignored and made.dim():
        made.view(-1)[3::7] = IGNORED
    return made.cuda()


def function(reduction: str, backend: str, smoothing: float = 0.0) -> Any:
    return lambda x, target: kernel_twins.cross_entropy(
        x, target, reduction=reduction, label_smoothing=smoothing, backend=backend
    )


def pytorchs(x: Any, target: Any, reduction: str, smoothing: float = 0.0) -> Any:
    return torch.nn.functional.cross_entropy(x, target, reduction=reduction, label_smoothing=smoothing)


def exact(x: Any, target: Any, reduction: str, smoothing: float, dout: Any) -> tuple[Any, Any]:
    """Loss and gradient in float64."""
    wide = x.detach().double().requires_grad_()
    loss = pytorchs(wide, target, reduction, smoothing)
    (dx,) = torch.autograd.grad(loss, wide, dout.double())
    return loss.detach(), dx


def assert_near(out: Any, right: Any, atol: float) -> None:
    rtol = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}[out.dtype]
    torch.testing.assert_close(out.double(), right, rtol=rtol, atol=atol)


def assert_both_right(backend: str, x: Any, target: Any, reduction: str, smoothing: float) -> None:
    x = x.detach().requires_grad_()
    loss = function(reduction, backend, smoothing)(x, target)
    dout = values(*loss.shape, dtype=loss.dtype, seed=1)
    right, right_dx = exact(x, target, reduction, smoothing, dout)
    assert loss.dtype == x.dtype and loss.shape == right.shape
    rounded = right.to(x.dtype).double()  # infinite where a sum is beyond the dtype's range
    assert_near(loss.detach(), torch.where(rounded.isinf(), rounded, right), 1e-4)
    (dx,) = torch.autograd.grad(loss, x, dout)
    assert dx.shape == x.shape and dx.dtype == x.dtype
    assert_near(dx, right_dx, 2e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Values
# ----------------------------------------------------------------------------------------------------------------------


@OURS
@pytest.mark.parametrize("case", FORWARD.test_cases, ids=lambda case: case.slug)
def test_every_case_of_the_ladder_is_right(backend, case) -> None:
    logits, target = FORWARD.inputs(case, generator(case, "cuda"))
    function("none", backend)(values(1, 1), classes(values(1, 1)))  # registers the operators
    library = torch.ops.kernel_twins
    operator = library.cross_entropy if backend == "cuda" else library.cross_entropy_triton
    options = FORWARD.options(case)
    losses, lse, _ = operator(logits, target, options["ignore_index"], 0, options["label_smoothing"], True)
    outs = (losses, lse)[: len(FORWARD.outputs(case))]
    verdict = compare(FORWARD, case, (logits, target), outs)
    assert verdict.ok, verdict.reason


@OURS
@BY_DTYPE
@BY_REDUCTION
@BY_SMOOTHING
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape(backend, dtype, reduction, smoothing, shape) -> None:
    x = values(*shape, dtype=dtype)
    assert_both_right(backend, x, classes(x), reduction, smoothing)


@OURS
@BY_REDUCTION
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(backend, reduction, layout) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for n in (40, 67, 131, 1029, 2100, 9000, 140_003):
            x = LAYOUTS[layout](values(12, n, dtype=dtype))
            assert_both_right(backend, x, classes(x), reduction, 0.1)


@OURS
@BY_REDUCTION
def test_a_call_as_before_has_its_own_values_addresses_and_options(backend, reduction) -> None:
    for n in (256, 5003):
        wide = values(64, n + 8)
        for x in (values(64, n), values(64, n, seed=1), wide[:, :n], wide[:, 1 : n + 1]):
            for smoothing in (0.0, 0.1, 0.2):
                assert_both_right(backend, x, classes(x), reduction, smoothing)
        target = classes(x, ignored=False)
        ignored = int(target[0])
        loss = kernel_twins.cross_entropy(x, target, ignore_index=ignored, reduction="sum", backend=backend)
        kept = target != ignored
        right = kernel_twins.cross_entropy(x[kept], target[kept], reduction="sum", backend="torch")
        torch.testing.assert_close(loss, right)


@ALL
def test_rows_of_special_values_give_what_pytorch_gives(backend) -> None:
    inf, nan = math.inf, math.nan
    special = [[-inf] * 4, [-inf, 0, 1, -inf], [inf, 0, 1, 2], [nan, 0, 1, 2], [-inf, nan, -inf, 0], [0.0] * 4]
    special += [[88.0, 89.0, 1e4, -1e4]]
    for n in (1, 9, 300, 5003):
        for smoothing in (0.0, 0.1):
            x = torch.tensor(special, device="cuda").repeat_interleave(n, 1).requires_grad_()
            for target in (torch.zeros(len(special), dtype=torch.int64), torch.full((len(special),), 4 * n - 1)):
                loss = function("none", backend, smoothing)(x, target.cuda())
                right = pytorchs(x, target.cuda(), "none", smoothing)
                torch.testing.assert_close(loss, right, rtol=1e-4, atol=1e-5, equal_nan=True)
                got, expected = (torch.autograd.grad(each.sum(), x)[0] for each in (loss, right))
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("op", "step", "backend"), STEPS)
def test_a_target_that_is_no_class_makes_nan_and_reads_nothing(op, step, backend) -> None:
    """PyTorch's kernels assert on the GPU, after which the process has no GPU left."""
    call = load(op.name, step, backend)
    for n in (40, 1_029, 70_000):
        logits = values(6, n)
        target = torch.tensor([0, n, -1, 2**40, -(2**62), n - 1], device="cuda")
        losses = torch.empty(6, device="cuda")
        bad = torch.tensor([False, True, True, True, True, False], device="cuda")
        if op is FORWARD:
            call(logits, target, out=losses)
            assert torch.equal(losses.isnan(), bad)
            continue
        out, lse = torch.empty_like(logits), torch.logsumexp(logits.float(), 1)
        call(logits, target, lse, torch.ones(6, device="cuda"), out=out)
        assert torch.equal(out.isnan(), bad[:, None].expand(6, n))


@OURS
@BY_REDUCTION
def test_a_target_that_is_no_class_makes_nan_where_derivatives_go_on(backend, reduction) -> None:
    x = values(6, 40, dtype=torch.float32, requires_grad=True)
    target = torch.tensor([0, 40, -1, 2**40, IGNORED, 39], device="cuda")
    bad = torch.tensor([False, True, True, True, False, False], device="cuda")
    loss = function(reduction, backend, 0.1)(x, target)
    for create_graph in (False, True):
        (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss), retain_graph=True, create_graph=create_graph)
        assert torch.equal(dx.isnan(), bad[:, None].expand(6, 40)) and not dx[4].any()


NO_CLASS = """
import torch, kernel_twins

n = 40
target = torch.tensor([0, n, -1, 2**40, -100, n - 1], device="cuda")
random = torch.Generator("cuda").manual_seed(0)
for name, dtype, narrow, weight, shape in (
    ("ours", torch.float32, False, None, (6, n)),
    ("of float64", torch.float64, False, None, (6, n)),
    ("with weights", torch.float32, False, torch.ones(n, device="cuda"), (6, n)),
    ("that would be copied", torch.bfloat16, False, None, (2, n, 3)),
    ("of uint8", torch.float32, True, None, (6, n)),
    ("of no class at all", torch.float32, False, None, (6, 0)),
):
    classes = target
    if narrow:
        classes = torch.tensor([0, n, 255, 200, 1, n - 1], dtype=torch.uint8, device="cuda")
    classes = classes.view(shape[0], *shape[2:])
    wrong = ((classes < 0) | (classes >= shape[1])) & (classes != -100)
    for reduction in ("none", "mean", "sum"):
        x = torch.randn(shape, generator=random, dtype=dtype, device="cuda", requires_grad=True)
        def total(x):
            return kernel_twins.cross_entropy(x, classes, weight, reduction=reduction).sum()
        loss = kernel_twins.cross_entropy(x, classes, weight, reduction=reduction)
        assert torch.equal(loss.isnan(), wrong if reduction == "none" else wrong.any()), name
        gradients = [torch.autograd.grad(total(x), x)[0], torch.func.grad(total)(x.detach())]
        if reduction != "none" and weight is None:
            gradients.append(x.detach().clone())
            assert kernel_twins.cross_entropy_gradient_(gradients[-1], classes, reduction=reduction).isnan(), name
        for dx in gradients:
            assert dx.movedim(1, -1)[wrong].isnan().all(), name
            assert reduction != "none" or not dx.movedim(1, -1)[~wrong].isnan().any(), name
torch.cuda.synchronize()
print("alive")
"""


def test_auto_survives_a_target_that_is_no_class_wherever_it_goes() -> None:
    """In a process of its own, which PyTorch's kernel would leave without a GPU."""
    done = subprocess.run([sys.executable, "-c", NO_CLASS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n", done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("op", "step", "backend"), STEPS)
def test_more_rows_than_a_grid_has_blocks(op, step, backend) -> None:
    """One row of logits is seen by all, as PyTorch, which other tests compare with, cannot have so many losses."""
    m, call = 2**31 + 5, load(op.name, step, backend)
    if op.step(step).accepts(Case.of(m, 2, dtype="bf16")):
        pytest.skip(f"{step} has a block for each row")
    logits, odd = values(1, 2), [0, 2**30 - 1, 2**30, 2**31 - 1, m - 1]
    target = torch.zeros(m, dtype=torch.int64, device="cuda")
    target[odd] = 1
    both = torch.arange(2, device="cuda")
    small = pytorchs(logits.float().expand(2, 2), both, "none")
    if op is FORWARD:
        out, right = torch.full((m,), math.nan, device="cuda"), small
        call(logits.expand(m, 2), target, out=out)
    else:
        out = torch.full((m, 2), math.nan, dtype=torch.bfloat16, device="cuda")
        lse = torch.logsumexp(logits.float(), 1)
        right = (torch.exp(logits.float() - lse) - torch.eye(2, device="cuda")).bfloat16()
        call(logits.expand(m, 2), target, lse.repeat(m), torch.ones(1, device="cuda").expand(m), out=out)
    torch.testing.assert_close(out[odd], right[1].expand(5, *right.shape[1:]), rtol=1e-2, atol=1e-5)
    out[odd] = out[1].clone()
    torch.testing.assert_close(out[1], right[0], rtol=1e-2, atol=1e-5)
    assert all(bool((part == out[1]).all()) for part in out.split(2**28))


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_more_rows_of_a_block_each_than_a_grid_has_blocks() -> None:
    m, n = 2**31 + 5, 1_032  # packs of a row: 129, a warp takes 128
    logits, target = values(1, n), torch.zeros(m, dtype=torch.int64, device="cuda")
    out = torch.full((m,), math.nan, device="cuda")
    load(FORWARD.name, "v04_rows_per_block", "cuda")(logits.expand(m, n), target, out=out)
    torch.testing.assert_close(out[:1], pytorchs(logits.float(), target[:1], "none"), rtol=1e-4, atol=1e-5)
    assert all(bool((part == out[0]).all()) for part in out.split(2**28))


@OURS
def test_a_mean_of_many_rows_is_right_and_the_same_every_time(backend) -> None:
    for m in (1, 4_096, 4_097, 300_000):
        x = values(m, 10, dtype=torch.float32)
        target = classes(x)
        right, _ = exact(x, target, "mean", 0.0, torch.ones((), device="cuda"))
        results = [function("mean", backend)(x, target) for _ in range(5)]
        assert_near(results[0], right, 1e-6)
        assert all(torch.equal(each, results[0]) for each in results)


@ALL
@BY_REDUCTION
def test_where_all_is_ignored_or_nothing_there(backend, reduction) -> None:
    for m, n in ((3, 5), (0, 5), (40, 0)):
        x, target = values(m, n, requires_grad=True), torch.full((m,), IGNORED, device="cuda")
        loss = function(reduction, backend)(x, target)
        torch.testing.assert_close(loss, pytorchs(x, target, reduction), equal_nan=True)
        (dx,) = torch.autograd.grad(loss.sum(), x)
        assert dx.shape == x.shape and not dx.any()


@ALL
@BY_REDUCTION
@pytest.mark.parametrize("in_dims", [(0, 0), (1, 0), (2, 1), (0, None)], ids=str)
def test_vmap_is_a_call_for_each_example(backend, reduction, in_dims) -> None:
    x = values(5, 33, 257, dtype=torch.float32)
    target = torch.stack([classes(each) for each in x])
    given_x = x.movedim(0, in_dims[0]).contiguous()
    given_target = target[0] if in_dims[1] is None else target.movedim(0, in_dims[1]).contiguous()
    found = torch.func.vmap(function(reduction, backend, 0.1), in_dims=in_dims)(given_x, given_target)
    targets = [target[0]] * len(x) if in_dims[1] is None else target
    right = torch.stack([pytorchs(*each, reduction, 0.1) for each in zip(x, targets, strict=True)])
    torch.testing.assert_close(found, right)


# ----------------------------------------------------------------------------------------------------------------------
# Memory and the host
# ----------------------------------------------------------------------------------------------------------------------


@OURS
@BY_REDUCTION
def test_nothing_as_large_as_the_logits_is_stored(backend, reduction) -> None:
    x = values(512, 40_001)[:, :40_000].detach().requires_grad_()
    target = classes(x)
    size = x.numel() * x.itemsize
    for turn in range(2):  # the first compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = function(reduction, backend)(x, target)
        if turn:
            assert torch.cuda.max_memory_allocated() - before <= SLACK
        (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
        if turn:
            assert torch.cuda.max_memory_allocated() - before <= size + SLACK
        del loss, dx


@ALL
@BY_REDUCTION
def test_the_host_waits_for_nothing(backend, reduction) -> None:
    x = values(64, 300, requires_grad=True)
    target = classes(x)

    def step():
        loss = function(reduction, backend)(x, target)
        torch.autograd.grad(loss, x, torch.ones_like(loss))
        if reduction != "none" and backend != "torch":
            with torch.no_grad():
                kernel_twins.cross_entropy_gradient_(x.detach().clone(), target, reduction=reduction, backend=backend)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ----------------------------------------------------------------------------------------------------------------------
# The gradient in the place of the logits
# ----------------------------------------------------------------------------------------------------------------------


@ALL
@BY_DTYPE
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@BY_SMOOTHING
def test_the_gradient_takes_the_place_of_the_logits(backend, dtype, reduction, smoothing) -> None:
    for m, n in ((5, 1), (300, 7), (67, 40), (33, 1024), (9, 5003), (9, 70_000)):
        whole = values(m, n + 3, dtype=dtype)
        for x in (whole[:, :n], whole[:, 1 : n + 1], whole):
            target, before = classes(x), whole.clone()
            right, right_dx = exact(x, target, reduction, smoothing, torch.ones((), device="cuda"))
            leaf, version = x.detach().clone().requires_grad_(), x._version
            loss = kernel_twins.cross_entropy_gradient_(
                x, target, reduction=reduction, label_smoothing=smoothing, backend=backend
            )
            if backend == "torch":  # PyTorch rounds more than we do, and the same way wherever the logits lie
                right = pytorchs(leaf, target, reduction, smoothing)
                (right_dx,) = torch.autograd.grad(right, leaf)
                assert torch.equal(loss, right) and torch.equal(x, right_dx)
            else:
                assert_near(loss, right, 1e-4)
                assert_near(x, right_dx, 2e-6)
            assert not loss.requires_grad and x._version > version
            x.copy_(leaf.detach())
            assert torch.equal(whole, before)  # nothing beside x was touched


@OURS
def test_the_gradient_in_place_needs_no_second_place(backend) -> None:
    x = values(512, 40_000)
    target = classes(x)
    for turn in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kernel_twins.cross_entropy_gradient_(x, target, backend=backend)
        if turn:
            assert torch.cuda.max_memory_allocated() - before <= SLACK


def test_the_gradient_in_place_leaves_to_pytorch_what_only_pytorch_does() -> None:
    x = values(6, 5, dtype=torch.float32)
    for target in (torch.softmax(values(6, 5, dtype=torch.float32, seed=1), 1), classes(x, ignored=False).byte()):
        leaf, y = x.clone().requires_grad_(), x.clone()
        right = torch.nn.functional.cross_entropy(leaf, target)
        assert torch.equal(kernel_twins.cross_entropy_gradient_(y, target), right.detach())
        assert torch.equal(y, torch.autograd.grad(right, leaf)[0])


@ALL
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_in_the_place_of_a_batch_of_logits(backend, reduction) -> None:
    x = values(5, 33, 257, dtype=torch.float32)
    target = torch.stack([classes(each) for each in x])
    one = torch.ones((), device="cuda")
    rights, gradients = zip(*(exact(*each, reduction, 0.0, one) for each in zip(x, target, strict=True)), strict=True)
    found = torch.func.vmap(
        lambda x, target: kernel_twins.cross_entropy_gradient_(x, target, reduction=reduction, backend=backend)
    )(x, target)
    assert_near(found, torch.stack(rights), 1e-4)
    assert_near(x, torch.stack(gradients), 2e-6)


@OURS
def test_what_cannot_be_overwritten_is_refused(backend) -> None:
    x = values(6, 5)
    for wrong in (x.t().contiguous().t(), x[:1].expand(6, 5), values(2, 5, 3), values(64).as_strided((6, 5), (3, 1))):
        with pytest.raises(ValueError, match=r"^input has strides .*, must have rows of neighbouring classes"):
            kernel_twins.cross_entropy_gradient_(wrong, classes(wrong), backend=backend)
    with pytest.raises(RuntimeError, match=r"^input requires grad, and cross_entropy_gradient_ overwrites it"):
        kernel_twins.cross_entropy_gradient_(x.requires_grad_(), classes(x), backend=backend)


# ----------------------------------------------------------------------------------------------------------------------
# Registrations, derivatives, graphs, streams
# ----------------------------------------------------------------------------------------------------------------------


@BY_REDUCTION
def test_the_operators_are_what_pytorch_expects(reduction) -> None:
    function("mean", "triton")(values(1, 1), classes(values(1, 1)))  # registers them
    library = torch.ops.kernel_twins
    index = REDUCTIONS[reduction]
    for forward, backward, in_place in (
        (library.cross_entropy, library.cross_entropy_backward, library.cross_entropy_gradient_),
        (library.cross_entropy_triton, library.cross_entropy_backward_triton, library.cross_entropy_gradient_triton_),
    ):
        for shape, dtype in (((64, 40), torch.float32), ((4, 5, 6), torch.bfloat16), ((5,), torch.float16)):
            x = values(*shape, dtype=dtype, requires_grad=True)
            target = classes(x)
            torch.library.opcheck(forward.default, (x, target, IGNORED, index, 0.1))
            loss, lse, scale = (each.detach() for each in forward(x, target, IGNORED, index, 0.1))
            given = (torch.ones_like(loss), x.detach(), target, lse, scale, IGNORED, index, 0.1)
            torch.library.opcheck(backward.default, given)
            if index and x.dim() <= 2:
                torch.library.opcheck(in_place.default, (x.detach(), target, IGNORED, index, 0.1))


@OURS
@BY_REDUCTION
def test_second_derivatives(backend, reduction) -> None:
    x = values(9, 33, dtype=torch.float32, requires_grad=True)
    target = classes(x)
    wide = x.detach().double().requires_grad_()
    seconds = []
    for each, loss in (
        (x, function(reduction, backend, 0.1)(x, target)),
        (wide, pytorchs(wide, target, reduction, 0.1)),
    ):
        dout = torch.ones_like(loss, requires_grad=True)
        (dx,) = torch.autograd.grad(loss, each, dout, create_graph=True)
        seconds.append([g.double() for g in torch.autograd.grad(dx.square().sum(), (each, dout))])
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-5)


@ALL
@BY_REDUCTION
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(backend, reduction, dynamic) -> None:
    torch.compiler.reset()
    call = function(reduction, backend)
    compiled = torch.compile(lambda x, target: call(x * 2, target).sin(), fullgraph=True, dynamic=dynamic)
    for shape in ((64, 96), (130, 57), (70, 300)):
        x = values(*shape, dtype=torch.float32, requires_grad=True)
        target = classes(x)
        out, right = compiled(x, target), pytorchs(x * 2, target, reduction).sin()
        torch.testing.assert_close(out, right, rtol=1e-3, atol=1e-4)
        gradients = (torch.autograd.grad(each.sum(), x)[0] for each in (out, right))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


@OURS
@BY_REDUCTION
@pytest.mark.parametrize("shape", [(64, 256), (9_000, 40), (37, 5003), (8, 65_536), (3, 262_147)], ids=str)
def test_captured_and_replayed_with_gradients(backend, reduction, shape) -> None:
    x = values(*shape, requires_grad=True)
    target = classes(x)

    def step():
        loss = function(reduction, backend)(x, target)
        return loss.detach(), *torch.autograd.grad(loss, x, torch.ones_like(loss))

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
@BY_REDUCTION
def test_under_autocast_the_loss_is_float32_as_pytorchs(backend, reduction) -> None:
    for dtype in DTYPES:
        x = values(33, 257, dtype=dtype, requires_grad=True)
        target = classes(x)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss, right = function(reduction, backend)(x, target), pytorchs(x, target, reduction)
        assert loss.dtype == right.dtype == torch.float32
        if backend == "torch":  # its float32 is of logarithms in x's dtype
            assert torch.equal(loss, right)
            continue
        dout = torch.ones_like(loss)
        right, dx = exact(x, target, reduction, 0.0, dout)
        torch.testing.assert_close(loss.double(), right, rtol=1e-5, atol=1e-6)
        (got,) = torch.autograd.grad(loss, x, dout)
        assert got.dtype == dtype
        assert_near(got, dx, 1e-5)


@ALL
@BY_REDUCTION
def test_classes_in_int32_are_read_as_in_int64(backend, reduction) -> None:
    x = values(33, 257, requires_grad=True)
    target = classes(x)
    call = function(reduction, backend)
    loss, right = call(x, target.int()), call(x, target)
    assert torch.equal(loss, right)
    assert torch.equal(*(torch.autograd.grad(each.sum(), x)[0] for each in (loss, right)))
    if reduction != "none":
        found, same = x.detach().clone(), x.detach().clone()
        kernel_twins.cross_entropy_gradient_(found, target.int(), reduction=reduction, backend=backend)
        kernel_twins.cross_entropy_gradient_(same, target, reduction=reduction, backend=backend)
        assert torch.equal(found, same)


@ALL
@BY_REDUCTION
def test_weights_of_classes(backend, reduction) -> None:
    for dtype in DTYPES:
        x = values(33, 257, dtype=dtype, requires_grad=True)
        target, weight = classes(x), torch.rand(257, device="cuda").to(dtype)
        loss = kernel_twins.cross_entropy(x, target, weight, reduction=reduction, backend=backend)
        right = torch.nn.functional.cross_entropy(x.double(), target, weight.double(), reduction=reduction)
        assert loss.dtype == dtype
        near = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(loss.double(), right, rtol=near, atol=near)
        got, wanted = (torch.autograd.grad(each.sum(), x)[0] for each in (loss, right))
        torch.testing.assert_close(got, wanted, rtol=near, atol=near)


@OURS
def test_streams_run_at_once(backend) -> None:
    given = [(x, classes(x)) for x in (values(9_000, 512, seed=seed) for seed in range(2))]
    expected = [function("mean", backend)(*each) for each in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    for _ in range(50):
        outs = []
        for stream, each in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                outs.append(function("mean", backend)(*each))
        torch.cuda.synchronize()
        assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


@OURS
def test_tensors_off_the_gpu_are_refused(backend) -> None:
    with pytest.raises(ValueError, match=r"^input is on cpu, must be on a CUDA device .* call input.cuda\(\)"):
        kernel_twins.cross_entropy(torch.ones(3, 5), torch.zeros(3, dtype=torch.int64), backend=backend)


@OURS
def test_calls_keep_no_tensor_alive(backend) -> None:
    memory = []
    for _ in range(3):
        x = values(56, 4096, requires_grad=True)
        function("mean", backend)(x, classes(x)).backward()
        del x
        memory.append(torch.cuda.memory_allocated())
    assert memory[2] <= memory[0]  # the first call may keep what all later ones use

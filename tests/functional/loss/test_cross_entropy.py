"""cross_entropy without a GPU: layouts, reductions, gradients, the gradient in place, tracing, and what is refused.

The CUDA backend's operators compute on the CPU by PyTorch's own. The Triton backend's are given PyTorch in the place of
their kernels, which other tests run.
"""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import kernel_twins  # noqa: E402
from kernel_twins import OPS  # noqa: E402
from kernel_twins.errors import UnavailableError  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402
from tests.sides import as_interpreted, cuda_library, cuda_takes_the_cpu  # noqa: E402

torch_cross_entropy = torch.nn.functional.cross_entropy
functional = importlib.import_module("kernel_twins.functional.loss.cross_entropy")  # the module, which a function hides
ROOT = Path(__file__).resolve().parents[3]
IGNORED = -100
REDUCTIONS = ("none", "mean", "sum")
BY_REDUCTION = pytest.mark.parametrize("reduction", REDUCTIONS)
BY_SMOOTHING = pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
SHAPES: list[tuple[int, ...]] = [(5,), (3, 5), (1, 1), (2, 5, 3), (2, 5, 3, 4)]
BY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


def values(shape, dtype=torch.float32, requires_grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return made.requires_grad_(requires_grad)


def classes(shape, ignored=True):
    """Targets of logits of that shape, one of several ignored."""
    dim = 0 if len(shape) == 1 else 1
    rows = (*shape[:dim], *shape[dim + 1 :])
    made = torch.randint(0, shape[dim], rows, generator=torch.Generator().manual_seed(1))
    if ignored and made.numel() > 1:
        made.view(-1)[1] = IGNORED
    return made


def pytorchs(input, target, reduction="mean", smoothing=0.0, ignore_index=IGNORED):  # noqa: A002
    return torch.nn.functional.cross_entropy(
        input, target, reduction=reduction, label_smoothing=smoothing, ignore_index=ignore_index
    )


def ours(input, target, reduction="mean", smoothing=0.0, ignore_index=IGNORED, backend="auto"):  # noqa: A002
    return kernel_twins.cross_entropy(
        input, target, reduction=reduction, label_smoothing=smoothing, ignore_index=ignore_index, backend=backend
    )


def replaced(op: str, device: int | None) -> Any:
    """A launcher by PyTorch, which insists on what a kernel is promised."""

    def launch(logits: Any, target: Any, *others: Any, out: Any, ignore_index: int, label_smoothing: float) -> None:
        m, n = logits.shape
        assert n <= 1 or logits.stride(1) == 1
        assert target.shape == (m,) and target.is_contiguous()
        wide = logits.float()
        if op == "cross_entropy":
            losses, lse = out
            assert losses.shape == lse.shape == (m,) and losses.is_contiguous() and lse.is_contiguous()
            losses.copy_(pytorchs(wide, target, "none", label_smoothing, ignore_index))
            lse.copy_(torch.logsumexp(wide, 1).masked_fill(target == ignore_index, 0.0))
            return
        lse, dout = others
        assert lse.shape == dout.shape == (m,) and lse.is_contiguous() and lse.dtype == dout.dtype == torch.float32
        assert out.shape == (m, n) and (n <= 1 or out.stride(1) == 1)
        ignored = target == ignore_index
        torch.testing.assert_close(lse, torch.logsumexp(wide, 1).masked_fill(ignored, 0.0))
        wanted = torch.full_like(wide, label_smoothing / n)
        wanted[torch.arange(m), target.masked_fill(ignored, 0)] += 1 - label_smoothing
        dx = (torch.exp(wide - lse[:, None]) - wanted) * dout[:, None]
        out.copy_(dx.masked_fill(ignored[:, None], 0.0))

    return launch


def replaced_mean(losses: Any, target: Any, loss: Any, scale: Any, ignore_index: int, mean: bool) -> None:
    """The same of what takes the mean."""
    assert losses.dim() == target.dim() == 1 and losses.is_contiguous() and target.is_contiguous()
    assert loss.shape == scale.shape == () and losses.dtype == scale.dtype == torch.float32
    count = (target != ignore_index).sum() if mean else torch.ones(())
    loss.copy_(losses.sum() / count)
    scale.copy_(count.float().reciprocal())


@pytest.fixture(params=["cuda", "triton"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``forward``, ``backward`` and ``in_place`` of a backend, ``loss`` alone, and its ``wide``-est dtype."""
    if request.param == "cuda":
        library = cuda_library("cross_entropy_result")
        found = SimpleNamespace(
            forward=library.cross_entropy.default,
            backward=library.cross_entropy_backward.default,
            in_place=library.cross_entropy_gradient_.default,
            loss=library.cross_entropy_result.default,
            wide=torch.float64,
        )
    else:
        as_interpreted(monkeypatch)
        side = importlib.import_module("kernel_twins.functional.loss.triton_cross_entropy")
        monkeypatch.setattr(side, "triton_launcher", replaced)
        monkeypatch.setattr(side, "cross_entropy_mean", replaced_mean)
        found = SimpleNamespace(
            forward=side.operator,
            backward=side.backward_operator,
            in_place=side.in_place_operator,
            loss=lambda *given: side.operator(*given)[0],
            wide=torch.float32,
        )
    found.name = request.param
    return found


def given(input, target, reduction, smoothing=0.0, ignore_index=IGNORED):  # noqa: A002
    """What the operators take."""
    return input, target, ignore_index, REDUCTIONS.index(reduction), smoothing


# ----------------------------------------------------------------------------------------------------------------------
# Values and layouts
# ----------------------------------------------------------------------------------------------------------------------


@BY_SHAPE
@BY_REDUCTION
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_off_the_gpu_it_is_pytorchs(shape, reduction, backend) -> None:
    x, target = values(shape), classes(shape)
    for smoothing in (0.0, 0.1):
        assert torch.equal(
            ours(x, target, reduction, smoothing, backend=backend), pytorchs(x, target, reduction, smoothing)
        )
    assert ours(x.double(), target, reduction, backend=backend).dtype == torch.float64
    probabilities = torch.softmax(values(shape, seed=2), 0 if len(shape) == 1 else 1)
    assert torch.equal(ours(x, probabilities, reduction), pytorchs(x, probabilities, reduction))


@BY_SHAPE
@BY_REDUCTION
@BY_SMOOTHING
def test_values_gradients_and_layouts(operators, shape, reduction, smoothing) -> None:
    x, target = values(shape, requires_grad=True), classes(shape)
    dim = 0 if len(shape) == 1 else 1
    loss, lse, scale = operators.forward(*given(x, target, reduction, smoothing))
    right = pytorchs(x, target, reduction, smoothing)
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(lse, torch.logsumexp(x, dim).masked_fill(target == IGNORED, 0.0))
    assert loss.requires_grad and not lse.requires_grad and not scale.requires_grad
    dout = values(loss.shape, seed=1)
    (dx,) = torch.autograd.grad(loss, x, dout)
    torch.testing.assert_close(dx, torch.autograd.grad(right, x, dout)[0])
    assert dx.movedim(dim, -1).is_contiguous()
    metas = operators.forward(*given(x.detach().to("meta"), target.to("meta"), reduction, smoothing))
    for meta, real in zip(metas, (loss, lse, scale), strict=True):
        assert meta.is_meta and (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)


@BY_REDUCTION
def test_any_strides(operators, reduction) -> None:
    x = values((6, 4, 10))
    for each in (x.transpose(0, 1), x[:, :, ::2], x[0].t(), x[0, :, :7], x[:, 0], x[0, :1].expand(5, 10), x[..., :1]):
        target = classes(each.shape)
        if target.dim() > 1:
            target = target.t().contiguous().t()
        leaf = each.detach().requires_grad_()
        loss, *_ = operators.forward(*given(leaf, target, reduction))
        right = pytorchs(leaf, target, reduction)
        torch.testing.assert_close(loss, right)
        dout = values((), seed=1).expand(loss.shape)
        torch.testing.assert_close(torch.autograd.grad(loss, leaf, dout), torch.autograd.grad(right, leaf, dout))


@BY_REDUCTION
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_in_the_end(operators, reduction, dtype) -> None:
    x, target = values((7, 33), dtype, requires_grad=True), classes((7, 33))
    wide = x.detach().float().requires_grad_()
    right = pytorchs(wide, target, reduction)
    for fp32_loss in (False, True):
        loss, lse, _ = operators.forward(*given(x, target, reduction), fp32_loss)
        assert loss.dtype == (torch.float32 if fp32_loss else dtype) and lse.dtype == torch.float32
        torch.testing.assert_close(loss, right.to(loss.dtype))
        (dx,) = torch.autograd.grad(loss.sum(), x)
        assert dx.dtype == dtype
        torch.testing.assert_close(dx, torch.autograd.grad(right.sum(), wide, retain_graph=True)[0].to(dtype))


@BY_REDUCTION
def test_where_all_is_ignored_or_nothing_there(operators, reduction) -> None:
    for target in (torch.full((3,), IGNORED), torch.empty(0, dtype=torch.int64)):
        x = values((len(target), 5), requires_grad=True)
        loss, *_ = operators.forward(*given(x, target, reduction))
        torch.testing.assert_close(loss, pytorchs(x, target, reduction), equal_nan=True)
        (dx,) = torch.autograd.grad(loss.sum(), x)
        assert dx.shape == x.shape and not dx.any()


def test_what_ignored_rows_hold_matters_not(operators) -> None:
    x, target = values((3, 5)), torch.tensor([1, 2, 3])
    x[1] = math.nan
    x.requires_grad_()
    loss, *_ = operators.forward(*given(x, target, "mean", ignore_index=2))
    torch.testing.assert_close(loss, pytorchs(x.detach()[::2], target[::2]))
    (dx,) = torch.autograd.grad(loss, x)
    assert not dx[1].any() and bool(dx[::2].isfinite().all())


def test_masked_logits_do_not_touch_the_loss(operators) -> None:
    x, target = values((3, 8)), torch.tensor([1, 2, 3])
    x[:, 4:] = -math.inf
    x.requires_grad_()
    loss, *_ = operators.forward(*given(x, target, "mean"))
    torch.testing.assert_close(loss, pytorchs(x, target))
    (dx,) = torch.autograd.grad(loss, x)
    assert bool(dx.isfinite().all()) and not dx[:, 4:].any()


@BY_REDUCTION
def test_past_the_operator_a_call_is_the_same(operators, reduction) -> None:
    if operators.name == "cuda":
        pytest.skip("the CUDA side has no other way than its operator")
    for shape in SHAPES:
        x, target = values(shape, requires_grad=True), classes(shape)
        loss, right = ours(x, target, reduction, 0.1, backend="triton"), pytorchs(x, target, reduction, 0.1)
        assert "_CrossEntropy" in type(loss.grad_fn).__name__
        torch.testing.assert_close(loss, right)
        dout = values(loss.shape, seed=1)
        torch.testing.assert_close(torch.autograd.grad(loss, x, dout), torch.autograd.grad(right, x, dout))
        assert not ours(x.detach(), target, reduction, backend="triton").requires_grad


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives
# ----------------------------------------------------------------------------------------------------------------------


@BY_REDUCTION
@BY_SMOOTHING
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 4, 3)], ids=str)
def test_first_and_second_derivatives(operators, shape, reduction, smoothing) -> None:
    x, target = values(shape, operators.wide, requires_grad=True), classes(shape)

    def ours(x):
        return operators.forward(*given(x, target, reduction, smoothing))[0]

    if operators.wide == torch.float64:
        assert torch.autograd.gradcheck(ours, (x,))
        assert torch.autograd.gradgradcheck(ours, (x,))
        return
    seconds = []
    for function in (ours, lambda x: pytorchs(x, target, reduction, smoothing)):
        loss = function(x)
        dout = values(loss.shape, requires_grad=True, seed=1)
        (dx,) = torch.autograd.grad(loss, x, dout, create_graph=True)
        seconds.append(torch.autograd.grad(dx.square().sum(), (x, dout)))
    torch.testing.assert_close(*seconds)


def test_a_target_that_is_no_class_makes_nan_where_derivatives_go_on(operators) -> None:
    """On a GPU, PyTorch's scatter_add would end the process."""
    x, target = values((6, 5), requires_grad=True), torch.tensor([0, 5, -1, 2**40, IGNORED, 4])
    bad = torch.tensor([False, True, True, True, False, False])
    for reduction in REDUCTIONS:
        options = IGNORED, REDUCTIONS.index(reduction), 0.1
        dout = torch.ones(6 if reduction == "none" else ())
        if operators.name == "cuda":
            lse, scale = torch.zeros(6), torch.ones(())
            dx = operators.backward(dout, x.detach(), target, lse, scale, *options)
        else:
            side = importlib.import_module("kernel_twins.functional.loss.triton_cross_entropy")
            dx = side._differentiable_backward(dout, x, target, *options)
            (second,) = torch.autograd.grad(dx[~bad].square().sum(), x)
            assert torch.equal(second.isnan(), bad[:, None].expand(6, 5))
        assert torch.equal(dx.isnan(), bad[:, None].expand(6, 5))
        assert not dx[4].any()


def test_changed_logits_are_noticed(operators) -> None:
    x, target = values((3, 4), requires_grad=True), classes((3, 4))
    y = x * 1
    loss, *_ = operators.forward(*given(y, target, "mean"))
    y.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


def test_forward_mode_derivatives_are_refused_and_not_lost(operators) -> None:
    x, target = values((3, 4)), classes((3, 4))
    if operators.name == "cuda":
        call = lambda x: operators.forward(x, target)[0]  # noqa: E731
    else:
        call = lambda x: kernel_twins.cross_entropy(x, target, backend="triton")  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative: pass backend='torch'$"):
        torch.func.jvp(call, (x,), (x,))


def test_tangents_of_gradients_are_refused_and_not_lost(operators) -> None:
    x = values((3, 4), requires_grad=True)
    y = operators.loss(*given(x, classes((3, 4)), "none", 0.0))
    with torch.autograd.forward_ad.dual_level():
        dout = torch.autograd.forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative: pass backend='torch'$"):
            torch.autograd.grad(y, x, dout)


@BY_REDUCTION
def test_what_is_registered_is_what_pytorch_expects(operators, reduction) -> None:
    for shape, dtype in (((3, 5), torch.float32), ((2, 5, 3), torch.bfloat16), ((5,), torch.float16)):
        x, target = values(shape, dtype, requires_grad=True), classes(shape)
        torch.library.opcheck(operators.forward, given(x, target, reduction, 0.1))
        if operators.name == "cuda":
            torch.library.opcheck(operators.loss, given(x, target, reduction, 0.1))
        loss, lse, scale = (each.detach() for each in operators.forward(*given(x, target, reduction, 0.1)))
        arguments = (torch.ones_like(loss), x.detach(), target, lse, scale, IGNORED, REDUCTIONS.index(reduction), 0.1)
        torch.library.opcheck(operators.backward, arguments)
        if reduction != "none" and len(shape) <= 2:
            torch.library.opcheck(operators.in_place, given(x.detach(), target, reduction, 0.1))


# ----------------------------------------------------------------------------------------------------------------------
# torch.func.vmap
# ----------------------------------------------------------------------------------------------------------------------


@BY_SHAPE
@BY_REDUCTION
def test_batches_are_one_call(operators, shape, reduction) -> None:
    """Wherever the batch is, and where one of the two has none."""
    many, some = values((4, *shape)), torch.stack([classes(shape), classes(shape, ignored=False)] * 2)
    for at, of_target in itertools.product(range(len(shape) + 1), (0, -1)):
        x, target = many.movedim(0, at).contiguous(), some.movedim(0, of_target).contiguous()
        cases = [(x, target, (at, of_target)), (x, some[0], (at, None)), (many[0], target, (None, of_target))]
        for given_x, given_target, in_dims in cases:
            found = torch.func.vmap(
                lambda x, target: operators.loss(*given(x, target, reduction, 0.1)), in_dims=in_dims
            )(given_x, given_target)
            of_x, of_classes = (
                each.unbind(dim) if dim is not None else [each] * 4
                for each, dim in zip((given_x, given_target), in_dims, strict=True)
            )
            right = [pytorchs(*each, reduction, 0.1) for each in zip(of_x, of_classes, strict=True)]
            torch.testing.assert_close(found, torch.stack(right), equal_nan=True)


@BY_REDUCTION
def test_batches_of_half_precision_and_of_nothing(operators, reduction) -> None:
    call = lambda x, target: operators.forward(*given(x, target, reduction))  # noqa: E731
    x, target = values((4, 300, 5), torch.bfloat16), torch.stack([classes((300, 5))] * 4)
    loss, lse, _ = torch.func.vmap(call)(x, target)
    assert loss.dtype == torch.bfloat16 and lse.shape == target.shape
    right = torch.stack([pytorchs(x.float(), target, reduction) for x, target in zip(x, target, strict=True)])
    torch.testing.assert_close(loss.float(), right, rtol=8e-3, atol=0)
    nothing, *_ = torch.func.vmap(call)(values((4, 0, 5)), classes((4, 1, 5))[:, :0])
    torch.testing.assert_close(
        nothing, torch.stack([pytorchs(values((0, 5)), nothing.new_empty(0).long(), reduction)] * 4), equal_nan=True
    )


@BY_SHAPE
@BY_REDUCTION
def test_gradients_of_a_batch_of_losses(operators, shape, reduction) -> None:
    x, target = values(shape, requires_grad=True), classes(shape)
    loss, *_ = operators.forward(*given(x, target, reduction, 0.1))
    douts = values((3, *loss.shape), seed=1)
    (found,) = torch.autograd.grad(loss, x, douts, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(loss, x, dout, retain_graph=True)[0] for dout in douts]
    torch.testing.assert_close(found, torch.stack(each))


@pytest.mark.parametrize("shape", [(5,), (3, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_in_the_place_of_a_batch_of_logits(operators, shape, reduction) -> None:
    """Each example's is its own loss's, wherever the batch is; by our operators, and by PyTorch."""
    many, some = values((4, *shape)), torch.stack([classes(shape), classes(shape, ignored=False)] * 2)
    rights, gradients = [], []
    for x, target in zip(many, some, strict=True):
        leaf = x.clone().requires_grad_()
        right = pytorchs(leaf, target, reduction, 0.1)
        rights.append(right.detach())
        gradients.append(torch.autograd.grad(right, leaf)[0])
    for call in (
        lambda x, target: operators.in_place(*given(x, target, reduction, 0.1)),
        lambda x, target: kernel_twins.cross_entropy_gradient_(x, target, reduction=reduction, label_smoothing=0.1),
    ):
        for at in range(len(shape) + 1):
            x = many.clone().movedim(0, at).contiguous()
            version = x._version
            found = torch.func.vmap(call, in_dims=(at, 0))(x, some)
            torch.testing.assert_close(found, torch.stack(rights), equal_nan=True)
            torch.testing.assert_close(x.movedim(at, 0), torch.stack(gradients), equal_nan=True)
            assert x._version > version
        same = many.clone()
        torch.func.vmap(call, in_dims=(0, None))(same, some[1])
        each = many[2].clone()
        call(each, some[1])
        torch.testing.assert_close(same[2], each)
    with pytest.raises(ValueError, match=r"^input is one for all of vmap's examples, must be one for each"):
        torch.func.vmap(lambda target: operators.in_place(*given(many[0].clone(), target, reduction)))(some)


def test_more_classes_than_the_steps_count_are_refused(operators) -> None:
    """By name and with a remedy, and before a kernel is reached: a row of them takes gigabytes."""
    if operators.name == "triton":
        pytest.skip("its steps count further")
    most = 2**31 - 2**15
    with FakeTensorMode():
        target = torch.zeros(1, dtype=torch.int64, device="cuda")
        for call in (operators.forward, operators.loss, operators.in_place):
            for classes in (most + 1, 2**31, 2**32):
                wide = torch.empty((1, classes), dtype=torch.float16, device="cuda")
                told = rf"^input has {classes} classes, must have {most} or fewer: pass backend='torch'$"
                with pytest.raises(ValueError, match=told):
                    call(*given(wide, target, "mean"))
        taken = torch.empty((1, most), dtype=torch.float16, device="cuda")
        assert operators.forward(*given(taken, target, "mean"))[0].shape == ()


# ----------------------------------------------------------------------------------------------------------------------
# The gradient in the place of the logits
# ----------------------------------------------------------------------------------------------------------------------


def in_place(operators, input, target, reduction="mean", smoothing=0.0):  # noqa: A002
    if operators.name == "triton":
        return kernel_twins.cross_entropy_gradient_(
            input, target, reduction=reduction, label_smoothing=smoothing, backend="triton"
        )
    return operators.in_place(*given(input, target, reduction, smoothing))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@BY_SMOOTHING
def test_the_gradient_takes_the_place_of_the_logits(operators, reduction, smoothing) -> None:
    whole = values((6, 12))
    for x in (whole, whole[:, :7], whole[::2], whole[0], whole[:1, 3:]):
        target = classes(x.shape)
        leaf = x.detach().clone().requires_grad_()
        right = pytorchs(leaf, target, reduction, smoothing)
        (gradient,) = torch.autograd.grad(right, leaf)
        for call in (
            lambda x, target: in_place(operators, x, target, reduction, smoothing),
            lambda x, target: kernel_twins.cross_entropy_gradient_(
                x, target, reduction=reduction, label_smoothing=smoothing
            ),
        ):
            before = whole.clone()
            version = x._version
            loss = call(x, target)
            torch.testing.assert_close(loss, right.detach())
            torch.testing.assert_close(x, gradient)
            assert not loss.requires_grad and x._version > version
            x.copy_(leaf.detach())
            assert torch.equal(whole, before)  # nothing beside x was touched


def test_the_gradient_in_place_serves_a_model(operators) -> None:
    weight, features, target = values((5, 4), requires_grad=True), values((7, 4), seed=1), classes((7, 5))
    loss = pytorchs(features @ weight.t(), target)
    (right,) = torch.autograd.grad(loss, weight)
    logits = features @ weight.t()
    gradient = logits.detach()
    torch.testing.assert_close(in_place(operators, gradient, target), loss.detach())
    logits.backward(gradient)
    torch.testing.assert_close(weight.grad, right)


def test_what_the_gradient_in_place_cannot_overwrite_is_refused(operators) -> None:
    x, target = values((3, 5)), classes((3, 5))
    with pytest.raises(
        RuntimeError, match=r"^input requires grad, and cross_entropy_gradient_ overwrites it without a"
    ):
        in_place(operators, x.clone().requires_grad_(), target)
    with pytest.raises(RuntimeError, match=r"^input requires grad"):
        kernel_twins.cross_entropy_gradient_(x.clone().requires_grad_(), target)
    with torch.no_grad():
        in_place(operators, x.clone().requires_grad_(), target)
    for reduction in ("none", "median"):
        with pytest.raises(ValueError, match=r"^reduction is .*, must be mean or sum"):
            kernel_twins.cross_entropy_gradient_(x, target, reduction=reduction)
    with pytest.raises(ValueError, match=r"^reduction is 0, must be 1 for mean or 2 for sum"):
        operators.in_place(*given(x, target, "none"))
    for wrong in (x.t().contiguous().t(), x[:1].expand(3, 5), values((3, 5, 2)), values(64).as_strided((6, 5), (3, 1))):
        meta = torch.empty_strided(wrong.shape, wrong.stride(), device="meta")
        for each in (wrong, meta):  # what is traced here must run there
            with pytest.raises(ValueError, match=r"^input has strides .*, must have rows of neighbouring classes"):
                operators.in_place(each, classes(wrong.shape).to(each.device))
        with FakeTensorMode() as mode, pytest.raises(ValueError, match=r"^input has strides .*, must have rows of"):
            operators.in_place(mode.from_tensor(wrong), mode.from_tensor(classes(wrong.shape)))
    for served in (
        x[:, 1:4],
        x[::2],
        x[:1].t()[:, :1].t(),
        x[0],
        x[:0],
        x[:, :1],
        values((3, 5, 1)),
        values((1, 5, 1)),
    ):
        assert operators.in_place(served.clone().to("meta"), classes(served.shape).to("meta")).shape == ()


def gradient_by_autograd(input, target, **options):  # noqa: A002
    leaf = input.detach().clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(leaf, target, **options)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@BY_SMOOTHING
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_pytorchs_gradient_in_place_is_its_own_bit_by_bit_wherever_it_is_called(smoothing, dtype, kind) -> None:
    """Where autograd records nothing, in inference mode, and where it cannot be traced, too."""
    for shape in ((7, 33), (33,), (2, 5, 3)):
        torch.compiler.reset()
        x = values(shape, dtype)
        target = classes(shape) if kind == "classes" else torch.softmax(values(shape, dtype, seed=2), int(x.dim() > 1))
        right, gradient = gradient_by_autograd(x, target, label_smoothing=smoothing)

        def call(input, target):  # noqa: A002
            return kernel_twins.cross_entropy_gradient_(input, target, label_smoothing=smoothing, backend="torch")

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for function in (call, compiled):
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with mode():
                    y = x.clone()
                    loss = function(y, target)
                assert torch.equal(loss, right) and torch.equal(y, gradient)
                assert not loss.requires_grad and not y.requires_grad


def test_what_pytorchs_gradient_in_place_refuses_is_named() -> None:
    x, target = values((3, 5)), classes((3, 5))
    for backend in ("auto", "torch"):
        with pytest.raises(TypeError, match=r"^input is torch.int32, must be a floating-point dtype: call i"):
            kernel_twins.cross_entropy_gradient_(x.int(), target, backend=backend)
        with pytest.raises(
            TypeError, match=r"^input is a list, must be a torch.Tensor: call torch.as_tensor\(input\)$"
        ):
            kernel_twins.cross_entropy_gradient_([[1.0]], target, backend=backend)  # type: ignore[arg-type]


def test_the_gradient_in_place_leaves_to_pytorch_what_only_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities and classes of uint8 on a GPU, which are refused where "cuda" is asked for."""
    cuda_library()
    monkeypatch.setattr(functional, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(functional, "_runs", lambda backend, device: True)

    def of_cuda(*_):
        raise AssertionError("the kernels were chosen")

    monkeypatch.setattr(functional, "require_gpu", of_cuda)
    x, target = values((3, 5)), classes((3, 5), ignored=False)
    for other in (torch.softmax(values((3, 5), seed=2), 1), target.to(torch.uint8)):
        y = x.clone()
        right, gradient = gradient_by_autograd(x, other)
        assert torch.equal(kernel_twins.cross_entropy_gradient_(y, other), right) and torch.equal(y, gradient)
    with pytest.raises(AssertionError, match="the kernels were chosen"):
        kernel_twins.cross_entropy_gradient_(x.clone(), target)


# ----------------------------------------------------------------------------------------------------------------------
# Targets that are no class, where "auto" leaves a call to PyTorch
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU pass for a GPU's, for which the extension was not built."""
    constant = torch.compiler.assume_constant_result
    monkeypatch.setattr(functional, "is_on_gpu", constant(lambda tensor: True))
    monkeypatch.setattr(functional, "_runs", constant(lambda backend, device: False))
    monkeypatch.setattr("kernel_twins.functional.backends.measured_gpu", lambda device: "GPU")


NO_CLASS = torch.tensor([0, 5, -1, 2**40, IGNORED, 4])
BAD = torch.tensor([False, True, True, True, False, False])


@BY_SMOOTHING
@BY_REDUCTION
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.usefixtures("left_to_pytorch")
def test_auto_makes_nan_of_a_target_that_is_no_class_on_a_gpu(reduction, smoothing, weighted) -> None:
    """PyTorch's kernel there ends the process; on the CPU that stands for it, it raises."""
    weight = torch.arange(1.0, 6.0) if weighted else None
    for shape, of_rows in (((6, 5), lambda t: t), ((1, 5, 6), lambda t: t[None]), ((2, 5, 3), lambda t: t.view(2, 3))):
        x, target, bad = values(shape, requires_grad=True), of_rows(NO_CLASS), of_rows(BAD)
        options = {"reduction": reduction, "label_smoothing": smoothing}
        loss = kernel_twins.cross_entropy(x, target, weight, **options)
        assert torch.equal(loss.isnan(), bad if reduction == "none" else torch.tensor(True))
        for create_graph in (False, True):
            (dx,) = torch.autograd.grad(loss, x, torch.ones_like(loss), retain_graph=True, create_graph=create_graph)
            assert dx.movedim(1, -1)[bad].isnan().all()
            if reduction == "none":
                assert not dx.movedim(1, -1)[~bad].isnan().any() and not dx.movedim(1, -1)[target == IGNORED].any()
        with pytest.raises(IndexError):
            kernel_twins.cross_entropy(x, target, weight, backend="torch", **options)


@BY_REDUCTION
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("left_to_pytorch")
def test_what_auto_leaves_to_pytorch_is_pytorchs_bit_by_bit(reduction, dtype) -> None:
    for shape in SHAPES:
        for weight in (None, values((shape[min(1, len(shape) - 1)],), dtype, seed=2).abs()):
            x, target = values(shape, dtype, requires_grad=True), classes(shape)
            options = {"reduction": reduction, "label_smoothing": 0.1, "weight": weight}
            found, right = (call(x, target, **options) for call in (kernel_twins.cross_entropy, torch_cross_entropy))
            assert torch.equal(found, right) and found.dtype == right.dtype
            gradients = [torch.autograd.grad(each, x, torch.ones_like(each))[0] for each in (found, right)]
            assert torch.equal(*gradients)
    x, probabilities = values((3, 5), dtype), torch.softmax(values((3, 5), dtype, seed=2), 1)
    assert torch.equal(ours(x, probabilities, reduction), pytorchs(x, probabilities, reduction))
    narrow = classes((3, 5), ignored=False).to(torch.uint8)
    assert torch.equal(ours(x, narrow, reduction), pytorchs(x, narrow, reduction))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.usefixtures("left_to_pytorch")
def test_the_gradient_in_place_is_nan_of_a_target_that_is_no_class(reduction) -> None:
    x = values((6, 5))
    loss = kernel_twins.cross_entropy_gradient_(x, NO_CLASS, reduction=reduction)
    assert loss.isnan() and x[BAD].isnan().all()
    with pytest.raises(IndexError):
        kernel_twins.cross_entropy_gradient_(values((6, 5)), NO_CLASS, reduction=reduction, backend="torch")


@BY_REDUCTION
@pytest.mark.usefixtures("left_to_pytorch")
def test_a_target_that_is_no_class_makes_nan_in_transforms_and_graphs(reduction) -> None:
    x = values((6, 5))

    def total(x: Any) -> Any:
        return ours(x, NO_CLASS, reduction).sum()

    for gradient in (
        torch.func.grad(total)(x),
        torch.func.vmap(torch.func.grad(total))(x[None])[0],
        torch.compile(torch.func.grad(total), fullgraph=True, backend="aot_eager")(x),
    ):
        assert gradient[BAD].isnan().all()


def test_off_the_gpu_a_target_that_is_no_class_is_pytorchs_index_error() -> None:
    for call in (kernel_twins.cross_entropy, kernel_twins.cross_entropy_gradient_):
        with pytest.raises(IndexError, match="out of bounds"):
            call(values((6, 5)), NO_CLASS)


@pytest.mark.parametrize("smoothing", [-0.1, 1.5, math.nan])
@pytest.mark.parametrize("backend", ["auto", "torch", "cuda", "triton"])
def test_a_smoothing_that_is_no_share_is_refused_by_all(backend, smoothing) -> None:
    for call in (kernel_twins.cross_entropy, kernel_twins.cross_entropy_gradient_):
        with pytest.raises(
            ValueError, match=rf"^label_smoothing is {smoothing}, must be from 0 to 1: the share of a t"
        ):
            call(values((3, 5)), classes((3, 5)), label_smoothing=smoothing, backend=backend)


# ----------------------------------------------------------------------------------------------------------------------
# Tracing
# ----------------------------------------------------------------------------------------------------------------------


@BY_REDUCTION
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(operators, reduction, dynamic) -> None:
    torch.compiler.reset()
    calls = [
        lambda x, target: operators.forward(*given(x, target, reduction))[0].sin(),
        lambda x, target: ours(x, target, reduction).sin(),
    ]
    if operators.name == "triton":
        calls.append(lambda x, target: ours(x, target, reduction, backend="triton").sin())
    for call in calls:
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for m in (3, 7):
            x, target = values((m, 5), requires_grad=True), classes((m, 5))
            out, right = compiled(x, target), pytorchs(x, target, reduction).sin()
            torch.testing.assert_close(out, right)
            torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x) for each in (out, right)))


def test_the_gradient_in_place_is_compiled(operators) -> None:
    torch.compiler.reset()

    def call(x, target):
        return operators.in_place(x, target), x + 0

    x, target = values((3, 5)), classes((3, 5))
    y = x.clone()
    loss, gradient = call(y, target)
    again, compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(x, target)
    torch.testing.assert_close((again, compiled, x), (loss, gradient, y))


@pytest.mark.parametrize("backend", ["named", "torch", "auto"])
@pytest.mark.parametrize("shape", [(3, 5), (5,), (2, 5, 3)], ids=str)
def test_classes_in_int32_are_read_as_in_int64(operators, monkeypatch, backend, shape) -> None:
    """By every function: forward, backward, in place, the module, and in a graph."""
    if operators.name == "cuda":
        cuda_takes_the_cpu(monkeypatch)
    backend = operators.name if backend == "named" else backend
    x, target = values(shape, requires_grad=True), classes(shape)
    right = pytorchs(x, target, "mean")
    (dx,) = torch.autograd.grad(right, x)
    module = kernel_twins.nn.CrossEntropyLoss(ignore_index=IGNORED, backend=backend)
    for call in (lambda x, target: ours(x, target, backend=backend), module):
        loss = call(x, target.int())
        torch.testing.assert_close(loss, right)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], dx)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, target: ours(x, target, backend=backend), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, target.int()), right)
    if len(shape) == 2:
        gradient = x.detach().clone()
        loss = kernel_twins.cross_entropy_gradient_(gradient, target.int(), ignore_index=IGNORED, backend=backend)
        torch.testing.assert_close((loss, gradient), (right.detach(), dx))


@BY_REDUCTION
@pytest.mark.parametrize("shape", [(3, 5), (5,), (2, 5, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_classes(operators, monkeypatch, reduction, shape, dtype) -> None:
    """Also of the module, in a graph, in a batch, and where the ignored class, or every row, has the weight 0."""
    if operators.name == "cuda":
        cuda_takes_the_cpu(monkeypatch)
    torch.compiler.reset()

    def call(x: Any, target: Any, weight: Any, ignore_index: int = IGNORED) -> Any:
        return kernel_twins.cross_entropy(
            x, target, weight, reduction=reduction, ignore_index=ignore_index, backend=operators.name
        )

    x, target = values(shape, dtype, requires_grad=True), classes(shape)
    weight = values((5,), seed=3).abs()
    module = kernel_twins.nn.CrossEntropyLoss(weight, reduction=reduction, backend=operators.name)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    right = torch.nn.functional.cross_entropy(x.float(), target, weight, reduction=reduction)
    (dx,) = torch.autograd.grad(right.sum(), x)
    for loss in (call(x, target, weight), compiled(x, target, weight), module(x, target)):
        assert loss.dtype == dtype
        torch.testing.assert_close(loss.float(), right, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), x)[0], dx, rtol=2e-2, atol=1e-2)
    batch = torch.stack([x.detach(), 2 * x.detach()])
    found = torch.func.vmap(call, (0, None, None))(batch, target, weight)
    torch.testing.assert_close(found, torch.stack([call(each, target, weight) for each in batch]))
    known = target.clamp(min=0)
    for ignored, of in ((int(known.view(-1)[0]), weight), (IGNORED, torch.zeros(5))):
        right = torch.nn.functional.cross_entropy(x.float(), known, of, reduction=reduction, ignore_index=ignored)
        found = call(x, known, of, ignored).float()
        torch.testing.assert_close(found, right, rtol=1e-2, atol=1e-2, equal_nan=True)


def test_weights_that_the_kernels_do_not_take(operators, monkeypatch) -> None:
    if operators.name == "cuda":
        cuda_takes_the_cpu(monkeypatch)
    given = values((3, 5)), classes((3, 5))
    for weight, smoothing, error, said in (
        (torch.ones(5), 0.1, ValueError, r"^label_smoothing is 0.1, must be 0.0 with a weight for backend='\w+': pass"),
        ([1.0] * 5, 0.0, TypeError, r"^weight is a list, must be a torch.Tensor or None: call torch.as_tensor"),
        (
            torch.ones(4),
            0.0,
            ValueError,
            r"^weight has shape \(4,\), must have \(5,\): one factor for each class of in",
        ),
        (torch.ones(5, device="meta"), 0.0, ValueError, r"^weight is on meta, must be on cpu like input"),
    ):
        with pytest.raises(error, match=said):
            kernel_twins.cross_entropy(
                *given,
                weight,  # type: ignore[arg-type]
                label_smoothing=smoothing,
                backend=operators.name,
            )


def test_autocast_of_the_cpu_changes_no_dtype(operators) -> None:
    x, target = values((3, 5), torch.bfloat16), classes((3, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert operators.forward(x, target)[0].dtype == torch.bfloat16


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


def test_what_is_refused_is_named(operators) -> None:
    x, target = values((3, 5)), classes((3, 5))
    with pytest.raises(TypeError, match=r"^input is torch.int32, must be torch.float32 or .* call input.to"):
        operators.forward(x.int(), target)
    with pytest.raises(TypeError, match=r"^target is torch.int32, must be torch.int64: call target.to"):
        operators.forward(x, target.int())
    with pytest.raises(
        ValueError, match=r"^target has shape \(5,\), must have \(3,\): one class for each row of input"
    ):
        operators.forward(x, classes((5, 3)))
    with pytest.raises(
        ValueError, match=r"^target is on meta, must be on cpu like input: call target.to\(input.device\)$"
    ):
        operators.forward(x, target.to("meta"))
    with pytest.raises(ValueError, match=r"^input has 0 dimensions, must have 1 or more"):
        operators.forward(x[0, 0], target[0])
    with pytest.raises(ValueError, match=r"^label_smoothing is 1.5\d*, must be from 0 to 1$"):
        operators.forward(x, target, IGNORED, 1, 1.5)
    with pytest.raises(ValueError, match=r"^reduction is 3, must be 0 for none, 1 for mean or 2 for sum$"):
        operators.forward(x, target, IGNORED, 3)
    loss, lse, scale = operators.forward(x, target)
    with pytest.raises(ValueError, match=r"^dout has shape \(3,\), must have \(\) like the loss$"):
        operators.backward(lse, x, target, lse, scale, IGNORED, 1, 0.0)
    with pytest.raises(ValueError, match=r"^lse has shape \(2,\), must have that of target, \(3,\)$"):
        operators.backward(loss, x, target, lse[:2], scale, IGNORED, 1, 0.0)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_what_only_pytorch_does_is_refused_by_name(backend) -> None:
    if backend == "cuda":
        cuda_library()
    else:
        pytest.importorskip("triton")
    x, target = values((3, 5)), classes((3, 5))
    with pytest.raises(TypeError, match=r"^target is torch.float32, must be torch.int64, classes and not their probab"):
        kernel_twins.cross_entropy(x, torch.softmax(x, 1), backend=backend)
    with pytest.raises(ValueError, match=r"^reduction is 'median', must be one of none, mean, sum$"):
        kernel_twins.cross_entropy(x, target, reduction="median", backend=backend)
    for call in (kernel_twins.cross_entropy, kernel_twins.cross_entropy_gradient_):
        with pytest.raises(
            TypeError, match=r"^target is a list, must be a torch.Tensor of torch.int64: call torch.as_t"
        ):
            call(x, [0, 1, 2], backend=backend)  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match=r"^ignore_index is 1.5, must be an integer: pass the class that is to be ig"
        ):
            call(x, target, ignore_index=1.5, backend=backend)  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match=r"^input is a list, must be a torch.Tensor: call torch.as_tensor\(input\)$"
        ):
            call([[1.0] * 5] * 3, target, backend=backend)  # type: ignore[arg-type]
    assert torch.equal(
        kernel_twins.cross_entropy(x, target, torch.arange(5.0)),
        torch.nn.functional.cross_entropy(x, target, torch.arange(5.0)),
    )


def test_backends_that_are_not_there_are_named() -> None:
    x, target = values((3, 5)), classes((3, 5))
    for call in (kernel_twins.cross_entropy, kernel_twins.cross_entropy_gradient_):
        with pytest.raises(ValueError, match=r"^backend is 'numpy', must be one of auto, cuda, triton, torch$"):
            call(x, target, backend="numpy")
        with pytest.raises(
            (ValueError, UnavailableError), match=r"input is on cpu, must be on a CUDA device|CUDA side"
        ):
            call(x, target, backend="cuda")


def test_the_steps_behind_the_functions_are_the_last_ones() -> None:
    for op in ("cross_entropy", "cross_entropy_backward"):
        for backend, names in OPS[op].behind.items():
            assert OPS[op].steps_of(backend)[-1].name == names[0]


def test_the_module_is_the_function() -> None:
    x, target = values((3, 5)), classes((3, 5))
    module = kernel_twins.nn.CrossEntropyLoss(ignore_index=2, reduction="sum", label_smoothing=0.1)
    assert torch.equal(module(x, target.clamp(min=0)), pytorchs(x, target.clamp(min=0), "sum", 0.1, 2))
    shown = repr(module)
    assert shown == "CrossEntropyLoss(ignore_index=2, reduction='sum', label_smoothing=0.1, backend='auto')"
    with pytest.raises(ValueError, match="backend is 'numpy'"):
        kernel_twins.nn.CrossEntropyLoss(backend="numpy")


def test_the_module_takes_class_weights_first_as_pytorchs() -> None:
    x, target, weight = values((3, 5)), classes((3, 5)), torch.arange(1.0, 6.0)
    module, right = kernel_twins.nn.CrossEntropyLoss(weight), torch.nn.CrossEntropyLoss(weight)
    assert torch.equal(module(x, target), right(x, target))
    assert repr(module).startswith("CrossEntropyLoss(weight=(5,), ignore_index=-100, ")
    assert torch.equal(module.state_dict()["weight"], right.state_dict()["weight"])
    assert not kernel_twins.nn.CrossEntropyLoss().state_dict()
    with pytest.raises(TypeError, match=r"^weight is 2, must be None or a torch.Tensor .* name the arguments that"):
        kernel_twins.nn.CrossEntropyLoss(2)  # type: ignore[arg-type]
    cuda_library()
    with pytest.raises(ValueError, match=r"^input is on cpu, must be on a CUDA device for backend='cuda'"):
        kernel_twins.nn.CrossEntropyLoss(weight, backend="cuda")(x, target)


@pytest.mark.parametrize("op", ["cross_entropy", "cross_entropy_backward"])
def test_steps_with_a_block_for_each_row_refuse_more_rows_than_a_grid_has_blocks(op) -> None:
    most = Case.of(2**31 - 1, 2, dtype="bf16")
    more = Case.of(2**31, 2, dtype="bf16")
    for step in OPS[op].steps:
        assert OPS[op].serves(step, most)
        refused = OPS[op].refusal(step, more) == "there are 2147483648 rows, a grid has 2147483647 blocks"
        assert refused == (step.name in ("v01_two_passes", "v02_online", "v01_scalar"))

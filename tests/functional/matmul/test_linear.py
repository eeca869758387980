"""The linear layer without a GPU: values, gradients, tracing, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins.ops.activations import ACTIVATIONS  # noqa: E402
from tests.sides import cuda_library  # noqa: E402

BY_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
X_SHAPES = [(3, 5), (5,), (2, 3, 5), (0, 5)]
WANTED = [wanted for wanted in itertools.product((False, True), repeat=3) if any(wanted)]
BY_WANTED = pytest.mark.parametrize(
    "wanted", WANTED, ids=lambda wanted: "+".join(itertools.compress(("x", "weight", "bias"), wanted))
)


@pytest.fixture
def operator():
    """The CUDA backend's operator, which computes on the CPU by PyTorch's own."""
    return cuda_library("linear").linear.default


def operands(x_shape=(3, 5), dtype=torch.float64, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = (x_shape, (4, 5), (4,))
    made = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return tuple(tensor.requires_grad_(requires_grad) for tensor in made)


def expected(x, weight, bias, activation):
    return ACTIVATIONS[activation](torch.nn.functional.linear(x, weight, bias))


@BY_ACTIVATION
@pytest.mark.parametrize("x_shape", X_SHAPES, ids=str)
def test_values_are_pytorchs(operator, activation, x_shape) -> None:
    x, weight, bias = operands(x_shape)
    for given in (bias, None):
        right = expected(x, weight, given, activation)
        torch.testing.assert_close(operator(x, weight, given, activation), right)
        torch.testing.assert_close(kernel_twins.linear(x, weight, given, activation), right)
    meta = operator(x.to("meta"), weight.to("meta"), None, activation)
    assert meta.shape == right.shape and meta.is_contiguous()


@BY_ACTIVATION
@pytest.mark.parametrize("x_shape", X_SHAPES[:3], ids=str)
def test_gradients_agree_with_finite_differences(operator, activation, x_shape) -> None:
    x, weight, bias = operands(x_shape, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: operator(*given, activation), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *given: operator(*given, None, activation), (x, weight))
    assert torch.autograd.gradcheck(lambda of: operator(x.detach(), weight.detach(), of, activation), (bias,))


@BY_ACTIVATION
def test_traces_and_registrations_are_what_pytorch_expects(operator, activation) -> None:
    for given in (operands((2, 3, 5), torch.float32, True), (*operands(dtype=torch.bfloat16)[:2], None)):
        torch.library.opcheck(operator, (*given, activation))


@BY_ACTIVATION
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(operator, activation, dynamic) -> None:
    torch.compiler.reset()

    def function(*given):
        return operator(*given, activation)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 6):
        given = operands((rows, 5), requires_grad=True)
        x, weight, bias = given
        right = expected(x, weight, bias, activation)
        out = compiled(*given)
        torch.testing.assert_close(out, right)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), given), torch.autograd.grad(right.sum(), given))


@BY_ACTIVATION
def test_second_derivatives(operator, activation) -> None:
    given = operands(requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda *given: operator(*given, activation), given)
    assert torch.autograd.gradgradcheck(lambda *given: operator(*given, None, activation), given[:2])


@BY_WANTED
@BY_ACTIVATION
def test_second_derivatives_where_others_are_frozen(operator, activation, wanted) -> None:
    """What a gradient is differentiated for is reached though it, and what it was multiplied by, are not saved."""
    given = operands()
    places = [i for i, wants in enumerate(wanted) if wants]

    def call(*values):
        return operator(*({**dict(enumerate(given)), **dict(zip(places, values, strict=True))}.values()), activation)

    assert torch.autograd.gradgradcheck(call, [given[i].requires_grad_() for i in places])


@BY_ACTIVATION
def test_second_derivatives_of_what_hooks_have_kept(operator, activation) -> None:
    def penalty(call):
        given = operands(requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda kept: kept):
            out = call(*given, activation)
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        return first, torch.autograd.grad(sum(each.square().sum() for each in first), given)

    torch.testing.assert_close(penalty(operator), penalty(expected))


@BY_ACTIVATION
def test_a_gradient_is_differentiated_in_a_batch(operator, activation) -> None:
    def batch(call):
        given = operands(requires_grad=True)
        (dx,) = torch.autograd.grad(call(*given, activation).square().sum(), given[:1], create_graph=True)
        units = torch.eye(dx.numel(), dtype=dx.dtype).view(-1, *dx.shape)
        return torch.autograd.grad(dx, given, units, is_grads_batched=True)

    torch.testing.assert_close(batch(operator), batch(expected))


@BY_WANTED
@BY_ACTIVATION
@pytest.mark.parametrize("x_shape", X_SHAPES[:3], ids=str)
def test_no_more_is_kept_than_pytorch_keeps(operator, activation, x_shape, wanted) -> None:
    given = [each.requires_grad_(wants) for each, wants in zip(operands(x_shape), wanted, strict=True)]

    def kept(call):
        saved = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            out = call(*given, activation)
        assert out.requires_grad
        return sum(saved.values())

    assert kept(operator) <= kept(expected)


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        pytest.param({"weight": lambda w: w.mT}, ValueError, r"^weight has shape \(5, 4\), must have 5", id="w"),
        pytest.param({"weight": lambda w: w[0]}, ValueError, r"^weight has 1 dimensions, must have 2", id="rank"),
        pytest.param({"bias": lambda b: b[:3]}, ValueError, r"^bias has shape \(3,\), must have \(4,\)", id="bias"),
        pytest.param(
            {"bias": lambda b: b.half()},
            TypeError,
            r"^bias is torch.float16, must .*: call bias.to\(x.dtype\)$",
            id="dtype",
        ),
        pytest.param({"x": lambda x: x.int()}, TypeError, r"^x is torch.int32, must be", id="integers"),
    ],
)
def test_what_is_refused_is_named(operator, spoil, error, said) -> None:
    given = dict(zip(("x", "weight", "bias"), operands(dtype=torch.float32), strict=True))
    given |= {name: change(given[name]) for name, change in spoil.items()}
    with pytest.raises(error, match=said):
        operator(given["x"], given["weight"], given["bias"], "gelu")


def test_activations_and_backends_are_refused_by_name(operator) -> None:
    x, weight, bias = operands()
    with pytest.raises(ValueError, match=r"^activation is 'tanh', must be none, relu"):
        operator(x, weight, bias, "tanh")
    no_name: Any = ["gelu"]
    with pytest.raises(ValueError, match=r"^activation is \['gelu'\], must be None or one of none, relu"):
        kernel_twins.linear(x, weight, bias, no_name)
    with pytest.raises(ValueError, match=r"^activation is 'tanh', must be None or one of none, relu"):
        kernel_twins.linear(x, weight, bias, "tanh")
    with pytest.raises(ValueError, match=r"^backend is 'cublas', must be one of auto, cuda, triton, torch"):
        kernel_twins.linear(x, weight, bias, backend="cublas")
    with pytest.raises(ValueError, match=r"^x is on cpu, must be on a CUDA device"):
        kernel_twins.linear(x, weight, bias, backend="cuda")


@BY_ACTIVATION
def test_no_features_at_all(operator, activation) -> None:
    x, weight = torch.ones(3, 5, requires_grad=True), torch.ones(0, 5, requires_grad=True)
    out = operator(x, weight, None, activation)
    assert out.shape == (3, 0)
    dx, dweight = torch.autograd.grad(out.sum(), (x, weight))
    assert dx.shape == (3, 5) and not dx.any() and dweight.shape == (0, 5)


def test_forward_mode_is_refused_and_not_lost(operator) -> None:
    x, weight, bias = operands()
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(lambda given: operator(given, weight, bias, "gelu"), (x,), (torch.ones_like(x),))


@BY_ACTIVATION
def test_tangents_of_gradients_are_refused_and_not_lost(operator, activation) -> None:
    given = operands(requires_grad=True)
    out = operator(*given, activation)
    with torch.autograd.forward_ad.dual_level():
        dout = torch.autograd.forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
            torch.autograd.grad(out, given, dout)


@BY_WANTED
@BY_ACTIVATION
def test_operands_may_change_that_no_gradient_needs(operator, activation, wanted) -> None:
    """x for a frozen weight, weight for an x that wants none, and always the bias."""
    given = x, weight, bias = operands()
    for each, wants in zip(given, wanted, strict=True):
        each.requires_grad_(wants)
    asked = [each for each in given if each.requires_grad]
    right = torch.autograd.grad(expected(x, weight, bias, activation).sum(), asked)
    out = operator(*given, activation)
    needed = (wanted[1], wanted[0], False)
    with torch.no_grad():
        for each, needs in zip(given, needed, strict=True):
            if not needs:
                each.add_(1)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), asked), right)


def test_auto_under_autocast_takes_what_pytorch_would(operator) -> None:
    x, weight, bias = operands(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kernel_twins.linear(x, weight, bias).dtype == torch.bfloat16
        assert operator(x, weight, bias, "gelu").dtype == torch.float32


def test_the_ladder_knows_the_same_activations() -> None:
    out = torch.empty(2, 3, dtype=torch.bfloat16)
    x, weight, bias = (torch.empty(shape, dtype=out.dtype) for shape in ((2, 5), (3, 5), (3,)))
    op = kernel_twins.OPS["linear"]
    assert {case.get("act", "none") for case in op.test_cases} == set(ACTIVATIONS)
    for activation in ACTIVATIONS:
        op.check(x, weight, bias, out=out, activation=activation)
    with pytest.raises(ValueError, match=r"^activation is 'tanh', must be none, relu"):
        op.check(x, weight, bias, out=out, activation="tanh")

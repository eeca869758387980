"""The linear layer on a GPU: fused or not, it is PyTorch's in wider arithmetic, and so are its gradients."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins.ops.activations import ACTIVATIONS  # noqa: E402

pytestmark = pytest.mark.gpu

BY_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
SHAPES = [(1, 1, 1), (64, 4096, 4096), (129, 127, 65), (256, 512, 384), (2101, 2203, 135), (5, 7, 0), (0, 7, 5)]


def operands(m, n, k, dtype=torch.bfloat16, requires_grad=False):
    random = torch.Generator("cuda").manual_seed(0)

    def make(*shape, scale=1.0):
        values = torch.randn(shape, generator=random, device="cuda") * scale
        return values.to(dtype).requires_grad_(requires_grad)

    return make(m, k), make(n, k, scale=max(1, k) ** -0.5), make(n)


def expected(x, weight, bias, activation):
    bias = None if bias is None else bias.double()
    return ACTIVATIONS[activation](torch.nn.functional.linear(x.double(), weight.double(), bias))


def assert_near(out, right, x, weight, bias) -> None:
    """Within a rounding of the result, and what an fp32 sum of its terms may err by (see harness/check.py)."""
    assert out.shape == right.shape
    terms = expected(x.abs(), weight.abs(), None if bias is None else bias.abs(), "none")
    bound = torch.finfo(out.dtype).eps * right.abs() + 4 * torch.finfo(torch.float32).eps * 1.13 * terms
    assert bool(((out.double() - right).abs() <= bound).all())


@BY_ACTIVATION
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(activation, dtype, shape) -> None:
    x, weight, bias = operands(shape[0], shape[1], shape[2], dtype)
    for given in (bias, None):
        out = kernel_twins.linear(x, weight, given, activation, backend="cuda")
        assert_near(out, expected(x, weight, given, activation), x, weight, given)


@BY_ACTIVATION
def test_any_strides_and_leading_dimensions(activation) -> None:
    x, weight, bias = operands(6 * 40, 96, 128)
    x = x.view(6, 40, 128).transpose(0, 1)
    weight = weight.mT.contiguous().mT
    spread = torch.stack([bias, bias], 1)[:, 0]
    for rows, of in ((x, bias), (x[0, 0], bias), (x, spread)):
        out = kernel_twins.linear(rows, weight, of, activation, "cuda")
        assert_near(out, expected(rows, weight, of, activation), rows, weight, of)


@BY_ACTIVATION
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_gradients(activation, shape) -> None:
    m, n, k = shape
    x, weight, bias = given = operands(m, n, k, requires_grad=True)
    out = kernel_twins.linear(x, weight, bias, activation, backend="cuda")
    dout = torch.randn_like(out)
    right = torch.autograd.grad(expected(x, weight, bias, activation), given, dout.double())
    for gradient, each in zip(torch.autograd.grad(out, given, dout), right, strict=True):
        assert gradient.dtype == torch.bfloat16
        # relu's slope jumps where rounding moves a sum across 0.
        assert float((gradient.double() - each).norm()) <= 0.01 * float(each.norm()) + 1e-6


@BY_ACTIVATION
def test_what_is_saved_is_what_the_activation_was_applied_to(activation) -> None:
    x, weight, bias = operands(130, 200, 96)
    kernel_twins.linear(x, weight, bias, activation, "cuda")  # registers the operators
    if activation in ("none", "relu"):
        with pytest.raises(ValueError, match="saves nothing"):
            torch.ops.kernel_twins.linear_saving(x, weight, bias, activation)
        return
    out, pre = torch.ops.kernel_twins.linear_saving(x, weight, bias, activation)
    assert torch.equal(out, kernel_twins.linear(x, weight, bias, activation, "cuda"))
    assert_near(pre, expected(x, weight, bias, "none"), x, weight, bias)


@BY_ACTIVATION
def test_a_thousand_runs_agree_bit_by_bit(activation) -> None:
    x, weight, bias = operands(64, 4096, 4096)
    dout = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    first = kernel_twins.linear(x, weight, bias, activation, "cuda")
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        differing += (kernel_twins.linear(x, weight, bias, activation, "cuda") != first).any()
    if activation != "none":
        gradients = torch.ops.kernel_twins.linear_backward(dout, first, activation)
        for _ in range(1000):
            again = torch.ops.kernel_twins.linear_backward(dout, first, activation)
            differing += sum((one != other).any() for one, other in zip(again, gradients, strict=True))
    assert differing.item() == 0


@BY_ACTIVATION
def test_registrations_and_graphs(activation) -> None:
    given = operands(64, 96, 128, torch.float32, True)
    x, weight, bias = operands(64, 4096, 4096)
    right = kernel_twins.linear(x, weight, bias, activation, "cuda")  # which loads the operators
    torch.library.opcheck(torch.ops.kernel_twins.linear.default, (*given, activation))
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: kernel_twins.linear(x, weight, bias, activation, "cuda"), fullgraph=True, mode="reduce-overhead"
    )
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(x).clone(), right)


BACKENDS = pytest.mark.parametrize("backend", ["auto", "cuda", "triton", "torch"])


@BACKENDS
def test_under_autocast_products_are_pytorchs(backend) -> None:
    for dtypes in [(torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.float32), (torch.float16,) * 3]:
        given = [
            each.detach().to(dtype).requires_grad_() for each, dtype in zip(operands(129, 256, 64), dtypes, strict=True)
        ]
        x, weight, bias = given
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = (
                kernel_twins.linear(x, weight, bias, "gelu", backend),
                kernel_twins.matmul(x, weight.mT, backend=backend),
            )
            right = expected_under_autocast(x, weight, bias), torch.matmul(x, weight.mT)
        for ours, theirs in zip(found, right, strict=True):
            assert ours.dtype == theirs.dtype == torch.bfloat16
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
        got, wanted = (torch.autograd.grad(sum(each.float().sum() for each in outs), given) for outs in (found, right))
        assert [each.dtype for each in got] == list(dtypes)
        for each, other in zip(got, wanted, strict=True):
            assert (each - other).float().norm() <= 2e-2 * other.float().norm()


def expected_under_autocast(x, weight, bias):
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))


@BACKENDS
def test_matmul_stays_true_fp32_under_autocast_if_asked(backend) -> None:
    x, weight, _ = operands(129, 256, 64, torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = kernel_twins.matmul(x, weight.mT, backend=backend, autocast=False)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().mT, rtol=1e-5, atol=1e-5)


@BACKENDS
def test_float32_weights_are_read_in_the_dtype_of_x(backend) -> None:
    x, weight, bias = operands(129, 256, 64)
    wide = weight.float().requires_grad_(), bias.float().requires_grad_()
    out = kernel_twins.linear(x, *wide, "gelu", backend)
    narrow = weight.clone().requires_grad_(), bias.clone().requires_grad_()  # "auto" may choose otherwise without
    assert torch.equal(out, kernel_twins.linear(x, *narrow, "gelu", backend))
    assert [each.dtype for each in torch.autograd.grad(out.sum(), wide)] == [torch.float32] * 2


@pytest.mark.parametrize("backend", ["auto", "cuda", "triton"])
@pytest.mark.parametrize(
    "batched", [(True, False, False), (False, True, True), (True, True, True), (False, False, True)]
)
def test_vmap_is_no_loop(backend, batched) -> None:
    """One launch for all examples, and no warning."""
    given = [
        torch.stack([each * (i + 1) for i in range(5)]) if has else each
        for each, has in zip(operands(33, 64, 128), batched, strict=True)
    ]
    in_dims = tuple(0 if has else None for has in batched)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.func.vmap(lambda x, weight, bias: kernel_twins.linear(x, weight, bias, "gelu", backend), in_dims)(
            *given
        )
        products = torch.func.vmap(lambda x, weight, _: kernel_twins.matmul(x, weight.mT, backend=backend), in_dims)(
            *given
        )
    right = torch.func.vmap(lambda *each: torch.nn.functional.gelu(torch.nn.functional.linear(*each)), in_dims)(*given)
    torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(
        products, torch.func.vmap(lambda x, weight, _: x @ weight.mT, in_dims)(*given), rtol=2e-2, atol=2e-2
    )

"""The linear layer's Triton side: in Triton's interpreter without a GPU, compiled on one.

Interpreting is decided when a kernel is imported, for the whole process, so those tests run in processes of their own
(forks.py): of float16 alone, because interpreted, tl.dot of bf16 operands is silently wrong.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import weakref
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins.ops.activations import ACTIVATIONS  # noqa: E402
from tests import forks  # noqa: E402
from tests.sides import as_interpreted  # noqa: E402

BY_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)
REAL = [activation for activation in ACTIVATIONS if activation != "none"]  # whose dz is not dout
SHAPES = [(1, 1, 1), (64, 4096, 4096), (129, 127, 65), (256, 512, 384), (2101, 2203, 135), (5, 7, 0), (0, 7, 5)]
RAGGED = [(1, 1, 1), (65, 66, 67), (136, 264, 72), (5, 7, 0), (0, 7, 5), (7, 0, 5)]
FEW_LINES = [(1, 1, 1), (3, 130, 700), (7, 500, 264), (400, 13, 264), (100, 16, 2100), (16, 40, 1)]
EMPTY = [(5, 7, 0), (0, 7, 5), (7, 0, 5)]
BRANCHES = 2  # of the kernel: sums shared or not


def operands(shape, dtype=torch.float16, requires_grad=False, device="cpu", lead=()):
    m, n, k = shape
    random = torch.Generator(device).manual_seed(0)

    def make(*shape, scale=1.0):
        values = torch.randn(shape, generator=random, device=device) * scale
        return values.to(dtype).requires_grad_(requires_grad)

    return make(*lead, m, k), make(n, k, scale=max(1, k) ** -0.5), make(n)


def linear(activation, x, weight, bias):
    return kernel_twins.linear(x, weight, bias, activation, backend="triton")


def expected(activation, x, weight, bias):
    bias = None if bias is None else bias.double()
    return ACTIVATIONS[activation](torch.nn.functional.linear(x.double(), weight.double(), bias))


def assert_near(out, right, of_sum=0.0) -> None:
    """Within two roundings of the result, of 0.05 where it is less, and what an fp32 sum may err by."""
    assert out.shape == right.shape
    eps = 2 * torch.finfo(out.dtype).eps
    assert bool(((out.double() - right).abs() <= eps * right.abs().clamp(min=0.05) + of_sum).all())


def fp16_values(device="cpu"):
    """All of fp16's values from -16 to 16, in a column."""
    words = torch.arange(-(2**15), 2**15, device=device).to(torch.int16)
    values = words.view(torch.float16)
    return values[values.abs() <= 16].unsqueeze(1)


def assert_rounded_once(out, right) -> None:
    """Within 0.57 of the distance of two neighbours, of which rounding itself may take 0.5."""
    _, exponents = torch.frexp(right)  # right is a fraction from 0.5 to 1 times 2 to the power of that
    spacing = torch.ldexp(torch.ones_like(right), (exponents - 11).clamp(min=-24))
    assert float(((out.double() - right).abs() / spacing).max()) <= 0.57


def error_of_sum(x, weight, bias):
    """What an fp32 sum of the layer's terms may err by, after an activation (see kernel_twins/harness/check.py)."""
    terms = expected("none", x.abs(), weight.abs(), None if bias is None else bias.abs())
    return 4 * torch.finfo(torch.float32).eps * 1.13 * terms


def assert_gradients_near(gradients, right) -> None:
    for gradient, each in zip(gradients, right, strict=True):
        assert gradient.shape == each.shape
        # relu's slope jumps where rounding moves a sum across 0.
        assert float((gradient.double() - each).norm()) <= 0.01 * float(each.norm()) + 1e-6


# ----------------------------------------------------------------------------------------------------------------------
# In the interpreter
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what", [f"step {turn}" for turn in range(BRANCHES)] + ["few_rows", "backward", "operators", "second", "compiled"]
)
def test_interpreted(what: str) -> None:
    function, *arguments = what.split()
    forks.interpreted("tests.functional.matmul.test_linear_triton", f"interpret_{function}", *arguments)


def interpret_step(turn: str) -> None:
    """One branch of v01's kernel, on ragged and on empty sizes."""
    tuning = importlib.import_module("kernel_twins._triton.lib.tuning")
    step = importlib.import_module("kernel_twins._triton.matmul.linear.v01_fused")
    found: dict[bool, Any] = {}
    for config in step.CONFIGS:
        found.setdefault(config.kwargs["SPLIT_K"] > 1, config)
    assert len(found) == BRANCHES
    config = list(found.values())[int(turn)]
    setattr(tuning, "choose", partial(chosen, config))  # noqa: B010
    interpret_layers(step.linear_v01_fused, RAGGED)


def interpret_few_rows() -> None:
    """v02's kernel, whose programs share tiles of few rows and of few columns: 3 SMs, for one tile to be enough."""
    step = importlib.import_module("kernel_twins._triton.matmul.linear.v02_few_rows")
    setattr(step, "sm_count", lambda _: 3)  # noqa: B010
    interpret_layers(step.linear_v02_few_rows, [*FEW_LINES, *EMPTY])


def interpret_layers(launch: Any, shapes: list[tuple[int, int, int]]) -> None:
    """Every activation with and without bias and pre, and operands of every layout."""
    for shape, activation in itertools.product(shapes, ACTIVATIONS):
        x, weight, bias = operands(shape)
        for given, save in itertools.product((bias, None), (False, True)):
            out, pre = torch.full((2, *shape[:2]), torch.nan, dtype=x.dtype)
            launch(x, weight, given, out=(out, pre) if save else out, activation=activation)
            assert_near(out, expected(activation, x, weight, given))
            if save:
                assert_near(pre, expected("none", x, weight, given))
    x, weight, bias = operands((12, 48, 72))
    for left, right in (
        (x.t().contiguous().t(), weight),
        (x, weight.t().contiguous().t()),
        (x[:, ::3], weight[:, ::3]),
    ):
        out = torch.empty(12, 48, dtype=x.dtype)
        launch(left, right, bias, out=out, activation="gelu")
        assert_near(out, expected("gelu", left, right, bias))
    for given in (bias[:1], None):  # a single column may be told from a row by its strides alone
        out = torch.empty(1, 12, dtype=x.dtype).t()
        launch(x, weight[:1], given, out=out, activation="gelu")
        assert_near(out, expected("gelu", x, weight[:1], given))
    special = torch.tensor([[-torch.inf], [torch.inf], [torch.nan], [-6e4], [6e4]], dtype=x.dtype)
    for activation in ACTIVATIONS:
        out = torch.empty_like(special)
        launch(special, torch.ones_like(special[:1]), None, out=out, activation=activation)
        torch.testing.assert_close(out, ACTIVATIONS[activation](special.double()).half(), equal_nan=True)
        every = fp16_values()[::16]
        out = torch.empty_like(every)
        launch(every, torch.ones_like(every[:1]), None, out=out, activation=activation)
        assert_rounded_once(out, ACTIVATIONS[activation](every.double()))


def chosen(config: Any, kernel: Any, *_: Any) -> tuple[Any, dict[str, Any]]:
    """What ``tuning.choose`` returns where ``config`` has won."""
    return kernel.fn, config.all_kwargs()


def interpret_backward() -> None:
    """Slopes and sums against float64, on shapes of one strip and several, one chunk and several."""
    backward = importlib.import_module("kernel_twins._triton.matmul.linear.backward").linear_backward
    for shape, activation in itertools.product(((1, 1), (5, 7), (300, 33), (2000, 3), (70, 600), (0, 5)), REAL):
        dout, pre = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).half()
        dz, dbias = backward(dout, pre, activation)
        applied_to = pre.double().requires_grad_()
        (right,) = torch.autograd.grad(ACTIVATIONS[activation](applied_to), applied_to, dout.double())
        assert_near(dz, right)
        assert_near(dbias, dz.double().sum(0))
    dout, out = torch.tensor([[torch.inf, torch.nan, -2.0]]).half(), torch.tensor([[0.0, 0.0, 3.0]]).half()
    dz, dbias = backward(dout, out, "relu")
    assert dz.tolist() == [[0.0, 0.0, -2.0]] and dbias.tolist() == [0.0, 0.0, -2.0]


def interpret_operators() -> None:
    """The public function's values and gradients, for each of x's ranks."""
    for dtype, activation in itertools.product((torch.float16, torch.float32), ACTIVATIONS):
        for lead, pick in (((2,), ...), ((), ...), ((), 0)):
            x, weight, bias = operands((3, 8, 16), dtype, True, lead=lead)
            for of in (bias, None):
                given = [tensor for tensor in (x, weight, of) if tensor is not None]
                out = linear(activation, x[pick], weight, of)
                right = expected(activation, x[pick], weight, of)
                assert_near(out, right, error_of_sum(x[pick], weight, of))
                with torch.no_grad():
                    assert torch.equal(out, linear(activation, x[pick], weight, of))
                dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
                wanted = torch.autograd.grad(right, given, dout.double())
                assert_gradients_near(torch.autograd.grad(out, given, dout, retain_graph=True), wanted)
                alone = torch.ops.kernel_twins.linear_triton(x[pick], weight, of, activation)
                assert_gradients_near(torch.autograd.grad(alone, given, dout), wanted)
    empty = operands((0, 4, 5), requires_grad=True)
    gradients = torch.autograd.grad(linear("gelu", *empty).sum(), empty)
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in empty]
    assert all(not gradient.any() for gradient in gradients)


def interpret_second() -> None:
    """Second derivatives, of the public function and of the operator by itself."""
    for activation in ACTIVATIONS:
        given = operands((3, 8, 16), torch.float32, True)
        out, right = linear(activation, *given), expected(activation, *given)
        alone = torch.ops.kernel_twins.linear_triton(*given, activation)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
        wanted, *others = (
            sum(each.square().sum() for each in torch.autograd.grad(of, given, dout.to(of.dtype), create_graph=True))
            for of in (right, out, alone)
        )
        wants = (*given[:2], dout)
        for other in others:
            assert_gradients_near(
                torch.autograd.grad(other, wants), torch.autograd.grad(wanted, wants, retain_graph=True)
            )


def interpret_compiled() -> None:
    """What the operators promise PyTorch, and traces without a break."""
    operators = importlib.import_module("kernel_twins.functional.matmul.triton_linear")
    for dtype, activation in itertools.product((torch.float16, torch.float32), ACTIVATIONS):
        given = operands((3, 8, 16), dtype, True)
        if dtype == torch.float32:
            torch.library.opcheck(operators.operator, (*given, activation))
            if activation not in operators.SAVES_NOTHING:
                torch.library.opcheck(operators.saving_operator, (*given, activation))
        dout, saved = (torch.randn(3, 8, dtype=dtype) for _ in range(2))
        if activation in REAL:
            torch.library.opcheck(operators.backward_operator, (dout, saved, activation))
        torch.compiler.reset()
        compiled = torch.compile(
            lambda *given, activation=activation: linear(activation, *given),
            fullgraph=True,
            backend="aot_eager",
        )
        out, right = compiled(*given), linear(activation, *given)
        torch.testing.assert_close(out, right)
        gradients = (torch.autograd.grad(each.sum(), given) for each in (out, right))
        torch.testing.assert_close(*gradients)


# ----------------------------------------------------------------------------------------------------------------------
# Without a GPU and without the interpreter
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def triton_side(monkeypatch: pytest.MonkeyPatch) -> Any:
    as_interpreted(monkeypatch)
    return importlib.import_module("kernel_twins.functional.matmul.triton_linear")


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        pytest.param({"weight": lambda w: w.mT}, ValueError, r"^weight has shape \(16, 8\), must have 16", id="w"),
        pytest.param({"weight": lambda w: w[0]}, ValueError, r"^weight has 1 dimensions, must have 2", id="rank"),
        pytest.param({"weight": lambda w: w.tolist()}, TypeError, r"^weight is a list, must be", id="no tensor"),
        pytest.param({"weight": lambda w: w.to("meta")}, ValueError, r"^weight is on meta, must be on", id="device"),
        pytest.param({"bias": lambda b: b[:3]}, ValueError, r"^bias has shape \(3,\), must have \(8,\)", id="bias"),
        pytest.param(
            {"bias": lambda b: b.half()},
            TypeError,
            r"^bias is torch.float16, must .*: call bias.to\(x.dtype\)$",
            id="dtype",
        ),
        pytest.param({"x": lambda x: x.int()}, TypeError, r"^x is torch.int32, must be", id="integers"),
        pytest.param({"x": lambda x: x[0, 0]}, ValueError, r"^x has 0 dimensions, must have 1 or more", id="scalar"),
    ],
)
def test_what_is_refused_is_named(triton_side, spoil, error, said) -> None:
    given = dict(zip(("x", "weight", "bias"), operands((3, 8, 16), torch.float32), strict=True))
    given |= {name: change(given[name]) for name, change in spoil.items()}
    with pytest.raises(error, match=said):
        linear("gelu", given["x"], given["weight"], given["bias"])


def test_activations_are_refused_by_name(triton_side) -> None:
    given = operands((3, 8, 16))
    with pytest.raises(ValueError, match=r"^activation is 'tanh', must be none, relu, gelu, gelu_tanh or silu: apply"):
        torch.ops.kernel_twins.linear_triton(*given, "tanh")
    with pytest.raises(ValueError, match=r"^activation is 'relu', which saves nothing of its own"):
        torch.ops.kernel_twins.linear_saving_triton(*given, "relu")


def test_tensors_off_the_gpu_are_refused() -> None:
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"^x is on cpu, must be on a CUDA device for backend='triton': call x.cuda"):
        linear("none", *operands((3, 8, 16)))


@BY_ACTIVATION
def test_meta_tensors_give_the_results_shape(triton_side, activation) -> None:
    x, weight, bias = (tensor.to("meta") for tensor in operands((3, 8, 16), lead=(2,)))
    out = torch.ops.kernel_twins.linear_triton(x, weight, bias, activation)
    assert out.shape == (2, 3, 8) and out.is_contiguous() and out.dtype == x.dtype


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@BY_ACTIVATION
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(activation, dtype, shape) -> None:
    x, weight, bias = operands(shape, dtype, device="cuda")
    for given in (bias, None):
        out = linear(activation, x, weight, given)
        assert_near(out, expected(activation, x, weight, given), error_of_sum(x, weight, given))


@pytest.mark.gpu
@BY_ACTIVATION
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_activations_are_as_exact_as_their_rounding(activation, backend) -> None:
    x = fp16_values("cuda")
    out = kernel_twins.linear(x, torch.ones_like(x[:1]), None, activation, backend=backend)
    assert_rounded_once(out, ACTIVATIONS[activation](x.double()))


@pytest.mark.gpu
@BY_ACTIVATION
def test_any_strides_and_leading_dimensions(activation) -> None:
    x, weight, bias = operands((6 * 40, 96, 128), torch.bfloat16, device="cuda")
    x = x.view(6, 40, 128).transpose(0, 1)
    weight = weight.mT.contiguous().mT
    for rows in (x, x[0, 0], x[..., ::2]):
        columns = weight[:, :: 128 // rows.shape[-1]]
        out = linear(activation, rows, columns, bias)
        assert_near(out, expected(activation, rows, columns, bias))
    spread = torch.stack([bias, bias], 1)[:, 0]
    assert_near(linear(activation, x, weight, spread), expected(activation, x, weight, bias))


@pytest.mark.gpu
@BY_ACTIVATION
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_gradients(activation, shape) -> None:
    given = operands(shape, torch.bfloat16, True, "cuda")
    out = linear(activation, *given)
    dout = torch.randn_like(out)
    right = torch.autograd.grad(expected(activation, *given), given, dout.double())
    gradients = torch.autograd.grad(out, given, dout)
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)
    assert_gradients_near(gradients, right)


@pytest.mark.gpu
@BY_ACTIVATION
@pytest.mark.parametrize("shape", [(130, 200, 96), (64, 4096, 4096), (65, 67, 96)], ids=str)
def test_what_is_saved_is_what_the_activation_was_applied_to(activation, shape) -> None:
    x, weight, bias = operands(shape, torch.bfloat16, device="cuda")
    linear(activation, x, weight, bias)  # registers the operators
    if activation in ("none", "relu"):
        with pytest.raises(ValueError, match="saves nothing"):
            torch.ops.kernel_twins.linear_saving_triton(x, weight, bias, activation)
        return
    out, pre = torch.ops.kernel_twins.linear_saving_triton(x, weight, bias, activation)
    assert torch.equal(out, linear(activation, x, weight, bias))
    assert_near(pre, expected("none", x, weight, bias))


@pytest.mark.parametrize(
    ("saved", "error", "said"),
    [
        (
            torch.ones(2, 4),
            TypeError,
            r"^saved is torch.float32, must be torch.bfloat16 like dout: call saved.to\(dout.dtype\)$",
        ),
        (torch.ones(4, 2).bfloat16(), ValueError, r"^saved has shape \(4, 2\), must have that of dout, \(2, 4\)$"),
        (
            torch.ones(2, 4).bfloat16().to("meta"),
            ValueError,
            r"^saved is on meta, must be on cpu like dout: call saved.to\(dout.device\)$",
        ),
    ],
)
def test_backward_refuses_what_is_not_like_dout(saved, error, said) -> None:
    pytest.importorskip("triton")
    compute = importlib.import_module("kernel_twins.functional.matmul.triton_linear")._compute_backward
    with pytest.raises(error, match=said):
        compute(torch.ones(2, 4).bfloat16(), saved, "gelu")


@pytest.mark.gpu
@pytest.mark.parametrize("activation", REAL)
@pytest.mark.parametrize("shape", [(1, 1), (300, 33), (2000, 3), (2101, 2203), (4096, 4096), (64, 14336)], ids=str)
def test_backward_is_pytorchs(activation, shape) -> None:
    backward = importlib.import_module("kernel_twins._triton.matmul.linear.backward").linear_backward
    generator = torch.Generator("cuda").manual_seed(0)
    bf16, fp16 = torch.bfloat16, torch.float16
    for dtype, offset in ((bf16, 0), (bf16, 0), (fp16, 0), (bf16, 1), (bf16, 0)):  # what was compiled is launched again
        storage = torch.randn(2, math.prod(shape) + offset, generator=generator, device="cuda").to(dtype)
        dout, pre = (each[offset:].view(shape) for each in storage.unbind())
        dz, dbias = backward(dout, pre, activation)
        applied_to = pre.double().requires_grad_()
        (right,) = torch.autograd.grad(ACTIVATIONS[activation](applied_to), applied_to, dout.double())
        assert_near(dz, right)
        assert_near(dbias, dz.double().sum(0))


@pytest.mark.gpu
@BY_ACTIVATION
def test_many_runs_agree_bit_by_bit(activation) -> None:
    x, weight, bias = operands((64, 4096, 4096), torch.bfloat16, device="cuda")
    dout = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    first = linear(activation, x, weight, bias)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(300):
        differing += (linear(activation, x, weight, bias) != first).any()
    if activation in REAL:
        backward = torch.ops.kernel_twins.linear_backward_triton
        gradients = backward(dout, first, activation)
        for _ in range(300):
            again = backward(dout, first, activation)
            differing += sum((one != other).any() for one, other in zip(again, gradients, strict=True))
    assert differing.item() == 0


@pytest.mark.gpu
@BY_ACTIVATION
def test_registrations(activation) -> None:
    operators = importlib.import_module("kernel_twins.functional.matmul.triton_linear")
    given = operands((64, 96, 128), torch.float32, True, "cuda")
    torch.library.opcheck(operators.operator, (*given, activation))
    half = operands((64, 96, 128), torch.bfloat16, device="cuda")
    torch.library.opcheck(operators.operator, (*half[:2], None, activation))
    if activation not in operators.SAVES_NOTHING:
        torch.library.opcheck(operators.saving_operator, (*given, activation))
    if activation not in REAL:
        return
    out = linear(activation, *half)
    torch.library.opcheck(operators.backward_operator, (torch.randn_like(out), out, activation))


@pytest.mark.gpu
@BY_ACTIVATION
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(activation, dynamic) -> None:
    def function(*given):
        return linear(activation, *given)

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    for rows in (64, 130):
        given = operands((rows, 96, 256), torch.bfloat16, True, "cuda")
        out, right = compiled(*given), function(*given)
        torch.testing.assert_close(out, right)
        gradients = (torch.autograd.grad(each.sum(), given) for each in (out, right))
        torch.testing.assert_close(*gradients)


@pytest.mark.gpu
@BY_ACTIVATION
def test_graph_trees(activation) -> None:
    x, weight, bias = operands((72, 4096, 4096), torch.bfloat16, device="cuda")  # no other test has called with
    torch.compiler.reset()
    compiled = torch.compile(lambda x: linear(activation, x, weight, bias), fullgraph=True, mode="reduce-overhead")
    outs = []
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        outs.append(compiled(x).clone())
    right = linear(activation, x, weight, bias)
    assert all(torch.equal(out, right) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [2, 4])
def test_shared_sums_are_right_and_the_same_every_time(monkeypatch, parts) -> None:
    """No committed winner shares sums, but a search on another GPU may choose so."""
    tuning = importlib.import_module("kernel_twins._triton.lib.tuning")
    matmul = importlib.import_module("kernel_twins._triton.matmul.matmul_bf16.v17_prologue")
    fused = importlib.import_module("kernel_twins._triton.matmul.linear.v01_fused")
    config = next(config for config in matmul.CONFIGS if config.kwargs["SPLIT_K"] == parts)
    monkeypatch.setattr(tuning, "choose", partial(chosen, config))
    monkeypatch.setattr(matmul, "_plans", {})
    monkeypatch.setattr(fused, "_plans", {})
    x, weight, bias = operands((72, 520, 4104), torch.bfloat16, device="cuda")
    layers, products = zip(
        *(
            (linear("gelu", x, weight, bias), kernel_twins.matmul(x, weight.t(), backend="triton", out_dtype=out_dtype))
            for _ in range(50)
            for out_dtype in (torch.bfloat16, torch.float32)
        ),
        strict=True,
    )
    assert_near(layers[0], expected("gelu", x, weight, bias), error_of_sum(x, weight, bias))
    assert all(torch.equal(layer, layers[0]) for layer in layers)
    for turn in range(2):
        assert_near(products[turn], expected("none", x, weight, None), error_of_sum(x, weight, None))
        assert all(torch.equal(product, products[turn]) for product in products[turn::2])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_calls_keep_no_tensor_alive(backend) -> None:
    x, weight, bias = operands((56, 264, 136), torch.bfloat16, requires_grad=True, device="cuda")
    out = kernel_twins.linear(x, weight, bias, "gelu", backend=backend)
    out.sum().backward()
    product = kernel_twins.matmul(x.detach(), weight.detach().t().contiguous(), backend=backend)
    kept = [weakref.ref(tensor) for tensor in (x, weight, bias, out, product)]
    memory = torch.cuda.memory_allocated()
    del x, weight, bias, out, product
    gc.collect()
    assert [tensor() for tensor in kept] == [None] * len(kept)
    assert torch.cuda.memory_allocated() < memory


@pytest.mark.gpu
@BY_ACTIVATION
@pytest.mark.parametrize("shape", [(64, 4096, 4096), (65, 67, 96)], ids=str)
def test_captured_and_replayed_with_gradients(activation, shape) -> None:
    given = operands(shape, torch.bfloat16, True, "cuda")
    dout = torch.randn(shape[:2], device="cuda", dtype=torch.bfloat16)

    def step():
        out = linear(activation, *given)
        return out.detach(), *torch.autograd.grad(out, given, dout)

    right = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(3):
        for result in results:
            result.zero_()
        graph.replay()
        assert all(torch.equal(result, each) for result, each in zip(results, right, strict=True))


@pytest.mark.parametrize("function", ["matmul", "linear"])
def test_forward_mode_is_refused_and_not_lost(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """On the CPU, as if interpreted: the refusal comes before anything is launched."""
    as_interpreted(monkeypatch)
    from kernel_twins.functional.matmul import triton_linear, triton_matmul

    x, weight, bias = operands((3, 4, 5))
    calls = {
        "matmul": lambda given: triton_matmul.product(given, weight.mT),
        "linear": lambda given: triton_linear.linear(given, weight, bias, "gelu"),
    }
    with pytest.raises(NotImplementedError, match=f"Triton {function} has no forward-mode derivative: pass backend"):
        torch.func.jvp(calls[function], (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("lead", [(), (2,)], ids=["matrix", "batch"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
def test_gradients_are_batched_and_their_tangents_refused(
    monkeypatch: pytest.MonkeyPatch, activation: str | None, lead: tuple[int, ...]
) -> None:
    """Of matmul, or of linear with an activation; by PyTorch in the place of kernels, which know no batches."""
    as_interpreted(monkeypatch)
    from kernel_twins.functional.matmul import triton_matmul

    def replaced(*_: Any) -> Any:
        return lambda a, b, *, out: out.copy_(a @ b)

    monkeypatch.setattr(triton_matmul, "triton_launcher", replaced)
    x, weight, bias = operands((3, 4, 5), torch.float32, requires_grad=True, lead=lead)
    given = (x, weight) if activation is None else (x, weight, bias)
    if activation is None:
        out, right = kernel_twins.matmul(x, weight.mT, backend="triton"), x @ weight.mT
    else:
        out = linear(activation, x, weight, bias)
        right = ACTIVATIONS[activation](torch.nn.functional.linear(x, weight, bias))
    douts = torch.randn(6, *out.shape)
    gradients = (
        torch.autograd.grad(each, given, douts, is_grads_batched=True, retain_graph=True) for each in (out, right)
    )
    torch.testing.assert_close(*gradients)
    with torch.autograd.forward_ad.dual_level():
        dout = torch.autograd.forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
            torch.autograd.grad(out, given, dout)

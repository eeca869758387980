"""dropout_add without a GPU: layouts, gradients, tracing, batching, and what is refused.

The CUDA backend's operator computes on the CPU by PyTorch's operations. The Triton backend's is given PyTorch in the
place of its kernels, which other tests run.
"""

from __future__ import annotations

import importlib
import itertools
import math
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from kernel_twins import OPS  # noqa: E402
from kernel_twins.errors import UnavailableError  # noqa: E402
from kernel_twins.functional.dropout import dropout as functional_dropout  # noqa: E402
from kernel_twins.ops.activations import ACTIVATIONS  # noqa: E402
from kernel_twins.ops.dropout import shared  # noqa: E402
from tests.sides import as_interpreted, cuda_library  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
P = 0.3
SHAPES = [(), (1,), (5,), (3, 5), (2, 3, 5), (2, 1, 4, 3), (3, 1)]
EMPTY = [(0,), (0, 5), (3, 0), (2, 0, 5)]
BY_ACTIVATION = pytest.mark.parametrize("activation", ACTIVATIONS)


def values(shape, dtype=torch.float32, requires_grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return made.requires_grad_(requires_grad)


def operands(shape, dtype=torch.float32, requires_grad=False, residual=True, bias=True) -> Any:
    """x, residual and bias, as far as there are."""
    return (
        values(shape, dtype, requires_grad),
        values(shape, dtype, requires_grad, seed=1) if residual else None,
        values(shape[-1:], dtype, requires_grad, seed=2) if bias and shape else None,
    )


def present(*given):
    return [each for each in given if each is not None]


def mask_of(shape, state, p=P):
    seed, offset = (int(number) % 2**64 for number in state)
    kept = shared.kept((1, math.prod(shape)), slice(0, 1), torch.device("cpu"), p=p, seed=seed, offset=offset)
    return kept.view(shape)


def by_definition(mask, x, residual, bias, *, activation="none") -> Any:
    y = ACTIVATIONS[activation](x if bias is None else x + bias)
    y = torch.where(mask, y * shared.scale(P), torch.zeros((), dtype=x.dtype))
    return y if residual is None else y + residual


def replaced(op: str, device: int | None) -> Any:
    """A launcher by PyTorch, which insists on what a kernel is promised."""

    def check(inputs: Any, outputs: Any, options: dict[str, Any]) -> dict[str, Any]:
        state = (options["seed"], options["offset"])
        if options["offset"] is None:
            state = options["seed"]
            assert state.shape == (2,) and state.dtype == torch.int64 and state.is_contiguous()
            state = (int(state[0]) % 2**64, int(state[1]) % 2**64 // 4 * 4)
        given = options | {"seed": state[0], "offset": state[1]}
        OPS[op].check(*inputs, out=outputs, **given)
        return given

    def launch(*inputs: Any, out: Any, **options: Any) -> None:
        exemplar: Any = OPS[op].exemplar
        found = exemplar(*inputs, out=out, **check(inputs, out, options))
        if op == "dropout_add_backward":
            for each, values in zip(out if isinstance(out, tuple) else (out,), found, strict=True):
                each.copy_(values)

    return launch


def replaced_bias(dout: Any, x: Any, bias: Any, dbias: Any, **options: Any) -> None:
    """The sum over all rows alone, by the launcher above."""
    launch = replaced("dropout_add_backward", None)
    launch(dout, x, bias, out=(torch.empty_like(dout, memory_format=torch.contiguous_format), dbias), **options)


class Operators:
    """A backend's operators, called alike."""

    def __init__(self, backend: str, forward: Any, backward: Any, wide: Any) -> None:
        self.backend, self.forward, self.backward, self.wide = backend, forward, backward, wide

    def __call__(self, x, residual=None, bias=None, p=P, activation="none"):
        return self.forward(x, residual, bias, p, activation)

    def result(self, x, residual=None, bias=None, p=P, activation="none"):
        """What the public function returns, by what it calls."""
        if self.backend == "cuda":
            return torch.ops.kernel_twins.dropout_add_result.default(x, residual, bias, p, activation)
        return self(x, residual, bias, p, activation)[0]


@pytest.fixture(params=["cuda", "triton"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Operators:
    if request.param == "cuda":
        library = cuda_library("dropout_add_result")
        return Operators("cuda", library.dropout_add.default, library.dropout_add_backward.default, torch.float64)
    as_interpreted(monkeypatch)
    side = importlib.import_module("kernel_twins.functional.dropout.triton_dropout")
    monkeypatch.setattr(side, "triton_launcher", replaced)
    alone = importlib.import_module("kernel_twins._triton.dropout.dropout_add_backward.bias")
    monkeypatch.setattr(alone, "dropout_add_bias", replaced_bias)
    return Operators("triton", side.operator, side.backward_operator, torch.float32)


# ----------------------------------------------------------------------------------------------------------------------
# Values and layouts
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_off_the_gpu_it_is_pytorchs(backend) -> None:
    for activation, (residual, bias) in itertools.product(ACTIVATIONS, itertools.product((False, True), repeat=2)):
        x, added, shift = operands((3, 5), residual=residual, bias=bias)
        for p, training in ((P, True), (0.0, True), (1.0, True), (P, False)):
            torch.manual_seed(0)
            got = kernel_twins.dropout_add(x, added, p, training, bias=shift, activation=activation, backend=backend)
            torch.manual_seed(0)
            y = ACTIVATIONS[activation](x if shift is None else x + shift)
            y = torch.nn.functional.dropout(y, p, training)
            assert torch.equal(got, y if added is None else y + added)


def test_off_the_gpu_where_there_is_nothing_to_do_x_comes_back_as_pytorchs() -> None:
    x = values((3, 5)).t()
    for p, training in ((0.0, True), (P, False)):
        right = torch.nn.functional.dropout(x, p, training)
        assert kernel_twins.dropout_add(x, None, p, training).data_ptr() == right.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@BY_ACTIVATION
def test_values_gradients_and_layouts(operators, activation, shape) -> None:
    for residual, bias in itertools.product((False, True), repeat=2):
        given = operands(shape, requires_grad=True, residual=residual, bias=bias)
        out, state = operators(*given, activation=activation)
        assert state.shape == (2,) and state.dtype == torch.int64 and not state.requires_grad
        right = by_definition(mask_of(shape, state), *given, activation=activation)
        torch.testing.assert_close(out, right)
        assert out.is_contiguous()
        dout, wanted = values(shape, seed=4), present(*given)
        torch.testing.assert_close(*(torch.autograd.grad(each, wanted, dout) for each in (out, right)))

        meta = operators(*(None if each is None else each.detach().to("meta") for each in given))
        for each, real in zip(meta, (out, state), strict=True):
            assert each.is_meta and (each.shape, each.stride(), each.dtype) == (real.shape, real.stride(), real.dtype)


def test_every_call_draws_anew_and_a_seed_repeats_it(operators) -> None:
    x = torch.ones(64, 33)
    torch.manual_seed(3)
    first, second = (operators(x)[0] for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(operators(x)[0], first) and not torch.equal(first, second)
    assert abs(int((first == 0).sum()) - P * x.numel()) < 5 * math.sqrt(P * (1 - P) * x.numel())


class Offsets:
    """A stand-in for a GPU's generator: what is drawn from it, and what others draw whenever somebody looks."""

    def __init__(self, others: Any = ()) -> None:
        self.offset, self.others = 0, iter(others)
        self.taken: list[range] = []
        self.mutex = threading.Lock()

    def initial_seed(self) -> int:
        return 7

    def get_offset(self) -> int:
        if step := next(self.others, 0):
            self.taken.append(range(self.offset, self.offset + step))
            self.offset += step
        return self.offset

    def draw(self) -> None:
        with self.mutex:
            self.offset += 12


@pytest.fixture
def next_state(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``next_state(generator)``: the state of the next Triton call, as on a GPU with that generator."""
    pytest.importorskip("triton")
    side = importlib.import_module("kernel_twins.functional.dropout.triton_dropout")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "_standard_gamma", lambda _, generator: generator.draw())
    monkeypatch.setattr(side, "_draw_of_nothing", lambda _: (torch.empty(0), 12))
    monkeypatch.setattr(side, "_drawn", lambda *_: torch.tensor([-1, -1]))

    def state(generator: Any) -> Any:
        monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
        return side._next_state(torch.device("cuda:0"), P)

    return state


def test_a_triton_call_takes_what_the_generator_gives_next(next_state) -> None:
    generator = Offsets()
    assert [next_state(generator) for _ in range(3)] == [(7, 0), (7, 12), (7, 24)]


@pytest.mark.parametrize("at", range(6))
def test_what_others_draw_meanwhile_is_theirs_alone(next_state, at) -> None:
    generator = Offsets((*(0 for _ in range(at)), 4))
    states = [next_state(generator) for _ in range(3)]
    drawn = [number for each in generator.taken for number in each]
    ours = [number for _, offset in states for number in range(offset, offset + 12)]
    assert drawn and len({*drawn, *ours}) == len(drawn) + len(ours)


def test_where_others_never_rest_pytorch_draws_the_state(next_state) -> None:
    assert next_state(Offsets(itertools.repeat(4))).tolist() == [-1, -1]


def test_where_pytorch_skips_a_draw_of_nothing_it_draws_the_state(monkeypatch, next_state) -> None:
    side = importlib.import_module("kernel_twins.functional.dropout.triton_dropout")
    monkeypatch.setattr(side, "_draw_of_nothing", lambda _: (torch.empty(0), 0))
    assert next_state(Offsets()).tolist() == [-1, -1]


def test_threads_take_different_states(next_state) -> None:
    states: list[tuple[int, int]] = []
    next_state(Offsets())
    side = importlib.import_module("kernel_twins.functional.dropout.triton_dropout")

    def work() -> None:
        mine = [side._next_state(torch.device("cuda:0"), P) for _ in range(300)]
        states.extend(each for each in mine if isinstance(each, tuple))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        pool = [threading.Thread(target=work) for _ in range(8)]
        for each in pool:
            each.start()
        for each in pool:
            each.join()
    finally:
        sys.setswitchinterval(before)
    assert states and len(set(states)) == len(states)


def test_a_result_is_never_x_itself(operators) -> None:
    x = values((3, 5)).t()
    out, _ = operators(x, p=0.0)
    assert torch.equal(out, x) and out.is_contiguous() and out.data_ptr() != x.data_ptr()


def test_p_of_0_and_1_draw_nothing(operators) -> None:
    x, residual, bias = operands((3, 5), requires_grad=True)
    before = torch.get_rng_state()
    out, state = operators(x, residual, bias, 0.0)
    torch.testing.assert_close(out, x + bias + residual, rtol=0, atol=1e-6)
    assert not state.any()
    out, _ = operators(x.detach() * math.inf, residual, bias, 1.0)
    assert torch.equal(out, residual)
    out, _ = operators(x, residual, bias, 1.0)
    gradients = torch.autograd.grad(out.sum(), (x, residual, bias))
    assert not gradients[0].any() and bool((gradients[1] == 1).all()) and not gradients[2].any()
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_dropped_is_nothing_whatever_it_was(operators) -> None:
    x = torch.full((64,), math.nan, requires_grad=True)
    out, state = operators(x)
    kept = mask_of((64,), state)
    assert bool((out[~kept] == 0).all()) and bool(out[kept].isnan().all())
    (dx,) = torch.autograd.grad(out, x, torch.full((64,), math.inf))
    assert bool((dx[~kept] == 0).all()) and bool((dx[kept] == math.inf).all())


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_nothing_at_all(operators, shape) -> None:
    given = operands(shape, requires_grad=True)
    out, _ = operators(*given, activation="gelu")
    dx, residual, dbias = torch.autograd.grad(out.sum(), given)
    assert out.shape == dx.shape == residual.shape == shape and dbias.shape == shape[-1:] and not dbias.any()


def test_any_strides(operators) -> None:
    x, other = values((6, 4, 10)), values((6, 4, 10), seed=1)
    for of in (
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(2, 0, 1),
        lambda x: x[:, :, ::2],
        lambda x: x[:, :, :7],
        lambda x: x[:, 1:3],
        lambda x: x[:1].expand(5, 4, 10),
        lambda x: x[:1, :1].expand(6, 4, 10),
        lambda x: x[..., :1],
        lambda x: x[0, 0, :1].expand(6, 4, 10),
    ):
        given, residual = (of(each).detach().requires_grad_() for each in (x, other))
        bias = values((given.shape[-1], 2), seed=2)[:, 0].requires_grad_()  # not contiguous
        out, state = operators(given, residual, bias, activation="silu")
        right = by_definition(mask_of(given.shape, state), given, residual, bias, activation="silu")
        torch.testing.assert_close(out, right)
        for dout in (of(values((6, 4, 10), seed=4)), values((), seed=1).expand(given.shape)):
            wanted = (given, residual, bias)
            gradients = [torch.autograd.grad(each, wanted, dout, retain_graph=True) for each in (out, right)]
            torch.testing.assert_close(*gradients)


def test_signs_that_are_yet_to_be_changed(operators) -> None:
    x = torch.view_as_complex(values((3, 4, 2))).conj().imag
    assert x.is_neg()
    out, state = operators(x, x)
    torch.testing.assert_close(out, by_definition(mask_of((3, 4), state), x, x, None))


@BY_ACTIVATION
def test_past_the_operator_a_call_is_the_same(operators, monkeypatch, activation) -> None:
    if operators.backend == "cuda":
        pytest.skip("the CUDA side has no other way than its operator")
    side = importlib.import_module("kernel_twins.functional.dropout.triton_dropout")
    for state in ((2**63 + 5, 8), torch.tensor([-5, 8])):  # as the host knows them, or the GPU alone
        monkeypatch.setattr(side, "_next_state", lambda device, p, state=state: state)
        for residual, bias in itertools.product((False, True), repeat=2):
            x, added, shift = given = operands((3, 5), requires_grad=True, residual=residual, bias=bias)
            right = by_definition(mask_of((3, 5), state), *given, activation=activation)

            def call(x=x, added=added, shift=shift):
                return kernel_twins.dropout_add(x, added, P, bias=shift, activation=activation, backend="triton")

            out = call()
            assert "_DropoutAdd" in type(out.grad_fn).__name__
            torch.testing.assert_close(out, right)
            dout, wanted = values((3, 5), seed=4), present(*given)
            torch.testing.assert_close(*(torch.autograd.grad(each, wanted, dout) for each in (out, right)))
            with torch.no_grad():
                torch.testing.assert_close(call(), right)


# ----------------------------------------------------------------------------------------------------------------------
# Derivatives
# ----------------------------------------------------------------------------------------------------------------------


@BY_ACTIVATION
def test_first_and_second_derivatives(operators, activation) -> None:
    for residual, bias in itertools.product((False, True), repeat=2):
        given = operands((2, 5), operators.wide, requires_grad=True, residual=residual, bias=bias)
        wanted, dout = present(*given), values((2, 5), operators.wide, requires_grad=True, seed=4)
        out, state = operators(*given, activation=activation)
        right = by_definition(mask_of((2, 5), state), *given, activation=activation)
        seconds = []
        for result in (out, right):
            firsts = torch.autograd.grad(result, wanted, dout, create_graph=True)
            summed = sum(each.square().sum() for each in firsts)
            seconds.append(torch.autograd.grad(summed, (*wanted, dout), allow_unused=True, materialize_grads=True))
        torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-5)


def test_only_gradients_that_somebody_asks_for(operators) -> None:
    dout = values((3, 5), seed=4)
    for asked in itertools.product((False, True), repeat=3):
        given = operands((3, 5))
        for tensor, learns in zip(given, asked, strict=True):
            tensor.requires_grad_(learns)
        wanted = [tensor for tensor in given if tensor.requires_grad]
        out, state = operators(*given, activation="gelu")
        assert out.requires_grad == bool(wanted)
        if wanted:
            out.backward(dout)
            right = by_definition(mask_of((3, 5), state), *given, activation="gelu")
            assert all((tensor.grad is not None) == tensor.requires_grad for tensor in given)
            torch.testing.assert_close([t.grad for t in wanted], list(torch.autograd.grad(right, wanted, dout)))


def test_a_changed_input_is_noticed_where_it_is_needed(operators) -> None:
    for activation, needed in (("none", False), ("gelu", True)):
        leaf = values((3, 5), requires_grad=True)
        x = leaf * 1
        out, _ = operators(x, activation=activation)
        x.detach().zero_()
        if needed:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()


def test_other_derivatives_are_refused_and_not_lost(operators) -> None:
    x = values((3, 4))

    def call(x):
        if operators.backend == "cuda":
            return operators(x)[0]
        return kernel_twins.dropout_add(x, backend="triton")

    with pytest.raises(RuntimeError, match=r"functorch transforms|autograd.Function"):
        torch.func.grad(lambda x: operators(x)[0].sum())(x)
    with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative: pass backend='torch'$"):
        torch.func.jvp(call, (x,), (x,))


def test_tangents_of_gradients_are_refused_and_not_lost(operators) -> None:
    x = values((3, 4), requires_grad=True)
    y = operators.result(x, activation="gelu")
    with torch.autograd.forward_ad.dual_level():
        dout = torch.autograd.forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative: pass backend='torch'$"):
            torch.autograd.grad(y, x, dout)


def test_what_is_registered_is_what_pytorch_expects(operators) -> None:
    assert (
        torch.Tag.nondeterministic_seeded in operators.forward._opoverload.tags
        if (operators.backend == "triton")
        else torch.Tag.nondeterministic_seeded in operators.forward.tags
    )
    state = torch.tensor([5, 8])
    for dtype, activation in ((torch.float32, "none"), (torch.bfloat16, "gelu"), (torch.float16, "relu")):
        x, residual, bias = operands((2, 3, 5), dtype, requires_grad=True)
        for given in ((x, residual, bias), (x, None, None)):
            # Two calls of a random operator are not alike, which all tests but these expect.
            alike = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(operators.forward, (*given, P, activation), test_utils=alike)
            torch.library.opcheck(operators.forward, (*given, 0.0, activation))
            if operators.backend == "cuda":
                result = torch.ops.kernel_twins.dropout_add_result.default
                torch.library.opcheck(result, (*given, P, activation), test_utils=alike)
                torch.library.opcheck(result, (*given, 0.0, activation))
        dout, *others = (each.detach() for each in (residual, x, bias))
        slopes = (None, None) if activation == "none" else others
        for flags in itertools.product((False, True), repeat=2):
            torch.library.opcheck(operators.backward, (dout, *slopes, state, P, activation, *flags))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_bias_alone_may_want_a_gradient(operators, activation) -> None:
    """As a sum of what nobody asks for, and is not returned."""
    for x_grad in (False, True):
        x, residual, bias = operands((2, 3, 5))
        bias.requires_grad_()
        torch.manual_seed(2)
        out, state = operators(x.requires_grad_(x_grad), residual, bias, P, activation)
        dout = values((2, 3, 5), seed=4)
        for create_graph in (False, True):
            (dbias,) = torch.autograd.grad(out, bias, dout, create_graph=create_graph, retain_graph=True)
            wide = bias.detach().double().requires_grad_()
            right = torch.where(
                mask_of(x.shape, state), ACTIVATIONS[activation](x.detach().double() + wide) / (1 - P), 0.0
            )
            torch.testing.assert_close(dbias, torch.autograd.grad(right, wide, dout.double())[0].float())
        slopes = (None, None) if activation == "none" else (x.detach(), bias.detach())
        dx, alone = operators.backward(dout, *slopes, state, P, activation, False, True)
        assert dx.shape == (0,) and alone.shape == bias.shape
        torch.testing.assert_close(alone, dbias.detach())


# ----------------------------------------------------------------------------------------------------------------------
# Tracing, batching, autocast
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(operators, dynamic) -> None:
    """What is random is checked by what it leaves: gradients are those of the mask that was drawn."""
    torch.compiler.reset()
    calls: list[Any] = [lambda *given: operators(*given, activation="gelu")[0]]
    if operators.backend == "triton":
        calls.append(
            lambda x, residual, bias: kernel_twins.dropout_add(
                x, residual, P, bias=bias, activation="gelu", backend="triton"
            )
        )
    for call in calls:

        def function(x, residual, bias, call=call):
            return call(x, torch.zeros_like(x), bias) + residual

        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for m in (3, 7):
            x, residual, bias = given = operands((2, m, 5), requires_grad=True)
            out = compiled(*given)
            mask = (out - residual).abs() > 1e-5
            right = by_definition(mask, x, residual, bias, activation="gelu")
            torch.testing.assert_close(out, right)
            torch.testing.assert_close(*(torch.autograd.grad(each.sum(), given) for each in (out, right)))


def test_auto_is_compiled_without_a_break() -> None:
    torch.compiler.reset()
    module = kernel_twins.nn.DropoutAdd(0.0, "gelu")
    x, residual, bias = operands((3, 5))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, residual, bias), torch.nn.functional.gelu(x + bias) + residual)


def test_batched(operators) -> None:
    """Each example has a mask of its own, and all that is not random is as PyTorch has it."""
    x, residual, bias = operands((4, 3, 5), requires_grad=True)
    several = values((4, 5), seed=3)
    for given, in_dims in (
        ((x, residual, bias), (0, 0, None)),
        ((x.transpose(0, 1), residual, bias), (1, 0, None)),
        ((x[0], residual, bias), (None, 0, None)),
        ((x, residual[0], several), (0, None, 0)),
        ((x[0], residual[0], several), (None, None, 0)),
    ):

        def batched(p, function, given=given, in_dims=in_dims):
            call = torch.func.vmap(partial(function, p), in_dims=in_dims, randomness="different")
            return call(*given)

        out = batched(0.0, lambda p, x, residual, bias: operators.result(x, residual, bias, p))
        right = batched(0.0, lambda p, x, residual, bias: x + bias + residual)
        torch.testing.assert_close(out, right)
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x, retain_graph=True) for each in (out, right)))
        masks = batched(P, lambda p, x, residual, bias: operators.result(x, residual, bias, p) == residual)
        assert 0 < int(masks.sum()) < masks.numel()
        assert any(not torch.equal(each, masks[0]) for each in masks)


@pytest.mark.parametrize("randomness", ["error", "same"])
def test_masks_for_examples_are_asked_for_by_name(operators, randomness) -> None:
    x = values((4, 3, 5))
    with pytest.raises(
        RuntimeError, match=rf"^vmap's randomness is '{randomness}', must be 'different' for dropout_add"
    ):
        torch.func.vmap(operators.result, randomness=randomness)(x)
    out = torch.func.vmap(lambda x: operators.result(x, p=0.0), randomness=randomness)(x)
    assert torch.equal(out, x)


def test_gradients_are_batched(operators) -> None:
    given = operands((3, 5), requires_grad=True)
    douts = values((4, 3, 5), seed=6)
    out, state = operators(*given, activation="gelu")
    right = by_definition(mask_of((3, 5), state), *given, activation="gelu")
    torch.testing.assert_close(
        *(torch.autograd.grad(each, given, douts, is_grads_batched=True) for each in (out, right))
    )
    if operators.backend == "triton":  # past the operator
        x = given[0]
        out = kernel_twins.dropout_add(x, p=P, backend="triton")
        mask = out != 0
        (dx,) = torch.autograd.grad(out, x, douts, is_grads_batched=True)
        torch.testing.assert_close(dx, torch.where(mask, douts / (1 - P), 0.0))


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


def test_what_is_refused_is_named(operators) -> None:
    x, residual, bias = operands((3, 5))
    for error, told, changes in (
        (TypeError, r"^x is torch.int32, must be torch.float32 or .* call x.to", {"x": x.int()}),
        (TypeError, r"^residual is torch.float16, must be torch.float32 like x: ", {"residual": residual.half()}),
        (ValueError, r"^residual has shape \(5,\), must have that of x, \(3, 5\)$", {"residual": residual[0]}),
        (ValueError, r"^residual is on meta, must be on cpu like x: ", {"residual": residual.to("meta")}),
        (TypeError, r"^bias is torch.bfloat16, must be torch.float32 like x: ", {"bias": bias.bfloat16()}),
        (ValueError, r"^bias has shape \(3,\), must have \(5,\): one element for each in x's last", {"bias": bias[:3]}),
        (ValueError, r"^bias has shape \(1, 5\), must have \(5,\): ", {"bias": bias[None]}),
        (ValueError, r"^x has 0 dimensions, must have 1 or more where", {"x": x[0, 0], "residual": None}),
        (ValueError, r"^p is 1.5, must be from 0 to 1: the share of elements that are dropped$", {"p": 1.5}),
        (ValueError, r"^activation is 'tanh', must be none, relu, gelu, gelu_tanh or silu: ", {"activation": "tanh"}),
    ):
        with pytest.raises(error, match=told):
            operators(**({"x": x, "residual": residual, "bias": bias} | changes))


def test_what_is_no_tensor_is_named(operators, monkeypatch) -> None:
    monkeypatch.setattr(functional_dropout, "require_gpu", lambda *_: None)  # of CUDA's
    no_tensor: Any = [1.0] * 5
    for name in ("residual", "bias"):
        given: dict[str, Any] = {name: no_tensor}
        with pytest.raises(TypeError, match=rf"^{name} is a list, must be a torch.Tensor or None: call torch.as_tens"):
            kernel_twins.dropout_add(values((3, 5)), **given, backend=operators.backend)


def test_what_stands_for_tensors_on_a_gpu_is_as_narrow_as_they_are(operators) -> None:
    """A trace takes no float64 that a kernel would refuse; one for the CPU takes what PyTorch takes there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, state = torch.empty((3, 5), dtype=torch.float64), torch.empty(2, dtype=torch.int64)
        if operators.backend == "cuda":
            assert operators(x)[0].dtype == torch.float64
        x, state = x.to("cuda:0"), state.to("cuda:0")
        with pytest.raises(TypeError, match=r"^x is torch.float64, must be torch.float32 or "):
            operators(x)
        with pytest.raises(TypeError, match=r"^dout is torch.float64, must be torch.float32 or "):
            operators.backward(x, None, None, state, P, "none", True, False)
        assert operators(x.float())[0].dtype == torch.float32


def test_what_a_backward_pass_refuses_is_named(operators) -> None:
    dout, x, bias = operands((3, 5))
    state = torch.tensor([5, 8])
    for error, told, changes in (
        (TypeError, r"^dout is torch.int32, must be torch.float32 or ", {"dout": dout.int()}),
        (ValueError, r"^activation is 'none', which has no use for x and bias: leave", {"activation": "none"}),
        (ValueError, r"^x is missing, must be there: the slope of 'gelu' is taken at x", {"x": None}),
        (ValueError, r"^x has shape \(5, 3\), must have that of dout, \(3, 5\)$", {"x": x.t()}),
        (
            ValueError,
            r"^bias has shape \(3,\), must have \(5,\): one element for each in dout's last",
            {"bias": bias[:3]},
        ),
        (ValueError, r"^p is -1, must be from 0 to 1|^p is -1.0, must be from 0 to 1", {"p": -1.0}),
        (TypeError, r"^state is torch.int32, must be torch.int64: call state.to", {"state": state.int()}),
        (ValueError, r"^state has shape \(1,\), must have \(2,\): a seed and an offset$", {"state": state[:1]}),
        (
            ValueError,
            r"^state is on meta, must be on cpu like dout: call state.to\(dout.device\)$",
            {"state": state.to("meta")},
        ),
    ):
        given: dict[str, Any] = {"dout": dout, "x": x, "bias": bias, "state": state, "p": P, "activation": "gelu"}
        with pytest.raises(error, match=told):
            operators.backward(*(given | changes).values(), True, True)


def test_devices_backends_and_others_than_tensors_are_refused() -> None:
    x, function = values((3, 5)), kernel_twins.dropout_add
    no_tensor: Any = [1.0]
    no_names: list[Any] = ["tanh", ["relu"]]
    no_numbers: list[Any] = ["a", None, torch.tensor([0.1, 0.2])]
    with pytest.raises(ValueError, match=r"^backend is 'cublas', must be one of auto, cuda, triton, torch$"):
        function(x, backend="cublas")
    for backend in ("auto", "cuda", "triton", "torch"):
        for p in (-0.1, 1.1, math.nan):
            with pytest.raises(ValueError, match=r"^p is .*, must be from 0 to 1"):
                function(x, p=p, backend=backend)
        for activation in no_names:
            told = rf"^activation is {re.escape(repr(activation))}, must be none, relu, gelu, gelu_tanh or silu"
            with pytest.raises(ValueError, match=told):
                function(x, activation=activation, backend=backend)
        for other in no_numbers:
            with pytest.raises(TypeError, match=rf"^p is a {type(other).__name__}, must be a number from 0 to 1: the"):
                function(x, p=other, backend=backend)
    with pytest.raises((ValueError, UnavailableError), match=r"backend='torch'"):
        function(x, backend="cuda")
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"^x is on cpu, must be on a CUDA device for backend='triton': call x.cuda"):
        function(x, backend="triton")
    with pytest.raises(TypeError, match=r"^x is a list, must be a torch.Tensor: call torch.as_tensor\(x\)$"):
        function(no_tensor, backend="triton")


# ----------------------------------------------------------------------------------------------------------------------
# The module, and the steps behind a backend
# ----------------------------------------------------------------------------------------------------------------------


def test_the_module_drops_in_training_alone() -> None:
    module = kernel_twins.nn.DropoutAdd(P, "gelu")
    x, residual, bias = operands((3, 5), requires_grad=True)
    assert repr(module) == f"DropoutAdd(p={P}, activation='gelu', backend='auto')"
    torch.manual_seed(0)
    out = module(x, residual, bias)
    torch.manual_seed(0)
    right = torch.nn.functional.dropout(torch.nn.functional.gelu(x + bias), P) + residual
    assert torch.equal(out, right)
    assert torch.equal(module.eval()(x, residual, bias), torch.nn.functional.gelu(x + bias) + residual)
    assert torch.equal(module(x), torch.nn.functional.gelu(x))
    for options, told in (
        ({"p": 2}, "^p is 2, must be from 0 to 1"),
        ({"activation": "tanh"}, "^activation is 'tanh', must be none"),
        ({"backend": "cublas"}, "^backend is 'cublas', must be one of"),
    ):
        with pytest.raises(ValueError, match=told):
            kernel_twins.nn.DropoutAdd(**options)
    no_number: Any = "a"
    with pytest.raises(TypeError, match=r"^p is a str, must be a number from 0 to 1: the share of elements that are"):
        kernel_twins.nn.DropoutAdd(no_number)


def test_the_function_is_found_lazily() -> None:
    script = (
        "import sys, kernel_twins as k; assert not {'torch', 'triton'} & sys.modules.keys(); k.nn.DropoutAdd; "
        "k.dropout_add; assert 'torch' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_every_backend_names_steps_that_there_are() -> None:
    for op in ("dropout_add", "dropout_add_backward"):
        for backend, names in OPS[op].behind.items():
            assert all(backend in OPS[op].step(name).backends for name in names)

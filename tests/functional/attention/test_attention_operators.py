"""The operators of attention on tensors of the CPU, where PyTorch stands in the place of kernels."""

from __future__ import annotations

import importlib
import itertools
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import kernel_twins  # noqa: E402
from kernel_twins.functional.attention import torch_attention  # noqa: E402
from kernel_twins.functional.attention.shared import Options  # noqa: E402
from tests.attention_reference import (  # noqa: E402
    KINDS,
    SUBSETS,
    asked,
    attend,
    attend_to_sequences,
    gradients,
    operands,
    starts,
    tokens,
)
from tests.sides import as_interpreted, cuda_library  # noqa: E402

BY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
BY_LENGTHS = pytest.mark.parametrize(("queries", "keys"), [(5, 7), (7, 5), (6, 6), (1, 4), (3, 0), (0, 3)], ids=str)


def by_pytorch(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, *, out, scale=None, band=None, softcap=None, from_end=False
) -> None:
    """What a step is called with, and writes."""
    first, last = band
    options = Options(scale, first, last, from_end, softcap or 0.0)
    found = torch_attention.attention(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    for each, result in zip(out, found, strict=True):
        each.copy_(result)


@pytest.fixture(params=["cuda", "triton"])
def operators(request, monkeypatch) -> Any:
    """The operators of a backend: attention and its gradient."""
    if request.param == "cuda":
        library = cuda_library("attention")
        return library.attention.default, library.attention_backward.default
    as_interpreted(monkeypatch)
    triton_attention = importlib.import_module("kernel_twins.functional.attention.triton_attention")
    monkeypatch.setattr(triton_attention, "triton_launcher", lambda op, device: by_pytorch)
    return triton_attention.operator, triton_attention.backward_operator


def near(found: Any, right: Any) -> None:
    for each, exact in zip(found, right, strict=True):
        torch.testing.assert_close(each.double(), exact.double(), rtol=2e-2, atol=2e-2)


@BY_LENGTHS
@BY_KIND
def test_the_operators_values_and_gradients(operators, kind, queries, keys) -> None:
    given = operands(queries, keys, dtype=torch.float16, requires_grad=True)
    found, right = operators[0](*given, None, None, *asked(**kind)), attend(*given, **kind)
    near(found, right)
    near(gradients(found, given), gradients(right, given))


@BY_KIND
def test_one_result_alone_may_be_differentiated(operators, kind) -> None:
    given = operands(dtype=torch.float16, requires_grad=True)
    for one in (slice(0, 1), slice(1, 2)):
        found, right = operators[0](*given, None, None, *asked(**kind))[one], attend(*given, **kind)[one]
        leaves = given[: 3 - one.start]  # lse does not depend on v
        near(gradients(found, leaves), gradients(right, leaves))


@BY_KIND
def test_the_operators_of_sequences(operators, kind) -> None:
    given, ends = tokens(torch.float16, requires_grad=True), starts()
    heads = [each.transpose(0, 1)[None] for each in given]
    out, lse = operators[0](*heads, *ends, *asked(**kind))
    found, right = (out[0].transpose(0, 1), lse[0]), attend_to_sequences(*given, *ends, **kind)
    near(found, right)
    near(gradients(found, given), gradients(right, given))


@BY_KIND
def test_what_is_registered_is_what_pytorch_expects(operators, kind) -> None:
    forward, backward = operators
    options = asked(**kind)
    for dense, ends in ((True, (None, None)), (False, starts())):
        q, k, v = operands(dtype=torch.bfloat16)
        if not dense:
            q, k, v = (each.transpose(0, 1)[None] for each in tokens(torch.bfloat16))
            k, v = k.nan_to_num(), v.nan_to_num()
        torch.library.opcheck(forward, (*(each.requires_grad_() for each in (q, k, v)), *ends, *options))
        q, k, v = (each.detach() for each in (q, k, v))
        out, lse = forward(q, k, v, *ends, *options)
        for dlse, wanted in ((None, ()), (torch.zeros_like(lse), ()), (None, (False, True, False))):
            torch.library.opcheck(backward, (torch.ones_like(out), dlse, q, k, v, out, lse, *ends, *options, *wanted))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "sequences"])
def test_any_of_the_gradients_alone_are_the_same_and_the_others_have_no_elements(operators, packed) -> None:
    forward, backward = operators
    given, ends, options = operands(dtype=torch.float16), (None, None), asked(causal=True, softcap=2.0)
    if packed:
        given, ends = [each.transpose(0, 1)[None] for each in tokens(torch.float16)], starts()
    out, lse = forward(*given, *ends, *options)
    for dlse in (None, torch.ones_like(lse)):
        derived = partial(backward, torch.ones_like(out), dlse, *given, out, lse, *ends, *options)
        every = derived()
        for wanted in SUBSETS:
            for found, right, is_wanted in zip(derived(*wanted), every, wanted, strict=True):
                assert found.dtype == right.dtype
                if is_wanted:
                    assert torch.equal(found, right) and found.stride() == right.stride()
                else:
                    assert found.shape == (0,)


def test_nan_of_tokens_in_no_sequence_reaches_no_gradient() -> None:
    library = cuda_library("attention")
    given, ends = [each.transpose(0, 1)[None] for each in tokens(torch.float16)], starts()
    (out, lse), options = library.attention.default(*given, *ends), asked()
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    derived = partial(library.attention_backward.default, dout, dlse, *given, out, lse, *ends, *options)
    right = derived()
    for each in (dout, dlse, given[0]):
        each[:, :, ends[0][-1] :] = torch.nan
    assert all(torch.equal(*pair) for pair in zip(derived(), right, strict=True))


class Shapes(TorchDispatchMode):
    """Those of the gradients that calls of the operator return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[tuple[int, ...]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if "attention_backward" in function.name():
            self.seen.append([tuple(each.shape) for each in out])
        return out


def test_autograd_asks_for_no_gradient_that_nobody_wants(operators) -> None:
    every = gradients(operators[0](*(leaves := operands(dtype=torch.float16, requires_grad=True))), leaves)
    for wanted in SUBSETS[1:]:
        given = operands(dtype=torch.float16)
        leaves = [each.requires_grad_() for each, is_wanted in zip(given, wanted, strict=True) if is_wanted]
        results = operators[0](*given)
        with Shapes() as shapes:
            found = gradients(results, leaves)
        assert shapes.seen == [
            [tuple(each.shape) if is_wanted else (0,) for each, is_wanted in zip(given, wanted, strict=True)]
        ]
        near(found, itertools.compress(every, wanted))


def test_autograd_asks_the_cuda_operator_for_no_more_than_a_call_does() -> None:
    """In Python PyTorch tells what requires a gradient, and not what a call asks for."""
    operator = cuda_library("attention").attention.default
    for place in range(3):  # of operands that all require one
        given = operands(dtype=torch.float16, requires_grad=True)
        results = operator(*given)
        with Shapes() as shapes:
            gradients(results[:1], given[place])
        assert [shape != (0,) for shape in shapes.seen[0]] == [place == each for each in range(3)]


def test_the_operators_defaults_are_no_mask(operators) -> None:
    given = operands(dtype=torch.float16)
    near(operators[0](*given), attend(*given))
    torch.library.opcheck(operators[0], given)


def test_results_and_gradients_lie_as_the_operands(operators) -> None:
    for order in ((0, 2, 1, 3), (0, 1, 2, 3)):
        given = [
            each.detach().permute(order).contiguous().permute(order).requires_grad_()
            for each in operands(dtype=torch.float16)
        ]
        out, lse = operators[0](*given)
        assert out.stride() == given[0].stride() and lse.is_contiguous()
        found = torch.autograd.grad(out.sum(), given)
        assert [each.stride() for each in found] == [each.stride() for each in given]
    packed = torch.randn(2, 5, 3, 4, 8, dtype=torch.float16)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    assert operators[0](q, k, v)[0].transpose(1, 2).is_contiguous()


def test_batches_are_folded_and_sequences_go_one_by_one(operators) -> None:
    forward, options = operators[0], asked(causal=True)
    q, k, v = operands(dtype=torch.float16)
    pairs = torch.stack([q, -q, 2 * q], 2)
    found = torch.func.vmap(lambda q, k: forward(q, k, v, None, None, *options), in_dims=(2, None))(pairs, k)
    right = [forward(each, k, v, None, None, *options) for each in pairs.unbind(2)]
    near(found, [torch.stack(each) for each in zip(*right, strict=True)])
    q, k, v = (each.transpose(0, 1)[None] for each in tokens(torch.float16))
    ends = torch.stack([starts()[0], torch.tensor([0, 2, 2, 5, 15], dtype=torch.int32)])
    found = torch.func.vmap(lambda ends: forward(q, k, v, ends, starts()[1], *options))(ends)
    right = [forward(q, k, v, each, starts()[1], *options) for each in ends]
    near(found, [torch.stack(each) for each in zip(*right, strict=True)])


def test_gradients_may_come_in_a_batch(operators) -> None:
    given = operands(dtype=torch.float16, requires_grad=True)
    out, _ = operators[0](*given)
    douts = torch.randn((3, *out.shape), generator=torch.Generator().manual_seed(1)).half()
    found = torch.autograd.grad(out, given, douts, is_grads_batched=True, retain_graph=True)
    right = [torch.autograd.grad(out, given, dout, retain_graph=True) for dout in douts]
    near(found, [torch.stack(each) for each in zip(*right, strict=True)])
    q, k, v = (each.detach() for each in given)
    out, _ = operators[0](q, k.requires_grad_(), v)
    near(torch.autograd.grad(out, k, douts, is_grads_batched=True), found[1:2])


def test_a_gradients_gradient_is_refused_where_it_is_asked_for(operators) -> None:
    given = operands(dtype=torch.float16, requires_grad=True)
    (dq,) = torch.autograd.grad(operators[0](*given)[0].sum(), given[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="has no gradient of its gradient: pass backend='torch'"):
        dq.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_operators_are_compiled_without_a_break(operators, dynamic) -> None:
    torch.compiler.reset()
    options = asked(causal=True, window=(3, 0))
    call = lambda *given: operators[0](*given, None, None, *options)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch._dynamo.config.patch(error_on_recompile=dynamic):
        for queries, keys in ((5, 7), (12, 40), (33, 34)):
            given = operands(queries, keys, dtype=torch.float16, requires_grad=True)
            found, right = compiled(*given), call(*given)
            near(found, right)
            near(gradients(found, given), gradients(right, given))
    q, k, v = (each.detach() for each in given)
    leaf = k.requires_grad_()
    near(gradients(compiled(q, leaf, v), [leaf]), gradients(call(q, leaf, v), [leaf]))


def test_exported() -> None:
    operator = cuda_library("attention").attention.default

    class Layer(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, q, k, v):
            return operator(q, k, v, None, None, *asked(causal=True))

    given, length = operands(6, 6, dtype=torch.float16), torch.export.Dim("length", min=2)
    exported = torch.export.export(Layer(), given, dynamic_shapes=({2: length},) * 3).module()
    for length in (6, 11):
        given = operands(length, length, dtype=torch.float16)
        near(exported(*given), attend(*given, causal=True))


def test_finite_differences_of_the_cuda_operator() -> None:
    operator = cuda_library("attention").attention.default
    given = operands(3, 4, heads=2, kv_heads=1, requires_grad=True)
    for kind in KINDS.values():
        options = asked(**kind)
        assert torch.autograd.gradcheck(lambda *given, of=options: operator(*given, None, None, *of)[0], given)
        if kind.get("causal") != "top-left":  # lse is finite
            assert torch.autograd.gradcheck(lambda *given, of=options: operator(*given, None, None, *of)[1], given)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "dtype": (lambda q, k, v: (q.int(), k.int(), v.int()), TypeError, r"^q is torch.int32, must be torch.bfloat16 or"),
    "dtypes": (lambda q, k, v: (q, k.bfloat16(), v), TypeError, r"^k is torch.bfloat16, must be torch.float16 like q"),
    "shape": (lambda q, k, v: (q, k, v[:, :, 1:]), ValueError, r"^v has shape \(2, 2, 6, 8\), must have that of k"),
    "heads": (lambda q, k, v: (q[:, :3], k, v), ValueError, r"^k has 2 heads, must have a number that divides q's 3"),
    "batch": (lambda q, k, v: (q, k[:1], v[:1]), ValueError, r"^k has a batch of 1, must have q's, 2: call expand"),
    "d": (lambda q, k, v: (q[..., :4], k[..., :4], v[..., :4]), ValueError, r"^q has a head dimension of 4, must have"),
    "ds": (lambda q, k, v: (q, k[..., :4], v[..., :4]), ValueError, r"^k has a head dimension of 4, must have q's, 8"),
    "rank": (lambda q, k, v: (q[0], k, v), ValueError, r"^q has 3 dimensions, must have 4, \[B, H, S, D\]"),
    "one of two": (lambda q, k, v: (q, k, v, starts()[0]), ValueError, r"^cu_seqlens_q and cu_seqlens_k must be given"),
    "starts": (
        lambda q, k, v: (q[:1], k[:1], v[:1], starts()[0].long(), starts()[1]),
        TypeError,
        r"^cu_seqlens_q is torch.int64, must be torch.int32: call cu_seqlens_q",
    ),
    "batch of sequences": (
        lambda q, k, v: (q, k, v, *starts()),
        ValueError,
        r"^q has a batch of 2, must have 1 with c",
    ),
}


@pytest.mark.parametrize(("spoil", "error", "said"), WRONG.values(), ids=WRONG)
def test_what_the_operators_refuse_is_named(operators, spoil, error, said) -> None:
    with pytest.raises(error, match=said):
        operators[0](*spoil(*operands(dtype=torch.float16)))


WRONG_GRADIENT: dict[str, tuple[Any, type[Exception], str]] = {
    "rows": (lambda dout, dlse, out, lse: (dout[:, :, 1:], dlse, out, lse), ValueError, r"^dout has shape \(.*, must"),
    "dtype": (lambda dout, dlse, out, lse: (dout, dlse, out.bfloat16(), lse), TypeError, r"^out is torch.bfloat16, mu"),
    "sums": (lambda dout, dlse, out, lse: (dout, dlse, out, lse.half()), TypeError, r"^lse is torch.float16, must be"),
    "numbers": (lambda dout, dlse, out, lse: (dout, dlse[..., 1:], out, lse), ValueError, r"^dlse has shape \(.*, mus"),
}


@pytest.mark.parametrize(("spoil", "error", "said"), WRONG_GRADIENT.values(), ids=WRONG_GRADIENT)
def test_what_the_gradients_operator_refuses_is_named(operators, spoil, error, said) -> None:
    given = operands(dtype=torch.float16)
    out, lse = operators[0](*given, None, None, *asked())
    dout, dlse, out, lse = spoil(out.clone(), lse.clone(), out, lse)
    with pytest.raises(error, match=said):
        operators[1](dout, dlse, *given, out, lse, None, None, *asked())


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_derivatives_of_transforms_and_forward_mode_are_refused_and_not_lost(monkeypatch, backend) -> None:
    module = importlib.import_module("kernel_twins.functional.attention.attention")
    if backend == "cuda":
        cuda_library("attention")
        monkeypatch.setattr(module, "require_gpu", lambda *_: None)
    else:
        as_interpreted(monkeypatch)
    q, k, v = operands(dtype=torch.float16)
    for call in (
        partial(kernel_twins.attention, backend=backend),
        partial(kernel_twins.scaled_dot_product_attention, enable_gqa=True, backend=backend),
    ):
        with pytest.raises(NotImplementedError, match=r"no derivative for torch.func's grad and vjp: pass backend='to"):
            torch.func.grad(lambda q, of=call: of(q, k, v).sum())(q)
        with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
            torch.func.jvp(lambda q, of=call: of(q, k, v), (q,), (q,))

"""attention and scaled_dot_product_attention without a GPU: by PyTorch, what is refused, and what "auto" does."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

import kernel_twins  # noqa: E402
from kernel_twins.functional.attention import torch_attention  # noqa: E402
from kernel_twins.functional.attention.shared import options_of  # noqa: E402
from kernel_twins.functional.expected import attended  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402
from tests.attention_reference import (  # noqa: E402
    KINDS,
    STARTS,
    asked,
    attend,
    attend_to_sequences,
    gradients,
    operands,
    starts,
    tokens,
)
from tests.sides import as_interpreted  # noqa: E402

sdpa: Any = kernel_twins.scaled_dot_product_attention
pytorchs: Any = functional.scaled_dot_product_attention
module = importlib.import_module("kernel_twins.functional.attention.attention")  # which a function hides
BY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
LENGTHS = [(5, 7), (7, 5), (6, 6), (1, 4), (3, 0), (0, 3)]
BY_LENGTHS = pytest.mark.parametrize(("queries", "keys"), LENGTHS, ids=str)


# ----------------------------------------------------------------------------------------------------------------------
# PyTorch's side
# ----------------------------------------------------------------------------------------------------------------------


@BY_LENGTHS
@BY_KIND
def test_values_and_gradients_are_the_formulas(kind, queries, keys) -> None:
    given = operands(queries, keys, requires_grad=True)
    right = attend(*given, **kind)
    found = kernel_twins.attention(*given, return_lse=True, **kind)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(kernel_twins.attention(*given, **kind), right[0])
    torch.testing.assert_close(gradients(found, given), gradients(right, given))


@BY_KIND
def test_second_derivatives_and_forward_mode_by_pytorch(kind) -> None:
    given = operands(3, 4, heads=2, kv_heads=1, requires_grad=True)
    call = lambda *given: kernel_twins.attention(*given, return_lse=True, **kind)  # noqa: E731
    assert torch.autograd.gradgradcheck(lambda *given: call(*given)[0], given)
    plain = tuple(each.detach() for each in given)
    (_, tangent), (_, right) = (
        torch.func.jvp(of, plain, plain) for of in (lambda *x: call(*x)[0], lambda *x: attend(*x, **kind)[0])
    )
    torch.testing.assert_close(tangent, right)


@BY_KIND
def test_some_queries_at_a_time_give_the_same(monkeypatch, kind) -> None:
    given = operands(13, 9)
    whole = kernel_twins.attention(*given, return_lse=True, **kind)
    monkeypatch.setattr(torch_attention, "_CHUNK", 150)
    torch.testing.assert_close(kernel_twins.attention(*given, return_lse=True, **kind), whole)


@BY_KIND
def test_sequences_are_attended_one_by_one(kind) -> None:
    given: Any = tokens(requires_grad=True)
    cu_seqlens_q, cu_seqlens_k = starts()
    found = kernel_twins.attention(
        *given, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, return_lse=True, **kind
    )
    q, k, v = given
    right = attend_to_sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, **kind)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(gradients(found, given), gradients(right, given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_have_the_operands_dtype_and_lse_is_fp32(dtype) -> None:
    given = operands(dtype=dtype)
    out, lse = kernel_twins.attention(*given, causal=True, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    right = attend(*given, causal=True)
    eps = max(1e-6, torch.finfo(dtype).eps)
    torch.testing.assert_close(out.double(), right[0], rtol=eps, atol=eps)
    torch.testing.assert_close(lse.double(), right[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.arange(35).view(5, 7) % 3 > 0},
        {"attn_mask": torch.linspace(-1, 1, 35).view(5, 7)},
        {"scale": 0.3},
    ],
    ids=lambda arguments: " ".join(arguments) or "none",
)
def test_off_the_gpu_scaled_dot_product_attention_is_pytorchs(arguments) -> None:
    given = operands(kv_heads=4, dtype=torch.float32)
    for backend in ("auto", "torch"):
        for of in (given, [each[0] for each in given], [each[0, 0] for each in given]):
            out = sdpa(*of, **arguments, backend=backend)
            assert torch.equal(out, pytorchs(*of, **arguments))
    grouped = operands(dtype=torch.float32)
    out = sdpa(*grouped, **arguments, enable_gqa=True)
    assert torch.equal(out, pytorchs(*grouped, **arguments, enable_gqa=True))


def test_dropout_is_pytorchs() -> None:
    given = operands(kv_heads=4, dtype=torch.float32)
    found = []
    for call in (sdpa, pytorchs):
        torch.manual_seed(0)
        found.append(call(*given, dropout_p=0.5))
    assert torch.equal(*found)


def test_a_negative_scale_is_right_by_pytorchs_kernels_too() -> None:
    given = operands(kv_heads=4, dtype=torch.float32)
    right = attend(*given, causal="top-left", scale=-0.7)[0]
    for found in (
        sdpa(*given, is_causal=True, scale=-0.7),
        kernel_twins.attention(*given, causal="top-left", scale=-0.7),
    ):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "sequences"])
@pytest.mark.parametrize("kind", [KINDS[name] for name in ("causal", "window top-left", "all")], ids=str)
def test_compiled_without_a_break_for_all_lengths(kind, varlen) -> None:
    torch.compiler.reset()
    cu_seqlens_q, cu_seqlens_k = starts() if varlen else (None, None)

    def call(q, k, v):
        more = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        return kernel_twins.attention(q, k, v, **more, return_lse=True, backend="torch", **kind)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for more in (0, 4, 30):
            if varlen:
                given = [torch.cat([each, each.new_zeros(more, *each.shape[1:])]) for each in tokens()]
            else:
                given = operands(5 + more, 9 + 2 * more)
            torch.testing.assert_close(compiled(*given), call(*given))


def test_shapes_are_found_on_the_meta_device() -> None:
    q, k, v = (each.to("meta") for each in operands())
    out = kernel_twins.attention(q, k, v)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "meta")


def test_autocast_casts_operands_as_pytorchs_does() -> None:
    given = operands(kv_heads=4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        right = pytorchs(*given)
        for arguments in ({}, {"softcap": 30.0}, {"window": (5, 5)}):
            out = kernel_twins.attention(*given, **arguments)
            assert out.dtype == right.dtype == torch.bfloat16
            assert kernel_twins.attention(*operands(), **arguments).dtype == torch.float64


# ----------------------------------------------------------------------------------------------------------------------
# Arguments of the functions, and what "auto" does
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (
            {"causal": "lower"},
            ValueError,
            r"^causal is 'lower', must be None, False, True, 'bottom-right' or 'top-left'",
        ),
        ({"window": 5}, TypeError, r"^window is 5, must be None or \(left, right\), each an int"),
        ({"window": (1, 2, 3)}, TypeError, r"^window is \(1, 2, 3\), must be None or \(left, right\)"),
        ({"window": (1.5, 2)}, TypeError, r"^window is \(1.5, 2\), must be"),
        ({"window": (-2, 0)}, ValueError, r"^window is \(-2, 0\), must be .*: -1 is all, too"),
        ({"softcap": -1.0}, ValueError, r"^softcap is -1.0, must be from 1e-30 to 1e\+30, .*: pass None"),
        ({"softcap": 3e38}, ValueError, r"^softcap is 3e\+38, must be from 1e-30 to 1e\+30, .*: pass None"),
        ({"softcap": "none"}, TypeError, r"^softcap is 'none', must be a number or None"),
        ({"scale": "none"}, TypeError, r"^scale is 'none', must be a number or None"),
        ({"cu_seqlens_q": starts()[0]}, ValueError, r"^cu_seqlens_k is None, must be given with cu_seqlens_q"),
        ({"cu_seqlens_k": starts()[1]}, ValueError, r"^cu_seqlens_q is None, must be given with cu_seqlens_k"),
        (dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts(), strict=True)), ValueError, r"^q has 4 dimensions, must "),
        ({"backend": "flash"}, ValueError, r"^backend is 'flash', must be one of auto, cuda, triton, torch$"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, said) -> None:
    with pytest.raises(error, match=said):
        kernel_twins.attention(*operands(), **arguments)


@pytest.mark.parametrize("arguments", [{}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda q, k, v: (q, k.float(), v), TypeError, r"^k is torch.float32, must be torch.float64 like q: call k.to"),
        (lambda q, k, v: (q, k, v.float()), TypeError, r"^v is torch.float32, must be torch.float64 like q: call v.to"),
        (
            lambda q, k, v: (q.int(), k.int(), v.int()),
            TypeError,
            r"^q is torch.int32, must be a floating dtype: call q",
        ),
        (
            lambda q, k, v: (q, k, v[:, :, 1:]),
            ValueError,
            r"^v has shape .*, must have that of k, .*: pass a row for e",
        ),
        (lambda q, k, v: (q[:, :3], k, v), ValueError, r"^k has 2 heads, .* divides q's 3: .*; call transpose\(1, 2\)"),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(spoil, error, said, arguments) -> None:
    with pytest.raises(error, match=said):
        kernel_twins.attention(*spoil(*operands()), **arguments)


@pytest.mark.parametrize(
    ("cu_seqlens_q", "cu_seqlens_k", "error", "said"),
    [
        (starts()[0].long(), starts()[1], TypeError, r"^cu_seqlens_q is torch.int64, must be torch.int32"),
        (starts()[0], starts()[1][:3], ValueError, r"^cu_seqlens_k has 3 elements, must have 5 like cu_seqlens_q"),
        (starts()[0][None], starts()[1], ValueError, r"^cu_seqlens_q has shape \(1, 5\), must have \(N \+ 1,\)"),
        (starts()[0], STARTS, TypeError, r"^cu_seqlens_k is a list, must be a torch.Tensor or None: call torch.te"),
    ],
)
def test_wrong_starts_are_named(cu_seqlens_q, cu_seqlens_k, error, said) -> None:
    with pytest.raises(error, match=said):
        kernel_twins.attention(*tokens(), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)


def test_what_only_pytorch_takes_is_refused_by_the_others(monkeypatch) -> None:
    as_interpreted(monkeypatch)
    same = operands(kv_heads=4, dtype=torch.float16)
    wrong: list[tuple[Any, Any, str]] = [
        (same, {"attn_mask": torch.ones(5, 7)}, r"^attn_mask is given, must be None: pass is_causal, or backend='torc"),
        (same, {"dropout_p": 0.1}, r"^dropout_p is 0.1, must be 0: pass backend='torch'"),
        (operands(dtype=torch.float16), {}, r"^key has 2 heads, must have query's 4: pass enable_gqa=True"),
        ([each[0] for each in same], {}, r"^query has 3 dimensions, must have 4, \[B, H, S, D\]: call unsqueeze"),
        ((*same[:2], same[2][..., :4]), {}, r"^value has shape \(2, 4, 7, 4\), must have that of key, "),
    ]
    for given, arguments, said in wrong:
        with pytest.raises(ValueError, match=said):
            sdpa(*given, **arguments, backend="triton")
    with pytest.raises(TypeError, match=r"^query is torch.float64, must be torch.bfloat16 or torch.float16"):
        sdpa(*operands(kv_heads=4), backend="triton")


def test_an_unlimited_window_may_be_none_or_minus_one() -> None:
    for left, right in itertools.product((None, -1), repeat=2):
        assert asked(window=(left, right)) == asked()
        assert asked(window=(left, right), causal=True) == asked(causal="bottom-right") == asked(causal=True)
    assert asked(window=(2, None)) == asked(window=[2, -1]) != asked(window=(2, 0))
    assert asked(window=(2, 7), causal="top-left")[1:4] == (-2, 0, False)


def test_determinism_is_what_pytorch_was_told_unless_it_is_said() -> None:
    assert not asked().deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert asked().deterministic
        assert not options_of(None, None, None, None, False).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert options_of(None, None, None, None, True).deterministic


def test_auto_leaves_to_pytorch_what_the_others_refuse(monkeypatch) -> None:
    monkeypatch.setattr(module, "is_on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    monkeypatch.setattr(module, "_runs", lambda *_: True)
    monkeypatch.setattr(module, "expected", lambda *_, **__: "cuda")
    q, k, v = operands(dtype=torch.float16)
    options = asked()
    choose = module._choose
    assert choose(q, k, v, options=options) == "cuda"
    assert choose(*tokens(torch.float16), *starts(), options=options) == "cuda"
    for given in (
        (q.float(), k.float(), v.float()),
        (q, k.bfloat16(), v),
        (q[0], k[0], v[0]),
        (q, k, v, *starts()),
        (q, k, v, starts()[0], None),
        (q[..., :4], k[..., :4], v[..., :4]),
        (q[:, :3], k, v),
        (q, k, v[..., 1:]),
        (q, k, None),
    ):
        assert choose(*given, options=options) == "torch"
    with torch.autograd.forward_ad.dual_level():
        assert choose(q, k, v, options=options) == "torch"


def test_auto_takes_pytorch_only_where_it_has_a_kernel(monkeypatch) -> None:
    asked_for: list[Any] = []

    def expected(function, problem, device, runs, differentiated, over_torch):
        asked_for.append((problem, over_torch))
        return "cuda"

    monkeypatch.setattr(module, "expected", expected)
    q, k = (2, 8, 64, 128), (2, 2, 96, 128)
    for kind, key, needs_ours in (
        ({}, q, False),
        ({"causal": True}, q, False),
        ({"causal": "top-left"}, k, False),
        ({"causal": True}, k, False),
        ({"window": (5, None)}, q, False),
        ({"softcap": 5.0}, q, False),
        ({}, q, True),
    ):
        module._choice(q, key, key, torch.bfloat16, asked(**kind), needs_ours, 0)
    assert asked_for == [
        (attended(Case.parse(slug)), over_torch)
        for slug, over_torch in (
            ("2x8x64x128-bf16", False),
            ("2x8x64x128-bf16-mask.causal", False),
            ("2x8x64x128-bf16-keys.96-kv.2-mask.top", False),
            ("2x8x64x128-bf16-keys.96-kv.2-mask.causal", True),
            ("2x8x64x128-bf16-window.5_64", True),
            ("2x8x64x128-bf16", True),
            ("2x8x64x128-bf16", True),
        )
    ]

"""dropout_add without a GPU: the random words, what the specs' rule finds, what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS, load_baseline  # noqa: E402
from kernel_twins.harness.check import check, check_baseline, generator  # noqa: E402
from kernel_twins.ops.dropout import philox, shared  # noqa: E402
from kernel_twins.ops.tensors import empty_outputs  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

FORWARD, BACKWARD = OPS["dropout_add"], OPS["dropout_add_backward"]
assert FORWARD.exemplar is not None and BACKWARD.exemplar is not None
RIGHT, RIGHT_BACKWARD = FORWARD.exemplar, BACKWARD.exemplar
BOTH = {"residual": "yes", "bias": "yes"}
ONES = 2**32 - 1


# ----------------------------------------------------------------------------------------------------------------------
# Random words
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_words_are_those_that_random123_publishes(counter, key, words) -> None:
    """Its file of known answers, for philox4x32 with ten rounds."""
    drawn = philox.philox4x32(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in drawn) == words


def test_an_elements_word_depends_on_its_number_alone() -> None:
    whole = philox.words(5, 8, 0, 100, "cpu")
    for start, stop in ((0, 1), (3, 4), (3, 9), (4, 100), (99, 100), (7, 7)):
        assert torch.equal(philox.words(5, 8, start, stop, "cpu"), whole[start:stop])
    far = 2**34 + 2
    assert torch.equal(philox.words(5, 8, far, far + 9, "cpu")[6:], philox.words(5, 8, far + 6, far + 9, "cpu"))
    assert not torch.equal(philox.words(5, 8, far, far + 9, "cpu"), philox.words(5, 8, 2, 11, "cpu"))


def test_all_bits_of_seed_and_offset_count() -> None:
    drawn = [philox.words(seed, offset, 0, 4, "cpu") for seed in (1, 1 + 2**63) for offset in (4, 4 + 2**63)]
    assert len({tuple(each.tolist()) for each in drawn}) == 4


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.99])
def test_the_share_that_is_kept(p) -> None:
    n = 2**20
    kept = shared.kept((1, n), slice(0, 1), torch.device("cpu"), p=p, seed=3, offset=4)
    assert abs(int(kept.sum()) - (1 - p) * n) < 5 * math.sqrt(p * (1 - p) * n)


def test_p_of_0_and_1_are_exact() -> None:
    for p, expected in ((0, True), (1, False)):
        kept = shared.kept((4, 1_003), slice(1, 3), torch.device("cpu"), p=p, seed=3, offset=4)
        assert kept.shape == (2, 1_003) and bool((kept == expected).all())


def test_words_are_drawn_once_for_all_rows_that_a_judge_asks_for(monkeypatch) -> None:
    drawn: list[int] = []
    right = philox.words

    def words(seed, offset, start, stop, device):
        drawn.append(stop - start)
        return right(seed, offset, start, stop, device)

    monkeypatch.setattr(philox, "words", words)
    parts = [slice(0, 9), slice(0, 5), slice(5, 9), slice(0, 9)]
    first, *others = (shared.kept((9, 77), part, torch.device("cpu"), p=0.3, seed=5, offset=8) for part in parts)
    assert all(torch.equal(each, first[part]) for part, each in zip(parts[1:], others, strict=True))
    assert drawn == [9 * 77]


# ----------------------------------------------------------------------------------------------------------------------
# The rule
# ----------------------------------------------------------------------------------------------------------------------


def wrong_mask(*inputs: Any, **options: Any) -> Any:
    return RIGHT(*inputs, **(options | {"seed": options["seed"] + 1}))


def without_scale(*inputs: Any, **options: Any) -> Any:
    p, out = options["p"], options["out"]
    RIGHT(*inputs, **options)
    residual = inputs[1]
    out.copy_((out - residual) * (1 - p) + residual)


def activation_after_dropout(x: Any, residual: Any, bias: Any, *, out: Any, activation: str, **options: Any) -> None:
    RIGHT(x, None, bias, out=out, activation="none", **options)
    out.copy_(torch.nn.functional.gelu(out) + residual)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("wrong", [wrong_mask, without_scale, activation_after_dropout])
def test_wrong_kernels_are_found(wrong, dtype) -> None:
    case = Case.of(9, 1_003, dtype=dtype, act="gelu", **BOTH)
    assert check(FORWARD, RIGHT, case, device="cpu").ok
    assert not check(FORWARD, wrong, case, device="cpu").ok


def test_one_element_that_is_kept_in_error_is_found() -> None:
    case = Case.of(9, 1_003, dtype="bf16", p="50")
    mask = shared.kept(case.shape, slice(0, 9), torch.device("cpu"), p=0.5, seed=0, offset=0)
    row, col = (int(index[7]) for index in (~mask).nonzero(as_tuple=True))

    def wrong(x: Any, *, out: Any, **options: Any) -> None:
        RIGHT(x, out=out, **options)
        out[row, col] = 2 * x[row, col]

    verdict = check(FORWARD, wrong, case, device="cpu")
    assert verdict.reason.startswith(f"element ({row}, {col})")


def test_sums_that_miss_a_row_are_found() -> None:
    def wrong(dout: Any, *, out: Any, **options: Any) -> None:
        dx, dbias = RIGHT_BACKWARD(dout, out=out, **options)
        out[0].copy_(dx)
        out[1].copy_(dbias - dx[3])

    case = Case.of(300, 1_003, dtype="bf16", bias="yes")
    verdict = check(BACKWARD, wrong, case, device="cpu")
    assert verdict.reason.startswith("out[1]: ")


def test_gradients_are_autograds() -> None:
    """Of what the forward pass's reference computes, with the same mask."""
    for activation in shared.ACTIVATIONS:
        case = Case.of(5, 33, dtype="fp32", act=activation, bias="yes", p="30")
        inputs = BACKWARD.inputs(case, generator(case, "cpu"))
        dout, *others = inputs
        x, bias = others or (torch.randn(5, 33), torch.randn(33))
        x, bias = x.double().requires_grad_(), bias.double().requires_grad_()
        forward = Case.of(5, 33, dtype="fp32", act=activation, p="30", **BOTH)
        out, _ = FORWARD.reference(forward, (x, torch.zeros(5, 33), bias), slice(0, 5))
        expected = torch.autograd.grad(out, (x, bias), dout.double())
        dx, _ = BACKWARD.reference(case, inputs, slice(0, 5))
        dbias, _ = BACKWARD.more_references[0](case, inputs, slice(0, 33))
        torch.testing.assert_close((dx, dbias), expected)


@pytest.mark.parametrize("op", [FORWARD, BACKWARD], ids=lambda op: op.name)
def test_baselines_are_judged_where_nothing_is_random(op) -> None:
    case = Case.of(33, 257, dtype="bf16", p="50", **BOTH)
    pytorchs = load_baseline(op.name, "torch")
    assert not check(op, pytorchs, case, device="cpu").ok  # its mask is another one
    assert check_baseline(op, pytorchs, case, device="cpu").ok


def test_pytorchs_own_share_is_the_same() -> None:
    x, p = torch.ones(512, 512), 0.1
    out = load_baseline("dropout_add", "torch")(x, out=None, p=p)
    assert abs(int((out == 0).sum()) - p * x.numel()) < 5 * math.sqrt(p * (1 - p) * x.numel())
    assert math.isclose(float(out.max()), 1 / (1 - p), rel_tol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Cases and refusals
# ----------------------------------------------------------------------------------------------------------------------


def test_least_traffic_counts_what_is_there() -> None:
    size = 8 * 16 * 2
    assert FORWARD.bytes(Case.of(8, 16, dtype="bf16")) == 2 * size
    assert FORWARD.bytes(Case.of(8, 16, dtype="bf16", **BOTH)) == 3 * size
    assert BACKWARD.bytes(Case.of(8, 16, dtype="bf16", bias="yes")) == 2 * size
    assert BACKWARD.bytes(Case.of(8, 16, dtype="bf16", act="gelu")) == 3 * size


@pytest.mark.parametrize("op", [FORWARD, BACKWARD], ids=lambda op: op.name)
def test_checks_let_the_test_cases_through(op) -> None:
    for case in op.test_cases:
        if math.prod(case.shape) < 2**16:
            inputs = op.inputs(case, generator(case, "cpu"))
            op.check(*inputs, out=empty_outputs(op, case, "cpu"), **op.options(case))


def t(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"x": t(3, 8).double()}, TypeError, "x is torch.float64, must be torch.float32 or"),
        ({"x": t(8)}, ValueError, "x has 1 dimensions, must have 2"),
        ({"x": t(8, 3).t()}, ValueError, "x has strides .*, must have contiguous rows"),
        ({"residual": t(3, 8).half()}, TypeError, "residual is torch.float16, must be torch.float32 like x"),
        ({"residual": t(3, 1)}, ValueError, r"residual has shape \(3, 1\), must have \(3, 8\)"),
        ({"bias": t(3)}, ValueError, r"bias has shape \(3,\), must have \(8,\): one element for each column of x"),
        ({"bias": t(16)[::2]}, ValueError, "bias has strides"),
        ({"out": t(3, 8).half()}, TypeError, "out is torch.float16"),
        ({"p": -0.1}, ValueError, "p is -0.1, must be from 0 to 1"),
        ({"p": math.nan}, ValueError, "p is nan, must be from 0 to 1"),
        ({"activation": "tanh"}, ValueError, "activation is 'tanh', must be none, relu, gelu, gelu_tanh or silu"),
        ({"seed": 2**64}, ValueError, "seed is 18446744073709551616, must be from 0"),
        ({"seed": -1}, ValueError, "seed is -1, must be from 0"),
        ({"offset": 6}, ValueError, "offset is 6, must be a multiple of 4"),
    ],
    ids=str,
)
def test_forward_refusals(change, error, said) -> None:
    given = {"x": t(3, 8), "residual": t(3, 8), "bias": t(8), "out": t(3, 8)}
    FORWARD.check(**given)
    with pytest.raises(error, match=said):
        FORWARD.check(**(given | change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"activation": "none"}, "activation is 'none', which has no use for x and bias: leave them out"),
        ({"x": None}, "x is missing, must be there: the slope of 'gelu' is taken at x"),
        ({"x": t(3, 4)}, r"x has shape \(3, 4\), must have \(3, 8\)"),
        ({"bias": t(3)}, r"bias has shape \(3,\), must have \(8,\)"),
        ({"out": (t(3, 8),)}, "out has 1 tensors, must have 2: dx, dbias"),
        ({"out": (t(3, 8), t(3))}, r"out\[1\] has shape \(3,\), must have \(8,\)"),
        ({"p": 1.5}, "p is 1.5, must be from 0 to 1"),
    ],
    ids=str,
)
def test_backward_refusals(change, said) -> None:
    given = {"dout": t(3, 8), "x": t(3, 8), "bias": t(8), "activation": "gelu", "out": (t(3, 8), t(8))}
    BACKWARD.check(**given)
    BACKWARD.check(**(given | {"out": t(3, 8)}))
    with pytest.raises(ValueError, match=said):
        BACKWARD.check(**(given | change))

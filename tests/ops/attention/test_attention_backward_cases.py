"""attention_backward without a GPU: what its spec refuses, and that PyTorch's operations pass its rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS  # noqa: E402
from kernel_twins.harness.check import check, generator  # noqa: E402
from kernel_twins.ops.attention import shared  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

OP = OPS["attention_backward"]
assert OP.exemplar is not None
RIGHT = OP.exemplar


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are small, and threads of several processes would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ----------------------------------------------------------------------------------------------------------------------
# Arguments
# ----------------------------------------------------------------------------------------------------------------------


def heads(*shape: int, dtype: Any = torch.bfloat16, device: str = "cpu") -> Any:
    return torch.zeros(shape, dtype=dtype, device=device)


def numbers(*shape: int) -> Any:
    return heads(*shape, dtype=torch.float32)


def arguments() -> dict[str, Any]:
    """Four heads of six queries, which share two heads of five keys, with eight columns."""
    of_queries = {name: heads(2, 4, 6, 8) for name in ("dout", "q", "result")}
    of_keys = {name: heads(2, 2, 5, 8) for name in ("k", "v")}
    out = tuple(torch.empty_like(each) for each in (of_queries["q"], *of_keys.values()))
    return {**of_queries, **of_keys, "lse": numbers(2, 4, 6), "dlse": numbers(2, 4, 6), "out": out}


OPERANDS = ("dout", "q", "k", "v", "result")
REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"v": [1.0]}, TypeError, r"v is a list, must be a torch.Tensor: call torch.as_tensor\(v\)"),
    ({"q": [1.0]}, TypeError, r"q is a list, must be a torch.Tensor: call torch.as_tensor\(q\)"),
    ({"q": numbers(2, 4, 6, 8)}, TypeError, "q is torch.float32, must be torch.bfloat16 or torch.float16: call q.to"),
    (
        {"dout": heads(2, 4, 6, 8, dtype=torch.float16)},
        TypeError,
        r"dout is torch.float16, must be torch.bfloat16 like q: call dout.to\(q.dtype\)",
    ),
    ({"k": heads(2, 5, 8)}, ValueError, "k has 3 dimensions, must have 4"),
    ({"v": heads(2, 2, 5, 8, device="meta")}, ValueError, r"v is on meta, must be on cpu like q: call v.to"),
    (
        {"q": heads(2, 4, 6, 12), "dout": heads(2, 4, 6, 12), "result": heads(2, 4, 6, 12)},
        ValueError,
        "q has a head dimension of 12, must be a multiple of 8 up to 128: pad it with zeros",
    ),
    ({"q": heads(2, 4, 6, 136)}, ValueError, "q has a head dimension of 136, must be a multiple of 8 up to 128"),
    ({"k": heads(2, 3, 5, 8)}, ValueError, "k has 3 heads, must divide q's 4: repeat them"),
    ({"k": heads(2, 0, 5, 8)}, ValueError, "k has 0 heads, must divide q's 4"),
    ({"k": heads(3, 2, 5, 8)}, ValueError, r"k has shape .*, must have \(2, 2, 5, 8\): batch and head dimension are q"),
    ({"v": heads(2, 2, 4, 8)}, ValueError, r"v has shape .*, must have \(2, 2, 5, 8\): it has a row for each of k's"),
    ({"dout": heads(2, 4, 5, 8)}, ValueError, r"dout has shape .*, must have \(2, 4, 6, 8\): it has a row for each"),
    ({"result": heads(2, 2, 6, 8)}, ValueError, r"result has shape .*, must have \(2, 4, 6, 8\): it has a row for"),
    ({"lse": heads(2, 4, 6)}, TypeError, r"lse is torch.bfloat16, must be torch.float32: call lse.to\(...\)"),
    ({"lse": None}, TypeError, "lse is a NoneType, must be a torch.Tensor"),
    ({"lse": numbers(2, 4, 5)}, ValueError, r"lse has shape .*, must have \(2, 4, 6\): it has a number for each"),
    ({"lse": numbers(2, 6, 4).mT}, ValueError, r"lse has strides .*, must be contiguous: call lse.contiguous\(\)"),
    ({"dlse": numbers(2, 4, 6).double()}, TypeError, "dlse is torch.float64, must be torch.float32: call dlse.to"),
    ({"dlse": numbers(2, 4, 1)}, ValueError, r"dlse has shape .*, must have \(2, 4, 6\): it has a number for each"),
    ({"dlse": numbers(2, 4, 1).expand(2, 4, 6)}, ValueError, "dlse has strides .*, must be contiguous: call dlse.cont"),
]  # fmt: skip


def test_right_arguments_are_accepted() -> None:
    given = arguments()
    OP.check(**given)
    OP.check(**given | {"dlse": None}, scale=-0.5, band=(-2, 0))
    OP.check(**given | {"dout": heads(1, 1, 1, 8).expand(2, 4, 6, 8)})
    OP.check(**given | {"q": heads(2, 6, 4, 8).transpose(1, 2), "k": heads(2, 2, 5, 11)[..., :8]})


@pytest.mark.parametrize(("changed", "error", "message"), REFUSALS, ids=lambda each: str(each)[:40])
def test_wrong_inputs_are_refused_by_name(changed, error, message) -> None:
    with pytest.raises(error, match=f"^{message}"):
        OP.check(**arguments() | changed)


@pytest.mark.parametrize("name", OPERANDS)
def test_rows_are_contiguous(name) -> None:
    given = arguments()
    given[name] = given[name].mT.contiguous().mT
    with pytest.raises(ValueError, match=rf"^{name} has strides .*, the last must be 1: call {name}.contiguous\(\)$"):
        OP.check(**given)


def test_wrong_outs_are_refused_by_their_place() -> None:
    given = arguments()
    dq, dk, dv = given.pop("out")
    refusals: list[tuple[Any, type[Exception], str]] = [
        (dq, TypeError, "out is a Tensor, must be a tuple of 3 tensors: dq, dk, dv"),
        ((dq, dk), ValueError, "out has 2 tensors, must have 3: dq, dk, dv"),
        ((dq, dk, None), TypeError, r"out\[2\] is a NoneType, must be a torch.Tensor"),
        ((dq.float(), dk, dv), TypeError, r"out\[0\] is torch.float32, must be torch.bfloat16 like q: allocate it so"),
        ((dq, dq, dv), ValueError, r"out\[1\] has shape .*, must have \(2, 2, 5, 8\): it is the gradient of k"),
        ((dq, dk, dv[:1]), ValueError, r"out\[2\] has shape .*, must have \(2, 2, 5, 8\): it is the gradient of v"),
        ((dq.to("meta"), dk, dv), ValueError, r"out\[0\] is on meta, must be on cpu like q: allocate it so with"),
        ((dq, heads(2, 5, 2, 8).transpose(1, 2), dv), ValueError, r"out\[1\] has strides .*, must be contiguous: allo"),
        ((dq, dk, dk), ValueError, r"out overlaps out\[2\] in memory, must be apart from it: allocate it with"),
        *(((given[name], dk, dv), ValueError, f"out overlaps {name} in memory") for name in ("dout", "q", "result")),
        *(((dq, given[name], dv), ValueError, f"out overlaps {name} in memory") for name in ("k", "v")),
    ]
    for out, error, message in refusals:
        with pytest.raises(error, match=f"^{message}"):
            OP.check(**given, out=out)
    for name in ("lse", "dlse"):
        size = given["q"].numel()
        memory = torch.zeros(size // 2, dtype=torch.float32)
        own = memory[: given[name].numel()].view(given[name].shape)
        with pytest.raises(ValueError, match=f"^out overlaps {name} in memory"):
            OP.check(**given | {name: own}, out=(memory.view(torch.bfloat16).view(dq.shape), dk, dv))


# ----------------------------------------------------------------------------------------------------------------------
# Cases
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case.of(1, 2, 150, 64, dtype="bf16", dlse="yes"),
        Case.of(2, 4, 140, 128, dtype="bf16", dlse="yes", kv="2", mask="causal"),
        Case.of(1, 4, 100, 64, dtype="fp16", kv="1"),
        Case.of(1, 2, 257, 128, dtype="bf16", window="3_70", keys="300"),
        Case.of(1, 2, 259, 64, dtype="fp16", mask="causal", keys="130"),  # the first queries see no key
        Case.of(1, 2, 130, 128, dtype="bf16", mask="top", keys="259"),  # the last keys are seen by no query
        Case.of(2, 2, 140, 64, dtype="bf16", dout="expanded"),
        Case.of(2, 2, 70, 64, dtype="bf16", keys="0"),
        Case.of(1, 2, 0, 64, dtype="bf16", keys="5"),
    ],
    ids=lambda case: case.slug,
)  # fmt: skip
def test_pytorchs_operations_pass_at_a_case_that_kernels_are_tested_at(case) -> None:
    assert case in OP.test_cases
    verdict = check(OP, RIGHT, case, device="cpu")
    assert verdict.ok, verdict.reason


def test_gradients_are_those_of_the_formula() -> None:
    """As PyTorch finds them through its own softmax, of the result and of the logarithms."""
    case = Case.of(2, 4, 9, 8, dtype="fp16", kv="2", mask="causal", keys="12", dlse="yes")
    dout, q, k, v, _, _, dlse = OP.inputs(case, generator(case, "cpu"))
    leaves = tuple(each.double().requires_grad_() for each in (q, k, v))
    options = OP.options(case)
    first, last = options["band"]
    distance = torch.arange(12) - torch.arange(9)[:, None]
    ks, vs = (each.repeat_interleave(2, 1) for each in leaves[1:])
    scores = (leaves[0] @ ks.mT * options["scale"]).masked_fill((distance < first) | (distance > last), -torch.inf)
    result, lse = scores.softmax(3) @ vs, scores.logsumexp(3)
    expected = torch.autograd.grad((result, lse), leaves, (dout.double(), dlse.double()))
    saved = (result.detach().half(), lse.detach().float())
    for index, found in enumerate(RIGHT(dout, q, k, v, *saved, dlse, out=None, **options)):
        torch.testing.assert_close(found.double(), expected[index], rtol=0, atol=0.01)


def test_what_no_step_serves_is_told() -> None:
    told = {
        Case.of(1, 2, 9, 256, dtype="bf16"): "head dimension is 256, this step has registers for up to 128",
        Case.of(1, 2, 9, 64, dtype="bf16", cap="2"): "this step has no softcap",
        Case.of(3, 2, 9, 64, dtype="bf16", packed="yes"): "this step has one length for all sequences",
        Case.of(1, 2, 9, 64, dtype="fp32"): "dtype is fp32, must be bf16 or fp16",
    }
    assert {case: OP.accepts(case) for case in told} == told


def test_costs_count_five_products_and_what_is_read_and_written() -> None:
    case = Case.of(2, 16, 64, 128, dtype="bf16", kv="4", keys="32")
    assert OP.flops(case) == 5 * 2 * 128 * 2 * 16 * shared.seen(case) // 2
    assert OP.bytes(case) == 2 * (4 * 2 * 16 * 64 + 4 * 2 * 4 * 32) * 128 + 4 * 2 * 16 * 64

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
from tests.attention_reference import attend, attend_to_sequences  # noqa: E402

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


def starts(*first: int) -> Any:
    return torch.tensor(first, dtype=torch.int32)


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
        "q has a head dimension of 12, must be a multiple of 8 up to 256: pad it with zeros",
    ),
    ({"q": heads(2, 4, 6, 264)}, ValueError, "q has a head dimension of 264, must be a multiple of 8 up to 256"),
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
    ({"softcap": 0.0}, ValueError, "softcap is 0.0, must be greater than 0: pass None for none"),
    ({"cu_seqlens_k": starts(0, 5)}, TypeError, "cu_seqlens_q is None, must be a tensor where the other one is: pass"),
    ({"cu_seqlens_q": starts(0, 6), "cu_seqlens_k": starts(0, 5)}, ValueError, "q has a batch of 2, must be 1 with cu"),
]  # fmt: skip


def test_right_arguments_are_accepted() -> None:
    given = arguments()
    OP.check(**given)
    OP.check(**given | {"dlse": None}, scale=-0.5, band=(-2, 0), softcap=2.0, from_end=True, deterministic=True)
    OP.check(**given | {"dout": heads(1, 1, 1, 8).expand(2, 4, 6, 8)})
    OP.check(**given | {"q": heads(2, 6, 4, 8).transpose(1, 2), "k": heads(2, 2, 5, 11)[..., :8]})
    for unwanted in range(3):
        OP.check(**given | {"out": tuple(None if i == unwanted else each for i, each in enumerate(given["out"]))})
    packed = {name: each[:1] for name, each in given.items() if name != "out"}
    out = tuple(each[:1] for each in given["out"])
    OP.check(**packed, cu_seqlens_q=starts(0, 2, 6), cu_seqlens_k=starts(1, 4, 4), out=out)


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
        ((dq, dk, [1.0]), TypeError, r"out\[2\] is a list, must be a torch.Tensor"),
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
        Case.of(2, 1, 150, 192, dtype="fp16", keys="81", dlse="yes"),
        Case.of(1, 2, 200, 64, dtype="bf16", cap="2"),
        Case.of(1, 2, 130, 128, dtype="fp16", cap="0.5", mask="causal", scale="neg"),
        Case.of(7, 2, 140, 64, dtype="bf16", packed="yes"),
        Case.of(5, 2, 90, 256, dtype="bf16", packed="yes", keys="210", mask="top"),
        Case.of(6, 1, 350, 64, dtype="fp16", packed="yes", window="30_5", cap="3", scale="neg"),
    ],
    ids=lambda case: case.slug,
)  # fmt: skip
def test_pytorchs_operations_pass_at_a_case_that_kernels_are_tested_at(case) -> None:
    assert case in OP.test_cases
    verdict = check(OP, RIGHT, case, device="cpu")
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("more", [{}, {"cap": "0.5"}, {"cap": "0.5", "packed": "yes"}], ids=str)
def test_gradients_are_those_of_the_formula(more: dict[str, str]) -> None:
    """As PyTorch finds them through its own softmax, of the result and of the logarithms."""
    case = Case.of(2, 4, 9, 8, dtype="fp16", kv="2", mask="causal", keys="12", dlse="yes", **more)
    dout, q, k, v, _, _, dlse, *places = OP.inputs(case, generator(case, "cpu"))
    leaves = tuple(each.double().requires_grad_() for each in (q, k, v))
    kind = {"causal": True, "softcap": float(more.get("cap", 0)), "scale": OP.options(case)["scale"]}
    if places:
        rows = (each.squeeze(0).transpose(0, 1) for each in leaves)
        found, sums = attend_to_sequences(*rows, *places, **kind)
        result, lse = found.transpose(0, 1)[None], sums[None]
    else:
        result, lse = attend(*leaves, **kind)
    known = ~lse.isinf()  # of rows that see a key
    douts = dout.double().masked_fill(~known[..., None], 0.0), dlse.double().masked_fill(~known, 0.0)
    expected = torch.autograd.grad((result, lse), leaves, douts)
    saved = (result.detach(), lse.detach())
    given = dout, q, k, v, *saved, dlse, *places
    for index, described in enumerate((OP.reference, *OP.more_references)):
        exact, _ = described(case, given, slice(None))
        torch.testing.assert_close(exact, expected[index], rtol=0, atol=1e-9)
    rounded = dout, q, k, v, saved[0].half(), saved[1].float(), dlse, *places
    for index, found in enumerate(RIGHT(*rounded, out=None, **OP.options(case))):
        torch.testing.assert_close(found.double(), expected[index], rtol=0, atol=0.01)


def test_what_only_the_last_step_serves_is_told() -> None:
    told = {
        Case.of(1, 2, 9, 256, dtype="bf16"): "head dimension is 256, this step has registers for up to 128",
        Case.of(1, 2, 9, 64, dtype="bf16", cap="2"): "this step has no softcap",
        Case.of(3, 2, 9, 64, dtype="bf16", packed="yes"): "this step has one length for all sequences",
        Case.of(1, 2, 9, 64, dtype="bf16", deterministic="yes"): "this step has no choice of deterministic sums",
    }
    for step in OP.steps[:-1]:
        assert {case: step.accepts(case) for case in told} == told
    assert all(OP.serves(OP.steps[-1], case) for case in told)
    assert OP.accepts(Case.of(1, 2, 9, 64, dtype="fp32")) == "dtype is fp32, must be bf16 or fp16"


def test_costs_count_five_products_and_what_is_read_and_written() -> None:
    case = Case.of(2, 16, 64, 128, dtype="bf16", kv="4", keys="32")
    assert OP.flops(case) == 5 * 2 * 128 * 2 * 16 * shared.seen(case) // 2
    assert OP.bytes(case) == 2 * (4 * 2 * 16 * 64 + 4 * 2 * 4 * 32) * 128 + 4 * 2 * 16 * 64


def test_costs_of_packed_sequences_are_those_of_their_tokens() -> None:
    case = Case.of(5, 4, 70, 64, dtype="bf16", packed="yes", keys="35", kv="2")
    queries, keys = (sum(each) for each in zip(*shared.lengths_of(case), strict=True))
    assert OP.bytes(case) == 2 * (4 * 4 * queries + 4 * 2 * keys) * 64 + 4 * 4 * queries
    assert OP.flops(case) == 5 * 2 * 64 * 4 * sum(each * of_keys for each, of_keys in shared.lengths_of(case))
    dq, dk, dv = OP.outputs(case)
    assert dq.shape == (1, 4, queries + shared.PADDING, 64)
    assert dk.shape == dv.shape == (1, 2, keys + shared.PADDING, 64)

"""attention's gradients on a GPU: right in every kind and layout, any of them alone, the same bits where promised."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import kernel_twins  # noqa: E402
from kernel_twins import OPS  # noqa: E402
from kernel_twins.functional.attention.shared import Options  # noqa: E402
from kernel_twins.harness.check import compare, generator  # noqa: E402
from tests.attention_on_gpu import (  # noqa: E402
    BY_KIND,
    COPIED,
    KEY_STARTS,
    LAYOUTS,
    OURS,
    STARTS,
    assert_near,
    douts_of,
    operands,
    sequences,
    starts_of,
    values,
    with_gradients,
)
from tests.attention_reference import KINDS, SUBSETS, attend, attend_to_sequences  # noqa: E402

pytestmark = pytest.mark.gpu

OP = OPS["attention_backward"]
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["dense", "sequences"])


def called(backend: str, given: Any, **kind: Any) -> Any:
    """The result and lse, of q, k and v, and where there are sequences of their starts."""
    q, k, v, *ends = given
    more = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True)) if ends else {}
    return kernel_twins.attention(q, k, v, **more, **kind, return_lse=True, backend=backend)


def leaves_of(given: Any, wanted: tuple[bool, ...] = (True, True, True)) -> Any:
    """The same tensors, of which q, k and v are leaves; those that are wanted require a gradient."""
    leaves = (each.detach().requires_grad_(of) for each, of in zip(given[:3], wanted, strict=True))
    return (*leaves, *given[3:])


def derived(backend: str, given: Any, dout: Any, **kind: Any) -> Any:
    leaves = leaves_of(given)
    return torch.autograd.grad(called(backend, leaves, **kind)[0], leaves[:3], dout)


def extra_bytes(call: Callable[[], Any]) -> int:
    """The memory that a call holds at its peak, once all that it keeps is there."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return int(torch.cuda.max_memory_allocated()) - before


# ----------------------------------------------------------------------------------------------------------------------
# Values
# ----------------------------------------------------------------------------------------------------------------------


@OURS
@pytest.mark.parametrize("case", OP.test_cases, ids=lambda case: case.slug)
def test_every_case_of_the_ladder_is_right(backend, case) -> None:
    called(backend, operands())  # registers the operator
    operator = getattr(torch.ops.kernel_twins, {"cuda": "attention_backward"}.get(backend, "attention_backward_triton"))
    given = OP.inputs(case, generator(case, "cuda"))
    dout, q, k, v, result, lse, *more = given
    dlse, *ends = [*more, None, None, None][:3]
    said = OP.options(case)
    first, last = said["band"]
    rest = said.get("from_end", False), said.get("softcap", 0.0), said.get("deterministic", False)
    options = Options(said["scale"], first, last, *rest)
    found = operator(dout, dlse, q, k, v, result, lse, *ends, *options)
    verdict = compare(OP, case, given, tuple(each.contiguous() for each in found))
    assert verdict.ok, verdict.reason


@OURS
@PACKED
@pytest.mark.parametrize("d", [8, 40, 72, 128, 136, 192, 256])
def test_every_head_dimension_with_all_options(backend, packed, d) -> None:
    given = sequences(d) if packed else operands(d=d)
    leaves = leaves_of(given)
    right = attend_to_sequences if packed else attend
    for kind in (KINDS["all"], {"softcap": 20.0}):
        found = with_gradients(lambda *x, of=kind: called(backend, (*x, *leaves[3:]), **of), leaves[:3], of_lse=True)
        exact = with_gradients(lambda *x, of=kind: right(*x, *leaves[3:], **of), leaves[:3], of_lse=True)
        assert_near(found, exact)


@OURS
@BY_KIND
def test_one_result_alone_may_be_differentiated(backend, kind) -> None:
    given = operands(requires_grad=True)
    (out, lse), (right, sums) = called(backend, given, **kind), attend(*given, **kind)
    dout, dlse = douts_of(out, lse)
    found, exact = (torch.autograd.grad(each, given, dout.to(each.dtype), retain_graph=True) for each in (out, right))
    assert_near(found, exact)
    dq, dk, dv = torch.autograd.grad(lse, given, dlse)
    assert_near((dq, dk), torch.autograd.grad(sums, given[:2], dlse.double()))
    assert not dv.any()


NAN_KINDS = pytest.mark.parametrize("kind", [KINDS[name] for name in ("full", "top-left", "softcap")], ids=str)


@OURS
@NAN_KINDS
def test_tokens_in_no_sequence_take_and_give_nothing(backend, kind) -> None:
    given = sequences()
    dout = values(*given[0].shape, seed=5)
    right = derived(backend, given, dout, **kind, deterministic=True)
    for each in (dout, given[0]):
        each[: STARTS[0]] = each[STARTS[-1] :] = math.nan
    for each in given[1:3]:
        each[KEY_STARTS[-1] :] = math.nan
    dq, dk, dv = derived(backend, given, dout, **kind, deterministic=True)
    assert all(torch.equal(*pair) for pair in zip((dq, dk, dv), right, strict=True))
    outside = dq[: STARTS[0]], dq[STARTS[-1] :], dk[KEY_STARTS[-1] :], dv[KEY_STARTS[-1] :]
    assert not any(each.any() for each in outside)


@OURS
@NAN_KINDS
def test_nan_reaches_no_other_sequence(backend, kind) -> None:
    given = sequences()
    dout = values(*given[0].shape, seed=5)
    right = derived(backend, given, dout, **kind, deterministic=True)
    behind = STARTS[1], KEY_STARTS[1], KEY_STARTS[1]
    for each, end in zip(given[:3], behind, strict=True):
        each[:end] = math.nan
    found = derived(backend, given, dout, **kind, deterministic=True)
    for each, exact, end in zip(found, right, behind, strict=True):
        assert torch.equal(each[end:], exact[end:])


@OURS
def test_no_kernel_of_pytorchs_computes_a_gradient(backend) -> None:
    theirs = {"aten::_flash_attention_backward", "aten::mm", "aten::bmm", "aten::matmul"}
    for kind in KINDS.values():
        for given in (operands(), sequences()):
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                derived(backend, given, values(*given[0].shape, seed=5), **kind)
            names = {event.name for event in seen.events()}
            assert not names & theirs
            assert backend == "triton" or "kernel_twins::attention_backward" in names


# ----------------------------------------------------------------------------------------------------------------------
# Layouts and memory
# ----------------------------------------------------------------------------------------------------------------------

EXPANDED: dict[str, Any] = {
    "a row": lambda x: x[:1, :1, :1].expand(x.shape),
    "a row of each head": lambda x: x[:, :, :1].expand(x.shape),
    "a head": lambda x: x[:, :1].expand(x.shape),
    "expanded": LAYOUTS["expanded"],
}
DOUTS = LAYOUTS | COPIED | EXPANDED | {"a number": lambda x: x[:1, :1, :1, :1].expand(x.shape)}


@OURS
@pytest.mark.parametrize("layout", DOUTS)
def test_any_strides_of_the_results_gradient(backend, layout) -> None:
    given = operands(requires_grad=True)
    out, right = called(backend, given, causal=True)[0], attend(*given, causal=True)[0]
    dout = DOUTS[layout](values(*out.shape, seed=5))
    assert_near(torch.autograd.grad(out, given, dout), torch.autograd.grad(right, given, dout.double()))


@OURS
@pytest.mark.parametrize("layout", EXPANDED)
def test_an_expanded_gradient_of_the_result_is_not_copied(backend, layout) -> None:
    given = leaves_of(operands(2048, 2048, heads=8, kv_heads=8), (False, False, True))
    out, v = called(backend, given)[0], given[2]
    dout = EXPANDED[layout](values(*out.shape, seed=5))
    assert extra_bytes(lambda: torch.autograd.grad(out, v, dout, retain_graph=True)) <= v.nbytes + 2**20


@OURS
@pytest.mark.parametrize("layout", ["tokens first", "packed", "pitched"])
@pytest.mark.parametrize("d", [40, 64, 120, 128])
def test_gradients_lie_as_their_operands(backend, layout, d) -> None:
    given = leaves_of([LAYOUTS[layout](each) for each in operands(d=d)])
    dout = values(*given[0].shape, seed=5)
    found = derived(backend, given, dout, causal=True)
    assert_near(found, torch.autograd.grad(attend(*given, causal=True)[0], given, dout.double()))
    inner = layout != "pitched"
    for each in found:
        assert (each.transpose(1, 2) if inner else each).is_contiguous()


@OURS
@pytest.mark.usefixtures("alone")
def test_heads_that_lie_2_to_the_31_elements_apart(backend) -> None:
    near = *operands(300, 300, batch=1, heads=2, kv_heads=2), values(1, 2, 300, 64, seed=5)
    whole = torch.empty(2**31 + 4 * 300 * 64, dtype=torch.bfloat16, device="cuda")
    far = [whole.as_strided(each.shape, (0, 2**31, 64, 1), 300 * 64 * i).copy_(each) for i, each in enumerate(near)]
    found, right = (
        derived(backend, given[:3], given[3], causal=True, deterministic=True) for given in (far, list(near))
    )
    assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Any of them alone, and the same bits
# ----------------------------------------------------------------------------------------------------------------------


@OURS
@PACKED
@pytest.mark.parametrize("kind", [KINDS[name] for name in ("causal", "all")], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_any_of_the_gradients_alone(backend, packed, kind, deterministic, d) -> None:
    """CUDA's have the same bits as all of them; Triton compiles a kernel for each choice."""
    given = sequences(d) if packed else operands(1000, 1500, d=d)
    leaves = leaves_of(given)
    out, _ = called(backend, leaves, **kind, deterministic=deterministic)
    (dout,) = douts_of(out)
    every = torch.autograd.grad(out, leaves[:3], dout)
    for wanted in SUBSETS[1:]:
        chosen = leaves_of(given, wanted)
        asked = list(itertools.compress(chosen[:3], wanted))
        found = torch.autograd.grad(called(backend, chosen, **kind, deterministic=deterministic)[0], asked, dout)
        right = list(itertools.compress(every, wanted))
        assert_near(found, right)
        if backend == "cuda":
            same = slice(1 if wanted[0] and not deterministic else 0, None)  # dq's sums are of any order
            assert all(torch.equal(*pair) for pair in zip(found[same], right[same], strict=True))


@OURS
def test_nothing_is_kept_for_a_gradient_that_nobody_wants(backend) -> None:
    given = operands(2048, 2048, heads=8, kv_heads=8)
    dout = values(*given[0].shape, seed=5)
    # dq may be summed in fp32.
    for wanted, of_each in (
        ((False, True, True), 1),
        ((False, False, True), 1),
        ((False, True, False), 1),
        ((True, False, False), 3),
    ):
        leaves = leaves_of(given, wanted)
        asked = list(itertools.compress(leaves, wanted))
        out, _ = called(backend, leaves)
        held = extra_bytes(partial(torch.autograd.grad, out, asked, dout, retain_graph=True))
        assert held <= of_each * sum(each.nbytes for each in asked) + 2**20


@OURS
def test_a_thread_that_has_not_used_the_gpu(backend) -> None:
    """Neither autograd's nor the caller's: memory comes from torch's cache, and no call before has set a context."""
    given, dout = leaves_of(operands()), values(2, 4, 130, 64, seed=5)
    right = derived(backend, given, dout, causal=True, deterministic=True)
    with ThreadPoolExecutor(1) as pool:
        call = partial(derived, backend, given, dout, causal=True, deterministic=True)
        assert all(torch.equal(*pair) for pair in zip(pool.submit(call).result(), right, strict=True))


@pytest.fixture(params=["argument", "PyTorch's setting"])
def deterministic(request) -> Any:
    """What a call is told so that its gradient is deterministic."""
    if request.param == "argument":
        yield {"deterministic": True}
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield {}
    finally:
        torch.use_deterministic_algorithms(False)


@OURS
@PACKED
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_deterministic_gradient_has_the_same_bits(backend, packed, d, deterministic) -> None:
    given = sequences(d) if packed else operands(1000, 1500, heads=16, d=d)
    dout = values(*given[0].shape, seed=5)
    first, *others = (derived(backend, given, dout, causal=True, **deterministic) for _ in range(20))
    assert all(torch.equal(*pair) for each in others for pair in zip(first, each, strict=True))


@OURS
@PACKED
def test_gradients_of_keys_and_values_always_have(backend, packed) -> None:
    given = sequences() if packed else operands(1000, 1500, heads=16)
    dout = values(*given[0].shape, seed=5)
    first, *others = (derived(backend, given, dout, causal=True)[1:] for _ in range(20))
    assert all(torch.equal(*pair) for each in others for pair in zip(first, each, strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints, autocast, compilers, graphs
# ----------------------------------------------------------------------------------------------------------------------


@OURS
@PACKED
def test_a_checkpoint_gives_the_same_bits(backend, packed) -> None:
    given = leaves_of(sequences() if packed else operands())
    dout = values(*given[0].shape, seed=5)
    right = derived(backend, given, dout, causal=True, deterministic=True)
    for use_reentrant in (False, True):
        call = lambda *x: called(backend, (*x, *given[3:]), causal=True, deterministic=True)[0]  # noqa: E731
        checkpoint(call, *given[:3], use_reentrant=use_reentrant).backward(dout)
        for each, exact in zip(given[:3], right, strict=True):
            assert torch.equal(each.grad, exact)
            each.grad = None


@OURS
@pytest.mark.parametrize("kind", [KINDS[name] for name in ("causal", "softcap")], ids=str)
def test_gradients_under_autocast_are_those_of_rounded_operands(backend, kind) -> None:
    given = operands(dtype=torch.float32, requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out, lse = called(backend, given, **kind)
    douts = douts_of(out, lse)
    found = torch.autograd.grad((out, lse), given, douts)
    assert {each.dtype for each in found} == {torch.float32}
    rounded = leaves_of([each.bfloat16() for each in given])
    right = torch.autograd.grad(attend(*rounded, **kind), rounded, [each.double() for each in douts])
    assert_near([each.bfloat16() for each in found], right)


@OURS
@PACKED
def test_gradients_are_compiled_without_a_break(backend, packed) -> None:
    torch.compiler.reset()
    given = leaves_of(sequences() if packed else operands())
    right = attend_to_sequences if packed else attend
    compiled = torch.compile(lambda *x: called(backend, (*x, *given[3:]), causal=True), fullgraph=True, dynamic=True)
    for wanted in SUBSETS[1:]:
        for each, is_wanted in zip(given[:3], wanted, strict=True):
            each.requires_grad_(is_wanted)
        leaves = list(itertools.compress(given[:3], wanted))
        (out, lse), exact = compiled(*given[:3]), right(*given, causal=True)
        (dout,) = douts_of(out)
        assert_near((out.detach(), lse.detach()), [each.detach() for each in exact])
        assert_near(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(exact[0], leaves, dout.double()))


@OURS
@PACKED
@pytest.mark.parametrize("kind", [KINDS[name] for name in ("causal", "all")], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_are_captured_and_replayed(backend, packed, kind, deterministic) -> None:
    """Of sequences whose starts have changed since, too, as the GPU alone knows them."""
    given = leaves_of(sequences() if packed else operands())
    douts: list[Any] = []

    def step() -> Any:
        results = called(backend, given, **kind, deterministic=deterministic)
        if not douts:
            douts.extend(douts_of(*results))
        return torch.autograd.grad(results, given[:3], douts)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    ends = [None, ([0, 7, 150, 150, 151, 410], [5, 5, 105, 300, 449, 450])] if packed else [None]
    for starts in ends:
        if starts is not None:
            for each, others in zip(given[3:], starts, strict=True):
                each.copy_(starts_of(others))
        exact = (attend_to_sequences if packed else attend)(*given, **kind)
        douts[1].copy_(douts_of(*exact)[1])
        right = torch.autograd.grad(exact, given[:3], [each.double() for each in douts])
        replayed = []
        for _ in range(3):
            for each in found:
                each.fill_(math.nan)
            graph.replay()
            assert_near(found, right)
            replayed.append([each.clone() for each in found])
        same = slice(0 if deterministic else 1, None)
        assert all(
            torch.equal(*pair) for again in replayed[1:] for pair in zip(again[same], replayed[0][same], strict=True)
        )

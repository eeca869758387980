"""Choices of "auto" that are kept: what makes two calls alike, and when a call is chosen anew."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from kernel_twins.functional import kept  # noqa: E402
from kernel_twins.harness.load import extension  # noqa: E402
from tests.sides import cuda_library  # noqa: E402


@pytest.fixture
def asked():
    """A kept choice, and the calls that it was asked for."""
    cuda_library()
    extension().ask_anew(False)
    calls = []

    def choose(*given):
        calls.append(given)
        return "torch"

    keeping = kept.kept(choose)

    def of(*given) -> bool:
        before = len(calls)
        assert keeping(*given) == "torch"
        return len(calls) > before

    return of


X = torch.zeros(4, 6)
ALIKE = [
    (X, X.clone()),
    ((X, None, 1.5), (X + 1, None, 1.5)),
    ((X, (6,)), (X, [6])),
    ((X, torch.Size([6])), (X, (6,))),
    (torch.nn.Parameter(X), X.clone().requires_grad_()),
    (torch.zeros(8, 8)[4:], torch.zeros(4, 8)),
    ("sum", "".join(["s", "um"])),
]
APART = [
    (X, X.bfloat16()),
    (X, X.t()),
    (X, X[:2]),
    (X, X.clone().requires_grad_()),
    (X, torch.empty(4, 7)[:, :6]),
    (X, torch.empty(25)[1:].view(4, 6)),
    (X, None),
    ((X, 1), (X, 2)),
    ((X, 1), (X, 1.0)),
    ((X, 1), (X, True)),
    ((X, 0.0), (X, -0.0)),
    ((X, (1, 2)), (X, (1,), 2)),
    ((X, X, None), (X, None, X)),
    ((X, "mean"), (X, "none")),
    ((X, "a" * 8), (X, "a" * 9)),
    ((X, torch.float32), (X, torch.float16)),
]


def given(case):
    return case if isinstance(case, tuple) else (case,)


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_calls_that_are_alike_are_chosen_once(asked, one, other) -> None:
    assert asked(*given(one))
    assert not asked(*given(other))
    assert not asked(*given(one))


@pytest.mark.parametrize(("one", "other"), APART)
def test_calls_that_differ_are_chosen_apart(asked, one, other) -> None:
    assert asked(*given(one))
    assert asked(*given(other))
    assert not asked(*given(one))
    assert not asked(*given(other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_autocast_tells_a_call_from_others(asked, device, dtype) -> None:
    assert asked(X)
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        assert asked(X)
        assert not asked(X)
    finally:
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, before)
    assert not asked(X)


def test_a_gradient_that_is_not_recorded_is_not_wanted(asked) -> None:
    leaf = X.clone().requires_grad_()
    assert asked(leaf)
    with torch.no_grad():
        assert asked(leaf)
        assert not asked(X)


def test_tf32_tells_a_call_from_others(asked) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    assert asked(X)
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert asked(X)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert not asked(X)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)
Subclass = type("Subclass", (torch.Tensor,), {})


@pytest.mark.parametrize("around", [Mode, forward_ad.dual_level, nullcontext])
def test_a_call_inside_a_mode_or_a_forward_derivative_is_chosen_anew(asked, around) -> None:
    assert asked(X)
    with around():
        assert [asked(X), asked(X)] == [around is not nullcontext] * 2
    assert not asked(X)


def test_a_call_inside_a_transform_is_chosen_anew(asked) -> None:
    seen = []

    def seeing(x):
        seen.extend([asked(X), asked(x), asked(x)])
        return x.sum()

    asked(X)
    torch.func.vmap(seeing)(X)
    torch.func.grad(seeing)(X)
    assert seen == [True] * 6
    assert not asked(X)


@pytest.mark.parametrize(
    "given",
    [
        object(),
        {1: 2},
        X.as_subclass(Subclass),
        2**70,
        (1, object()),
        X.to_sparse(),
        torch._neg_view(X),
        torch.nested.nested_tensor([X, X[:2]]),
        "\ud800",
        ENDLESS,
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_a_key_cannot_say_is_chosen_anew(asked, given) -> None:
    assert asked(given)
    assert asked(given)


def test_an_error_is_the_callers_and_is_not_kept() -> None:
    cuda_library()
    errors = [ValueError("first"), None]

    def choose(x):
        if error := errors.pop(0):
            raise error
        return "cuda"

    keeping = kept.kept(choose)
    with pytest.raises(ValueError, match="first"):
        keeping(X)
    assert keeping(X) == "cuda"


def test_ever_new_calls_do_not_take_ever_more_memory(asked) -> None:
    assert sum(asked(i) for i in range(5000)) == 5000
    assert not asked(4999)
    assert asked(0)


def test_torch_compile_traces_the_choice_itself() -> None:
    cuda_library()
    keeping = kept.kept(lambda x, dim: "cuda" if x.shape[dim] > 4 else "torch")

    @torch.compile(backend="eager", fullgraph=True)
    def called(x, dim):
        return x + (1 if keeping(x, dim) == "cuda" else 2)

    assert called(X, 1)[0, 0] == 1
    assert called(X, 0)[0, 0] == 2


def test_an_explanation_hears_what_is_chosen_and_ends_the_call(asked) -> None:
    went_on = []
    with kept.explained() as heard:
        asked(X)
        went_on.append(True)
    assert heard.backend == "torch" and not went_on
    assert asked(X)
    assert not asked(X)
    with kept.explained() as heard:
        asked(X)
    assert heard.backend == "torch"
    assert not asked(X)


def test_an_explanation_leaves_calls_of_other_threads_alone(asked) -> None:
    with ThreadPoolExecutor(1) as other, kept.explained() as heard:
        assert other.submit(asked, X).result()
        before = str(heard.backend)
        asked(X)
    assert before == ""
    assert heard.backend == "torch"

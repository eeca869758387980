"""How autograd's graph keeps the CUDA backend's calls: their names, what they save, and when that is given back.

The operators compute on the CPU by PyTorch's own, as in the tests of each function, which have the gradients' values.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests import ways  # noqa: E402
from tests.sides import cuda_library  # noqa: E402

Call = Callable[[Any, Tensor], Tensor]
CALLS: dict[str, Call] = {
    "MatmulBackward": lambda library, x: library.matmul(x, x.mT),
    "LinearBackward": lambda library, x: library.linear(x, x, None, "gelu"),
    "SoftmaxBackward": lambda library, x: library.softmax(x, -1, False),
    "LayerNormBackward": lambda library, x: library.layer_norm_result(x, (8,), None, x[0], 1e-5),
    "RmsNormBackward": lambda library, x: library.add_rms_norm_result(x, x * 2, (8,), x[0], 1e-5)[0],
    "DropoutAddBackward": lambda library, x: library.dropout_add_result(x, x * 2, x[0], 0.0, "silu"),
    "CrossEntropyBackward": lambda library, x: library.cross_entropy_result(x, torch.arange(4), -100, 1, 0.1),
    "ReductionBackward": lambda library, x: library.reduction_nd(x, [0], False, "max"),
    "AttentionBackward": lambda library, x: library.attention_result(
        *(x.view(1, 2, 2, 8) for _ in range(3)), None, None, None, -1, 0, True, 5.0, False
    ),
}


MORE_CALLS: dict[str, Call] = {
    "matmul of a batch": lambda library, x: library.matmul(x.view(2, 2, 8), x.mT),
    "matmul of a batch by a frozen matrix": lambda library, x: library.matmul(x.view(2, 2, 8), x.detach().mT),
    "matmul of a frozen batch": lambda library, x: library.matmul(x.detach().view(2, 2, 8), x.mT),
    "linear with frozen weights": lambda library, x: library.linear(x, x.detach(), None, "gelu"),
    "linear with relu": lambda library, x: library.linear(x, x, x[:, 0], "relu"),
    "linear without an activation": lambda library, x: library.linear(x, x, None, "none"),
    "log_softmax": lambda library, x: library.softmax(x, -1, True),
    "add_layer_norm": lambda library, x: library.add_layer_norm_result(x, x * 2, (8,), x[0], x[1], 1e-5)[0],
    "rms_norm": lambda library, x: library.rms_norm_result(x, (8,), x[0], 1e-5),
    "dropout_add without an activation": lambda library, x: library.dropout_add_result(x, None, x[0], 0.0, "none"),
    "sum": lambda library, x: library.reduction_nd(x, [0], False, "sum"),
}


@pytest.fixture
def library() -> Any:
    """The CUDA backend's operators."""
    return cuda_library()


@pytest.fixture(params=CALLS.items(), ids=lambda item: item[0])
def named(request: pytest.FixtureRequest, library) -> tuple[str, Callable[[Tensor], Tensor]]:
    """What a call is named in the graph, and the call."""
    name, call = request.param
    return name, partial(call, library)


def values() -> Tensor:
    return torch.randn((4, 8), generator=torch.Generator().manual_seed(0)).requires_grad_()


def gradient(out: Tensor, x: Tensor, **options: bool) -> Tensor:
    return torch.autograd.grad(out.square().sum(), x, **options)[0]


def test_a_call_has_its_functions_name(named) -> None:
    name, call = named
    assert call(values()).grad_fn.name() == name


def test_a_graph_is_passed_twice_where_it_is_kept_and_else_once(named) -> None:
    _, call = named
    x = values()
    out = call(x)
    first = gradient(out, x, retain_graph=True)
    assert torch.equal(gradient(out, x), first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradient(out, x)


def test_what_is_saved_passes_the_users_hooks_and_is_noticed_when_overwritten(named) -> None:
    _, call = named
    x = values()
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = call(x)
    torch.testing.assert_close(gradient(out, x), gradient(call(x), x), rtol=0, atol=0)
    assert seen
    out = call(x)
    with torch.no_grad():
        x.zero_()
        out.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), x)


def test_what_is_saved_lives_no_longer_than_its_result(named) -> None:
    """A call that saves its own result must not keep itself alive."""
    _, call = named

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()

    kept: list[weakref.ref[Kept]] = []

    def pack(tensor: Tensor) -> Kept:
        held = Kept(tensor)
        kept.append(weakref.ref(held))
        return held

    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            out = call(values())
        assert all(held() is not None for held in kept)
        del out
        assert [held for held in kept if held() is not None] == []
    finally:
        gc.enable()


class Memory(TorchDispatchMode):
    """Knows the memory of all that operators return in it, and does not keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, operator: Any, _: Any, given: Any = (), options: Any = None) -> Any:
        result = operator(*given, **(options or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self.made.append(StorageWeakRef(each.untyped_storage()))
        return result

    def is_gone(self) -> bool:
        if not all(each.expired() for each in self.made):
            gc.collect()  # cycles of Python's are its own matter
        return all(each.expired() for each in self.made)


@contextmanager
def refusing(number: int) -> Iterator[None]:
    """Of what is saved, the first ``number`` are taken."""
    taken = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal taken
        taken += 1
        if taken > number:
            raise InterruptedError
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda kept: kept):
        yield


def recomputed_and_dropped(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    checkpoint(call, x, use_reentrant=False)


def refused(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """By a hook that has taken none of what is saved, or all but the last."""
    for number in range(4):
        try:
            with refusing(number):
                call(x)
        except InterruptedError:
            continue
        break


WAYS = ways.OF_SAVING | {"checkpoint, dropped": recomputed_and_dropped, "refusing hooks": refused}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("call", (CALLS | MORE_CALLS).values(), ids=CALLS | MORE_CALLS)
def test_no_memory_is_left_behind(library, call, way) -> None:
    """However what is saved is kept, and though hooks throw, as checkpoint's do where they have seen enough."""
    x = values()
    with Memory() as memory, suppress(NotImplementedError):  # as attention's gradient refuses to be differentiated
        way(partial(call, library), x)
    del x
    assert memory.made
    assert memory.is_gone()


def test_gradients_may_come_in_a_batch(named) -> None:
    _, call = named
    x = values()
    out = call(x)
    douts = torch.randn((3, *out.shape), generator=torch.Generator().manual_seed(1))
    (found,) = torch.autograd.grad(out, x, douts, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(
        found, torch.stack([torch.autograd.grad(out, x, d, retain_graph=True)[0] for d in douts])
    )


def test_a_nodes_hook_sees_no_gradient_of_what_was_not_given(library) -> None:
    x = values()
    out = library.layer_norm_result(x, (8,), None, None, 1e-5)
    seen: list[bool] = []
    out.grad_fn.register_hook(lambda given, _: seen.extend(each is not None for each in given))
    out.sum().backward()
    assert seen == [True, False, False, False]


@pytest.mark.parametrize("given", (CALLS | MORE_CALLS).values(), ids=CALLS | MORE_CALLS)
def test_compiled_autograd_takes_a_call(library, given) -> None:
    call = partial(given, library)
    x = values()
    right = gradient(call(x), x)
    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: call(x).square().sum().backward(), backend="eager")()
    assert counters["compiled_autograd"]["captures"] == 1
    torch.testing.assert_close(x.grad, right, rtol=0, atol=0)

"""Building blocks for the contests of ``functions.csv``: calls in every backend, and the expected results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_twins.ops.tensors import DTYPE
from kernel_twins.spec import Case

Operands = tuple[Tensor, ...]
Call = Callable[..., Tensor]
Ours = Callable[[str], Call]  # from a backend to our call in it
Result = Tensor | tuple[Tensor, ...]  # out, or out and the operands' gradients

OURS = ("cuda", "triton", "auto")


@dataclass(frozen=True, slots=True)
class Contest:
    """One call in every backend, how it is timed (``kind``), and the expected result and gradients in fp32.

    For the kind ``backward`` a call runs the forward pass and returns the backward pass to be timed; ``judged`` then
    runs both. If a call's result is random, ``judged`` is the call without randomness.
    """

    kind: str
    function: str
    case: Case
    calls: Mapping[str, Callable[[], Any]]
    expected: tuple[Tensor, ...]
    judged: Mapping[str, Callable[[], Result]] = field(default_factory=dict)


# ----------------------------------------------------------------------------------------------------------------------
# Cases, operands and calls
# ----------------------------------------------------------------------------------------------------------------------


def host_cases(*shape: int, **variant: str) -> Iterator[tuple[Case, bool]]:
    """Cases for the host's time of a function, and whether the operands require gradients."""
    for dtype, grad in (("bf16", False), ("bf16", True), ("fp32", False)):
        yield Case.of(*shape, dtype=dtype, **variant, **({"grad": "yes"} if grad else {})), grad


def matrix(case: Case, seed: int = 0) -> Tensor:
    """A random matrix of the case's first two sizes."""
    source = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(case.shape[:2], generator=source, device="cuda").to(DTYPE[case.dtype])


def by_backend(function: Call, **arguments: Any) -> Ours:
    return lambda backend: partial(function, **arguments, backend=backend)


# ----------------------------------------------------------------------------------------------------------------------
# Contests
# ----------------------------------------------------------------------------------------------------------------------


def host(function: str, case: Case, eager: Call, ours: Ours, operands: Operands) -> Contest:
    return _forward("host", function, case, {"torch": eager, **{backend: ours(backend) for backend in OURS}}, operands)


def forward(function: str, case: Case, eager: Call, ours: Ours, operands: Operands) -> Contest:
    return _forward("forward", function, case, _beside_compiled(eager, ours), operands)


def gpu(function: str, case: Case, eager: Call, ours: Ours, operands: Operands, dout: Tensor | None = None) -> Contest:
    """Forward and backward pass; the result's gradient is random if none is given."""
    return _both(function, case, _beside_compiled(eager, ours), operands, dout)


def backward(function: str, case: Case, eager: Call, ours: Ours, operands: Operands) -> Contest:
    """The backward pass alone; its forward pass runs before and is not timed."""
    calls, dout = _beside_compiled(eager, ours), matrix(case, seed=1)
    both = _both(function, case, calls, operands, dout)

    def prepared(each: Call) -> Callable[[], Result]:
        return partial(_gradients, each(*operands), operands, dout)

    passes = {backend: partial(prepared, each) for backend, each in calls.items()}
    return replace(both, kind="backward", calls=passes, judged=both.calls)


def _beside_compiled(eager: Call, ours: Ours) -> dict[str, Call]:
    torch.compiler.reset()  # else later shapes compile as dynamic, and then not at all
    compiled = torch.compile(eager, fullgraph=True, dynamic=False)
    return {"torch": eager, "compiled": compiled, **{backend: ours(backend) for backend in ("cuda", "triton")}}


def _forward(kind: str, function: str, case: Case, calls: Mapping[str, Call], operands: Operands) -> Contest:
    expected = (calls["torch"](*(operand.detach().float() for operand in operands)),)
    given = {backend: partial(each, *operands) for backend, each in calls.items()}
    return Contest(kind, function, case, given, expected)


def _both(function: str, case: Case, calls: Mapping[str, Call], operands: Operands, dout: Tensor | None) -> Contest:
    dout = matrix(case, seed=1) if dout is None else dout
    wide = tuple(operand.detach().float().requires_grad_() for operand in operands)
    expected = tuple(each.detach() for each in _pass(calls["torch"], wide, dout.float()))
    passes = {backend: partial(_pass, each, operands, dout) for backend, each in calls.items()}
    return Contest("gpu", function, case, passes, expected)


def _pass(function: Call, operands: Operands, dout: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward: the result, and the gradients of those operands that have one."""
    return _gradients(function(*operands), operands, dout)


def _gradients(out: Tensor, operands: Operands, dout: Tensor) -> tuple[Tensor, ...]:
    for operand in operands:
        operand.grad = None
    out.backward(dout)
    return out, *(operand.grad for operand in operands if operand.grad is not None)

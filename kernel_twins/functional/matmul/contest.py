"""``matmul`` and ``linear`` as they are timed beside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

import kernel_twins
from kernel_twins import OPS
from kernel_twins.functional import contests
from kernel_twins.functional.matmul.contest_judge import LinearGradients, product_gradients, product_op
from kernel_twins.functional.matmul.linear import _choose as choose_linear
from kernel_twins.functional.matmul.matmul import _choose as choose_matmul
from kernel_twins.functional.sampled import Calls, Forward
from kernel_twins.ops.activations import ACTIVATIONS
from kernel_twins.ops.tensors import DTYPE
from kernel_twins.spec import Case


def _eager(activation: str) -> contests.Call:
    activate = ACTIVATIONS[activation]

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return activate(functional.linear(x, weight, bias))

    return linear


# ----------------------------------------------------------------------------------------------------------------------
# Chosen cases
# ----------------------------------------------------------------------------------------------------------------------


def _matmul_contests() -> Iterator[contests.Contest]:
    for case, grad in contests.host_cases(256, 256, 256):
        ours = contests.by_backend(kernel_twins.matmul)
        yield contests.host("matmul", case, torch.mm, ours, _operands(case, grad)[:2])  # all are square


def _linear_contests() -> Iterator[contests.Contest]:
    for grad in (False, True):
        case = _case(256, 256, 256, "gelu", grad)
        yield contests.host("linear", case, *_timed("gelu"), _operands(case, grad))
    for grad in (False, True):
        case = _case(4096, 4096, 4096, "gelu", grad)
        yield contests.forward("linear", case, *_timed("gelu"), _operands(case, grad))
    alike = [((4096, 4096, 4096), activation) for activation in ACTIVATIONS]
    for (m, n, k), activation in (*alike, ((8192, 8192, 4096), "gelu"), ((4096, 14336, 4096), "gelu")):
        case = _case(m, n, k, activation)
        yield contests.gpu("linear", case, *_timed(activation), _operands(case, True))


def _case(m: int, n: int, k: int, activation: str, grad: bool = False) -> Case:
    return Case.of(m, n, k, dtype="bf16", act=activation, **({"grad": "yes"} if grad else {}))


def _timed(activation: str) -> tuple[contests.Call, contests.Ours]:
    name = None if activation == "none" else activation
    return _eager(activation), contests.by_backend(kernel_twins.linear, activation=name)


def _operands(case: Case, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x: [M, K], weight: [N, K], bias: [N]; the elements of x @ weight.T have unit variance."""
    m, n, k = case.shape
    source = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=source, device="cuda") * scale
        return values.to(DTYPE[case.dtype]).requires_grad_(grad)

    return normal(m, k), normal(n, k, scale=k**-0.5), normal(n)


CONTESTS = {"matmul": _matmul_contests, "linear": _linear_contests}

# ----------------------------------------------------------------------------------------------------------------------
# Sampled cases
# ----------------------------------------------------------------------------------------------------------------------


def _matmul(case: Case) -> Calls:
    return Calls(
        eager=torch.matmul,
        ours=kernel_twins.matmul,
        chosen=partial(choose_matmul, out_dtype=None),
        forward=partial(Forward, product_op(case), case),
        leaves=(0, 1),
        gradients=product_gradients,
    )


def _linear(case: Case) -> Calls:
    name = case.get("act", "none")
    return Calls(
        eager=_eager(name),
        ours=partial(kernel_twins.linear, activation=name),
        chosen=partial(choose_linear, activation=name),
        forward=partial(Forward, OPS["linear"], case),
        leaves=(0, 1, 2),
        gradients=lambda operands, douts, _: LinearGradients(case, operands, *douts).fault,
    )


CALLS = {"matmul": _matmul, "linear": _linear}

"""``dropout_add`` as it is timed beside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

import kernel_twins
from kernel_twins import OPS
from kernel_twins.functional import contests
from kernel_twins.functional.dropout.dropout import _choose
from kernel_twins.functional.sampled import Backward, Calls, Fault, Forward, Given, Gradient, Operands, narrowed
from kernel_twins.ops.activations import ACTIVATIONS
from kernel_twins.ops.dropout.shared import options
from kernel_twins.spec import Case


def _contests() -> Iterator[contests.Contest]:
    """dropout(gelu(x + bias)) + residual at p = 0.1. It is judged at p = 0, because the masks differ."""
    for case, grad in contests.host_cases(64, 256, act="gelu"):
        x, residual, (bias, *_) = (contests.matrix(case, seed=seed) for seed in range(3))
        operands = tuple(tensor.requires_grad_(grad) for tensor in (x, residual, bias.clone()))
        kept, dropped = (
            contests.host("dropout_add", case, partial(_eager, p=p), contests.by_backend(_ours, p=p), operands)
            for p in (0.0, 0.1)
        )
        yield replace(kept, calls=dropped.calls, judged=kept.calls)


def _eager(x: Tensor, residual: Tensor, bias: Tensor, p: float) -> Tensor:
    return functional.dropout(functional.gelu(x + bias), p) + residual


def _ours(x: Tensor, residual: Tensor, bias: Tensor, p: float, backend: str) -> Tensor:
    return kernel_twins.dropout_add(x, residual, p, bias=bias, activation="gelu", backend=backend)


def _calls(case: Case) -> Calls:
    """Operands are x, residual and bias; the last two if the case has them."""
    p, activation, adds = options(case)["p"], case.get("act", "none"), case.get("residual") == "yes"

    def eager(x: Tensor, residual: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        y = functional.dropout(ACTIVATIONS[activation](x if bias is None else x + bias), p)
        return y if residual is None else y + residual

    def ours(x: Tensor, residual: Tensor | None = None, bias: Tensor | None = None, *, backend: str) -> Tensor:
        return kernel_twins.dropout_add(x, residual, p, bias=bias, activation=activation, backend=backend)

    def chosen(x: Tensor, residual: Tensor | None = None, bias: Tensor | None = None) -> str:
        return _choose(x, residual, bias, activation)

    def inputs(operands: Operands, douts: Operands, out: Operands) -> Operands:
        return douts if activation == "none" else (douts[0], operands[0], *operands[2:])

    gradient = Gradient(OPS["dropout_add_backward"], narrowed(case, "p", "act", "bias"), inputs)
    return Calls(
        eager=eager,
        ours=ours,
        chosen=chosen,
        forward=partial(Forward, OPS["dropout_add"], case),
        leaves=tuple(range(1 + adds + (case.get("bias") == "yes"))),
        gradients=partial(_gradients, gradient, adds),
        backward=gradient,
    )


def _gradients(gradient: Gradient, adds: bool, operands: Operands, douts: Operands, given: Given) -> Fault:
    """The mask must be the first one of seed 0. The residual is added last, so its gradient is the result's."""
    judge = Backward(gradient.op, gradient.case, given)

    def fault(out: Operands, found: Operands) -> str:
        if adds and not torch.equal(found[1], douts[0]):
            return "residual's gradient is another one"
        return judge.fault(out, found[:1] + found[2:] if adds else found)

    return fault


CONTESTS = {"dropout_add": _contests}
CALLS = {"dropout_add": _calls}

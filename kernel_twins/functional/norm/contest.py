"""``layer_norm`` and ``rms_norm`` as they are timed beside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import kernel_twins
from kernel_twins import OPS
from kernel_twins.functional import contests
from kernel_twins.functional.norm.norm import _choose
from kernel_twins.functional.sampled import Backward, Call, Calls, Fault, Forward, Given, Gradient, Operands, narrowed
from kernel_twins.ops.norm.shared import LAYER, RMS, Norm
from kernel_twins.spec import Case, Op

_NORMS = {"layer_norm": LAYER, "rms_norm": RMS}

# ----------------------------------------------------------------------------------------------------------------------
# Chosen cases
# ----------------------------------------------------------------------------------------------------------------------


def _contests(name: str) -> Iterator[contests.Contest]:
    for case, grad in contests.host_cases(64, 256):
        yield contests.host(name, case, *_timed(name, 256), _operands(name, case, grad))
    for m, n in ((16_384, 4_096), (4_096, 4_096), (4_096, 1_024)):
        case = Case.of(m, n, dtype="bf16")
        yield contests.gpu(name, case, *_timed(name, n), _operands(name, case, True))
        if m == 4_096:  # few rows, where the host's time matters
            yield contests.backward(name, case, *_timed(name, n), _operands(name, case, True))


def _timed(name: str, n: int) -> tuple[contests.Call, contests.Ours]:
    def of(module: ModuleType, **backend: str) -> contests.Call:
        norm: contests.Call = getattr(module, name)

        def function(x: Tensor, *affine: Tensor) -> Tensor:
            return norm(x, (n,), *affine, **backend)

        return function

    return of(functional), lambda backend: of(kernel_twins, backend=backend)


def _operands(name: str, case: Case, grad: bool) -> tuple[Tensor, ...]:
    """x: [M, N], weight: [N], about 1, and for layer_norm bias: [N]."""
    weight, *bias = (contests.matrix(Case.of(1, case.shape[1], dtype=case.dtype), seed=seed)[0] for seed in (2, 3))
    vectors = (0.1 * weight + 1, *bias) if _NORMS[name].centered else (0.1 * weight + 1,)
    return tuple(tensor.requires_grad_(grad) for tensor in (contests.matrix(case), *vectors))


CONTESTS = {name: partial(_contests, name) for name in _NORMS}

# ----------------------------------------------------------------------------------------------------------------------
# Sampled cases
# ----------------------------------------------------------------------------------------------------------------------


def _calls(name: str, case: Case) -> Calls:
    """Operands are x, weight, for layer_norm bias, and the residual, as far as the case has them."""
    norm, n, adds = _NORMS[name], case.shape[1], case.get("residual") == "yes"
    vectors = (1 + norm.centered) * (case.get("affine") != "none")

    def split(operands: Operands) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        x, *rest = operands
        return x, tuple(rest[:vectors]), rest[vectors] if adds else None

    def eager(*operands: Tensor) -> Any:
        x, affine, residual = split(operands)
        added = x if residual is None else x + residual
        y = getattr(functional, name)(added, (n,), *affine, eps=norm.eps)
        return (y, added) if adds else y

    def ours(*operands: Tensor, backend: str) -> Any:
        x, affine, residual = split(operands)
        function: Call = getattr(kernel_twins, name)
        return function(x, (n,), *affine, eps=norm.eps, residual=residual, backend=backend)

    def chosen(*operands: Tensor) -> str:
        x, affine, residual = split(operands)
        return _choose(name, x, (n,), affine, residual)

    def inputs(operands: Operands, douts: Operands, out: Operands) -> Operands:
        x, affine, residual = split(operands)
        added = x if residual is None else x + residual
        return douts[0], added, *norm.statistics(added), *affine[:1], *douts[1:]

    gradient = Gradient(OPS[f"{name}_backward"], narrowed(case, "residual", "affine"), inputs)
    return Calls(
        eager=eager,
        ours=ours,
        chosen=chosen,
        forward=partial(Forward, _without_statistics(OPS[name], case), case),
        leaves=tuple(range(1 + vectors + adds)),
        gradients=partial(_gradients, gradient, norm, adds),
        backward=gradient,
    )


def _gradients(gradient: Gradient, norm: Norm, adds: bool, operands: Operands, douts: Operands, given: Given) -> Fault:
    """The statistics are the forward pass's, with its errors. The residual's gradient is x's."""
    op, more = gradient.op, gradient.op.more_references
    more = (norm.computed_dweight, *more[1:]) if more else ()
    judge = Backward(replace(op, reference=norm.computed_dx, more_references=more), gradient.case, given)

    def fault(out: Operands, found: Operands) -> str:
        if adds and not torch.equal(found[-1], found[0]):
            return "residual's gradient is another one"
        return judge.fault(out, found[:-1] if adds else found)

    return fault


def _without_statistics(op: Op, case: Case) -> Op:
    """The operation with only the outputs of its public function: y and, with a residual, the sum."""
    torch_call, adds = op.baselines["torch"], case.get("residual") == "yes"
    assert torch_call is not None

    def exemplar(*inputs: Tensor, **arguments: Any) -> Operands:
        y, *others = torch_call(*inputs, **arguments)
        return (y, others[-1]) if adds else (y,)

    return replace(op, exemplar=exemplar, more_references=op.more_references[-1:] if adds else ())


CALLS = {name: partial(_calls, name) for name in _NORMS}

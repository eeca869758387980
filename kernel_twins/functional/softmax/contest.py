"""``softmax`` and ``log_softmax`` as they are timed beside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

import kernel_twins
from kernel_twins import OPS
from kernel_twins.functional import contests
from kernel_twins.functional.sampled import Backward, Calls, Fault, Forward, Given, Gradient, Operands, narrowed
from kernel_twins.functional.softmax.softmax import _choose
from kernel_twins.spec import Case


def _contests() -> Iterator[contests.Contest]:
    eager, ours = partial(functional.softmax, dim=-1), contests.by_backend(kernel_twins.softmax)
    for case, grad in contests.host_cases(64, 256):
        yield contests.host("softmax", case, eager, ours, (contests.matrix(case).requires_grad_(grad),))
    for m, n in ((16_384, 4_096), (4_096, 1_024)):
        case = Case.of(m, n, dtype="bf16")
        yield contests.gpu("softmax", case, eager, ours, (contests.matrix(case).requires_grad_(),))


def _calls(case: Case) -> Calls:
    log = case.get("log") == "yes"
    gradient = Gradient(OPS["softmax_backward"], narrowed(case, "log"), lambda operands, douts, out: (douts[0], out[0]))

    def gradients(operands: Operands, douts: Operands, _: Given) -> Fault:
        return _OfResult(gradient, case, operands, douts).fault

    return Calls(
        eager=partial(torch.log_softmax if log else torch.softmax, dim=-1),
        ours=partial(kernel_twins.log_softmax if log else kernel_twins.softmax, dim=-1),
        chosen=partial(_choose, dim=-1),
        forward=partial(Forward, OPS["softmax"], case),
        leaves=(0,),
        gradients=gradients,
        backward=gradient,
    )


class _OfResult(Backward):
    """The gradient is judged at the caller's own result, which has been judged before."""

    def __init__(self, gradient: Gradient, case: Case, operands: Operands, douts: Operands) -> None:
        super().__init__(gradient.op, gradient.case, partial(gradient.inputs, operands, douts))
        self._forward = partial(Forward, OPS["softmax"], case, operands)

    def fault(self, out: Operands, gradients: Operands) -> str:
        if self._known is None or not torch.equal(self._known.inputs[1], out[0]):
            if told := self._forward().fault(out):
                return f"the result: {told}"
            self._known = None
        return super().fault(out, gradients)


CONTESTS = {"softmax": _contests}
CALLS = {"softmax": _calls, "log_softmax": _calls}

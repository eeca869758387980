"""``cross_entropy`` and ``cross_entropy_gradient_`` as they are timed beside PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional

import kernel_twins
from kernel_twins import OPS
from kernel_twins.functional import contests
from kernel_twins.functional.loss.cross_entropy import _can_overwrite, _choose, _runs
from kernel_twins.functional.sampled import FP32_LOOP, Backward, Call, Calls, Forward, Gradient, Operands, narrowed
from kernel_twins.ops.in_parts import over_rows
from kernel_twins.ops.loss.shared import log_sums, options
from kernel_twins.spec import Case

# ----------------------------------------------------------------------------------------------------------------------
# Chosen cases
# ----------------------------------------------------------------------------------------------------------------------


def _contests() -> Iterator[contests.Contest]:
    for case, grad in contests.host_cases(64, 256):
        logits = contests.matrix(case).requires_grad_(grad)
        yield contests.host("cross_entropy", case, *_timed(case), (logits,))
    for m, n in ((8_192, 32_768), (1_766, 151_936)):
        case = Case.of(m, n, dtype="bf16")
        logits, dout = contests.matrix(case).requires_grad_(), torch.ones((), device="cuda")
        yield contests.gpu("cross_entropy", case, *_timed(case), (logits,), dout)


def _timed(case: Case) -> tuple[contests.Call, contests.Ours]:
    target = torch.arange(case.shape[0], device="cuda") * 7919 % case.shape[1]
    ours = contests.by_backend(kernel_twins.cross_entropy, target=target)
    return partial(functional.cross_entropy, target=target), ours


CONTESTS = {"cross_entropy": _contests}

# ----------------------------------------------------------------------------------------------------------------------
# Sampled cases
# ----------------------------------------------------------------------------------------------------------------------


def _loss(case: Case) -> Calls:
    arguments = options(case)

    def rows(logits: Tensor, target: Tensor, backend: str) -> Tensor:
        with torch.autocast(logits.device.type):  # autocast returns losses in fp32
            losses: Tensor = kernel_twins.cross_entropy(logits, target, reduction="none", backend=backend, **arguments)
            return losses

    gradient = _gradient(case)
    return Calls(
        eager=partial(functional.cross_entropy, **arguments),
        ours=partial(kernel_twins.cross_entropy, **arguments),
        chosen=partial(_choose, weight=None, reduction="mean"),
        forward=partial(_Judge, case),
        leaves=(0,),
        gradients=gradient.judged,
        backward=gradient,
        rows=rows,
    )


def _loss_and_gradient(case: Case) -> Calls:
    """PyTorch's gradient is a new tensor, ours overwrites the logits."""
    loss = _loss(case)

    def ours(logits: Tensor, target: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        return kernel_twins.cross_entropy_gradient_(logits, target, **options(case), backend=backend), logits

    def chosen(logits: Tensor, target: Tensor) -> str:
        return "cuda" if _can_overwrite(logits) and _runs("cuda", logits.device.index) else "torch"

    def compiled(compiler: Callable[[Call], Call]) -> Call:
        return _differentiated(compiler(loss.eager))

    eager = _differentiated(loss.eager)
    return replace(loss, eager=eager, compiled=compiled, ours=ours, chosen=chosen, leaves=(), in_place=True)


def _differentiated(loss_of: Call) -> Call:
    """A call that returns a function's loss of logits and target, and the gradient by PyTorch's autograd."""

    def both(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = loss_of(leaf, target)
            (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    return both


def _gradient(case: Case) -> Gradient:
    def inputs(operands: Operands, douts: Operands, out: Operands) -> Operands:
        logits, target = operands
        ignore_index = options(case)["ignore_index"]
        lse, _ = over_rows(
            slice(0, case.shape[0]),
            case.shape[1],
            lambda part: log_sums(logits[part].double(), target[part], ignore_index),
        )
        dout = douts[0].float() / (target != ignore_index).sum()
        return logits, target, lse.float(), dout.expand(case.shape[0]).contiguous()

    return Gradient(OPS["cross_entropy_backward"], narrowed(case, "smoothing", "target"), inputs)


class _Judge(Forward):
    """The judge of results: the mean, the gradient if the call returns it, and the rows' losses."""

    def __init__(self, case: Case, operands: Operands) -> None:
        op = OPS["cross_entropy"]
        known = replace(op, reference=lambda case, inputs, rows: (self._rows[0][rows], self._rows[1][rows]))
        super().__init__(known, case, operands)

    def fault(self, results: Operands, *, is_baseline: bool = False) -> str:
        loss, *gradients, rows = results
        return (
            self._mean_fault(loss)
            or super().fault((rows,))
            or (self._of_gradient.fault((), tuple(gradients)) if gradients else "")
        )

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        """The losses in float64 and their terms."""
        return OPS["cross_entropy"].reference(self.case, self.operands, slice(0, self.case.shape[0]))

    def _mean_fault(self, loss: Tensor) -> str:
        """What is wrong with the mean, which must be NaN if all rows are ignored."""
        exact, terms = self._rows
        count = (self.operands[1] != options(self.case)["ignore_index"]).sum()
        mean = exact.sum() / count
        bound = torch.finfo(loss.dtype).eps * mean.abs() + FP32_LOOP * terms.sum() / count
        if bool((loss.double() - mean).abs() <= bound) or bool(loss.isnan() & mean.isnan()):
            return ""
        return f"the loss is {loss.item():.8g}, must be {mean.item():.8g} ± {bound.item():.3g}"

    @cached_property
    def _of_gradient(self) -> Backward:
        gradient, one = _gradient(self.case), torch.ones((), device=self.operands[0].device)
        return Backward(gradient.op, gradient.case, partial(gradient.inputs, self.operands, (one,)))


CALLS = {"cross_entropy": _loss, "cross_entropy_gradient_": _loss_and_gradient}

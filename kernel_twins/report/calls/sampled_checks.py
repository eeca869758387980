"""Whether a public function is right at a sampled case: by the one rule of accuracy, and where no operation has a
reference for its gradient, by a definition here.

A judge is of one set of operands, and answers with what is wrong, empty where nothing is. What float64 makes of the
operands is computed at its first answer, and serves the others where check.py keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernel_twins import OPS
from kernel_twins.harness import check
from kernel_twins.ops.dropout.shared import slope as dropout_slope
from kernel_twins.ops.loss.shared import options
from kernel_twins.ops.norm.shared import Norm
from kernel_twins.report.calls.sampled_calls import NORMS, Calls, Operands, calls, gradient_operands
from kernel_twins.report.calls.sampled_cases import op_of
from kernel_twins.spec import Case, Op

Given = Callable[[Operands], Operands]  # from results, the inputs of the gradient's operation

_CHUNK = 2**26  # elements held in float64 at a time, in each of a few tensors
_FP32_LOOP = 4 * torch.finfo(torch.float32).eps  # of the terms of a sum, as in check.py
# How linear's gradients may err with a smooth activation, see _dz_and_errors. So many independent errors, each within
# its own, come to no more:
_DEVIATIONS = 6.0  # at an element
_RMS = 1.5  # in a row
_BEND = 0.34  # of gelu, gelu_tanh and silu, the largest |z| times the slope's slope


class Forward:
    """Of results. Those of cross_entropy are the mean, the gradient where the call gives it, and the rows' losses."""

    def __init__(self, function: str, case: Case, operands: Operands) -> None:
        self._case, self.operands = case, operands
        self._op = OPS[op_of(function, case)]
        self._problem = check.Problem(self._of_function(), case, operands)

    def fault(self, results: Operands, *, is_baseline: bool = False) -> str:
        if self._op.name == "cross_entropy":
            loss, *gradients, of_rows = results
            return (
                self._mean_fault(loss)
                or self._problem.compare((of_rows,)).reason
                or (self._gradient.fault((), tuple(gradients)) if gradients else "")
            )
        return self._problem.compare(results, is_baseline=is_baseline).reason

    def _of_function(self) -> Op:
        """The operation with the outputs that its public function has."""
        if self._op.name in NORMS:
            return _without_statistics(self._op, self._case)
        if self._op.name == "cross_entropy":
            return replace(
                self._op, reference=lambda case, inputs, rows: (self._losses[0][rows], self._losses[1][rows])
            )
        return self._op

    @cached_property
    def _losses(self) -> tuple[Tensor, Tensor]:
        """The rows', and their terms."""
        return self._op.reference(self._case, self.operands, slice(0, self._case.shape[0]))

    def _mean_fault(self, loss: Tensor) -> str:
        """NaN where all rows are ignored."""
        exact, terms = self._losses
        count = (self.operands[1] != options(self._case)["ignore_index"]).sum()
        mean = exact.sum() / count
        bound = torch.finfo(loss.dtype).eps * mean.abs() + _FP32_LOOP * terms.sum() / count
        if bool((loss.double() - mean).abs() <= bound) or bool(loss.isnan() & mean.isnan()):
            return ""
        return f"the loss is {loss.item():.8g}, must be {mean.item():.8g} ± {bound.item():.3g}"

    @cached_property
    def _gradient(self) -> Backward:
        of, one = calls("cross_entropy", self._case), torch.ones((), device=self.operands[0].device)
        given = partial(gradient_operands, self._case, of, self.operands, (one,))
        return Backward("cross_entropy", self._case, of, self.operands, (one,), given)


class Backward:
    """Of the operands' gradients, given the results of the same caller's forward pass; ``douts`` are their gradients.

    A mask that was drawn must be the first one of seed 0.
    """

    def __init__(self, function: str, case: Case, of: Calls, operands: Operands, douts: Operands, given: Given) -> None:
        self._function, self._case, self._calls = function, case, of
        self._operands, self._douts, self._given = operands, douts, given
        self._known: check.Problem | None = None
        self._of_dz: tuple[Tensor, dict[str, check.Problem]] | None = None

    def fault(self, out: Operands, gradients: Operands) -> str:
        if self._function == "matmul":
            return _fault_of(self._products, gradients)
        if self._function == "linear":
            return self._linear_fault(out, gradients)
        if self._calls.backward is None:
            return _reduction_fault(self._case, self._operands[0], self._douts[0], gradients[0])
        wanted = gradients
        if self._case.get("residual") == "yes":  # whose gradient is x's, or, where it is added last, the result's
            residual = 1 if self._function == "dropout_add" else len(self._operands) - 1
            same = self._douts[0] if self._function == "dropout_add" else gradients[0]
            if not torch.equal(gradients[residual], same):
                return "residual's gradient is another one"
            wanted = tuple(each for index, each in enumerate(gradients) if index != residual)
        of_result = "softmax" in self._function  # the gradient is of the caller's own
        if self._known is None or (of_result and not torch.equal(self._known.inputs[1], out[0])):
            if of_result and (told := Forward(self._function, self._case, self._operands).fault(out)):
                return f"the result: {told}"
            op, case = self._calls.backward
            if self._function in NORMS:
                op = _of_computed_statistics(op, NORMS[self._function])
            self._known = check.Problem(op, case, self._given(out))
        return self._known.compare(wanted).reason

    @cached_property
    def _products(self) -> dict[str, check.Problem]:
        """Gradients of a product are products."""
        (a, b), dout = self._operands, self._douts[0]
        return {"a": self._product(dout, b.t()), "b": self._product(a.t(), dout)}

    def _linear_fault(self, out: Operands, gradients: Operands) -> str:
        """dz is dout, with relu only where the result is above 0; where it is exact, gradients are sums of it."""
        activation = self._case.get("act", "none")
        (x, weight, _), dz = self._operands, self._douts[0]
        if activation not in ("none", "relu"):
            return _smooth_fault(self._case, self._operands, dz, gradients)
        if activation == "relu":
            if told := _side_fault(self._case, self._operands, out[0]):
                return told
            dz = dz.where(out[0] > 0, 0)
        if self._of_dz is None or not torch.equal(self._of_dz[0], dz):
            self._of_dz = None  # which is as large as what takes its place
            columns = Case.of(*dz.shape, dtype=self._case.dtype, axes="0")
            problems = {
                "x": self._product(dz, weight),
                "weight": self._product(dz.t(), x),
                "bias": check.Problem(OPS["reduction_nd"], columns, (dz,)),
            }
            self._of_dz = dz, problems
        return _fault_of(self._of_dz[1], gradients)

    def _product(self, a: Tensor, b: Tensor) -> check.Problem:
        case = Case.of(len(a), b.shape[1], len(b), dtype=self._case.dtype)
        return check.Problem(OPS[op_of("matmul", case)], case, (a, b))


def _side_fault(case: Case, operands: Operands, out: Tensor) -> str:
    """Of relu's result, the caller's own: above 0 where the sum is, and on either side where fp32 cannot tell.

    As of linear itself, a sum may be off by what tensor cores cut off, of which PyTorch's own error tells.
    """
    linear, (x, weight, bias) = OPS["linear"], operands
    before = Case.of(*case.shape, dtype=case.dtype)
    for part in _parts(len(x), max(len(weight), x.shape[1])):
        z, terms = linear.reference(before, operands, part)
        allowed = _FP32_LOOP * terms + 2 * (functional.linear(x[part], weight, bias).double() - z).abs()
        if bool((((out[part] > 0) != (z > 0)) & (z.abs() > allowed)).any()):
            return "the result is on the other side of 0 than its sum"
    return ""


def _fault_of(problems: Mapping[str, check.Problem], gradients: Operands) -> str:
    for (name, problem), gradient in zip(problems.items(), gradients, strict=True):
        if reason := problem.compare((gradient,)).reason:
            return f"{name}'s gradient: {reason}"
    return ""


def _of_computed_statistics(op: Op, norm: Norm) -> Op:
    """A norm's gradient where the statistics are the forward pass's, which may err as it may."""
    more = (norm.computed_dweight, *op.more_references[1:]) if op.more_references else ()
    return replace(op, reference=norm.computed_dx, more_references=more)


def _without_statistics(op: Op, case: Case) -> Op:
    """A norm's operation with the outputs that its public function has: y, and the sum where there is a residual."""
    torch_call, adds = op.baselines["torch"], case.get("residual") == "yes"
    assert torch_call is not None

    def exemplar(*inputs: Tensor, **arguments: Any) -> Operands:
        y, *others = torch_call(*inputs, **arguments)
        return (y, others[-1]) if adds else (y,)

    return replace(op, exemplar=exemplar, more_references=op.more_references[-1:] if adds else ())


# ----------------------------------------------------------------------------------------------------------------------
# Linear with a smooth activation
# ----------------------------------------------------------------------------------------------------------------------


def _smooth_fault(case: Case, operands: Operands, dout: Tensor, gradients: Operands) -> str:
    (x, weight, bias), (dx, dweight, dbias) = operands, gradients
    activation = case.get("act")
    for part in _parts(len(x), max(case.shape[1:])):
        dz, errors = _dz_and_errors(x[part], weight, bias, dout[part], activation)
        if fault := _sums_fault("x", dx[part], dz @ weight.double(), errors.square() @ weight.float().square()):
            return fault
    for part in _parts(len(weight), max(x.shape)):
        dz, errors = (each.t() for each in _dz_and_errors(x, weight[part], bias[part], dout[:, part], activation))
        squares = errors.square()
        fault = _sums_fault("weight", dweight[part], dz @ x.double(), squares @ x.float().square())
        fault = fault or _sums_fault("bias", dbias[None, part], dz.sum(1)[None], squares.sum(1)[None])
        if fault:
            return fault
    return ""


def _dz_and_errors(x: Tensor, weight: Tensor, bias: Tensor, dout: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation's gradient dz, in float64, and by how much an element of PyTorch's and of ours may be off.

    Both are rounded to the operands' dtype, as z is, at which the slope is taken. So dz errs by half an eps of itself,
    and by the slope's slope times half an eps of z, times dout.
    """
    z = functional.linear(x.double(), weight.double(), bias.double())
    slope, dout = dropout_slope(z, activation), dout.double()
    numbers = torch.finfo(x.dtype)
    errors = numbers.eps / 2 * (dout.abs() * (slope.abs() + _BEND) + numbers.tiny)
    return dout * slope, errors.float()


def _sums_fault(name: str, found: Tensor, exact: Tensor, squares: Tensor) -> str:
    """Of sums, rounded once, whose terms' errors have this sum of squares."""
    numbers, usual = torch.finfo(found.dtype), squares.double().sqrt()
    error = (found.double() - exact).abs()
    bound = numbers.eps * (exact.abs() + numbers.tiny) + _DEVIATIONS * usual
    if not bool((within := error <= bound).all()):  # written so that a NaN fails
        at = tuple((~within).nonzero()[0].tolist())
        must = f"{exact[at].item():.8g} ± {bound[at].item():.3g}"
        return f"{name}'s gradient: an element is {found[at].item():.8g}, must be {must}"
    rms, most = _rms(error), numbers.eps * (_rms(exact) + numbers.tiny) + _RMS * _rms(usual)
    if not bool((within := rms <= most).all()):
        row = int((~within).nonzero()[0])
        told = f"{rms[row].item():.3g}, must be up to {most[row].item():.3g}"
        return f"{name}'s gradient: a row has an RMS error of {told}"
    return ""


def _rms(values: Tensor) -> Tensor:
    return values.square().mean(dim=1).sqrt()


# ----------------------------------------------------------------------------------------------------------------------
# Reductions
# ----------------------------------------------------------------------------------------------------------------------


def _reduction_fault(case: Case, x: Tensor, dout: Tensor, dx: Tensor) -> str:
    """Of a mean or a maximum; elements are rounded twice at most."""
    axes = tuple(map(int, case.get("axes")))
    for axis in axes:
        dout = dout.unsqueeze(axis)
    count: Tensor | float = 1.0
    largest = None
    if case.get("kind") == "max":
        largest = x.amax(axes, keepdim=True)
        count = (x == largest).sum(axes, keepdim=True)
        largest = largest.expand(x.shape)
    else:
        for axis in axes:
            count *= x.shape[axis]
    share = (dout.double() / count).expand(x.shape)
    numbers = torch.finfo(dx.dtype)
    for part in _parts(len(x), x[0].numel()):
        exact = share[part]
        if largest is not None:
            exact = exact.where(x[part] == largest[part], 0.0)
        bound = 2 * numbers.eps * (exact.abs() + numbers.tiny)
        if not bool(((dx[part].double() - exact).abs() <= bound).all()):
            return "x's gradient has an element that is off by more than two roundings"
    return ""


def _parts(count: int, length: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, length))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))

"""Judges of the gradients of ``matmul`` and ``linear``, which are products and sums and are judged as such.

With a smooth activation, the activation's gradient is rounded on the way; the errors of sums then add up as independent
errors do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernel_twins import OPS
from kernel_twins.functional.sampled import FP32_LOOP, Fault, Given, Operands, fault_of, parts
from kernel_twins.harness import check
from kernel_twins.ops.activations import slope as slope_of
from kernel_twins.ops.tensors import name_of
from kernel_twins.spec import Case, Op

# The bounds for linear's gradients with a smooth activation, as multiples of the root of the sum of squared errors of
# all terms, see _dz_and_errors.
_DEVIATIONS = 6.0  # for the error of an element
_RMS = 1.5  # for the RMS error of a row
_BEND = 0.34  # the maximum of |z * activation''(z)| for gelu, gelu_tanh and silu


def product_op(case: Case) -> Op:
    return OPS["matmul_fp32" if case.dtype == "fp32" else "matmul_bf16"]


def product_gradients(operands: Operands, douts: Operands, _: Given) -> Fault:
    """The judge of a product's gradients, which are products."""
    (a, b), (dout,) = operands, douts
    problems = {"a": _product(dout, b.t()), "b": _product(a.t(), dout)}
    return lambda _, gradients: fault_of(problems, gradients)


def _product(a: Tensor, b: Tensor) -> check.Problem:
    case = Case.of(len(a), b.shape[1], len(b), dtype=name_of(a.dtype))
    return check.Problem(product_op(case), case, (a, b))


class LinearGradients:
    """The judge of linear's gradients. Without an activation dz is dout; with relu only where the result is above 0."""

    def __init__(self, case: Case, operands: Operands, dout: Tensor) -> None:
        self._case, self._operands, self._dout = case, operands, dout
        self._of_dz: tuple[Tensor, dict[str, check.Problem]] | None = None

    def fault(self, out: Operands, gradients: Operands) -> str:
        activation = self._case.get("act", "none")
        (x, weight, _), dz = self._operands, self._dout
        if activation not in ("none", "relu"):
            return _smooth_fault(self._case, self._operands, dz, gradients)
        if activation == "relu":
            if told := side_fault(self._case, self._operands, out[0]):
                return told
            dz = dz.where(out[0] > 0, 0)
        if self._of_dz is None or not torch.equal(self._of_dz[0], dz):
            self._of_dz = None  # frees its memory before the next one is made
            columns = Case.of(*dz.shape, dtype=self._case.dtype, axes="0")
            problems = {
                "x": _product(dz, weight),
                "weight": _product(dz.t(), x),
                "bias": check.Problem(OPS["reduction_nd"], columns, (dz,)),
            }
            self._of_dz = dz, problems
        return fault_of(self._of_dz[1], gradients)


def side_fault(case: Case, operands: Operands, out: Tensor) -> str:
    """What is wrong with the signs of relu's result: it must be above 0 where the sum is, unless fp32 cannot tell.

    As in linear itself, a sum may also be off by the tensor cores' truncation, which PyTorch's own error measures.
    """
    linear, (x, weight, bias) = OPS["linear"], operands
    before = Case.of(*case.shape, dtype=case.dtype)
    for part in parts(len(x), max(len(weight), x.shape[1])):
        z, terms = linear.reference(before, operands, part)
        allowed = FP32_LOOP * terms + 2 * (functional.linear(x[part], weight, bias).double() - z).abs()
        if bool((((out[part] > 0) != (z > 0)) & (z.abs() > allowed)).any()):
            return "the result is on the other side of 0 than its sum"
    return ""


# ----------------------------------------------------------------------------------------------------------------------
# Linear with a smooth activation
# ----------------------------------------------------------------------------------------------------------------------


def _smooth_fault(case: Case, operands: Operands, dout: Tensor, gradients: Operands) -> str:
    (x, weight, bias), (dx, dweight, dbias) = operands, gradients
    activation = case.get("act")
    for part in parts(len(x), max(case.shape[1:])):
        dz, errors = _dz_and_errors(x[part], weight, bias, dout[part], activation)
        if fault := _sums_fault("x", dx[part], dz @ weight.double(), errors.square() @ weight.float().square()):
            return fault
    for part in parts(len(weight), max(x.shape)):
        dz, errors = (each.t() for each in _dz_and_errors(x, weight[part], bias[part], dout[:, part], activation))
        squares = errors.square()
        fault = _sums_fault("weight", dweight[part], dz @ x.double(), squares @ x.float().square())
        fault = fault or _sums_fault("bias", dbias[None, part], dz.sum(1)[None], squares.sum(1)[None])
        if fault:
            return fault
    return ""


def _dz_and_errors(x: Tensor, weight: Tensor, bias: Tensor, dout: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation's gradient dz in float64, and a bound of each element's error, in PyTorch and in our kernels.

    dz is rounded to the operands' dtype, and so is z, at which the slope is taken. So dz has an error of eps / 2 * |dz|
    + |dout * activation''(z)| * eps / 2 * |z|.
    """
    z = functional.linear(x.double(), weight.double(), bias.double())
    slope, dout = slope_of(z, activation), dout.double()
    numbers = torch.finfo(x.dtype)
    errors = numbers.eps / 2 * (dout.abs() * (slope.abs() + _BEND) + numbers.tiny)
    return dout * slope, errors.float()


def _sums_fault(name: str, found: Tensor, exact: Tensor, squares: Tensor) -> str:
    """What is wrong with sums, rounded once; ``squares`` are the sums of their terms' squared errors."""
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

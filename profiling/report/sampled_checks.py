"""Whether a public function is right at a sampled case: by the one rule of accuracy, and where no operation has a
reference for its gradient, by a definition here. Each answers with what is wrong, empty where nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import kernel_twins
from kernel_twins import OPS, dropout, losses
from kernel_twins._profiling.report.sampled_calls import NORMS, Calls, Operands, gradient_operands
from kernel_twins._profiling.report.sampled_cases import op_of
from kernel_twins.check import compare
from kernel_twins.norms import Norm
from kernel_twins.spec import Case, Op

_CHUNK = 2**26  # elements held in float64 at a time, in each of a few tensors
_FP32_LOOP = 4 * torch.finfo(torch.float32).eps  # of the terms of a sum, as in check.py
_LIMIT = (
    0.03  # of a row's norm: what is rounded to bf16 on the way errs by 0.4 %, a row without one of its tiles by 9 %
)


def forward_fault(function: str, case: Case, operands: Operands, results: Operands, backend: str) -> str:
    """Of a call that gave these results; a mask that was drawn must be the first one of seed 0."""
    op = OPS[op_of(function, case)]
    if function.startswith("cross_entropy"):
        loss, *gradient = results
        fault = _loss_fault(case, operands, loss, backend)
        return fault or (_loss_gradient_fault(case, operands, gradient[0]) if gradient else "")
    if op.name in NORMS:
        op = _without_statistics(op, case)
    return compare(op, case, operands, results).reason


def backward_fault(
    function: str, case: Case, calls: Calls, operands: Operands, douts: Operands, out: Operands, gradients: Operands
) -> str:
    """Of the operands' gradients, given the results of the forward pass and their gradients."""
    if function == "matmul":
        return _product_fault(case, operands, douts[0], gradients)
    if function == "linear":
        return _linear_fault(case, operands, douts[0], gradients)
    if calls.backward is None:
        return _reduction_fault(case, operands[0], douts[0], out[0], gradients[0])
    # A residual's gradient is x's, or, where it is added last, the result's.
    residual = {"dropout_add": 1}.get(function, len(operands) - 1) if case.get("residual") == "yes" else None
    wanted = tuple(gradient for index, gradient in enumerate(gradients) if index != residual)
    if residual is not None:
        same = douts[0] if function == "dropout_add" else gradients[0]
        if not torch.equal(gradients[residual], same):
            return "residual's gradient is another one"
    op, backward_case = calls.backward
    if function in NORMS:
        op = _of_computed_statistics(op, NORMS[function])
    return compare(op, backward_case, gradient_operands(case, calls, operands, douts, out), wanted).reason


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


def _loss_fault(case: Case, operands: Operands, loss: Tensor, backend: str) -> str:
    """Of a mean; and of the rows' losses, which the same call gives without the mean, under autocast unrounded."""
    op, options = OPS["cross_entropy"], losses.options(case)
    exact, terms = op.reference(case, operands, slice(0, case.shape[0]))
    count = (operands[1] != options["ignore_index"]).sum()
    mean = exact.sum() / count
    bound = torch.finfo(loss.dtype).eps * mean.abs() + _FP32_LOOP * terms.sum() / count
    if not bool((loss.double() - mean).abs() <= bound):
        return f"the loss is {loss.item():.8g}, must be {mean.item():.8g} ± {bound.item():.3g}"
    with torch.autocast(operands[0].device.type):
        of_rows = kernel_twins.cross_entropy(*operands, reduction="none", backend=backend, **options)
    return compare(op, case, operands, (of_rows,)).reason


def _loss_gradient_fault(case: Case, operands: Operands, gradient: Tensor) -> str:
    from kernel_twins._profiling.report.sampled_calls import calls

    of = calls("cross_entropy", case)
    assert of.backward is not None
    one = torch.ones((), device=gradient.device)
    op, backward_case = of.backward
    return compare(op, backward_case, gradient_operands(case, of, operands, (one,), ()), (gradient,)).reason


def _product_fault(case: Case, operands: Operands, dout: Tensor, gradients: Operands) -> str:
    """Gradients of a product are products."""
    (m, n, k), (a, b) = case.shape, operands
    op = OPS[op_of("matmul", case)]
    products = (("a", (m, k, n), (dout, b.t())), ("b", (k, n, m), (a.t(), dout)))
    for (name, shape, given), gradient in zip(products, gradients, strict=True):
        if reason := compare(op, Case.of(*shape, dtype=case.dtype), given, (gradient,)).reason:
            return f"{name}'s gradient: {reason}"
    return ""


def _linear_fault(case: Case, operands: Operands, dout: Tensor, gradients: Operands) -> str:
    """Rows against float64, by their norms: on the way PyTorch and we round what comes out of the activation."""
    (x, weight, bias), (dx, dweight, dbias) = operands, gradients
    wide = weight.double()
    exact_dweight, exact_dbias = torch.zeros_like(wide), torch.zeros_like(bias, dtype=torch.float64)
    for part in _parts(len(x), max(case.shape[1:])):
        some = x[part].double()
        slope = dropout.slope(functional.linear(some, wide, bias.double()), case.get("act", "none"))
        dz = dout[part].double() * slope
        if fault := _rows_fault("x", dx[part], dz @ wide):
            return fault
        exact_dweight.addmm_(dz.t(), some)
        exact_dbias += dz.sum(0)
    for part in _parts(*weight.shape):
        if fault := _rows_fault("weight", dweight[part], exact_dweight[part]):
            return fault
    return _rows_fault("bias", dbias[None], exact_dbias[None])


def _rows_fault(name: str, found: Tensor, exact: Tensor) -> str:
    """A row that is small beside the others is measured by these: an activation's slope may be near 0 for all of it."""
    sizes = exact.norm(dim=1)
    share = ((found.double() - exact).norm(dim=1) / torch.maximum(sizes, sizes.square().mean().sqrt())).nan_to_num()
    finite = bool(found.isfinite().all())
    if finite and bool((share <= _LIMIT).all()):
        return ""
    off = f"{100 * share.max().item():.3g} %" if finite else "infinity or NaN"
    return f"{name}'s gradient has a row that is off by {off}, the limit is {100 * _LIMIT:g} % of its norm"


def _reduction_fault(case: Case, x: Tensor, dout: Tensor, out: Tensor, dx: Tensor) -> str:
    """Of a mean or a maximum; elements are rounded twice at most."""
    axes = tuple(map(int, case.get("axes")))
    for axis in axes:
        dout, out = dout.unsqueeze(axis), out.unsqueeze(axis)
    count: Tensor | float = 1.0
    if case.get("kind") == "max":
        count = (x == out).sum(axes, keepdim=True)
    else:
        for axis in axes:
            count *= x.shape[axis]
    share = (dout.double() / count).expand(x.shape)
    numbers = torch.finfo(dx.dtype)
    for part in _parts(len(x), x[0].numel()):
        exact = share[part]
        if case.get("kind") == "max":
            exact = exact.where(x[part] == out.expand(x.shape)[part], 0.0)
        bound = 2 * numbers.eps * (exact.abs() + numbers.tiny)
        if not bool(((dx[part].double() - exact).abs() <= bound).all()):
            return "x's gradient has an element that is off by more than two roundings"
    return ""


def _parts(count: int, length: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, length))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))

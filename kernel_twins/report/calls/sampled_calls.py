"""The public functions at a sampled case: as PyTorch computes them, as we do, and as other libraries' kernels do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import kernel_twins
from kernel_twins import OPS
from kernel_twins.functional.dropout.dropout import _choose as choose_dropout
from kernel_twins.functional.loss.cross_entropy import _can_overwrite
from kernel_twins.functional.loss.cross_entropy import _choose as choose_cross_entropy
from kernel_twins.functional.loss.cross_entropy import _runs as runs_cross_entropy
from kernel_twins.functional.matmul.linear import _choose as choose_linear
from kernel_twins.functional.matmul.matmul import _choose as choose_matmul
from kernel_twins.functional.norm.norm import _choose as choose_norm
from kernel_twins.functional.reduction.reduction import _choose as choose_reduction
from kernel_twins.functional.softmax.softmax import _choose as choose_softmax
from kernel_twins.ops.activations import ACTIVATIONS
from kernel_twins.ops.dropout.shared import options as dropout_options
from kernel_twins.ops.loss.shared import log_sums, over_rows
from kernel_twins.ops.loss.shared import options as loss_options
from kernel_twins.ops.norm.shared import LAYER, RMS, Norm
from kernel_twins.spec import Case, Op

Operands = tuple[Tensor, ...]  # the inputs of the operation, in its order
Function = Callable[..., Any]  # of operands: a result, or several


@dataclass(frozen=True, slots=True)
class Calls:
    """A public function at a case, called with the operands of the operation.

    ``ours`` takes ``backend`` besides; ``chosen`` is the backend that "auto" takes. ``leaves`` are the operands that
    have gradients. ``backward`` is the operation of the gradient and its case, where there is one.
    """

    eager: Function
    ours: Function
    chosen: Callable[..., str]
    leaves: tuple[int, ...]
    backward: tuple[Op, Case] | None = None


def calls(function: str, case: Case) -> Calls:
    """Of a function's name and one of its cases."""
    made: Calls = globals()[f"_{function.rstrip('_')}"](case)
    return made


def _matmul(case: Case) -> Calls:
    return Calls(torch.matmul, kernel_twins.matmul, partial(choose_matmul, out_dtype=None), (0, 1))


def _linear(case: Case) -> Calls:
    name = case.get("act", "none")

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ACTIVATIONS[name](functional.linear(x, weight, bias))

    return Calls(
        eager, partial(kernel_twins.linear, activation=name), partial(choose_linear, activation=name), (0, 1, 2)
    )


def _softmax(case: Case) -> Calls:
    log = case.get("log") == "yes"
    eager = partial(torch.log_softmax if log else torch.softmax, dim=-1)
    ours = partial(kernel_twins.log_softmax if log else kernel_twins.softmax, dim=-1)
    variant = {"log": "yes"} if log else {}
    return Calls(eager, ours, partial(choose_softmax, dim=-1), (0,), _backward("softmax", case, variant))


_log_softmax = _softmax


def _norm(name: str, norm: Norm, case: Case) -> Calls:
    """Operands are x, weight and, of layer_norm, bias; then the residual; of these, those that the case has."""
    n, adds, weighted = case.shape[1], case.get("residual") == "yes", case.get("affine") != "none"
    vectors = (1 + norm.centered) * weighted

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
        function: Function = getattr(kernel_twins, name)
        return function(x, (n,), *affine, eps=norm.eps, residual=residual, backend=backend)

    def chosen(*operands: Tensor) -> str:
        x, affine, residual = split(operands)
        return choose_norm(name, x, (n,), affine, residual)

    variant = {key: case.get(key) for key in ("residual", "affine") if case.get(key)}
    leaves = tuple(range(1 + vectors + adds))
    return Calls(eager, ours, chosen, leaves, _backward(name, case, variant))


NORMS = {"layer_norm": LAYER, "rms_norm": RMS}
_layer_norm, _rms_norm = (partial(_norm, name, norm) for name, norm in NORMS.items())


def _cross_entropy(case: Case) -> Calls:
    options = loss_options(case)
    eager = partial(functional.cross_entropy, **options)
    ours = partial(kernel_twins.cross_entropy, **options)
    chosen = partial(choose_cross_entropy, weight=None, reduction="mean")
    variant = {key: case.get(key) for key in ("smoothing", "target") if case.get(key)}
    return Calls(eager, ours, chosen, (0,), _backward("cross_entropy", case, variant))


def _cross_entropy_gradient(case: Case) -> Calls:
    """The loss and the gradient: PyTorch's beside the logits, ours in their place."""
    separate = _cross_entropy(case)

    def ours(logits: Tensor, target: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        loss = kernel_twins.cross_entropy_gradient_(logits, target, **loss_options(case), backend=backend)
        return loss, logits

    def chosen(logits: Tensor, target: Tensor) -> str:
        return "cuda" if _can_overwrite(logits) and runs_cross_entropy("cuda", logits.device.index) else "torch"

    return replace(separate, eager=loss_and_gradient(separate.eager), ours=ours, chosen=chosen, leaves=())


def loss_and_gradient(loss_of: Function) -> Function:
    """Of logits and target: what PyTorch's autograd makes of a function of these."""

    def both(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = loss_of(leaf, target)
            (gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), gradient

    return both


def _dropout_add(case: Case) -> Calls:
    """Operands are x and, as far as the case has them, residual and bias."""
    p, activation = dropout_options(case)["p"], case.get("act", "none")

    def eager(x: Tensor, residual: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        y = functional.dropout(ACTIVATIONS[activation](x if bias is None else x + bias), p)
        return y if residual is None else y + residual

    def ours(x: Tensor, residual: Tensor | None = None, bias: Tensor | None = None, *, backend: str) -> Tensor:
        return kernel_twins.dropout_add(x, residual, p, bias=bias, activation=activation, backend=backend)

    def chosen(x: Tensor, residual: Tensor | None = None, bias: Tensor | None = None) -> str:
        return choose_dropout(x, residual, bias)

    leaves = tuple(range(1 + (case.get("residual") == "yes") + (case.get("bias") == "yes")))
    variant = {key: case.get(key) for key in ("p", "act", "bias") if case.get(key)}
    return Calls(eager, ours, chosen, leaves, _backward("dropout_add", case, variant))


def _reduction(case: Case) -> Calls:
    kind, axes = case.get("kind"), tuple(map(int, case.get("axes")))
    name = {"max": "amax"}.get(kind, kind)
    dim: Any = (axes[0] if len(axes) == 1 else None) if kind == "argmax" else axes
    eager, ours = (partial(getattr(module, name), dim=dim) for module in (torch, kernel_twins))
    leaves = () if kind == "argmax" else (0,)
    return Calls(eager, ours, partial(choose_reduction, kind=kind), leaves)


_sum = _mean = _amax = _argmax = _reduction


def _backward(op: str, case: Case, variant: dict[str, str]) -> tuple[Op, Case]:
    return OPS[f"{op}_backward"], Case.of(*case.shape, dtype=case.dtype, **variant)


def gradient_operands(case: Case, of: Calls, operands: Operands, douts: Operands, out: Operands) -> Operands:
    """The inputs of the gradient's operation: from a call's operands and results, and the gradients of these."""
    assert of.backward is not None  # or there is no such operation
    op = of.backward[0].name.removesuffix("_backward")
    if op == "softmax":
        return douts[0], out[0]
    if op == "dropout_add":
        return douts if case.get("act", "none") == "none" else (douts[0], operands[0], *operands[2:])
    if op == "cross_entropy":
        logits, target = operands
        options = loss_options(case)
        ignored = target == options["ignore_index"]
        lse, _ = over_rows(
            slice(0, case.shape[0]),
            case.shape[1],
            lambda part: log_sums(logits[part].double(), target[part], options["ignore_index"]),
        )
        dout = douts[0].float() / (~ignored).sum()
        return logits, target, lse.float(), dout.expand(case.shape[0]).contiguous()
    x = operands[0] + operands[-1] if case.get("residual") == "yes" else operands[0]
    weight = () if case.get("affine") == "none" else operands[1:2]
    return douts[0], x, *NORMS[op].statistics(x), *weight, *douts[1:]

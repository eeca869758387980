"""``kernel_twins.cross_entropy`` and its gradient in place: by the last step of a ladder, or by PyTorch."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.nn import functional

from kernel_twins.errors import UnavailableError
from kernel_twins.functional.backends import (
    BACKENDS,
    Operator,
    constant,
    cuda_operator,
    expected,
    is_on_gpu,
    is_static,
    is_transformed,
    refuse_gradients,
    register_vmap,
    require_gpu,
    runs_of,
    triton_side,
)
from kernel_twins.functional.expected import pitch_of, rows
from kernel_twins.functional.kept import COPIED, EMPTY, NO_PLAIN, TRANSFORMED, kept, left
from kernel_twins.functional.loss.shared import (
    REDUCTIONS,
    backward_batching_rule,
    batching_rule,
    has_rows_apart,
    in_place_batching_rule,
    weighted,
)
from kernel_twins.functional.rows import rows_of
from kernel_twins.ops.tensors import DTYPE, require_device

_TARGET_DTYPES = (torch.int64, torch.uint8)  # those that PyTorch takes for classes
_INTEGERS = (int, torch.SymInt, numbers.Integral)  # isinstance tries them in order, and the last is slow

_cuda_operator, _no_cuda = cuda_operator("cross_entropy_result")
_cuda_gradient, _ = cuda_operator("cross_entropy_gradient_")


def cross_entropy(
    input: Tensor,  # noqa: A002  # torch's name
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """``log(sum(exp(input))) - input[target]`` over the classes, as torch.nn.functional.cross_entropy of class indices.

    input is (N, C), (C,) or (N, C, d1, ...), float32, bfloat16 or float16, with any strides; target has its shape
    without C and is int64, or int32, which is first copied into int64. No probability is stored: the backward pass
    keeps input itself and one number a row. input is copied only if classes are not contiguous or rows are not equally
    far apart, as with a d1. ``weight``, (C,), holds a factor for the rows of each class; a mean is divided by the sum
    of these factors. With "cuda" and "triton" it is PyTorch that multiplies rows' losses, and label_smoothing must then
    be 0. Only PyTorch takes probabilities as target.

    The loss has input's dtype, or float32 under CUDA's autocast, which does not cast input. It is computed in fp32 and
    summed in a fixed order. Rows with the target ``ignore_index`` do not count, whatever they hold; the mean of no rows
    is NaN, as PyTorch's. There are backward gradients of any order, but no forward mode.

    On a GPU, a target that is no class makes its row's loss and gradient NaN, and a mean or sum, too; if "auto" takes
    PyTorch for a mean or sum, it makes the gradient of every row NaN. With backend="torch" PyTorch's kernel aborts the
    process. On a CPU PyTorch raises IndexError.

    ``backend``: "cuda", "triton", "torch", or "auto": the one that this GPU's committed times let expect to be the
    fastest, interpolated between rows of like number, length and layout, with the backward pass where input requires
    grad. It is "cuda" if there are none. Inside torch.compile it is PyTorch unless ours is expected to be twice as fast
    as what Inductor makes of it alone. Outside "auto" takes PyTorch, whose targets it has to check in many small
    kernels, only for torch.func's transforms, for input that would be copied, for a weight, and for arguments that the
    others refuse: other dtypes, probabilities, tensors on a CPU, and empty ones. Of the transforms the others take
    vmap, with the rows of all examples in one call.

    TypeError or ValueError names the argument at fault; UnavailableError says what a backend lacks.
    """
    _require_smoothing(label_smoothing)
    target = _as_classes(target)
    automatic = backend == "auto"
    if automatic:
        backend = _kept(input, target, weight, reduction, label_smoothing > 0)
    if backend == "torch":
        options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        return _by_torch(input, target, weight, options, any_target=automatic)
    if backend == "cuda":
        if _cuda_operator is None:
            raise UnavailableError(_no_cuda)
        _require(input, target, ignore_index, reduction, backend)
        if weight is not None:
            return _weighted(input, target, weight, ignore_index, reduction, label_smoothing, backend)
        loss: Tensor
        try:
            loss = _cuda_operator(input, target, ignore_index, REDUCTIONS[reduction], label_smoothing)
        except RuntimeError:
            refuse_gradients("kernel_twins.cross_entropy", input)
            raise
        return loss
    if backend == "triton":
        of_triton = _by_triton()
        _require(input, target, ignore_index, reduction, backend)
        if weight is not None:
            return _weighted(input, target, weight, ignore_index, reduction, label_smoothing, backend)
        return of_triton(input, target, ignore_index, reduction, label_smoothing)
    raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")


def cross_entropy_gradient_(
    input: Tensor,  # noqa: A002  # torch's name
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Returns the loss of ``cross_entropy``, and overwrites input with the loss's gradient with respect to input.

    It is for training steps that do not use the logits again: logits and gradient, each as large as a batch times a
    vocabulary, then share one tensor. ``reduction`` is "mean" or "sum". input's classes must be contiguous, and its
    rows equally far apart. It is not differentiable, so input must not require grad while gradients are recorded::

        with torch.no_grad():
            loss = kernel_twins.cross_entropy_gradient_(logits, target)
        logits_of_the_model.backward(logits)

    where ``logits = logits_of_the_model.detach()``. All else is as in ``cross_entropy``. "torch" computes gradients by
    autograd; "auto" takes it on a CPU, for other strides, and if target is neither int64 nor int32. Under vmap there is
    one gradient for each example, and a second tensor of that size for a while.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}, must be mean or sum: of rows' losses there is no one gradient")
    if torch.is_grad_enabled() and isinstance(input, Tensor) and input.requires_grad:
        raise RuntimeError(
            "input requires grad, and cross_entropy_gradient_ overwrites it without a derivative: call it under "
            "torch.no_grad(), or with input.detach()"
        )
    _require_smoothing(label_smoothing)
    target = _as_classes(target)
    automatic = backend == "auto"
    if automatic:
        backend = _kept_in_place(input, target)
    if backend == "torch":
        options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
        return _gradient_by_torch(input, target, options, any_target=automatic)
    if backend == "cuda":
        if _cuda_gradient is None:
            raise UnavailableError(_no_cuda)
        _require(input, target, ignore_index, reduction, backend)
        return _cuda_gradient(input, target, ignore_index, REDUCTIONS[reduction], label_smoothing)
    if backend == "triton":
        of_triton = _by_triton()
        _require(input, target, ignore_index, reduction, backend)
        return of_triton(input, target, ignore_index, reduction, label_smoothing, in_place=True)
    raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")


@triton_side
def _by_triton() -> Operator:
    from kernel_twins.functional.loss import triton_cross_entropy

    return triton_cross_entropy.cross_entropy


def _weighted(
    logits: Tensor,
    target: Tensor,
    weight: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    backend: str,
) -> Tensor:
    """The loss with weights of classes, from rows' losses by a kernel."""
    if label_smoothing:
        raise ValueError(
            f"label_smoothing is {label_smoothing}, must be 0.0 with a weight for backend={backend!r}: "
            f"pass backend='torch'"
        )
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"weight is a {type(weight).__name__}, must be a torch.Tensor or None: "
            f"call torch.as_tensor(weight, device=input.device)"
        )
    require_device("weight", weight, "input", logits)
    n = logits.shape[min(1, logits.dim() - 1)] if logits.dim() else 0
    if weight.shape != (n,):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, must have ({n},): one factor for each class of input"
        )
    if backend == "cuda":
        try:
            losses, *_ = torch.ops.kernel_twins.cross_entropy.default(
                logits, target, ignore_index, REDUCTIONS["none"], 0.0, True
            )
        except RuntimeError:
            refuse_gradients("kernel_twins.cross_entropy", logits)
            raise
    else:
        losses = _by_triton()(logits, target, ignore_index, "none", 0.0, fp32_loss=True)
    loss = weighted(losses, target, weight, ignore_index, reduction)
    return loss if logits.is_cuda and torch.is_autocast_enabled("cuda") else loss.to(logits.dtype)


def _as_classes(target: Tensor) -> Tensor:
    """Classes in int32 as int64, which all kernels read, and PyTorch's too."""
    return target.long() if isinstance(target, Tensor) and target.dtype == torch.int32 else target


def _can_overwrite(logits: Tensor) -> bool:
    """Whether our kernels can read the logits without a copy, and overwrite them."""
    if not is_on_gpu(logits) or logits.dtype not in DTYPE.values() or logits.dim() == 0 or logits.numel() == 0:
        return False
    return has_rows_apart(logits)


def _by_torch(
    logits: Tensor, target: Tensor, weight: Tensor | None, options: dict[str, Any], any_target: bool
) -> Tensor:
    """PyTorch's loss. With ``any_target`` a target that is no class gives NaN on a GPU, instead of PyTorch's abort."""
    if not (
        any_target and is_on_gpu(logits) and is_on_gpu(target) and logits.dim() > 0 and target.dtype in _TARGET_DTYPES
    ):
        return functional.cross_entropy(logits, target, weight, **options)
    target = target.long()
    n = logits.shape[min(1, logits.dim() - 1)]
    no_class = ((target < 0) | (target >= n)) & (target != options["ignore_index"])
    known = 0 if n > 0 else options["ignore_index"]  # without classes every row must be ignored
    loss = functional.cross_entropy(logits, target.masked_fill(no_class, known), weight, **options)
    wrong = no_class if options["reduction"] == "none" else no_class.any()
    return loss * torch.where(wrong, math.nan, 1.0).to(loss.dtype)  # so that gradients are NaN, too


def _gradient_by_torch(logits: Tensor, target: Tensor, options: dict[str, Any], any_target: bool) -> Tensor:
    if not isinstance(logits, Tensor):
        raise TypeError(f"input is a {type(logits).__name__}, must be a torch.Tensor: call torch.as_tensor(input)")
    if not logits.is_floating_point():
        raise TypeError(f"input is {logits.dtype}, must be a floating-point dtype: call input.to(...)")

    def loss_of(logits: Tensor) -> Tensor:
        return _by_torch(logits, target, None, options, any_target)

    loss: Tensor
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or maybe_current_level() is not None:
        # None of these records autograd's own graph. torch.func records one, by the same formulas; elsewhere that would
        # slow the host down.
        with torch.inference_mode(False), torch.no_grad():
            gradient, loss = torch.func.grad_and_value(loss_of)(logits)
    else:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = loss_of(leaf)
            (gradient,) = torch.autograd.grad(loss, leaf)
    logits.copy_(gradient)
    return loss.detach()


def _require_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(
            f"label_smoothing is {label_smoothing}, must be from 0 to 1: the share of a target that all classes get"
        )


def _require(logits: Tensor, target: Tensor, ignore_index: int, reduction: str, backend: str) -> None:
    """TypeError or ValueError for arguments that our kernels do not take."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, must be one of {', '.join(REDUCTIONS)}")
    if not isinstance(target, Tensor):
        raise TypeError(
            f"target is a {type(target).__name__}, must be a torch.Tensor of torch.int64: call torch.as_tensor(target)"
        )
    if target.is_floating_point():
        raise TypeError(
            f"target is {target.dtype}, must be torch.int64, classes and not their probabilities, for "
            f"backend={backend!r}: pass backend='torch'"
        )
    if not isinstance(ignore_index, _INTEGERS):
        raise TypeError(f"ignore_index is {ignore_index!r}, must be an integer: pass the class that is to be ignored")
    if backend == "cuda":
        require_gpu("input", logits, backend)


# ----------------------------------------------------------------------------------------------------------------------
# backend="auto"
# ----------------------------------------------------------------------------------------------------------------------


def _choose(logits: Tensor, target: Tensor, weight: object, reduction: str, smoothed: bool = False) -> str:
    """The backend for this call. PyTorch gets calls with wrong arguments, since users know its error messages.

    A loss that is ``smoothed`` is chosen apart: it is another kernel, which a capture may not compile.
    """
    if not is_on_gpu(logits) or not is_on_gpu(target) or target.device != logits.device:
        return left(NO_PLAIN)
    if weight is not None:
        return left("a weight of the classes is PyTorch's in one pass")
    if logits.dtype not in DTYPE.values() or target.dtype != torch.int64 or reduction not in REDUCTIONS:
        return left(NO_PLAIN)
    dim = 0 if logits.dim() == 1 else 1
    if logits.dim() == 0 or target.shape != (*logits.shape[:dim], *logits.shape[dim + 1 :]):
        return left(NO_PLAIN)
    device = logits.device.index
    if is_transformed():
        return left(TRANSFORMED)
    differentiated = logits.requires_grad and torch.is_grad_enabled()
    tracing = torch.compiler.is_compiling()
    if tracing and not is_static(logits):
        return _any_choice(device, differentiated) if logits.dim() <= 2 else "torch"
    if not tracing and torch._C._len_torch_dispatch_stack() > 0:  # sizes may be symbols
        return "cuda" if logits.dim() <= 2 and _runs("cuda", device) else "torch"
    return _choice(tuple(logits.shape), logits.stride(), logits.dtype, device, differentiated, tracing)


_kept = kept(_choose)


@constant
def _any_choice(device: int, differentiated: bool) -> str:
    """The choice in a trace with sizes that are symbols."""
    return expected("cross_entropy", None, device, _runs, differentiated=differentiated, traced=True)


@constant
def _choice(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
    differentiated: bool,
    traced: bool = False,
) -> str:
    dim = 0 if len(shape) == 1 else 1
    if 0 in shape:
        return left(EMPTY)
    if rows_of(torch.empty_strided(shape, strides, device="meta"), dim) is None:
        return left(COPIED)
    n = shape[dim]
    problem = rows(math.prod(shape) // n, n, pitch_of(shape, strides, n, (dim,)), dtype.itemsize)
    # "auto" asks PyTorch for targets that are no class, in many small kernels, which Inductor makes one of.
    return expected(
        "cross_entropy",
        problem,
        device,
        _runs,
        differentiated=differentiated,
        over_torch=not traced,
        traced=traced,
    )


def _choose_in_place(logits: Tensor, target: Tensor) -> str:
    """The backend for a gradient that overwrites the logits: ours, where it can be."""
    if not isinstance(target, Tensor) or target.dtype != torch.int64 or not _can_overwrite(logits):
        return left(NO_PLAIN)
    return "cuda" if _runs("cuda", logits.device.index) else "torch"


_kept_in_place = kept(_choose_in_place)


_runs = runs_of(_cuda_operator, "cross_entropy", "cross_entropy_backward")
if _cuda_operator is not None:
    _library = torch.ops.kernel_twins
    _both = _library.cross_entropy.default, _library.cross_entropy_backward.default
    register_vmap("cross_entropy", batching_rule)
    register_vmap("cross_entropy_backward", backward_batching_rule)
    torch.library.register_vmap("kernel_twins::cross_entropy_gradient_", in_place_batching_rule(*_both))

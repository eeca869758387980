"""``kernel_twins.dropout_add``: by the last step of a ladder, or by PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernel_twins.errors import UnavailableError
from kernel_twins.functional.backends import (
    BACKENDS,
    constant,
    cuda_operator,
    expected,
    is_on_gpu,
    is_static,
    is_transformed,
    refuse_gradients,
    register_vmap,
    require_gpu,
    require_tensors,
    runs_of,
    triton_side,
)
from kernel_twins.functional.dropout.shared import batching_rule
from kernel_twins.functional.expected import pitch_of, rows
from kernel_twins.functional.kept import EMPTY, NO_PLAIN, TRANSFORMED, kept, left
from kernel_twins.functional.rows import one_by_one
from kernel_twins.ops.activations import ACTIVATIONS
from kernel_twins.ops.tensors import DTYPE

_DTYPES = tuple(DTYPE.values())


def dropout_add(
    x: Tensor,
    residual: Tensor | None = None,
    p: float = 0.5,
    training: bool = True,
    *,
    bias: Tensor | None = None,
    activation: str = "none",
    backend: str = "auto",
) -> Tensor:
    """``dropout(activation(x + bias), p, training) + residual`` in one pass over memory; no mask is stored.

    x has any shape and strides, residual has x's shape, bias has the size of x's last dimension. ``activation`` is
    none, relu, gelu (exact), gelu_tanh or silu. All tensors share one dtype, float32, bfloat16 or float16; the result
    has x's shape and dtype. The CUDA and Triton backends compute it in fp32, round once, and return a new contiguous
    tensor. PyTorch's result has the strides that its operations give it, and is x itself if there is nothing to do, as
    in F.dropout. Autocast changes nothing, as for PyTorch's operations.

    Masks come from the GPU's default generator: torch.manual_seed repeats them, and each replay of a graph draws new
    ones. Both backends draw the same masks, except Triton under graph capture or torch.compile; F.dropout draws others.
    A dropped element is 0 whatever it was; F.dropout multiplies, and makes NaN of infinities. A ``p`` of 0 or 1, or
    ``training=False``, draws nothing. The backward pass draws the mask again. There are backward gradients of any
    order, but no forward mode; bias's gradient is summed in a fixed order.

    ``backend``: "cuda", "triton", "torch", or "auto": the one that this GPU's committed times let expect to be the
    fastest, interpolated between rows of like number, length and layout, with the backward pass where x requires grad.
    It is "cuda" if there are none. Inside torch.compile it is PyTorch unless ours is expected to be twice as fast as
    what Inductor makes of it alone. "auto" takes PyTorch for torch.func's transforms and for arguments that the others
    refuse: other or mixed dtypes, operands to be broadcast, tensors on a CPU, and empty ones. Under torch.func.vmap the
    others take randomness="different" only.

    TypeError or ValueError names the argument at fault; UnavailableError says what a backend lacks.
    """
    try:
        is_right = 0 <= p <= 1 and activation in ACTIVATIONS
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors raise RuntimeError
        is_right = False
    if not is_right:
        require_options(p, activation)
    p = float(p) if training else 0.0
    if backend == "auto":
        backend = _kept(x, residual, bias, activation)
    if backend == "cuda":
        if _cuda_operator is None:
            raise UnavailableError(_no_cuda)
        require_gpu("x", x, backend)
        try:
            out: Tensor = _cuda_operator(x, residual, bias, p, activation)
        except RuntimeError:  # the dispatcher raises it, too
            require_tensors(residual, None, bias)
            refuse_gradients("kernel_twins.dropout_add", x, residual, bias)
            raise
        return out
    if backend == "triton":
        return _by_triton()(x, residual, bias, p, activation)
    if backend == "torch":
        y = functional.dropout(ACTIVATIONS[activation](x if bias is None else x + bias), p)
        return y if residual is None else y + residual
    raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")


@triton_side
def _by_triton() -> Callable[[Tensor, Tensor | None, Tensor | None, float, str], Tensor]:
    from kernel_twins.functional.dropout import triton_dropout

    return triton_dropout.dropout_add


def require_options(p: float, activation: str) -> None:
    """TypeError or ValueError if p is no number from 0 to 1, or the activation is unknown."""
    share = "from 0 to 1: the share of elements that are dropped"
    try:
        is_share = 0 <= p <= 1
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"p is a {type(p).__name__}, must be a number {share}") from error
    if not is_share:
        raise ValueError(f"p is {p}, must be {share}")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        *most, last = ACTIVATIONS
        raise ValueError(f"activation is {activation!r}, must be {', '.join(most)} or {last}: apply others before")


# ----------------------------------------------------------------------------------------------------------------------
# backend="auto"
# ----------------------------------------------------------------------------------------------------------------------


def _choose(x: Tensor, residual: Tensor | None, bias: Tensor | None, activation: str = "none") -> str:
    """The backend for this call. PyTorch gets calls with wrong arguments, since users know its error messages."""
    if not is_on_gpu(x) or x.dtype not in _DTYPES:
        return left(NO_PLAIN)
    dtype, device = x.dtype, x.device
    for each, shape in ((residual, x.shape), (bias, x.shape[-1:])):
        if each is not None and not (
            is_on_gpu(each) and each.dtype == dtype and each.device == device and each.shape == shape and each.dim() > 0
        ):
            return left(NO_PLAIN)
    if is_transformed():
        return left(TRANSFORMED)
    differentiated = x.requires_grad and torch.is_grad_enabled()
    tracing = torch.compiler.is_compiling()
    if tracing and not is_static(x):
        return _any_choice(device.index, differentiated)
    if not tracing and torch._C._len_torch_dispatch_stack() > 0:  # sizes may be symbols
        return "cuda" if _runs("cuda", device.index) else "torch"
    adds, shifts = residual is not None, bias is not None
    return _choice(tuple(x.shape), x.stride(), adds, shifts, activation, dtype, device.index, differentiated, tracing)


_kept = kept(_choose)


@constant
def _any_choice(device: int, differentiated: bool) -> str:
    """The choice in a trace with sizes that are symbols."""
    return expected("dropout_add", None, device, _runs, differentiated=differentiated, traced=True)


@constant
def _choice(
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    adds: bool,
    shifts: bool,
    activation: str,
    dtype: torch.dtype,
    device: int,
    differentiated: bool,
    traced: bool = False,
) -> str:
    if not sizes or 0 in sizes:
        return left(EMPTY)
    n = sizes[-1]
    options = ["residual.yes"] * adds + ["bias.yes"] * shifts + [f"act.{activation}"] * (activation != "none")
    pitch = pitch_of(sizes, strides, n, (len(sizes) - 1,))
    problem = rows(math.prod(sizes) // n, n, pitch, dtype.itemsize, options)
    return expected("dropout_add", problem, device, _runs, differentiated=differentiated, traced=traced)


# ----------------------------------------------------------------------------------------------------------------------
# The CUDA side
# ----------------------------------------------------------------------------------------------------------------------

_cuda_operator, _no_cuda = cuda_operator("dropout_add_result")
_runs = runs_of(_cuda_operator, "dropout_add", "dropout_add_backward")
if _cuda_operator is not None:
    register_vmap("dropout_add", batching_rule)
    register_vmap("dropout_add_backward", one_by_one)

"""``kernel_twins.layer_norm`` and ``kernel_twins.rms_norm``: by the last step of a ladder, or by PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional

from kernel_twins.errors import UnavailableError
from kernel_twins.functional.backends import (
    BACKENDS,
    HALF,
    Operator,
    as_numbers,
    constant,
    cuda_operator,
    expected,
    is_differentiated,
    is_on_gpu,
    is_static,
    narrowed,
    refuse_gradients,
    register_vmap,
    require_gpu,
    require_tensors,
    runs,
    triton_side,
)
from kernel_twins.functional.expected import pitch_of, rows
from kernel_twins.functional.kept import EMPTY, NO_PLAIN, TRANSFORMED, WIDENED, kept, left
from kernel_twins.functional.norm.shared import Affine, Result, batching_rule
from kernel_twins.functional.rows import one_by_one
from kernel_twins.ops.tensors import DTYPE
from kernel_twins.spec import Backend

Shape = int | Sequence[int]

_DTYPES = tuple(DTYPE.values())
_EPS = torch.finfo(torch.float32).eps  # PyTorch's default for rms_norm, also for narrower dtypes


@overload
def layer_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: None = None,
    backend: str = "auto",
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    backend: str = "auto",
) -> Result:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimensions, as torch's layer_norm.

    ``normalized_shape`` holds their sizes, or is the size of the last one. weight and bias have that shape. With a
    ``residual`` of x's shape, the norm is that of x + residual, rounded to x's dtype, and the result is (y, added).

    All tensors share one dtype, float32, bfloat16 or float16; float32 weights of a half-precision x are rounded to x's
    dtype, and their gradients are float32 (backend="torch" of rms_norm, and PyTorch on a CPU, read them as they are).
    x and residual have any strides. Results have x's shape and dtype, are computed in fp32, and are contiguous from the
    CUDA and Triton backends; PyTorch's have the strides that its operations give them. x and residual are copied only
    if their rows are not contiguous, or not equally far apart. Under CUDA's autocast the result is float32, as
    PyTorch's. There are backward gradients of any order, but no forward mode; weight's and bias's are summed in a fixed
    order.

    ``backend``: "cuda", "triton", "torch", or "auto": the one that this GPU's committed times let expect to be the
    fastest, interpolated between rows of like number, length and layout, with the backward pass where x requires grad.
    It is "cuda" if there are none. Inside torch.compile it is PyTorch unless ours is expected to be twice as fast as
    what Inductor makes of it alone. "auto" takes PyTorch for half precision under autocast, for torch.func's
    derivatives, and for arguments that the others refuse: other or mixed dtypes, a residual to be broadcast, tensors on
    a CPU, and empty ones.

    TypeError or ValueError names the argument at fault; UnavailableError says what a backend lacks.
    """
    return _norm("layer_norm", x, normalized_shape, (weight, bias), eps, residual, backend)


@overload
def rms_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: None = None,
    offset: float = 0.0,
    backend: str = "auto",
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor,
    offset: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
    backend: str = "auto",
) -> Result:
    """``x / sqrt(mean(x * x) + eps) * weight`` over the last dimensions, as torch's rms_norm; else as ``layer_norm``.

    An ``eps`` of None is float32's, also for narrower dtypes, as in PyTorch. Autocast changes nothing here.

    ``offset`` is added to weight, as models need whose weight is kept as a distance from 1. The sum is computed in fp32
    in each call, and rounded to x's dtype; its gradient is weight's.
    """
    if offset:
        if weight is None:
            raise ValueError(f"offset is {offset}, must be 0.0 without a weight: pass one, such as zeros")
        weight = weight + offset
    return _norm("rms_norm", x, normalized_shape, (weight,), eps, residual, backend)


def _norm(
    name: str, x: Tensor, shape: Shape, affine: Affine, eps: float | None, residual: Tensor | None, backend: str
) -> Result:
    if isinstance(shape, int):
        shape = (shape,)
    if not (_widens(name, x) or _takes_wide_weights(name, x, backend)):
        affine = narrowed(x, *affine)
    if backend == "auto":
        backend = _kept(name, x, shape, affine, residual)
    if residual is not None and is_on_gpu(x) and _widens(name, x):
        # The sum has the operands' dtype, and the norm is float32, as PyTorch's.
        added = x + residual
        return _norm(name, added, shape, affine, eps, None, backend), added  # type: ignore[return-value]
    if backend == "cuda":
        if not _CUDA:
            raise UnavailableError(_no_cuda)
        require_gpu("x", x, backend)
        operator, add_operator = _CUDA[name]
        eps = _EPS if eps is None else eps
        try:
            if residual is None:
                return operator(x, shape, *affine, eps)
            return add_operator(x, residual, shape, *affine, eps)
        except RuntimeError:  # the dispatcher raises it, too
            require_tensors(residual, *affine)
            refuse_gradients(f"kernel_twins.{name}", x, residual, *affine)
            raise
    if backend == "triton":
        return _by_triton()(name, x, residual, shape, affine, _EPS if eps is None else eps)
    if backend == "torch":
        added = x if residual is None else x + residual
        y = getattr(functional, name)(added, shape, *affine, eps)
        return y if residual is None else (y, added)
    raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")


@triton_side
def _by_triton() -> Callable[[str, Tensor, Tensor | None, Sequence[int], Affine, float], Result]:
    from kernel_twins.functional.norm import triton_norm

    return triton_norm.norm


def _takes_wide_weights(name: str, x: Tensor, backend: str) -> bool:
    """Whether this is PyTorch's call that multiplies float32 weights in fp32, whatever x's dtype."""
    if backend in ("cuda", "triton"):
        return False
    return (backend == "torch" and name == "rms_norm") or not (isinstance(x, Tensor) and x.is_cuda)


def _widens(name: str, x: Tensor) -> bool:
    """Whether autocast makes x on a GPU wider, as it does for PyTorch's layer_norm."""
    return name == "layer_norm" and torch.is_autocast_enabled("cuda") and isinstance(x, Tensor) and x.dtype in HALF


# ----------------------------------------------------------------------------------------------------------------------
# backend="auto"
# ----------------------------------------------------------------------------------------------------------------------


def _choose(name: str, x: Tensor, shape: Sequence[int], affine: Affine, residual: Tensor | None) -> str:
    """The backend for this call. PyTorch gets calls with wrong arguments, since users know its error messages."""
    if not is_on_gpu(x):
        return left(NO_PLAIN)
    dtype, device = x.dtype, x.device
    if dtype not in _DTYPES:
        return left(NO_PLAIN)
    if _widens(name, x):
        return left(WIDENED)
    for each in (*affine, residual):
        if each is not None and not (is_on_gpu(each) and each.dtype == dtype and each.device == device):
            return left(NO_PLAIN)
    if residual is not None and residual.shape != x.shape:
        return left(NO_PLAIN)
    if is_differentiated():
        return left(TRANSFORMED)
    differentiated = x.requires_grad and torch.is_grad_enabled()
    tracing = torch.compiler.is_compiling()
    if tracing and not is_static(x):
        return _any_choice(name, device.index, differentiated)
    if not tracing and torch._C._len_torch_dispatch_stack() > 0:  # sizes may be symbols
        return "cuda" if _runs(name, "cuda", device.index) else "torch"
    plain, adds = len(affine) == 0 or affine[0] is None, residual is not None
    shape = as_numbers(tuple(shape)) if tracing else tuple(shape)
    return _choice(name, tuple(x.shape), x.stride(), shape, plain, adds, dtype, device.index, differentiated, tracing)


_kept = kept(_choose)


@constant
def _any_choice(name: str, device: int, differentiated: bool) -> str:
    """The choice in a trace with sizes that are symbols."""
    return expected(name, None, device, partial(_runs, name), differentiated=differentiated, traced=True)


@constant
def _choice(
    name: str,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    shape: tuple[int, ...],
    plain: bool,
    adds: bool,
    dtype: torch.dtype,
    device: int,
    differentiated: bool,
    traced: bool = False,
) -> str:
    if not shape or sizes[-len(shape) :] != shape:
        return left(NO_PLAIN)
    if 0 in sizes:
        return left(EMPTY)
    n = math.prod(shape)
    pitch = pitch_of(sizes, strides, n, range(len(sizes) - len(shape), len(sizes)))
    options = ["affine.none"] * plain + ["residual.yes"] * adds
    problem = rows(math.prod(sizes) // n, n, pitch, dtype.itemsize, options)
    return expected(name, problem, device, partial(_runs, name), differentiated=differentiated, traced=traced)


@constant
def _runs(name: str, backend: Backend, device: int) -> bool:
    """Whether a backend is installed and has steps for this GPU, at any length of rows."""
    if backend == "cuda" and not _CUDA:
        return False
    return runs(backend, (name, f"{name}_backward"), device)


# ----------------------------------------------------------------------------------------------------------------------
# The CUDA side
# ----------------------------------------------------------------------------------------------------------------------

_found, _no_cuda = cuda_operator("layer_norm_result")
_CUDA: dict[str, tuple[Operator, Callable[..., tuple[Tensor, Tensor]]]] = {}  # without a residual and with one
if _found is not None:
    for _name in ("layer_norm", "rms_norm"):
        _without, _with = (getattr(torch.ops.kernel_twins, f"{each}_result") for each in (_name, f"add_{_name}"))
        _CUDA[_name] = _without.default, _with.default
        register_vmap(_name, partial(batching_rule, rows=1))
        register_vmap(f"add_{_name}", partial(batching_rule, rows=2))
        register_vmap(f"{_name}_backward", one_by_one)

"""``kernel_twins.sum``, ``mean``, ``amax`` and ``argmax`` over any axes: by the last step, or by PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from kernel_twins.errors import UnavailableError
from kernel_twins.functional.backends import (
    BACKENDS,
    HALF,
    as_numbers,
    batches,
    constant,
    cuda_operator,
    expected,
    in_dtype,
    is_differentiated,
    is_on_gpu,
    is_static,
    is_transformed,
    refuse_gradients,
    register_vmap,
    require_gpu,
    runs_of,
    triton_side,
)
from kernel_twins.functional.expected import reduced
from kernel_twins.functional.kept import EMPTY, NO_PLAIN, TRANSFORMED, WIDENED, kept, left
from kernel_twins.functional.reduction.shared import axes_of, batching_rule, gradient_batching_rule
from kernel_twins.ops.reduction.shared import MOST_AXES
from kernel_twins.ops.tensors import DTYPE

Dims = int | Sequence[int] | None

_cuda_operator, _no_cuda = cuda_operator("reduction_nd")
_PYTORCHS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "argmax": torch.argmax,
}

_NAMES = {"sum": "sum", "mean": "sum", "max": "amax", "argmax": "argmax"}  # in fastest.json, as declared


def sum(  # noqa: A001
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, backend: str = "auto", dtype: torch.dtype | None = None
) -> Tensor:
    """The sum over one dimension, several, or all (``dim=None``) of a tensor of up to five dimensions, as torch.sum.

    x is float32, bfloat16 or float16 with any strides, and is never copied. It is summed in fp32, and the result has
    its dtype (under CUDA's autocast float32, as PyTorch's). With a ``dtype``, one of these three, x is first cast to
    it, and may be of any; the result has it, also under autocast, and x's gradient has x's. Every call gives the same
    bits. There are backward gradients of any order, but no forward mode. x's gradient is an expanded view of out's, as
    PyTorch's: what writes into it in place must clone it first. A leaf's ``.grad`` is always a copy.

    ``backend``: "cuda", "triton", "torch", or "auto": the one that this GPU's committed times let expect to be the
    fastest, interpolated between reductions of like sizes, axes and layout, with the backward pass where x requires
    grad. It is "cuda" if there are none. Inside torch.compile it is PyTorch unless ours is expected to be twice as fast
    as what Inductor makes of it alone. "auto" takes PyTorch for arguments that the others refuse: other dtypes, tensors
    on a CPU, empty ones, and those of more than five dimensions (a batch of torch.func.vmap counts as one). It also
    takes PyTorch for half precision under autocast or to be cast to float32, forward mode, and torch.func's
    derivatives.

    TypeError, ValueError or IndexError names the argument at fault; UnavailableError says what a backend lacks.
    """
    return _reduced(x, dim, keepdim, backend, "sum", dtype)


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False, *, backend: str = "auto") -> Tensor:
    """The mean, as torch.mean; under autocast it keeps x's dtype, all else as ``sum``.

    The gradient has the same values as PyTorch's, but is a view as ``sum``'s is, where PyTorch's has memory of its own.
    """
    return _reduced(x, dim, keepdim, backend, "mean")


def amax(x: Tensor, dim: int | Sequence[int] = (), keepdim: bool = False, *, backend: str = "auto") -> Tensor:
    """The maximum, or NaN if there is one, as torch.amax. Equal maxima share its gradient evenly. Else as ``mean``.

    IndexError if there are no elements.
    """
    return _reduced(x, dim, keepdim, backend, "max")


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False, *, backend: str = "auto") -> Tensor:
    """The index of the maximum along ``dim``, or in the flattened x without one, as torch.argmax: int64.

    Of equal maxima the first counts. NaN is larger than any number; of several the first counts. All else as ``amax``.
    """
    return _reduced(x, dim, keepdim, backend, "argmax")


def _reduced(x: Tensor, dim: Dims, keepdim: bool, backend: str, kind: str, dtype: torch.dtype | None = None) -> Tensor:
    if backend == "auto":
        backend = _kept(x, kind, dim, dtype)
    if dtype is not None and backend != "torch":
        return in_dtype(lambda x: _reduced(x, dim, keepdim, backend, kind), x, dtype, backend)
    if backend == "torch":
        return _PYTORCHS[kind](x, dim, keepdim) if dtype is None else _PYTORCHS[kind](x, dim, keepdim, dtype=dtype)
    dims = () if dim is None else (dim,) if isinstance(dim, int) else _dims(dim, kind)
    if backend == "cuda":
        if _cuda_operator is None:
            raise UnavailableError(_no_cuda)
        require_gpu("x", x, backend)
        try:
            return _cuda_operator(x, dims, keepdim, kind)
        except RuntimeError:
            refuse_gradients(f"kernel_twins.{_PYTORCHS[kind].__name__}", x)
            raise
    if backend == "triton":
        return _by_triton()(x, dims, keepdim, kind)
    raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")


@triton_side
def _by_triton() -> Callable[[Tensor, Sequence[int], bool, str], Tensor]:
    from kernel_twins.functional.reduction import triton_reduction

    return triton_reduction.reduction


def _dims(dim: Any, kind: str) -> tuple[int, ...]:
    """A tuple of a ``dim`` that is no plain int: of several dimensions, which argmax refuses, or a NumPy integer."""
    if not isinstance(dim, (tuple, list)):
        with contextlib.suppress(TypeError):
            return (index(dim),)
    if kind == "argmax":
        raise TypeError(f"dim is {dim!r}, must be an int or None for argmax: make several one, with x.flatten(...)")
    try:
        return tuple(map(index, dim))
    except TypeError:
        raise TypeError(f"dim is {dim!r}, must be an int, a tuple of them or None: pass -1 for the last one") from None


def _choose(x: Tensor, kind: str, dim: Dims = None, wanted: torch.dtype | None = None) -> str:
    """The backend for this call. PyTorch gets calls with wrong arguments, since users know its error messages."""
    if not is_on_gpu(x) or (wanted or x.dtype) not in DTYPE.values() or x.dim() > MOST_AXES:
        return left(NO_PLAIN)
    if kind == "sum" and x.dtype in HALF and (wanted == torch.float32 or torch.is_autocast_enabled("cuda")):
        return left(WIDENED)
    if is_transformed() and (is_differentiated() or x.dim() + batches() > MOST_AXES):  # a batch adds an axis
        return left(TRANSFORMED)
    device = x.device.index
    # A sum's gradient is a view, without a kernel, and argmax has none.
    differentiated = kind in ("mean", "max") and x.requires_grad and torch.is_grad_enabled()
    tracing = torch.compiler.is_compiling()
    if tracing and not is_static(x):
        return _any_choice(kind, dim is None, device, differentiated)
    if not tracing and torch._C._len_torch_dispatch_stack() > 0:  # sizes may be symbols
        return "cuda" if _runs("cuda", device) else "torch"
    dims = tuple(dim) if isinstance(dim, (list, torch.Size)) else dim
    dims = as_numbers(dims) if tracing else dims
    return _choice(kind, tuple(x.shape), x.stride(), dims, wanted or x.dtype, device, differentiated, tracing)


_kept = kept(_choose)


@constant
def _any_choice(kind: str, no_dim: bool, device: int, differentiated: bool) -> str:
    """The choice in a trace with sizes that are symbols."""
    needs_ours = kind == "max" and no_dim
    return expected(
        _NAMES[kind], None, device, _runs, differentiated=differentiated, over_torch=needs_ours, traced=True
    )


@constant
def _choice(
    kind: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dim: Any,
    dtype: torch.dtype,
    device: int,
    differentiated: bool,
    traced: bool = False,
) -> str:
    if 0 in shape:
        return left(EMPTY)
    try:
        axes = axes_of(() if dim is None else _dims(dim, kind), len(shape))
    except (TypeError, ValueError, IndexError, RuntimeError):  # the backend says what is wrong with it
        return "cuda" if _runs("cuda", device) else "torch"
    no_dim = kind == "max" and dim is None  # which torch.amax refuses
    problem = reduced(shape, strides, axes, dtype.itemsize)
    return expected(
        _NAMES[kind], problem, device, _runs, differentiated=differentiated, over_torch=no_dim, traced=traced
    )


_runs = runs_of(_cuda_operator, "reduction_nd")
if _cuda_operator is not None:
    register_vmap("reduction_nd", batching_rule)
    if cuda_operator("amax_backward")[0]:  # an extension from before it has the gradient in PyTorch's operations
        register_vmap("amax_backward", gradient_batching_rule)

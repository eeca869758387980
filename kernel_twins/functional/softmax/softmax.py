"""``kernel_twins.softmax`` and ``kernel_twins.log_softmax``: by the last step of a ladder, or by PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernel_twins.errors import UnavailableError
from kernel_twins.functional.backends import (
    BACKENDS,
    HALF,
    as_numbers,
    constant,
    cuda_operator,
    expected,
    in_dtype,
    is_differentiated,
    is_on_gpu,
    is_static,
    refuse_gradients,
    register_vmap,
    require_gpu,
    runs_of,
    triton_side,
)
from kernel_twins.functional.expected import pitch_of, rows
from kernel_twins.functional.kept import COPIED, EMPTY, NO_PLAIN, TRANSFORMED, WIDENED, kept, left
from kernel_twins.functional.rows import counted, rows_of
from kernel_twins.functional.softmax.shared import batching_rule
from kernel_twins.ops.tensors import DTYPE

_cuda_operator, _no_cuda = cuda_operator("softmax")
_runs = runs_of(_cuda_operator, "softmax", "softmax_backward")
if _cuda_operator is not None:
    register_vmap("softmax", partial(batching_rule, names=("x",)))
    register_vmap("softmax_backward", partial(batching_rule, names=("dout", "y")))


def softmax(x: Tensor, dim: int = -1, backend: str = "auto", *, dtype: torch.dtype | None = None) -> Tensor:
    """``exp(x - max) / sum(exp(x - max))`` along one dimension of a tensor of any rank, as torch.softmax.

    x is float32, bfloat16 or float16, with any strides. The result has its shape and dtype (under CUDA's autocast
    float32, as PyTorch's) and is computed in fp32. With a ``dtype``, one of these three, x is first cast to it, and may
    be of any; the result has it, also under autocast, and x's gradient has x's. It is contiguous if ``dim`` is the last
    dimension. For another dimension the CUDA and Triton backends write the rows along ``dim`` one after the other, and
    return a view with ``dim`` back in its place: nothing is copied, but ``view`` may need ``contiguous()`` first. x is
    copied only if its rows are not contiguous, or not equally far apart. There are backward gradients of any order, but
    no forward mode.

    ``backend``: "cuda", "triton", "torch", or "auto": the one that this GPU's committed times let expect to be the
    fastest, interpolated between rows of like number, length and layout, with the backward pass where x requires grad.
    It is "cuda" if there are none. Inside torch.compile it is PyTorch unless ours is expected to be twice as fast as
    what Inductor makes of it alone. "auto" takes PyTorch where that needs less work: another dimension than the last if
    x would be copied, half precision under autocast, forward mode, torch.func's derivatives, and float16 to be cast to
    float32. It also takes PyTorch for arguments that the others refuse: other dtypes, tensors of other classes
    (DTensor), on a CPU, and empty ones.

    TypeError, ValueError or IndexError names the argument at fault; UnavailableError says what a backend lacks.
    """
    return _softmax(x, dim, backend, False, dtype)


def log_softmax(x: Tensor, dim: int = -1, backend: str = "auto", *, dtype: torch.dtype | None = None) -> Tensor:
    """``x - max - log(sum(exp(x - max)))`` along one dimension, as torch.log_softmax; all else as ``softmax``."""
    return _softmax(x, dim, backend, True, dtype)


def _softmax(x: Tensor, dim: int, backend: str, log: bool, dtype: torch.dtype | None) -> Tensor:
    if backend == "auto":
        backend = (_kept_log if log else _kept)(x, dim, dtype)
    if dtype is not None and backend != "torch":
        return in_dtype(lambda x: _softmax(x, dim, backend, log, None), x, dtype, backend)
    if backend == "cuda":
        if _cuda_operator is None:
            raise UnavailableError(_no_cuda)
        require_gpu("x", x, backend)
        try:
            return _cuda_operator(x, dim, log)
        except RuntimeError:
            refuse_gradients("kernel_twins.log_softmax" if log else "kernel_twins.softmax", x)
            raise
    if backend == "triton":
        return _by_triton()(x, dim, log)
    if backend == "torch":
        return (torch.log_softmax if log else torch.softmax)(x, dim, dtype=dtype)
    raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")


@triton_side
def _by_triton() -> Callable[[Tensor, int, bool], Tensor]:
    from kernel_twins.functional.softmax import triton_softmax

    return triton_softmax.softmax


# ----------------------------------------------------------------------------------------------------------------------
# backend="auto"
# ----------------------------------------------------------------------------------------------------------------------


def _choose(x: Tensor, dim: int, wanted: torch.dtype | None = None) -> str:
    """The backend for this call. PyTorch gets calls with wrong arguments, since users know its error messages."""
    if not is_on_gpu(x):
        return left(NO_PLAIN)
    dtype, device = wanted or x.dtype, x.device.index
    if dtype not in DTYPE.values():
        return left(NO_PLAIN)
    if x.dtype in HALF and torch.is_autocast_enabled("cuda"):
        return left(WIDENED)
    if wanted == torch.float32 and x.dtype == torch.float16:
        return left(WIDENED)
    tracing = torch.compiler.is_compiling()
    if is_differentiated():
        return left(TRANSFORMED)
    differentiated = x.requires_grad and torch.is_grad_enabled()
    if tracing and not is_static(x):
        return _any_choice(device, differentiated)
    if not tracing and torch._C._len_torch_dispatch_stack() > 0:  # sizes may be symbols
        return "cuda" if dim in (-1, x.dim() - 1) and _runs("cuda", device) else "torch"
    dim = as_numbers(dim) if tracing else dim
    return _choice(tuple(x.shape), x.stride(), dim, dtype, device, differentiated, tracing)


_kept, _kept_log = kept(_choose), kept(_choose)  # apart: what one has compiled, the other may not have in a capture


@constant
def _any_choice(device: int, differentiated: bool) -> str:
    """The choice in a trace with sizes that are symbols."""
    return expected("softmax", None, device, _runs, differentiated=differentiated, traced=True)


@constant
def _choice(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    device: int,
    differentiated: bool,
    traced: bool = False,
) -> str:
    rank = len(shape)
    try:
        dim = counted(dim, "x", rank)
    except (IndexError, TypeError):
        return left("there is no such dim")
    if 0 in shape:
        return left(EMPTY)
    is_last = dim + 1 >= rank
    if not is_last and rows_of(torch.empty_strided(shape, strides, device="meta"), dim) is None:
        return left(COPIED)
    n = shape[dim] if rank else 1
    pitch = pitch_of(shape, strides, n, (dim,))
    problem = rows(math.prod(shape) // n, n, pitch, dtype.itemsize)
    # Cases are measured along the last dimension. Along another one PyTorch copies rows that our kernels read in place.
    over_torch = not is_last and not traced
    return expected(
        "softmax", problem, device, _runs, differentiated=differentiated, over_torch=over_torch, traced=traced
    )

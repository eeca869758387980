"""``kernel_twins.matmul``: the product of tensors by the last step of a ladder, or by PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernel_twins.errors import UnavailableError
from kernel_twins.functional.backends import (
    BACKENDS,
    autocast_dtype,
    cast,
    constant,
    cuda_operator,
    expected,
    is_differentiated,
    is_on_gpu,
    is_static,
    refuse_gradients,
    register_vmap,
    require_gpu,
    runs,
    triton_side,
    wants_gradient,
)
from kernel_twins.functional.expected import product
from kernel_twins.functional.kept import CAST, EMPTY, NO_PLAIN, TRANSFORMED, kept, left
from kernel_twins.functional.matmul.batching import product_rule
from kernel_twins.functional.matmul.shared import Place, copyable, place, require_out_dtype
from kernel_twins.ops.matmul.shared import allows_tf32
from kernel_twins.ops.tensors import DTYPE, name_of, require_same_dtype
from kernel_twins.spec import ITEMSIZE, Backend

_cuda_operator, _no_cuda = cuda_operator("matmul")
_allows_tf32 = constant(allows_tf32)  # Dynamo guards the setting, but cannot read it
if _cuda_operator is not None:
    register_vmap("matmul", product_rule)


def matmul(
    a: Tensor, b: Tensor, *, backend: str = "auto", out_dtype: torch.dtype | None = None, autocast: bool = True
) -> Tensor:
    """The product of a and b, as ``torch.matmul`` reads their shapes: vectors, matrices, and batches that broadcast.

    a and b share one dtype, float32, bfloat16 or float16, and one device, and have any strides. Sums are in fp32.
    float32 operands are multiplied in true fp32, unless PyTorch computes them with TF32 on; "auto" avoids that except
    for batches. The result is contiguous and has the operands' dtype, or ``out_dtype``, which may be torch.float32 for
    half operands. Gradients have the operands' dtype; there is no forward mode.

    Under autocast operands are first cast to its dtype, as torch.matmul casts them: by "cuda" and "triton" in each
    call, while PyTorch, which "auto" takes then, keeps its casts of parameters. With ``autocast=False`` they stay as
    they are, so that float32 is true fp32 there, too.

    If b is one matrix, a's leading dimensions become rows of one product. Other batches take one launch for each
    product, if every product has as many tiles of 128 x 256 as the GPU has SMs and K is 1024 or more; else torch.bmm,
    by PyTorch's settings. torch.func.vmap makes of its examples more rows of a or columns of b, if the other operand is
    not batched, else a batch.

    ``backend``: "cuda", "triton", "torch", or "auto": the one that this GPU's committed measurements let expect to be
    the fastest, interpolated between products of like sizes, tiles and layout, with the backward pass where an operand
    requires grad, by the GPU's time or the host's, whichever is longer (in a capture the GPU's alone). If there are
    none, "auto" is "cuda" if this GPU runs it. Inside torch.compile it is PyTorch where what Inductor makes of it is
    expected to be faster. Vectors, broadcast batches, empty products, forward mode and torch.func's derivatives, other
    dtypes, and tensors of other classes (DTensor) or on a CPU go to PyTorch.

    TypeError or ValueError names the argument at fault; UnavailableError says what a backend lacks.
    """
    to = autocast_dtype(a) if autocast else None
    if to is not None and a.dtype == to == getattr(b, "dtype", to):
        to = None
    if backend == "auto":
        backend = _kept(a, b, out_dtype, to)
    if to is not None:
        if backend == "torch" and out_dtype is None:
            return torch.matmul(a, b)
        a, b = cast(to, a, b)
    if backend == "cuda":
        if _cuda_operator is None:
            raise UnavailableError(_no_cuda)
        require_gpu("a", a, backend)
        require_gpu("b", b, backend)
        try:
            return _cuda_operator(a, b, out_dtype)
        except RuntimeError:
            refuse_gradients("kernel_twins.matmul", a, b)
            raise
    if backend == "triton":
        return _by_triton()(a, b, out_dtype)
    if backend == "torch":
        return _torch(a, b, out_dtype)
    raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")


@triton_side
def _by_triton() -> Callable[[Tensor, Tensor, torch.dtype | None], Tensor]:
    from kernel_twins.functional.matmul import triton_matmul

    return triton_matmul.matmul


def _torch(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    is_usual = out_dtype is None and type(a) is type(b) is Tensor and a.dtype == b.dtype
    if is_usual and not torch._C._is_any_autocast_enabled():  # most calls, and soon told
        return torch.matmul(a, b)
    for name, tensor in (("a", a), ("b", b)):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__}, must be a torch.Tensor: call torch.as_tensor({name})"
            )
    require_same_dtype("b", b, "a", a)
    if a.device.type != "meta" and torch.is_autocast_enabled(a.device.type):  # autocast does not know meta
        with torch.autocast(a.device.type, enabled=False):
            return _torch(a, b, out_dtype)
    if out_dtype is None or out_dtype == a.dtype:
        return torch.matmul(a, b)
    require_out_dtype(a, out_dtype)
    wants_gradient = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    if a.is_cuda and a.dim() == b.dim() == 2 and not wants_gradient:
        return torch.mm(a, b, out_dtype=out_dtype)
    return torch.matmul(a.to(out_dtype), b.to(out_dtype))


# ----------------------------------------------------------------------------------------------------------------------
# backend="auto"
# ----------------------------------------------------------------------------------------------------------------------


def _choose(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, to: torch.dtype | None = None) -> str:
    """The backend for these operands, which autocast casts ``to`` a dtype.

    PyTorch gets wrong ones, since users know its error messages.
    """
    if not (is_on_gpu(a) and is_on_gpu(b)):
        return left(NO_PLAIN)
    if to is not None and out_dtype is None:
        return left(CAST)
    dtype, device = a.dtype if to is None else to, a.device
    if dtype not in DTYPE.values() or (to is None and b.dtype != dtype) or b.device != device:
        return left(NO_PLAIN)
    if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        return left(NO_PLAIN)
    wide = out_dtype is not None and out_dtype != dtype
    if is_differentiated():
        return left(TRANSFORMED)
    tracing, width = torch.compiler.is_compiling(), name_of(dtype)
    # With TF32 on, PyTorch's result would not be true fp32; and under a mode sizes may be symbols.
    if (dtype == torch.float32 and _allows_tf32()) or (not tracing and torch._C._len_torch_dispatch_stack() > 0):
        return "cuda" if _runs("cuda", width, wide, device.index) else "torch"
    differentiated = wants_gradient(a, b)
    if tracing and not is_static(a, b):
        return _any_choice(width, wide, device.index, differentiated)
    return _choice(place(a), place(b), width, wide, device.index, differentiated, tracing)


_kept = kept(_choose)


@constant
def _any_choice(dtype: str, wide: bool, device: int, differentiated: bool) -> str:
    """The choice in a trace with sizes that are symbols."""

    def runs_it(backend: Backend, device: int) -> bool:
        return _runs(backend, dtype, wide, device)

    return expected("matmul", None, device, runs_it, differentiated=differentiated, over_torch=wide, traced=True)


@constant
def _choice(a: Place, b: Place, dtype: str, wide: bool, device: int, differentiated: bool, traced: bool = False) -> str:
    (a_shape, *_), (b_shape, (row, col), _) = a, b
    shape = math.prod(a_shape[:-1]), b_shape[1], b_shape[0]
    if 0 in shape:
        return left(EMPTY)
    itemsize = ITEMSIZE[dtype]
    out_bytes = shape[1] * (4 if wide else itemsize)
    copied = out_bytes % 16 == 0 and copyable(a, itemsize) and copyable(b, itemsize)
    problem = product(*shape, itemsize, copied=copied, column_major=row == 1 != col)

    def runs_it(backend: Backend, device: int) -> bool:
        return _runs(backend, dtype, wide, device)

    # The measured products have a result of the operands' dtype; PyTorch is slower if the result is wider.
    return expected("matmul", problem, device, runs_it, differentiated=differentiated, over_torch=wide, traced=traced)


@constant
def _runs(backend: Backend, dtype: str, wide: bool, device: int) -> bool:
    """Whether a backend is installed and has a step for this GPU that writes this dtype."""
    if backend == "cuda" and _cuda_operator is None:
        return False
    return runs(backend, ("matmul_fp32" if dtype == "fp32" else "matmul_bf16",), device, wide)

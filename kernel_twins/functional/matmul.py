"""``kernel_twins.matmul``: the product of tensors by the last step of a ladder, or by PyTorch.

The CUDA side is an operator in C++ (cuda-kernels/functional.cpp), the Triton side one in Python. Nothing here imports
Triton before it is asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor

from kernel_twins import ops
from kernel_twins._load import UnavailableError, extension
from kernel_twins.ceilings import gpu_slug
from kernel_twins.functional.choice import nearest
from kernel_twins.spec import Backend, Case
from kernel_twins.tensors import DTYPE, name_of

BACKENDS = ("auto", "cuda", "triton", "torch")
STEPS: dict[Backend, dict[str, tuple[str, ...]]] = {
    "cuda": {"matmul_fp32": ("v11_tma", "v09_pipelined"), "matmul_bf16": ("v15_dispatch", "v05_grouped")},
    "triton": {"matmul_fp32": ("v10_autotuned",), "matmul_bf16": ("v15_dispatch",)},
}
"""What stands behind a backend: the first that the GPU runs. cuda-kernels/functional.cpp has the same names."""

_HALF = (torch.bfloat16, torch.float16)

_cuda_operator: Callable[..., Tensor] | None = None
_no_cuda = ""
try:
    extension()
    _cuda_operator = torch.ops.kernel_twins.matmul.default
except UnavailableError as _error:
    _no_cuda = str(_error)


def matmul(a: Tensor, b: Tensor, *, backend: str = "auto", out_dtype: torch.dtype | None = None) -> Tensor:
    """The product of a and b, as ``torch.matmul`` reads their shapes: vectors, matrices, and batches that broadcast.

    a and b are both float32, bfloat16 or float16, with any strides, on one device. Sums are fp32 (for float32 operands
    in true fp32, never TF32, but for batches that go to PyTorch); the result has the operands' dtype, or
    ``out_dtype``, which may be torch.float32 for half operands, and is contiguous. Gradients flow in the operands'
    dtype. Where b is one matrix, a's leading dimensions become rows of one product. Other batches are a launch each
    where every product has as many tiles of 128 x 256 as the GPU has SMs, and K of 1024 or more; else torch.bmm's.

    ``backend``: "cuda", "triton", "torch", or "auto", the fastest in this GPU's committed measurements at the nearest
    sizes. Where there are none, and under torch.compile, for which sizes may be symbols, "auto" is "cuda" if this GPU
    runs it. Vectors, batches that are broadcast, products with nothing in them, other dtypes and tensors off the GPU
    go to PyTorch.

    TypeError or ValueError names the argument at fault; UnavailableError says what a backend lacks.
    """
    if backend == "auto":
        backend = _choose(a, b, out_dtype)
    if backend == "cuda":
        if _cuda_operator is None:
            raise UnavailableError(f"{_no_cuda}, or pass backend='torch'")
        require_gpu("a", a, backend)
        require_gpu("b", b, backend)
        return _cuda_operator(a, b, out_dtype)
    if backend == "triton":
        return _triton()(a, b, out_dtype)
    if backend == "torch":
        return _torch(a, b, out_dtype)
    raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}")


def require_gpu(name: str, tensor: Tensor, backend: str) -> None:
    """TypeError where it is no tensor, ValueError where it is on no GPU."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, must be a torch.Tensor: call torch.as_tensor({name})")
    if not tensor.is_cuda:
        raise ValueError(
            f"{name} is on {tensor.device}, must be on a CUDA device for backend={backend!r}: "
            f"call {name}.cuda(), or pass backend='torch'"
        )


def _torch(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    for name, tensor in (("a", a), ("b", b)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, must be a torch.Tensor")
    if a.dtype != b.dtype:
        raise TypeError(f"b is {b.dtype}, must be {a.dtype} like a: call b.to(a.dtype)")
    if out_dtype is None or out_dtype == a.dtype:
        return torch.matmul(a, b)
    require_out_dtype(a, out_dtype)
    if a.is_cuda and a.dim() == b.dim() == 2 and not (a.requires_grad or b.requires_grad):
        return torch.mm(a, b, out_dtype=out_dtype)
    return torch.matmul(a.to(out_dtype), b.to(out_dtype))


def require_out_dtype(a: Tensor, out_dtype: torch.dtype) -> None:
    """TypeError where a product of a has no such result."""
    if out_dtype != a.dtype and not (a.dtype in _HALF and out_dtype == torch.float32):
        accepted = f"{a.dtype} or torch.float32" if a.dtype in _HALF else str(a.dtype)
        raise TypeError(
            f"out_dtype is {out_dtype}, must be {accepted}: leave it out, and convert the result with .to(...)"
        )


# ----------------------------------------------------------------------------------------------------------------------
# backend="auto"
# ----------------------------------------------------------------------------------------------------------------------


def _choose(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> str:
    """The backend for these operands. What is wrong with them PyTorch may say: its words are known."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_cuda and b.is_cuda and a.dtype in DTYPE.values()):
        return "torch"
    if a.dim() < 2 or b.dim() != 2 or a.dtype != b.dtype or a.device != b.device or a.shape[-1] != b.shape[0]:
        return "torch"
    wide = out_dtype is not None and out_dtype != a.dtype
    if torch.compiler.is_compiling():
        return "cuda" if _runs("cuda", name_of(a.dtype), wide, a.device.index) else "torch"
    row, col = b.stride()
    out_bytes = b.shape[1] * (4 if wide else a.element_size())
    copyable = out_bytes % 16 == 0 and _copyable(a) and _copyable(b)
    shape = a.shape[:-1].numel(), b.shape[1], b.shape[0]
    return _choice(shape, name_of(a.dtype), wide, row == 1 != col, copyable, a.device.index)


@lru_cache(maxsize=4096)
def _choice(shape: tuple[int, int, int], dtype: str, wide: bool, b_col: bool, copyable: bool, device: int) -> str:
    if 0 in shape:
        return "torch"
    gpu = gpu_slug(torch.cuda.get_device_name(device))
    best = nearest(gpu, "matmul", Case(shape, dtype, (("b", "col"),) if b_col else ()), copyable)
    if best == "triton" and _runs("triton", dtype, wide, device):
        return best
    return "cuda" if best != "torch" and _runs("cuda", dtype, wide, device) else "torch"


def _copyable(matrix: Tensor) -> bool:
    """Whether lines of neighbours start at multiples of 16 bytes, so that the copy engine can take them."""
    row, col = matrix.stride()[-2:]
    across = max(row, col) * matrix.element_size() % 16 == 0
    return min(row, col) == 1 and across and matrix.storage_offset() * matrix.element_size() % 16 == 0


@torch.compiler.assume_constant_result
def _runs(backend: Backend, dtype: str, wide: bool, device: int) -> bool:
    """Whether a backend is there and has a step for this GPU that writes what is asked for."""
    if backend == "cuda" and _cuda_operator is None:
        return False
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return False
    op = "matmul_fp32" if dtype == "fp32" else "matmul_bf16"
    steps = (ops.get(op).step(name) for name in STEPS[backend][op])
    capability = torch.cuda.get_device_capability(device)
    return any(step.runs_on(capability) and (step.fp32_out or not wide) for step in steps)


@cache
def _triton() -> Callable[[Tensor, Tensor, torch.dtype | None], Tensor]:
    try:
        from kernel_twins.functional import triton_matmul
    except ImportError as error:
        raise UnavailableError("the Triton side is missing: pip install triton, or pass backend='torch'") from error
    return triton_matmul.matmul

"""What a user would call instead of our products: PyTorch's own, and what torch.compile makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kernel_twins.ops.baselines import compiled_results
from kernel_twins.ops.matmul import shared

if TYPE_CHECKING:
    from torch import Tensor, dtype


def _require_true_fp32() -> None:
    if shared.allows_tf32():
        raise RuntimeError("TF32 is on; this baseline is true fp32: torch.set_float32_matmul_precision('highest')")


def torch_mm_fp32(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """PyTorch's product in true fp32; RuntimeError where TF32 has been allowed."""
    import torch

    _require_true_fp32()
    torch.mm(a, b, out=out)


def torch_mm(library: str) -> Callable[..., None]:
    """PyTorch's product of bf16 or fp16 operands by ``cublas`` or by ``cublaslt``.

    PyTorch asks which one is preferred at every product, so that a graph that is captured holds the right one.
    """

    def mm(a: Tensor, b: Tensor, *, out: Tensor) -> None:
        import torch

        if not a.is_cuda:  # where neither library is, nor a product whose result is wider than its operands
            torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
            return
        prefer = torch.backends.cuda.preferred_blas_library
        before = prefer()
        prefer(library)
        try:
            if out.dtype == a.dtype:
                torch.mm(a, b, out=out)
            else:
                torch.mm(a, b, out_dtype=out.dtype, out=out)
        finally:
            prefer(before)

    return mm


def compiled_product(mode: str = "default") -> Callable[..., Tensor]:
    """What torch.compile makes of the product of operands as they lie: it pads odd sizes where that is faster.

    Of fp32 it is true fp32; RuntimeError where TF32 has been allowed.
    """
    made = compiled_results(_product, mode)

    def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        import torch

        if a.dtype == torch.float32:
            _require_true_fp32()
        result: Tensor = made(a, b, out=out, out_dtype=out.dtype)
        return result

    return product


def _product(a: Tensor, b: Tensor, *, out_dtype: dtype) -> Tensor:
    import torch

    if a.dtype == out_dtype:
        return torch.mm(a, b)
    if not a.is_cuda:  # where there is no product whose result is wider than its operands
        return torch.mm(a.to(out_dtype), b.to(out_dtype))
    return torch.mm(a, b, out_dtype=out_dtype)

"""The baselines of products: PyTorch's own, and torch.compile's."""

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
    """PyTorch's product in true fp32; RuntimeError if TF32 is allowed."""
    import torch

    _require_true_fp32()
    torch.mm(a, b, out=out)


def torch_mm(library: str) -> Callable[..., None]:
    """PyTorch's product of bf16 or fp16 operands by ``cublas`` or by ``cublaslt``.

    PyTorch looks up the preferred library at every product, so a captured graph holds the right one.
    """

    def mm(a: Tensor, b: Tensor, *, out: Tensor) -> None:
        import torch

        if not a.is_cuda:  # a CPU has neither library, and no product with an fp32 result of narrower operands
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
    """torch.compile of the product, with operands in their own layouts. It pads odd sizes where that is faster.

    fp32 operands are multiplied in true fp32; RuntimeError if TF32 is allowed.
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
    if not a.is_cuda:  # a CPU has no product with an fp32 result of narrower operands
        return torch.mm(a.to(out_dtype), b.to(out_dtype))
    return torch.mm(a, b, out_dtype=out_dtype)

"""What torch.compile makes of a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kernel_twins.ops.baselines import compiled_results
from kernel_twins.ops.matmul import shared

if TYPE_CHECKING:
    from torch import Tensor, dtype


def compiled_product(mode: str = "default") -> Callable[..., Tensor]:
    """What torch.compile makes of the product of operands as they lie: it pads odd sizes where that is faster.

    Of fp32 it is true fp32; RuntimeError where TF32 has been allowed.
    """
    made = compiled_results(_product, mode)

    def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        import torch

        if a.dtype == torch.float32 and shared.allows_tf32():
            raise RuntimeError("TF32 is on; this baseline is true fp32: torch.set_float32_matmul_precision('highest')")
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

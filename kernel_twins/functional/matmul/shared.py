"""What a product's backend is chosen by, and checks of sizes and dtypes, for both sides of matmul and linear."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_twins.functional.backends import HALF

Place = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset in elements from an aligned address


def place(tensor: Tensor) -> Place:
    """What the choice of a backend depends on; a trace does not know the offset."""
    offset = 0 if torch.compiler.is_compiling() else int(tensor.storage_offset()) % 8
    return tuple(tensor.shape), tensor.stride(), offset


def copyable(matrix: Place, itemsize: int) -> bool:
    """Whether contiguous rows or columns start at multiples of 16 bytes, so that the copy engine can take them."""
    _, (*_, row, col), offset = matrix
    return min(row, col) == 1 and max(row, col) * itemsize % 16 == 0 and offset * itemsize % 16 == 0


def require_out_dtype(a: Tensor, out_dtype: torch.dtype) -> None:
    """TypeError if a product with a cannot have a result of this dtype."""
    if out_dtype != a.dtype and not (a.dtype in HALF and out_dtype == torch.float32):
        accepted = f"{a.dtype} or torch.float32" if a.dtype in HALF else str(a.dtype)
        raise TypeError(
            f"out_dtype is {out_dtype}, must be {accepted}: leave it out, and convert the result with .to(...)"
        )


def product_sizes(a: Sequence[int], b: Sequence[int]) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...]]:
    """M, N, K, the batch to which both shapes broadcast, and the result's shape; ValueError if they do not fit."""
    vector_a, vector_b = len(a) == 1, len(b) == 1
    m, k = (1 if vector_a else a[-2]), a[-1]
    rows, n = (b[0], 1) if vector_b else (b[-2], b[-1])
    if rows != k:
        raise ValueError(
            f"b has shape {tuple(b)}, must have {k} {'elements' if vector_b else 'rows'}, as many as a, of shape "
            f"{tuple(a)}, has {'elements' if vector_a else 'columns'}: transpose a matrix with .mT, or slice one"
        )
    lead_a, lead_b = tuple(a[:-2]), tuple(b[:-2])
    try:
        # Only if both have a batch: broadcast_shapes takes longer than all the rest.
        batch = torch.broadcast_shapes(lead_a, lead_b) if lead_a and lead_b else lead_a or lead_b
    except RuntimeError:
        raise ValueError(
            f"b has leading dimensions {lead_b}, must broadcast with a's, {lead_a}: the last "
            f"ones are matched first, and each pair must be equal or hold a 1"
        ) from None
    return m, n, k, tuple(batch), (*batch, *([] if vector_a else [m]), *([] if vector_b else [n]))

"""What both sides of matmul and linear share: what of products the choice of a backend depends on, and a refusal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel_twins.functional.backends import HALF
from kernel_twins.ops.matmul.shared import copyable_with_out
from kernel_twins.spec import Case

Place = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, elements past a multiple of 16 bytes or more


def place(tensor: Tensor) -> Place:
    """What a choice of backend depends on, as a key: a call has no time to work out more than is asked for."""
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()) % 8


def copyable(matrix: Place, itemsize: int) -> bool:
    """Whether lines of neighbours start at multiples of 16 bytes, so that the copy engine can take them."""
    _, (*_, row, col), offset = matrix
    return min(row, col) == 1 and max(row, col) * itemsize % 16 == 0 and offset * itemsize % 16 == 0


def comparable_with(as_they_are: bool) -> Callable[[Case], bool]:
    """Which measured products are like one whose operands and result the copy engine takes as they are, or cannot."""
    return lambda case: (copyable_with_out(case) == "") == as_they_are


def require_out_dtype(a: Tensor, out_dtype: torch.dtype) -> None:
    """TypeError where a product of a has no such result."""
    if out_dtype != a.dtype and not (a.dtype in HALF and out_dtype == torch.float32):
        accepted = f"{a.dtype} or torch.float32" if a.dtype in HALF else str(a.dtype)
        raise TypeError(
            f"out_dtype is {out_dtype}, must be {accepted}: leave it out, and convert the result with .to(...)"
        )

"""The key for choosing a product's backend, and a dtype check, for both sides of matmul and linear."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel_twins.functional.backends import HALF
from kernel_twins.ops.matmul.shared import copyable_with_out
from kernel_twins.spec import Case

Place = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, offset in elements from an aligned address


def place(tensor: Tensor) -> Place:
    """The key on which the choice of a backend depends. It is cheap to make: every call makes one."""
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()) % 8


def copyable(matrix: Place, itemsize: int) -> bool:
    """Whether contiguous rows or columns start at multiples of 16 bytes, so that the copy engine can take them."""
    _, (*_, row, col), offset = matrix
    return min(row, col) == 1 and max(row, col) * itemsize % 16 == 0 and offset * itemsize % 16 == 0


def comparable_with(as_they_are: bool) -> Callable[[Case], bool]:
    """Which measured products are comparable: those that the copy engine takes, or those that it does not take."""
    return lambda case: (copyable_with_out(case) == "") == as_they_are


def require_out_dtype(a: Tensor, out_dtype: torch.dtype) -> None:
    """TypeError if a product with a cannot have a result of this dtype."""
    if out_dtype != a.dtype and not (a.dtype in HALF and out_dtype == torch.float32):
        accepted = f"{a.dtype} or torch.float32" if a.dtype in HALF else str(a.dtype)
        raise TypeError(
            f"out_dtype is {out_dtype}, must be {accepted}: leave it out, and convert the result with .to(...)"
        )

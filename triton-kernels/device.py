"""What launchers ask of the GPU that a tensor is on."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor


@lru_cache
def sm_count(device: torch.device) -> int:
    """The number of SMs of a GPU; on the CPU, where the interpreter runs one program after the other, 2."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def describable(matrix: Tensor) -> bool:
    """Whether the current GPU's tensor memory accelerator (from 9.0) can copy tiles of a matrix.

    Neighbours must lie along a row, and the address and the pitch be multiples of 16 bytes. The interpreter acts as
    such a GPU.
    """
    if not triton.knobs.runtime.interpret and driver.active.get_current_target().arch < 90:
        return False
    (rows, cols), (pitch, stride) = matrix.shape, matrix.stride()
    aligned = matrix.data_ptr() % 16 == 0 and pitch * matrix.element_size() % 16 == 0
    return aligned and stride == 1 and pitch >= cols and min(rows, cols) > 0 and max(rows, cols) < 2**31


def describe(matrix: Tensor, block_rows: int, block_cols: int) -> TensorDescriptor | None:
    """A descriptor of a matrix and its tile for the tensor memory accelerator; None where it cannot copy it."""
    return TensorDescriptor.from_tensor(matrix, [block_rows, block_cols]) if describable(matrix) else None

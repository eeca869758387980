"""Properties of the GPU that a tensor is on, for launchers."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Literal

import torch
import triton
from torch import Tensor
from triton.runtime import driver

Layout = Literal["row", "col", "pointers"]


REFERENCE_SMS = 132
REFERENCE_SHARED_BYTES = 228 * 1024


@lru_cache
def sm_count(device: torch.device) -> int:
    """The number of SMs of a GPU.

    2 on the CPU, where the interpreter runs one program after the other. The H100's for meta tensors, for which kernels
    are only compiled.
    """
    if device.type == "meta":
        return REFERENCE_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache
def shared_bytes(device: torch.device) -> int:
    """The bytes of shared memory of an SM; the H100's for tensors that are not on a GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return REFERENCE_SHARED_BYTES


def has_tma() -> bool:
    """True if the current GPU has a TMA; the interpreter emulates one."""
    return triton.knobs.runtime.interpret or _arch(driver.active.get_current_device()) >= 90


def runs_gluon() -> bool:
    """True if kernels in Gluon run here: on a GPU of compute capability 9.0, by Triton 3.6, not in the interpreter.

    They are written for wgmma, and Gluon's interface changes with each minor version.
    """
    if triton.knobs.runtime.interpret or not triton.__version__.startswith("3.6."):
        return False
    return _arch(driver.active.get_current_device()) == 90


def layout_of(matrix: Tensor) -> Layout:
    """How the current GPU's TMA (from 9.0) can copy tiles of a matrix.

    "row" and "col" name the contiguous direction of a matrix whose address and pitch are multiples of 16 bytes;
    "pointers" is any other matrix, which the TMA cannot copy.
    """
    (rows, cols), (down, across) = matrix.shape, matrix.stride()
    size = matrix.element_size()
    if not has_tma() or matrix.data_ptr() % 16 or min(rows, cols) == 0 or max(rows, cols) >= 2**31:
        return "pointers"
    if across == 1 and down >= cols and down * size % 16 == 0 and down * size < 2**40:
        return "row"
    if down == 1 and across >= rows and across * size % 16 == 0 and across * size < 2**40:
        return "col"
    return "pointers"


def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for one launch, for ``triton.set_allocator``; it holds descriptors made on the GPU, 128 bytes each.

    It comes from torch's allocator, since Triton launches on torch's current stream: later work on the stream may reuse
    it, and under graph capture it belongs to the graph. The allocator is set per thread, so launchers set it on every
    call.
    """
    return torch.empty(size, dtype=torch.int8, device="cuda")  # aligned to 512 bytes


@cache
def _arch(device: int) -> int:
    arch: int = driver.active.get_current_target().arch
    return arch

"""What results must look like, and memory in which none lies before a call makes it."""

from __future__ import annotations

import contextlib
import gc
import math

import torch
from torch import Tensor

from kernel_twins.ops.tensors import OUT_DTYPE
from kernel_twins.spec import Case, Op

Form = tuple[tuple[int, ...], torch.dtype]  # of a result

POISON = 0xFF  # in every byte: NaN in each of our dtypes, and no place
_BLOCKS = 4  # of a result's size are poisoned: more than a call allocates before that


def forms_of(op: Op, case: Case) -> tuple[Form, ...]:
    """Of an operation's results."""
    return tuple((each.shape, OUT_DTYPE[each.dtype]) for each in op.outputs(case))


def misformed(forms: tuple[Form, ...], results: tuple[Tensor, ...]) -> str:
    """What is wrong with their number, shapes or dtypes, empty where nothing is."""
    if len(results) != len(forms):
        return f"returned {len(results)} results, must be {len(forms)}"
    for index, (each, (shape, dtype)) in enumerate(zip(results, forms, strict=True)):
        if (tuple(each.shape), each.dtype) != (shape, dtype):
            return f"result {index} is {tuple(each.shape)} of {each.dtype}, must be {shape} of {dtype}"
    return ""


def poison(forms: tuple[Form, ...], device: str) -> None:
    """Fill freed memory, in which right results may lie, with what no result is: all that the allocator keeps.

    Before that, the garbage of earlier calls is freed, and the allocator keeps enough for results of these forms.
    """
    gc.collect()
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in forms for _ in range(_BLOCKS)]
    _fill(sizes, device)
    if device != "cpu":
        _fill(_free(), device)


def _fill(sizes: list[int], device: str) -> None:
    """As many bytes as that at a time, the largest first, so that none lies where a larger one would have fitted."""
    held = []
    for size in sorted(sizes, reverse=True):
        with contextlib.suppress(torch.OutOfMemoryError):  # where none is left, all that was freed is filled
            held.append(torch.full((size,), POISON, dtype=torch.uint8, device=device))


def _free() -> list[int]:
    """The sizes of the blocks that the next allocations on the current stream are served from."""
    stream = torch.cuda.current_stream().cuda_stream
    segments = [each for each in torch.cuda.memory_snapshot() if each["stream"] == stream]
    blocks = [block for each in segments if each["segment_pool_id"] == (0, 0) for block in each["blocks"]]  # no graph's
    return [block["size"] for block in blocks if block["state"] == "inactive"]

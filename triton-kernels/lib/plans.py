"""A launch cache: repeated calls of a Triton kernel skip Triton's analysis of their arguments.

On each launch Triton specialises its arguments (dtypes, alignment, divisibility) and evaluates heuristics, which takes
several times as long as the launch. A plan keeps the results for calls that differ only in values and in equally
aligned addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.knobs import runtime
from triton.runtime import KernelInterface, driver
from triton.runtime.autotuner import Heuristics

PLANS = 4096  # most plans a step keeps

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


class Plan(NamedTuple):
    """A prepared launch, for calls that differ from the first one only in values and in equally aligned addresses."""

    kernel: CompiledKernel
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]  # the arguments after the tensors

    def __call__(self, first: Tensor, *others: Tensor | None, device: int | None = None) -> None:
        """On the first tensor's GPU; that of tensors in descriptors must be given."""
        if _is_watched():
            self.kernel[self.grid](first, *others, *self.arguments)
            return
        # The same launch without the metadata that hooks would get.
        kernel = self.kernel
        stream = driver.active.get_current_stream(first.get_device() if device is None else device)
        kernel.run(
            *self.grid, stream, kernel.function, kernel.packed_metadata, None, None, None, first, *others,
            *self.arguments,
        )  # fmt: skip


def _is_watched() -> bool:
    """True if a launch hook is set, such as a profiler's: in Triton's default chain, or in its place."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def alignment(*tensors: Tensor | None) -> tuple[bool | None, ...]:
    """What a kernel is specialised on: for each tensor, whether its address is a multiple of 16; None if absent."""
    return tuple([None if each is None else each.data_ptr() % 16 == 0 for each in tensors])


def launch(
    kernel: KernelInterface,
    grid: Grid,
    tensors: tuple[Tensor | None, ...],
    behind: tuple[Any, ...],
    constants: dict[str, Any],
) -> Plan | None:
    """Launch a kernel and return a plan of the launch. Its arguments: tensors, then ``behind``, then constants.

    Returns None in the interpreter, and under graph capture, where the configuration may be a provisional one.
    """
    compiled = kernel[grid](*tensors, *behind, **constants)
    if not isinstance(compiled, CompiledKernel) or torch.cuda.is_current_stream_capturing():
        return None
    names = compiled.src.fn.arg_names
    values = dict(zip(names, (*tensors, *behind), strict=False)) | constants
    for name, heuristic in kernel.values.items() if isinstance(kernel, Heuristics) else ():
        values[name] = heuristic(values)
    x, y, z = (*(grid(values) if callable(grid) else grid), 1, 1)[:3]
    return Plan(compiled, (x, y, z), tuple(values[name] for name in names[len(tensors) :]))


def keep(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...], plan: object) -> None:
    """Store a plan under the key of its calls; a full cache is emptied first."""
    if len(plans) == PLANS:
        plans.clear()
    plans[key] = plan

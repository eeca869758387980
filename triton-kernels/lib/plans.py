"""Launches that are kept: a kernel called again as before, with other values, needs no second look at its arguments.

Triton works out on each launch what its arguments are alike in, and heuristics work out tiles: several times what the
launch takes.
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

PLANS = 4096  # of a step that are kept

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


class Plan(NamedTuple):
    """What a call does that differs from an earlier one in nothing but the values, and addresses as aligned."""

    kernel: CompiledKernel
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]  # those behind the tensors

    def __call__(self, first: Tensor, *others: Tensor | None) -> None:
        if _is_watched():
            self.kernel[self.grid](first, *others, *self.arguments)
            return
        # What that comes down to, less what is gathered for hooks.
        kernel, stream = self.kernel, driver.active.get_current_stream(first.get_device())
        kernel.run(
            *self.grid, stream, kernel.function, kernel.packed_metadata, None, None, None, first, *others,
            *self.arguments,
        )  # fmt: skip


def _is_watched() -> bool:
    """Whether somebody, such as a profiler, hooks launches: in the chain that is there from the start, or its place."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def alignment(*tensors: Tensor | None) -> tuple[bool | None, ...]:
    """What of its tensors' addresses a kernel is compiled for: whether they are multiples of 16 bytes."""
    return tuple([None if each is None else each.data_ptr() % 16 == 0 for each in tensors])


def launch(
    kernel: KernelInterface,
    grid: Grid,
    tensors: tuple[Tensor | None, ...],
    behind: tuple[Any, ...],
    constants: dict[str, Any],
) -> Plan | None:
    """Launch a kernel that takes tensors, then what is ``behind`` them, then constants; and make a plan of it.

    None in the interpreter, and under capture, where the choice of a configuration is a makeshift.
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
    """Under what calls that are alike have in common; all others are forgotten when there are many."""
    if len(plans) == PLANS:
        plans.clear()
    plans[key] = plan

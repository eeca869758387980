"""Launches by the routing table, and the launch cache, of softmax's and softmax_backward's last Triton steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import KernelInterface

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.workspace import counter
from kernel_twins._triton.softmax.routes import Limits, Rows, Split, Tiling, route
from kernel_twins._triton.softmax.split import constants_of


class Kernels(NamedTuple):
    """A step's kernels: its own one, and the two of split rows."""

    step: KernelInterface
    parts: KernelInterface
    rows: KernelInterface
    numbers: int  # of a part
    by_log: bool  # the parts' numbers are others for the logarithm


class Prepared(NamedTuple):
    """The prepared launches of a call, for calls that differ only in values and in equally aligned addresses."""

    first: plans.Plan
    second: plans.Plan | None  # of split rows
    numbers: int  # in the workspace of split rows
    shares: bool  # programs share rows, for which they need counters

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the inputs and the result."""
        *inputs, out = tensors
        if self.second is None:
            self.first(*tensors, counter(out.device) if self.shares else None)
            return
        numbers = _workspace(self.numbers, out.device)
        self.first(*inputs, numbers)
        self.second(*tensors, numbers)


def launch(kernels: Kernels, limits: Limits, inputs: tuple[Tensor, ...], out: Tensor, log: bool) -> Prepared | None:
    """Run a problem without a plan and return its plan; None in the interpreter, and under graph capture."""
    (M, N), itemsize = out.shape, out.element_size()
    strides = tuple(each.stride(0) for each in inputs) if M > 1 else (N,) * len(inputs)
    rows = Rows(M, N, itemsize, strides, all(plans.alignment(*inputs, out)))
    way = route(rows, limits, out.device)
    if isinstance(way, Tiling):
        return _launch_tiles(kernels, rows, way, inputs, out, log)
    return _launch_split(kernels, rows, way, inputs, out, log)


def _launch_tiles(
    kernels: Kernels, rows: Rows, tiling: Tiling, inputs: tuple[Tensor, ...], out: Tensor, log: bool
) -> Prepared | None:
    shares = tiling.PARTS > 1
    tensors = *inputs, out, counter(out.device) if shares else None
    constants = {"LOG": log} | tiling.constants()
    plan = plans.launch(kernels.step, (tiling.programs,), tensors, (rows.M, rows.N, *rows.strides), constants)
    return None if plan is None else Prepared(plan, None, 0, shares)


def _launch_split(
    kernels: Kernels, rows: Rows, split: Split, inputs: tuple[Tensor, ...], out: Tensor, log: bool
) -> Prepared | None:
    grid, behind = (rows.M * split.parts,), (rows.N, *rows.strides, split.parts)
    size = kernels.numbers * rows.M * split.parts
    numbers = _workspace(size, out.device)
    # The first launch does without out, whose skew may be another one.
    constants = constants_of(rows, rows.inputs_together) | ({"LOG": log} if kernels.by_log else {})
    first = plans.launch(kernels.parts, grid, (*inputs, numbers), behind, constants)
    constants = constants_of(rows, split.WIDE) | {"LOG": log, "SLOTS": triton.next_power_of_2(split.parts)}
    second = plans.launch(kernels.rows, grid, (*inputs, out, numbers), behind, constants)
    return None if first is None or second is None else Prepared(first, second, size, False)


def _workspace(size: int, device: torch.device) -> Tensor:
    """Memory of torch's allocator: later work on the stream may reuse it, and a captured graph owns its own."""
    return torch.empty(size, dtype=torch.float32, device=device)

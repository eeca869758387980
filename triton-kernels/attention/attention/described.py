"""Prepared launches of attention's steps in Gluon, whose tensors come in descriptors that the host makes.

A repeated call takes over all of a descriptor but its tensor, and none of the checks, whose results its key implies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import KernelInterface

from kernel_twins._triton.attention.attention import tiles
from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.workspace import counter

Fields = dict[str, Any]


class Plan(NamedTuple):
    """A prepared launch, for calls that differ from the first one only in values and in equally aligned addresses."""

    launch: plans.Plan
    fields: tuple[Fields, Fields, Fields, Fields]  # of each descriptor, but the tensor, which is its caller's

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: object) -> None:
        """What follows lse is None in such a call."""
        of_q, of_k, of_v, of_out = self.fields
        self.launch(
            _described(q, of_q), _described(k, of_k), _described(v, of_v), _described(out, of_out), lse,
            counter(q.device), device=q.get_device(),
        )  # fmt: skip


def launch(
    kernel: KernelInterface,
    programs: int,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    block_n: int,
    behind: tuple[Any, ...],
    constants: dict[str, Any],
) -> Plan | None:
    """Launch a kernel on q, k, v, out and lse, with boxes of block_n keys, and return a plan of the launch.

    Behind these five the kernel takes a counter. ValueError where the copy engine cannot take a tensor; None as
    plans.launch.
    """
    *described, lse = tensors
    rows = tiles.WARPGROUP_M.value, block_n, block_n, tiles.WARPGROUP_M.value
    q, k, v, out = (tiles.describe(*each) for each in zip(("q", "k", "v", "out"), described, rows, strict=True))
    prepared = plans.launch(kernel, (programs,), (q, k, v, out, lse, counter(lse.device)), behind, constants)
    return None if prepared is None else Plan(prepared, (_fields(q), _fields(k), _fields(v), _fields(out)))


def _fields(descriptor: TensorDescriptor) -> Fields:
    return {name: value for name, value in vars(descriptor).items() if name != "base"}


def _described(tensor: Tensor, fields: Fields) -> TensorDescriptor:
    """A new descriptor each time, since threads may share a plan."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(fields, base=tensor)
    return descriptor

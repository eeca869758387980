"""reduction_nd v06_dispatch: routes send a call to the kernel that serves its axes.

Change:   where the compiler does not see multiples of 16 bytes, other kernels take packs of 16 bytes where memory has
          them (routes.py): of rows at any distance (packed_rows.py), and of columns whose rows start anywhere, or that
          are few (packed_columns.py). Argmax of short rows and of whole matrices takes packs everywhere. Many outputs
          of few elements give each lane whole ones (whole_columns.py). What they leave is v05's, as wide as all
          distances allow.
Why:      single elements of half precision take eight times the instructions of packs. Short inner axes leave half of
          v05's tiles without elements.
Error:    as v05's; lanes with whole outputs add R <= 4,096 elements one after the other.
Counter:  instructions fall, and dram_share rises.
Requires: nothing.
Twin:     cuda-kernels/reduction/reduction_nd/v06_dispatch.cu
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.reduction.reduction_nd.axes import Axes, count
from kernel_twins._triton.reduction.reduction_nd.routes import route_of
from kernel_twins._triton.reduction.reduction_nd.v05_split import Plan, launch, merge_planes, run_first, workspace

_plans: dict[tuple[Any, ...], Plan] = {}


def reduction_nd_v06_dispatch(x: Tensor, *, out: Tensor, dims: tuple[int, ...] = (-1,), kind: str = "sum") -> None:
    """out = the sum of x over the axes dims, or mean, max or argmax; fp32, bf16 or fp16 in, argmax int64 out."""
    launch(_plans, _first, x, out, dims, kind)


def _first(x: Tensor, out: Tensor, kept: Axes, reduced: Axes, kind: str) -> Plan | None:
    """Run a problem without a plan by its route, merge what that leaves, and return the plan, as run_first does."""
    route = route_of(x, kept, reduced, kind)
    if route is None:
        return run_first(x, out, kept, reduced, kind)
    size = route.planes * count(kept) + route.scratch
    parts, places = workspace(size, kind, x.device)
    first = plans.launch(route.kernel, route.grid, (x, out, parts, places), route.arguments, route.constants)
    merge = merge_planes(out, parts, places, kept, reduced, kind, route.planes)
    return None if first is None else Plan(first, size, merge)

"""reduction_nd v06_dispatch: routes send a call to the kernel that serves its axes.

Change:   where the compiler does not see multiples of 16 bytes, other kernels take packs of 16 bytes where memory has
          them (routes.py): of rows at any distance (packed_rows.py), and of columns whose rows start anywhere, or that
          are few (packed_columns.py). Many outputs of few elements give each lane whole ones (whole_columns.py). What
          they leave is v05's, as wide as all distances allow.
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

from kernel_twins._triton.lib import plans, tuning
from kernel_twins._triton.reduction.reduction_nd.axes import Axes, count, split
from kernel_twins._triton.reduction.reduction_nd.routes import Route, route_of
from kernel_twins._triton.reduction.reduction_nd.v05_split import (
    Plan,
    key_of,
    merge_planes,
    run,
    run_first,
    workspace,
)

_plans: dict[tuple[Any, ...], Plan] = {}


def reduction_nd_v06_dispatch(x: Tensor, *, out: Tensor, dims: tuple[int, ...] = (-1,), kind: str = "sum") -> None:
    """out = the sum of x over the axes dims, or mean, max or argmax; fp32, bf16 or fp16 in, argmax int64 out."""
    key = key_of(x, out, dims, kind)
    plan = _plans.get(key)
    if plan is not None and not tuning.is_recording():
        run(plan, x, out, kind)
        return
    kept, reduced = split(x.shape, x.stride(), [dim % x.dim() for dim in dims], kind == "argmax")
    route = route_of(x, kept, reduced, kind)
    plan = run_first(x, out, kept, reduced, kind) if route is None else _routed(x, out, kept, reduced, kind, route)
    if plan is not None:
        plans.keep(_plans, key, plan)


def _routed(x: Tensor, out: Tensor, kept: Axes, reduced: Axes, kind: str, route: Route) -> Plan | None:
    """Run another kernel, and merge its planes."""
    size = route.planes * count(kept) + route.scratch
    parts, places = workspace(size, kind, x.device)
    first = plans.launch(route.kernel, route.grid, (x, out, parts, places), route.arguments, route.constants)
    merge = merge_planes(out, parts, places, kept, reduced, kind, route.planes)
    return None if first is None else Plan(first, size, merge)

"""layer_norm_backward v07_dispatch: a kernel for rows of every length.

Change:   a routing table chooses among four kernels by the number, length and alignment of rows. The programs of a
          cooperative launch share rows that are longer than a tile, and exchange their sums through L2. Of matrices
          whose rows have other skews than dx's they shift packs in registers. Rows that leave a part of a tile idle,
          and short misaligned rows, are held in chunks of a few warps' registers, and so are the sums of their columns.
          Without a weight there are no sums, and programs take rows of their own. Rows that no cooperative launch
          holds, and few long rows, are split by two launches: the first one leaves the two sums of every part, the
          second one merges these, writes dx, and adds up its columns.
Why:      v03 reads long rows twice, has a tile of a power of 2, and loads short misaligned rows one element at a time.
          The registers of the whole GPU hold rows, and the sums of their columns, that those of an SM do not. The
          second launch reads rows again, but on all SMs, and its program has the same columns of every row.
Counter:  time stays where a block holds rows, and falls where they are long, leave lanes idle, or are misaligned.
Requires: rows whose elements are contiguous, at any distance from each other.
Routes:   (routing.py)
          - rows without a weight that a few warps hold: held_rows.py
          - rows with one that a few warps hold with the sums of their columns, whose chunks leave fewer lanes idle than
            tiles, or that tiles load by single elements though their skews are alike: summed_rows.py
          - rows too long for all programs that run at once, and few long rows: split_rows.py
          - others: cooperative_rows.py
Twin:     cuda-kernels/norm/layer_norm_backward/v07_dispatch.cu
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.lib.workspace import counter
from kernel_twins._triton.norm import routing
from kernel_twins._triton.norm.layer_norm_backward.column_sums import SUM_WARPS, norm_backward_sum_kernel, summing
from kernel_twins._triton.norm.layer_norm_backward.cooperative_rows import backward_rows
from kernel_twins._triton.norm.layer_norm_backward.cooperative_tiles import (
    DIVIDED,
    VECTOR_BYTES,
    divided,
    grid_of,
    shifted_matrices,
)
from kernel_twins._triton.norm.layer_norm_backward.held_rows import norm_backward_held_rows
from kernel_twins._triton.norm.layer_norm_backward.split_rows import norm_backward_split_rows
from kernel_twins._triton.norm.layer_norm_backward.summed_rows import norm_backward_summed_rows

Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]


@triton.heuristics(DIVIDED)
@triton.jit
def layer_norm_backward_v07_dispatch_kernel(
    dout, x, mean, rstd, weight, dadded, dx, partials, counters, M, N, stride_dm, stride_xm, stride_am,
    WIDE: tl.constexpr, SHIFTED: tl.constexpr, TILE_BYTES: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    backward_rows(
        dout, x, mean, rstd, weight, dadded, dx, partials, counters, M, N, stride_dm, stride_xm, stride_am,
        STAGES, ROWS, BLOCK_N, PARTS, SLOTS, VECTOR, EDGES, EVEN, SHIFTED,
    )  # fmt: skip


def layer_norm_backward_v07_dispatch(
    dout: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dadded: Tensor | None = None,
    *,
    out: Tensor | tuple[Tensor, ...],
) -> None:
    """out = dx, dweight and dbias, or without a weight dx alone; fp32, bf16 or fp16.

    dout, x, and dadded, the gradient of x + residual: [M, N], contiguous rows; mean, rstd: [M], fp32; weight, dweight,
    dbias: [N]; dx: [M, N].
    """
    inputs = dout, x, mean, rstd, weight, dadded
    launch(layer_norm_backward_v07_dispatch_kernel, "layer_norm_backward", inputs, out)


_plans: dict[tuple[Any, ...], Callable[..., None]] = {}  # the launch cache


def launch(kernel: Any, op: str, inputs: Inputs, out: Tensor | tuple[Tensor, ...]) -> None:
    """Run the kernels that suit the rows; ``kernel`` is the operation's own for cooperative rows."""
    dout, x, *_, dadded = inputs
    dx, *sums = out if isinstance(out, tuple) else (out,)
    dweight, dbias = (*sums, None, None)[:2]
    tensors = *inputs, dx, dweight, dbias
    if 0 in dout.shape:
        for each in sums:
            each.zero_()
        return
    strides = dout.stride(0), x.stride(0), None if dadded is None else dadded.stride(0)
    key = op, dout.shape, strides, dout.dtype, plans.alignment(*tensors), dout.get_device()
    plan = _plans.get(key)
    if plan is not None:
        plan(*tensors)
        return
    plan = _first_time(kernel, op, tensors)
    if plan is not None:
        plans.keep(_plans, key, plan)


def _first_time(kernel: Any, op: str, tensors: tuple[Tensor | None, ...]) -> Callable[..., None] | None:
    """Run a problem that is not in the launch cache, and make its plan, unless it is interpreted or captured."""
    dout, x, mean, rstd, weight, dadded, dx, *sums = tensors
    assert dout is not None and x is not None
    (M, N), itemsize = dout.shape, dout.element_size()
    strides = tuple(0 if each is None else each.stride(0) if M > 1 else N for each in (dout, x, dadded))
    matrices = dout, x, dadded, dx
    vector = routing.vector_of(N, strides, itemsize, (*matrices, weight, *sums))
    # Rows whose skews are alike need no common multiple: their ends are taken one by one.
    aligned = routing.vector_of(0, (), itemsize, matrices) * itemsize == VECTOR_BYTES
    apart = shifted_matrices(N, strides if dadded is not None else strides[:2], itemsize)
    # Single elements of whole words travel as fast as packs that are shifted together. Without a weight the compiler
    # loads no rows with ends ahead.
    shifts = aligned and itemsize < routing.WORD_BYTES and weight is not None
    wide, shifted = aligned and not apart, apart if shifts else 0
    route = routing.backward(op, dout, weight is not None, dadded is not None, vector, wide, shifted)
    if isinstance(route, routing.Held):
        plan = norm_backward_held_rows(route, (dout, x, mean, rstd, dadded, dx), (M, N, *strides), vector)
        return None if plan is None else lambda *tensors: plan(*tensors[:4], *tensors[5:7])
    if isinstance(route, routing.Summed):
        return norm_backward_summed_rows(route, tensors, (M, N, *strides))
    if isinstance(route, routing.Split):
        return norm_backward_split_rows(route, tensors, (M, N, *strides), vector)
    return _cooperative(kernel, {"WIDE": wide, "SHIFTED": shifted, **route}, tensors, strides)


def _cooperative(
    kernel: Any, config: dict[str, Any], tensors: tuple[Tensor | None, ...], strides: tuple[int, ...]
) -> Callable[..., None] | None:
    """Run the cooperative kernel and the sum of its partial sums; see _first_time."""
    dout, *_, dweight, dbias = tensors
    assert dout is not None
    (M, N), device, sums = dout.shape, dout.device, (dweight is not None) + (dbias is not None)
    shifted = config["SHIFTED"]
    tiles = divided(N, dout.element_size(), config["WIDE"], shifted, config, device)
    grid, shares = grid_of(M, N, shifted, config | tiles, device), tiles["PARTS"] > 1
    groups = grid[0] // tiles["PARTS"]

    def workspace() -> tuple[Tensor | None, Tensor | None]:
        partials = torch.empty((sums, groups, N), dtype=torch.float32, device=device) if sums else None
        return partials, counter(device) if shares else None

    partials, counters = workspace()
    behind = M, N, *strides
    first = plans.launch(kernel, grid, (*tensors[:7], partials, counters), behind, config)
    second = None
    if partials is not None:
        sum_grid, sum_behind = summing(sums, groups, N, sm_count(device))
        results = partials, dweight, dbias
        second = plans.launch(norm_backward_sum_kernel, sum_grid, results, sum_behind, {"num_warps": SUM_WARPS})
    if first is None or (sums and second is None):
        return None

    def again(*tensors: Tensor) -> None:
        partials, counters = workspace()
        first(*tensors[:7], partials, counters)
        if second is not None and partials is not None:
            second(partials, *tensors[7:])

    return again

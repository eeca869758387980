"""layer_norm v12_dispatch: a kernel for rows of every length.

Change:   a table tells the configuration from the length of rows, where v06 takes that of the nearest matrix that was
          searched. Rows that leave a part of v06's tile idle, and short misaligned rows, are held in chunks of a few
          warps' registers. Rows too long for v06, or so few that v06 leaves SMs idle, are split by two launches: the
          first one reads them and leaves the numbers of every part, the second one merges these and writes.
Why:      v06's tile of short rows is as long as the next power of 2, and where these are misaligned, so large that the
          addresses of its single elements spill. Rows that no cooperative launch holds had one program each, on as many
          SMs as there are rows. The second launch reads rows again, but all SMs work on every row.
Counter:  time stays where rows are tuned for, and falls where they are short and misaligned.
Requires: rows whose elements are contiguous, at any distance from each other.
Routes:   (routing.py)
          - rows that a few warps hold with fewer idle lanes than v06's tile has, and rows without 16-byte accesses that
            a warp holds: held_rows.py
          - rows too long for all programs that run at once, and few long rows: split_rows.py
          - others: v06's kernel
Source:   to merge: as v02.
Twin:     cuda-kernels/norm/layer_norm/v12_dispatch.cu
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.workspace import counter
from kernel_twins._triton.norm import routing
from kernel_twins._triton.norm.layer_norm.held_rows import norm_held_rows
from kernel_twins._triton.norm.layer_norm.split_rows import norm_split_rows
from kernel_twins._triton.norm.layer_norm.v06_cooperative import DIVIDED, SECTOR_BYTES, _first, norm_rows

Tensors = tuple[Tensor | None, ...]  # x, weight, bias, residual, y, mean, rstd and the sum


@triton.heuristics(DIVIDED)
@triton.jit
def layer_norm_v12_dispatch_kernel(
    x, weight, bias, residual, out, mean, rstd, added, counters, M, N, stride_xm, stride_rm, eps, WIDE: tl.constexpr,
    TILE_BYTES: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr, FULL: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    norm_rows(
        x, weight, bias, residual, out, mean, rstd, added, counters, M, N, stride_xm, stride_rm, eps, True,
        STAGES, ROWS, BLOCK_N, AT_ONCE, CHUNKS, PARTS, SLOTS, VECTOR, EDGES, FULL, HELD,
    )  # fmt: skip


def layer_norm_v12_dispatch(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-5,
    out: tuple[Tensor, ...],
) -> None:
    """out = y, mean, rstd, and with a residual the sum x + residual, which y then normalises; fp32, bf16 or fp16.

    x, residual: [M, N], contiguous rows; weight, bias: [N]; y and the sum: [M, N]; mean and rstd: [M], fp32.
    """
    y, mean, rstd, added = out if residual is not None else (*out, None)
    tensors = x, weight, bias, residual, y, mean, rstd, added
    launch(layer_norm_v12_dispatch_kernel, "layer_norm", x, residual, tensors, eps)


_plans: dict[tuple[Any, ...], Callable[..., None]] = {}  # the launch cache


def launch(kernel: Any, op: str, x: Tensor, residual: Tensor | None, tensors: Tensors, eps: float) -> None:
    """Run the kernel that suits the rows; ``kernel`` is the operation's own for cooperative rows."""
    aligned = tuple([None if each is None else each.data_ptr() % SECTOR_BYTES for each in tensors])
    stride_rm = None if residual is None else residual.stride(0)
    key = op, x.shape, x.stride(0), stride_rm, x.dtype, eps, aligned, x.get_device()
    plan = _plans.get(key)
    if plan is not None:
        plan(*tensors)
    elif x.shape[0] > 0:
        plan = _first_time(kernel, op, x, residual, tensors, eps)
        if plan is not None:
            plans.keep(_plans, key, plan)


def _first_time(
    kernel: Any, op: str, x: Tensor, residual: Tensor | None, tensors: Tensors, eps: float
) -> Callable[..., None] | None:
    """Run a problem that is not in the launch cache, and make its plan, unless it is interpreted or captured."""
    (M, N), device = x.shape, x.device
    strides = [N if M == 1 else each.stride(0) for each in (x, residual) if each is not None]
    sizes = M, N, strides[0], 0 if residual is None else strides[1]
    *operands, _, _, added = tensors  # but the statistics
    vector = routing.vector_of(N, strides, x.element_size(), (*operands, added))
    written = routing.vector_of(N, (), x.element_size(), (*tensors[1:3], tensors[4], added))
    route = routing.forward(op, x, residual is not None, vector, written)
    if isinstance(route, routing.Held):
        held = norm_held_rows(route, tensors, sizes, eps, vector)
        return None if held is None else held.__call__
    if isinstance(route, routing.Split):
        return norm_split_rows(route, tensors, sizes, eps, vector)
    known = _first(kernel, route, x, residual, tensors, eps)
    if known is None:
        return None
    plan, shares = known
    return lambda *tensors: plan(*tensors, counter(device) if shares else None)

"""layer_norm v12_dispatch: a kernel for rows of every length.

Change:   a routing table chooses among four kernels by the number, length and alignment of rows. The programs of a
          cooperative launch share rows that are longer than a tile, and exchange their numbers through L2. Rows that
          leave a part of a tile idle, and short misaligned rows, are held in chunks of a few warps' registers. Rows
          that no cooperative launch holds, and few long rows, are split by two launches: the first one reads them and
          leaves the numbers of every part, the second one merges these and writes.
Why:      v02 reads long rows twice, and v04's tile of short rows is as long as the next power of 2. The registers of
          the whole GPU hold rows that those of an SM do not. The second launch reads rows again, but all SMs work on
          every row.
Counter:  time falls where rows are long, and where they are short and misaligned; it falls a little at 4,096.
Requires: rows whose elements are contiguous, at any distance from each other.
Routes:   (routing.py)
          - 16-bit rows of odd lengths that a warp holds, with the same skew in all matrices: skewed_rows.py
          - rows that a few warps hold with fewer idle lanes than a tile has, and rows without 16-byte accesses that a
            warp holds: held_rows.py
          - rows too long for all programs that run at once, and few long rows: split_rows.py
          - others: cooperative_rows.py
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
from kernel_twins._triton.norm.layer_norm.cooperative_rows import norm_rows
from kernel_twins._triton.norm.layer_norm.cooperative_tiles import (
    DIVIDED,
    SECTOR_BYTES,
    VECTOR_BYTES,
    grid_of,
    launched,
)
from kernel_twins._triton.norm.layer_norm.held_rows import norm_held_rows
from kernel_twins._triton.norm.layer_norm.skewed_rows import norm_skewed_rows
from kernel_twins._triton.norm.layer_norm.split_rows import norm_split_rows

WORD_BYTES = 4

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
    M, N = x.shape
    strides = [N if M == 1 else each.stride(0) for each in (x, residual) if each is not None]
    sizes = M, N, strides[0], 0 if residual is None else strides[1]
    *operands, _, _, added = tensors  # but the statistics
    vector = routing.vector_of(N, strides, x.element_size(), (*operands, added))
    # Rows whose skews are alike need no common multiple: their ends are taken one by one.
    apart = [stride - N for stride in strides]
    wide = routing.vector_of(0, apart, x.element_size(), (x, residual, tensors[4], added)) * x.element_size()
    written = routing.vector_of(N, (), x.element_size(), (*tensors[1:3], tensors[4], added))
    has_weight = tensors[1] is not None or tensors[2] is not None
    route = routing.forward(op, x, residual is not None, vector, written, wide == VECTOR_BYTES, has_weight)
    if isinstance(route, routing.Skewed):
        skewed = norm_skewed_rows(route, tensors, sizes, eps)
        return None if skewed is None else skewed.__call__
    if isinstance(route, routing.Held):
        held = norm_held_rows(route, tensors, sizes, eps, vector)
        return None if held is None else held.__call__
    if isinstance(route, routing.Split):
        return norm_split_rows(route, tensors, sizes, eps, vector)
    return _cooperative(kernel, route, tensors, sizes, eps)


def _cooperative(
    kernel: Any, config: dict[str, Any], tensors: Tensors, sizes: tuple[int, ...], eps: float
) -> Callable[..., None] | None:
    """Run the cooperative kernel; see _first_time. ``sizes``: M, N, and the strides of rows of x and residual."""
    (x, _, _, residual, *_), (_, N, *strides) = tensors, sizes
    assert x is not None
    device, matrices = x.device, 1 if residual is None else 2
    places = [each.data_ptr() for each in tensors if each is not None and each.dim() == 2]
    places += [(stride - N) * x.element_size() for stride in strides[:matrices]]
    unit = SECTOR_BYTES if N * x.element_size() % VECTOR_BYTES else VECTOR_BYTES
    wide = all(place % unit == 0 for place in places)
    if unit == SECTOR_BYTES:  # rows have every skew: weight and bias are read in words, to be realigned
        vectors = [each.data_ptr() for each in tensors if each is not None and each.dim() == 1]
        wide = wide and all(place % WORD_BYTES == 0 for place in vectors)
    constants = {"WIDE": wide, **config}
    tiles = launched(dict(zip(kernel.arg_names, tensors, strict=False)) | constants | {"N": N})
    shares = tiles["PARTS"] > 1  # which takes counters
    grid = grid_of(x, matrices, constants | tiles)
    plan = plans.launch(kernel, grid, (*tensors, counter(device) if shares else None), (*sizes, eps), constants)
    if plan is None:
        return None
    return lambda *tensors: plan(*tensors, counter(device) if shares else None)

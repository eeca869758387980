"""rms_norm_backward v05_dispatch: layer_norm_backward's v07 without a mean.

Change:   the kernels of layer_norm_backward's v07, without the mean of x, that of the gradient, and dbias, and a table
          of configurations of its own.
Why:      layer_norm_backward's ladder found it. A part of a split row leaves one number instead of two.
Counter:  bytes_over_minimum falls to 1; time falls.
Requires: rows whose elements are contiguous, at any distance from each other.
Routes:   as layer_norm_backward's v07 (routing.py)
Twin:     cuda-kernels/norm/rms_norm_backward/v05_dispatch.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.norm.layer_norm_backward.cooperative_rows import backward_rows
from kernel_twins._triton.norm.layer_norm_backward.cooperative_tiles import DIVIDED
from kernel_twins._triton.norm.layer_norm_backward.v07_dispatch import launch


@triton.heuristics(DIVIDED)
@triton.jit
def rms_norm_backward_v05_dispatch_kernel(
    dout, x, mean, rstd, weight, dadded, dx, partials, counters, M, N, stride_dm, stride_xm, stride_am,
    WIDE: tl.constexpr, SHIFTED: tl.constexpr, TILE_BYTES: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    # As layer_norm_backward's v07, but mean is None, and partials are [1, groups, N], of dweight alone.
    backward_rows(
        dout, x, mean, rstd, weight, dadded, dx, partials, counters, M, N, stride_dm, stride_xm, stride_am,
        STAGES, ROWS, BLOCK_N, PARTS, SLOTS, VECTOR, EDGES, EVEN, SHIFTED,
    )  # fmt: skip


def rms_norm_backward_v05_dispatch(
    dout: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dadded: Tensor | None = None,
    *,
    out: Tensor | tuple[Tensor, ...],
) -> None:
    """out = dx and dweight, or without a weight dx alone; fp32, bf16 or fp16.

    dout, x, and dadded, the gradient of x + residual: [M, N], contiguous rows; rstd: [M], fp32; weight, dweight: [N];
    dx: [M, N].
    """
    inputs = dout, x, None, rstd, weight, dadded
    launch(rms_norm_backward_v05_dispatch_kernel, "rms_norm_backward", inputs, out)

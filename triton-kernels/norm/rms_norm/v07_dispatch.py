"""rms_norm v07_dispatch: layer_norm's v12 without a mean.

Change:   the kernels of layer_norm's v12, without the mean and the bias, and a table of configurations of its own.
Why:      layer_norm's ladder found it. A part of a split row leaves one number instead of two.
Counter:  time stays where a block holds rows, and falls where they are long, short and misaligned, or leave lanes idle.
Requires: rows whose elements are contiguous, at any distance from each other.
Routes:   as layer_norm's v12 (routing.py)
Twin:     cuda-kernels/norm/rms_norm/v07_dispatch.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.norm.layer_norm.cooperative_rows import norm_rows
from kernel_twins._triton.norm.layer_norm.cooperative_tiles import DIVIDED
from kernel_twins._triton.norm.layer_norm.v12_dispatch import launch


@triton.heuristics(DIVIDED)
@triton.jit
def rms_norm_v07_dispatch_kernel(
    x, weight, bias, residual, out, mean, rstd, added, counters, M, N, stride_xm, stride_rm, eps, WIDE: tl.constexpr,
    TILE_BYTES: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr, FULL: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    # As layer_norm's v12, but bias and mean are None.
    norm_rows(
        x, weight, bias, residual, out, mean, rstd, added, counters, M, N, stride_xm, stride_rm, eps, False,
        STAGES, ROWS, BLOCK_N, AT_ONCE, CHUNKS, PARTS, SLOTS, VECTOR, EDGES, FULL, HELD,
    )  # fmt: skip


def rms_norm_v07_dispatch(
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-6,
    out: tuple[Tensor, ...],
) -> None:
    """out = y, rstd, and with a residual the sum x + residual, which y then normalises; fp32, bf16 or fp16.

    x, residual: [M, N], contiguous rows; weight: [N]; y and the sum: [M, N]; rstd: [M], fp32.
    """
    y, rstd, added = out if residual is not None else (*out, None)
    tensors = x, weight, None, residual, y, None, rstd, added
    launch(rms_norm_v07_dispatch_kernel, "rms_norm", x, residual, tensors, eps)

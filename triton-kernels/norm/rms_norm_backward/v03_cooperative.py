"""rms_norm_backward v03_cooperative: layer_norm_backward's v05 without a mean.

Change:   the kernel of layer_norm_backward's v05 without the mean of x, that of the gradient, and dbias: persistent
          programs, rows that travel ahead, column sums in registers, and split rows. It is searched anew over a longer
          list (see tuning.py).
Why:      layer_norm_backward's ladder found it. With half the column sums to hold, registers are left, and the parts of
          a row exchange one number instead of two.
Counter:  bytes_over_minimum falls to 1; dram_share rises.
Requires: what layer_norm_backward's v05 requires.
Twin:     none, see the spec
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning
from kernel_twins._triton.norm.layer_norm_backward.v05_cooperative import CONFIGS, DIVIDED, _backward, fitting, launch
from kernel_twins._triton.norm.rms_norm_backward.v01_rows_then_columns import rms_norm_backward_v01_rows_then_columns


@triton.autotune(
    CONFIGS, key=["N"], prune_configs_by={"early_config_prune": fitting}, cache_results=True, do_bench=tuning.bench
)
@triton.heuristics(DIVIDED)
@triton.jit
def rms_norm_backward_v03_cooperative_kernel(
    dout, x, mean, rstd, weight, dadded, dx, partials, counters, M, N, stride_dm, stride_xm, stride_am,
    WIDE: tl.constexpr, TILE_BYTES: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    # As layer_norm_backward's v05, but mean is None, and partials are [1, groups, N], of dweight alone.
    _backward(
        dout, x, mean, rstd, weight, dadded, dx, partials, counters, M, N, stride_dm, stride_xm, stride_am,
        STAGES, ROWS, BLOCK_N, PARTS, SLOTS, VECTOR, EDGES, EVEN,
    )  # fmt: skip


def rms_norm_backward_v03_cooperative(
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
    launch(
        rms_norm_backward_v03_cooperative_kernel,
        "rms_norm_backward/v03_cooperative",
        lambda: rms_norm_backward_v01_rows_then_columns(dout, x, rstd, weight, dadded, out=out),
        (dout, x, None, rstd, weight, dadded),
        out,
    )

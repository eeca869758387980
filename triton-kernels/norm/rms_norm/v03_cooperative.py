"""rms_norm v03_cooperative: layer_norm's v06 without a mean.

Change:   the kernel of layer_norm's v06 without the mean and the bias: several rows a program, one row a program, or a
          row split over resident programs. It is searched anew over the same list (see tuning.py).
Why:      layer_norm's ladder found it. The parts of a row exchange one number instead of two. Trials ran before the
          last prediction.
Counter:  dram_share rises; time falls.
Requires: what layer_norm's v06 requires. Rows too long for all programs that can run at once: v01_two_passes.
Twin:     none, see the spec
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning
from kernel_twins._triton.norm.layer_norm.v06_cooperative import CONFIGS, DIVIDED, fitting, launch, norm_rows
from kernel_twins._triton.norm.rms_norm.v01_two_passes import rms_norm_v01_two_passes


@triton.autotune(
    CONFIGS, key=["N"], prune_configs_by={"early_config_prune": fitting}, cache_results=True, do_bench=tuning.bench
)
@triton.heuristics(DIVIDED)
@triton.jit
def rms_norm_v03_cooperative_kernel(
    x, weight, residual, out, rstd, added, counters, M, N, stride_xm, stride_rm, eps, WIDE: tl.constexpr,
    TILE_BYTES: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr, FULL: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    norm_rows(
        x, weight, None, residual, out, None, rstd, added, counters, M, N, stride_xm, stride_rm, eps, False,
        STAGES, ROWS, BLOCK_N, AT_ONCE, CHUNKS, PARTS, SLOTS, VECTOR, EDGES, FULL, HELD,
    )  # fmt: skip


def rms_norm_v03_cooperative(
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
    tensors = x, weight, residual, y, rstd, added
    if not launch(rms_norm_v03_cooperative_kernel, "rms_norm/v03_cooperative", x, residual, tensors, eps):
        rms_norm_v01_two_passes(x, weight, residual, eps=eps, out=out)

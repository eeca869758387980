"""cross_entropy_backward v01_scalar: a program walks along its row.

Change:   none yet, this is where the ladder starts.
Why:      the definition, word for word: the gradient is the probability exp(x - lse), with lse from the forward pass,
          less 1 at the target.
Counter:  dram_bytes are the least possible; dram_share stays as low as a program allows that waits for each block of
          its row.
Requires: rows whose elements are contiguous, at any distance from each other. Accesses take 16 bytes if N and that
          distance are multiples of 16; otherwise the compiler cannot know where a row starts, and accesses single
          elements.
Twin:     cuda-kernels/loss/cross_entropy_backward/v01_scalar.cu
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4
BLOCK = 1024

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def cross_entropy_backward_v01_scalar_kernel(
    logits, target, lse, dout, out, N: tl.int64, stride_lm: tl.int64, stride_dm: tl.int64, stride_om: tl.int64,
    ignore_index: tl.int64, smoothing, BLOCK: tl.constexpr,
):  # fmt: skip
    # logits, out: [M, N]; target, lse, dout: [M]. Offsets of rows have 64 bits.
    row = tl.program_id(0).to(tl.int64)
    row_logits, row_out, row_class = logits + row * stride_lm, out + row * stride_om, tl.load(target + row)
    ignored, is_class = row_class == ignore_index, (row_class >= 0) & (row_class < N)
    # A target that is no class makes the whole row NaN, as it makes the loss.
    row_lse, scale = tl.load(lse + row), tl.where(is_class, tl.load(dout + row * stride_dm), float("nan"))
    shared = smoothing / N
    for start in tl.range(0, N, BLOCK):
        col = start + tl.arange(0, BLOCK)
        values = tl.load(row_logits + col, mask=col < N).to(tl.float32)
        wanted = tl.where(col == row_class, shared + (1.0 - smoothing), shared)
        values = (tl.exp2((values - row_lse) * LOG2_E) - wanted) * scale
        tl.store(row_out + col, tl.where(ignored, 0.0, values).to(out.dtype.element_ty), mask=col < N)


def cross_entropy_backward_v01_scalar(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    out: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> None:
    """out = the gradient of logits, [M, N], contiguous rows, from the losses': dout, [M]; target, lse: [M]."""
    M, N = logits.shape
    if M == 0 or N == 0:
        return
    cross_entropy_backward_v01_scalar_kernel[(M,)](
        logits, target, lse, dout, out, N, logits.stride(0), dout.stride(0), out.stride(0), ignore_index,
        label_smoothing, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip

"""The last kernel of the steps that add dq up in memory: it scales and rounds the sums."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024  # of a program
NUM_WARPS = 4


@triton.jit(do_not_specialize=["Sq"])
def attention_backward_rounding_kernel(sums, dq, Sq, pitch, scale, D: tl.constexpr, ELEMENTS: tl.constexpr):
    # sums: [B * H, pitch, D], dq: [B * H, Sq, D].
    size = Sq.to(tl.int64) * D
    blocks = tl.cdiv(size, ELEMENTS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    element = tl.program_id(0) % blocks * ELEMENTS + tl.arange(0, ELEMENTS)
    values = tl.load(sums + head * pitch * D + element, mask=element < size)
    tl.store(dq + head * size + element, (values * scale).to(dq.dtype.element_ty), mask=element < size)


def round_sums(sums: Tensor, dq: Tensor, scale: float) -> None:
    """dq = sums * scale. sums: fp32 [B, H, pitch, D], of which the first Sq rows count, dq: [B, H, Sq, D], contiguous.

    No dimension is 0.
    """
    B, H, Sq, D = dq.shape
    attention_backward_rounding_kernel[(B * H * triton.cdiv(Sq * D, ELEMENTS),)](
        sums, dq, Sq, sums.shape[2], scale, D=D, ELEMENTS=ELEMENTS, num_warps=NUM_WARPS
    )

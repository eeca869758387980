"""The last kernel of the steps that add dq up in memory, which scales and rounds the sums, and how gradients lie."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024  # of a program
NUM_WARPS = 4
PACK = tl.constexpr(8)  # elements of 16 bytes


@triton.jit(do_not_specialize=["H", "Sq"])
def attention_backward_rounding_kernel(
    sums, dq, H, Sq, pitch, scale, stride_b, stride_h, stride_m,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # sums: [B, H, pitch, D] contiguous, dq: [B, H, Sq, D]. Offsets have 64 bits.
    blocks = tl.cdiv(Sq, ROWS)
    head = (tl.program_id(0) // blocks).to(tl.int64)  # of B * H
    row = (tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < Sq) & (d < D)
    values = tl.load(sums + (head * pitch + row) * D + d, mask=mask)
    dq_rows = dq + (head // H * stride_b + head % H * stride_h + row * stride_m) * PACK
    tl.store(dq_rows + d, (values * scale).to(dq.dtype.element_ty), mask=mask)


def round_sums(sums: Tensor, dq: Tensor, scale: float) -> None:
    """dq = sums * scale. sums: fp32 [B, H, pitch, D], of which the first Sq rows count; dq: [B, H, Sq, D].

    No dimension is 0, D is a multiple of 8, and dq's strides are what strides_of takes.
    """
    B, H, Sq, D = dq.shape
    width = triton.next_power_of_2(D)
    rows = ELEMENTS // width
    attention_backward_rounding_kernel[(B * H * triton.cdiv(Sq, rows),)](
        sums, dq, H, Sq, sums.shape[2], scale, *strides_of(dq), D=D, ROWS=rows, BLOCK_D=width, num_warps=NUM_WARPS
    )


def strides_of(gradient: Tensor) -> tuple[int, ...]:
    """Of batches, heads and rows of contiguous elements, in packs of 8 elements, of which they are multiples.

    The compiler makes accesses of 16 bytes where it knows rows to start at such multiples.
    """
    return tuple(stride // PACK.value for stride in gradient.stride()[:3])

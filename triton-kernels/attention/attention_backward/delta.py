"""What the steps of attention's backward pass take of a row instead of its result and its sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PITCH = 128  # rows of the largest tile
ROWS = 32  # of a program
NUM_WARPS = 4

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["H", "Sq"])
def attention_backward_delta_kernel(
    dout, result, lse, dlse, delta, lse2, H, Sq, pitch,
    stride_db, stride_dh, stride_dm, stride_rb, stride_rh, stride_rm,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # dout, result: [B, H, Sq, D]; lse, dlse (or None): [B, H, Sq], delta, lse2: [B, H, pitch] contiguous.
    # Offsets have 64 bits.
    blocks = pitch // ROWS
    row = (tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = (tl.program_id(0) // blocks).to(tl.int64)  # of B * H
    batch = head // H
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < Sq)[:, None] & (d < D)
    dout_rows = dout + batch * stride_db + head % H * stride_dh + row[:, None] * stride_dm
    result_rows = result + batch * stride_rb + head % H * stride_rh + row[:, None] * stride_rm
    dout_tile = tl.load(dout_rows + d, mask=mask, other=0.0).to(tl.float32)
    result_tile = tl.load(result_rows + d, mask=mask, other=0.0).to(tl.float32)
    sums = tl.sum(dout_tile * result_tile, axis=1)
    known = tl.load(lse + head * Sq + row, mask=row < Sq, other=-float("inf"))
    if dlse is not None:
        sums -= tl.load(dlse + head * Sq + row, mask=row < Sq, other=0.0)
    tl.store(delta + head * pitch + row, sums)
    # Of a row that sees no key, exp2(score - inf) is 0, where exp2(score - -inf) would be inf.
    tl.store(lse2 + head * pitch + row, tl.where(known == -float("inf"), float("inf"), known * LOG2_E))


def deltas(dout: Tensor, result: Tensor, lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """delta = sum(dout * result) - dlse of each row, and lse * log2(e), but inf where lse is -inf: fp32 [B, H, pitch].

    pitch is Sq up to a multiple of 128, so that whole tiles can be read: behind Sq, delta is 0 and lse * log2(e) inf.

    dout, result: [B, H, Sq, D], none of them 0, any strides but rows of D neighbours; lse, dlse: fp32 [B, H, Sq],
    contiguous, dlse None for zeros.
    """
    B, H, Sq, D = dout.shape
    pitch = triton.cdiv(Sq, PITCH) * PITCH
    delta, lse2 = torch.empty((2, B, H, pitch), dtype=torch.float32, device=dout.device)
    attention_backward_delta_kernel[(B * H * (pitch // ROWS),)](
        dout, result, lse, dlse, delta, lse2, H, Sq, pitch, *dout.stride()[:3], *result.stride()[:3],
        D=D, ROWS=ROWS, BLOCK_D=triton.next_power_of_2(D), num_warps=NUM_WARPS,
    )  # fmt: skip
    return delta, lse2

"""attention_backward v05_warp_specialized: two warps move data, two warpgroups only compute.

Change:   Gluon, the language beneath Triton's, instead of Triton. One warp fetches queries as soon as their stage is
          free, another one has the copy engine add finished parts of dq to memory. Two warpgroups own 64 keys each. In
          v03 the compiler decided when the same warps fetch and when they multiply, and their threads added dq by
          atomics.
Why:      a copy starts when it can, and an addition takes no instruction of the warps that compute. These keep the
          registers that the other two warps give back, for dk and dv of 64 keys beside two tiles of pairs.
Counter:  time falls; tensor_pipe rises.
Requires: as v03.
Source:   Shah et al., "FlashAttention-3" (2024), whose backward pass has these two warps.
Twin:     cuda-kernels/attention/attention_backward/v05_warp_specialized.cu
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernel_twins._triton.attention.attention import rings, tiles
from kernel_twins._triton.attention.attention_backward import pairs
from kernel_twins._triton.attention.attention_backward.delta import deltas
from kernel_twins._triton.attention.attention_backward.rounding import round_sums, strides_of


@gluon.jit
def _visit(i, dk, dv, own, ring, ds_tile, handover, walk, first_key, band, factor):
    """dk and dv with the i-th visit's queries, whose part of dq is handed over."""
    keys, values = own
    q_tiles, dout_tiles, lse2_tiles, delta_tiles, full, empty = ring
    part, part_full, part_empty = handover
    stage, phase = rings.place(i, pairs.STAGES)
    _, row = pairs.visit_of(i, walk)
    q_tile, dout_tile = rings.matrix(q_tiles.index(stage)), rings.matrix(dout_tiles.index(stage))
    mbarrier.wait(full.index(stage), phase)  # for the stage's queries
    scores = pairs.multiply(keys, q_tile.permute((1, 0)), pairs.BLOCK_N)
    dp = pairs.multiply(values, dout_tile.permute((1, 0)), pairs.BLOCK_N)
    scores, dp = hopper.warpgroup_mma_wait(0, deps=(scores, dp))
    scores = scores * factor - pairs.of_columns(lse2_tiles.index(stage), scores)
    if pairs.hides(row, first_key, band):
        scores = pairs.hide(scores, row, first_key, band, -float("inf"))
    p = gl.exp2(scores)
    ds = (p * (dp - pairs.of_columns(delta_tiles.index(stage), dp))).to(q_tile.dtype)
    ds_tile.store(ds)
    hopper.fence_async_shared()  # shows them to wgmma
    p, ds = tiles.operand(p, dv, q_tile.dtype), tiles.operand(ds, dk, q_tile.dtype)
    dq = pairs.multiply(ds_tile.permute((1, 0)), keys, pairs.BLOCK_M)
    dv = hopper.warpgroup_mma(p, dout_tile, dv, is_async=True)
    dk = hopper.warpgroup_mma(ds, q_tile, dk, is_async=True)
    dq, dv, dk, p, ds = hopper.warpgroup_mma_wait(0, deps=(dq, dv, dk, p, ds))
    mbarrier.wait(part_empty.index(0), i & 1 ^ 1)  # for dq's earlier part to have left
    rings.matrix(part).store(dq)
    hopper.fence_async_shared()  # shows them to the copy engine
    mbarrier.arrive(part_full.index(0))
    mbarrier.arrive(empty.index(stage))
    return dk, dv


@gluon.jit
def _consume(dk_out, dv_out, strides, own, ring, ds_tile, handover, H, group, band, factor, scale, D: gl.constexpr):
    dk_strides, dv_strides = strides
    keys, values, own_full = own
    batch, kv_head, first_key = pairs.corner(H // group, band)
    walk = pairs.walk_of(first_key, group, band)
    keys, values = rings.matrix(keys), rings.matrix(values)
    dk, dv = pairs.products(pairs.BLOCK_N, keys.shape[1]), pairs.products(pairs.BLOCK_N, keys.shape[1])
    if walk[2] > 0:
        mbarrier.wait(own_full.index(0), 0)  # for the keys and values
    for i in range(walk[2]):
        dk, dv = _visit(i, dk, dv, (keys, values), ring, ds_tile, handover, walk, first_key, band, factor)
    place = (batch, kv_head, first_key)
    pairs.store_rows(dk_out, dk_strides, dk, scale, place, band[1], D)
    pairs.store_rows(dv_out, dv_strides, dv, 1.0, place, band[1], D)


@gluon.jit(do_not_specialize=["H", "group", "Sq", "Sk", "pitch", "first", "last"])
def attention_backward_v05_warp_specialized_kernel(
    dout_desc, q_desc, k_desc, v_desc, lse2_desc, delta_desc, sums_desc, dk, dv, H, group, Sq, Sk, pitch, factor, scale,
    first, last, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn, D: gl.constexpr,
):  # fmt: skip
    # dout, q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], lse2, delta: [B * H * pitch], sums: [B, H, pitch, D], zeros at
    # first, and dk, dv: [B, H_KV, Sk, D], strides in packs. Query i sees the keys from i + first to i + last.
    own, ring, ds_tile = pairs.shared_memory(q_desc, k_desc, v_desc, lse2_desc)
    handover = pairs.handover_of(sums_desc)
    hopper.fence_async_shared()  # before the copy engine counts bytes on the barriers
    band = (Sq, Sk, first, last)
    strides = ((stride_dkb, stride_dkh, stride_dkn), (stride_dvb, stride_dvh, stride_dvn))
    described = (q_desc, dout_desc, k_desc, v_desc, lse2_desc, delta_desc)
    gl.warp_specialize(
        [
            (_consume, (dk, dv, strides, own, ring, ds_tile, handover, H, group, band, factor, scale, D)),
            (pairs.produce, (described, own, ring, H, group, pitch, band)),
            (pairs.add_parts, (sums_desc, handover, H, group, band)),
        ],
        worker_num_warps=[1, 1],  # of all but the first, which has the program's own eight
        worker_num_regs=[pairs.MOVER_REGISTERS, pairs.MOVER_REGISTERS],
    )


def attention_backward_v05_warp_specialized(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor, Tensor],
    scale: float | None = None,
    band: tuple[int, int] | None = None,
) -> None:
    """The gradients of q, k and v through ``attention``, of whose outputs dout and dlse are the gradients.

    dout, q, result: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], contiguous rows, bf16 or fp16; lse, dlse: fp32 [B, H, Sq],
    contiguous, lse -inf where a row sees no key; out: dq, dk and dv, as q, k and v are. Query i sees the keys from
    i + band[0] to i + band[1]. Without them, the scale is 1 / sqrt(D), and it sees all.
    """
    (B, H, Sq, D), (H_KV, Sk) = q.shape, k.shape[1:3]
    if B * H * Sq * Sk == 0:  # nothing that a descriptor could describe
        for gradient in out:
            gradient.zero_()
        return
    dq, dk, dv = out
    factor = tiles.factor_of(scale, D)
    scale = D**-0.5 if scale is None else scale
    delta, lse2 = deltas(dout, result, lse, dlse)
    pitch = delta.shape[2]
    sums = torch.zeros((B, H, pitch, D), dtype=torch.float32, device=q.device)
    attention_backward_v05_warp_specialized_kernel[(B * H_KV * triton.cdiv(Sk, pairs.BLOCK_N.value),)](
        tiles.describe("dout", dout, pairs.BLOCK_M.value),
        tiles.describe("q", q, pairs.BLOCK_M.value),
        tiles.describe("k", k, pairs.BLOCK_N.value),
        tiles.describe("v", v, pairs.BLOCK_N.value),
        pairs.describe_rows(lse2), pairs.describe_rows(delta), pairs.describe_sums(sums),
        dk, dv, H, H // H_KV, Sq, Sk, pitch, factor, scale, *tiles.limits_of(band, Sq, Sk),
        *strides_of(dk), *strides_of(dv), D=D, num_warps=pairs.NUM_WARPS,
    )  # fmt: skip
    round_sums(sums, dq, scale)

"""attention_backward v07_register_reduction: parts of dq go from registers to memory.

Change:   a thread adds its sums of dq to memory itself, four at a time. v06 stored them to shared memory, from where
          the copy engine added them. Sums lie in the order of threads' registers: views of a part, which move nothing,
          make neighbours of each thread's four.
Why:      shared memory is what limits these products, and dq went through it twice. The warp that added parts falls
          away, and so do the barriers of the hand-over. The instruction returns nothing, so that no thread waits for
          L2.
Counter:  time falls a little; instructions fall.
Requires: as v03.
Source:   PTX ISA, "red"; FlashAttention-3 does so at head dimension 256.
Twin:     cuda-kernels/attention/attention_backward/v07_register_reduction.cu
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernel_twins._triton.attention.attention import rings, tiles
from kernel_twins._triton.attention.attention_backward import pairs
from kernel_twins._triton.attention.attention_backward.delta import deltas
from kernel_twins._triton.attention.attention_backward.rounding import PACK, strides_of


@gluon.jit
def _add(sums, dq, row):
    """Adds a part of dq, whose first row this is, from registers. Sums lie in the order of registers and threads."""
    # Rows are told by warp, half of its 16 rows and quad of lanes, columns by warpgroup, group of 8, lane and register.
    views = dq.reshape([4, 2, 8, 2, dq.shape[1] // 16, 4, 2]).permute((4, 3, 0, 2, 5, 1, 6))
    parts = views.reshape([dq.shape[0] * dq.shape[1]])
    at = gl.arange(0, parts.shape[0], layout=parts.type.layout)
    gl.atomic_add(sums + row.to(gl.int64) * dq.shape[1] + at, parts, sem="relaxed")


@gluon.jit
def _visit(i, dk, dv, own, ring, ds_tile, sums, walk, first_key, pitch, band, factor):
    """dk and dv with the i-th visit's queries, whose part of dq is added to its sums."""
    keys, values = own
    q_tiles, dout_tiles, lse2_tiles, delta_tiles, full, empty = ring
    stage, phase = rings.place(i, pairs.STAGES)
    head, row = pairs.visit_of(i, walk)
    q_tile, dout_tile = rings.matrix(q_tiles.index(stage)), rings.matrix(dout_tiles.index(stage))
    mbarrier.wait(full.index(stage), phase)  # for the stage's queries
    scores = pairs.multiply(keys, q_tile.permute((1, 0)), pairs.BLOCK_N)
    dp = pairs.multiply(values, dout_tile.permute((1, 0)), pairs.BLOCK_N)
    scores = hopper.warpgroup_mma_wait(1, deps=(scores,))
    p = gl.exp2(scores * factor - pairs.of_columns(lse2_tiles.index(stage), scores))
    if pairs.hides(row, first_key, band):
        p = pairs.hide(p, row, first_key, band, 0.0)
    dp = hopper.warpgroup_mma_wait(0, deps=(dp,))
    rounded_p = tiles.operand(p, dv, q_tile.dtype)
    dv = hopper.warpgroup_mma(rounded_p, dout_tile, dv, is_async=True)
    ds = (p * (dp - pairs.of_columns(delta_tiles.index(stage), dp))).to(q_tile.dtype)
    ds_tile.store(ds)
    hopper.fence_async_shared()  # shows them to wgmma
    ds = tiles.operand(ds, dk, q_tile.dtype)
    dq = pairs.multiply(ds_tile.permute((1, 0)), keys, pairs.BLOCK_M)
    dk = hopper.warpgroup_mma(ds, q_tile, dk, is_async=True)
    dq, dv, rounded_p = hopper.warpgroup_mma_wait(1, deps=(dq, dv, rounded_p))
    _add(sums, dq, head * pitch + row)
    dk, ds = hopper.warpgroup_mma_wait(0, deps=(dk, ds))
    mbarrier.arrive(empty.index(stage))
    return dk, dv


@gluon.jit
def _consume(dk_out, dv_out, strides, sums, own, ring, ds_tile, H, group, pitch, band, factor, scale, D: gl.constexpr):
    dk_strides, dv_strides = strides
    keys, values, own_full = own
    batch, kv_head, first_key = pairs.corner(H // group, band)
    walk = pairs.walk_of(first_key, group, band)
    keys, values = rings.matrix(keys), rings.matrix(values)
    dk, dv = pairs.products(pairs.BLOCK_N, keys.shape[1]), pairs.products(pairs.BLOCK_N, keys.shape[1])
    if walk[2] > 0:
        mbarrier.wait(own_full.index(0), 0)  # for the keys and values
    sums += (batch * H + kv_head * group).to(gl.int64) * pitch * keys.shape[1]  # of the group's first head
    for i in range(walk[2]):
        dk, dv = _visit(i, dk, dv, (keys, values), ring, ds_tile, sums, walk, first_key, pitch, band, factor)
    place = (batch, kv_head, first_key)
    pairs.store_rows(dk_out, dk_strides, dk, scale, place, band[1], D)
    pairs.store_rows(dv_out, dv_strides, dv, 1.0, place, band[1], D)


@gluon.jit(do_not_specialize=["H", "group", "Sq", "Sk", "pitch", "first", "last"])
def attention_backward_v07_register_reduction_kernel(
    dout_desc, q_desc, k_desc, v_desc, lse2_desc, delta_desc, sums, dk, dv, H, group, Sq, Sk, pitch, factor, scale,
    first, last, stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn, D: gl.constexpr,
):  # fmt: skip
    # dout, q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], lse2, delta: [B * H * pitch], sums: [B, H, pitch, 64 or 128],
    # zeros at first, and dk, dv: [B, H_KV, Sk, D], strides in packs. Query i sees the keys from i + first to i + last.
    own, ring, ds_tile = pairs.shared_memory(q_desc, k_desc, v_desc, lse2_desc)
    hopper.fence_async_shared()  # before the copy engine counts bytes on the barriers
    band = (Sq, Sk, first, last)
    strides = ((stride_dkb, stride_dkh, stride_dkn), (stride_dvb, stride_dvh, stride_dvn))
    described = (q_desc, dout_desc, k_desc, v_desc, lse2_desc, delta_desc)
    gl.warp_specialize(
        [
            (_consume, (dk, dv, strides, sums, own, ring, ds_tile, H, group, pitch, band, factor, scale, D)),
            (pairs.produce, (described, own, ring, H, group, pitch, band)),
        ],
        worker_num_warps=[1],  # of all but the first, which has the program's own eight
        worker_num_regs=[pairs.MOVER_REGISTERS],
    )


@triton.jit(do_not_specialize=["H", "Sq"])
def attention_backward_v07_register_reduction_rounding_kernel(
    sums, dq, H, Sq, pitch, scale, stride_b, stride_h, stride_m,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # sums: [B, H, pitch, WIDTH], each tile of ROWS in the order in which _add writes it; dq: [B, H, Sq, D], strides in
    # packs.
    blocks = tl.cdiv(Sq, ROWS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    first_row = tl.program_id(0) % blocks * ROWS
    at = (head * pitch + first_row) * WIDTH + tl.arange(0, ROWS * WIDTH)
    parts = tl.load(sums + at).reshape(WIDTH // 16, 2, 4, 8, 4, 2, 2)
    tile = parts.permute(2, 5, 3, 1, 0, 4, 6).reshape(ROWS, WIDTH)
    row, d = first_row + tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    packs = head // H * stride_b + head % H * stride_h + row.to(tl.int64) * stride_m
    tl.store(dq + packs * PACK + d, (tile * scale).to(dq.dtype.element_ty), mask=(row < Sq) & (d < D))


def attention_backward_v07_register_reduction(
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
    sums = torch.zeros((B, H, pitch, tiles.padded(D)), dtype=torch.float32, device=q.device)
    attention_backward_v07_register_reduction_kernel[(B * H_KV * triton.cdiv(Sk, pairs.BLOCK_N.value),)](
        tiles.describe("dout", dout, pairs.BLOCK_M.value),
        tiles.describe("q", q, pairs.BLOCK_M.value),
        tiles.describe("k", k, pairs.BLOCK_N.value),
        tiles.describe("v", v, pairs.BLOCK_N.value),
        pairs.describe_rows(lse2), pairs.describe_rows(delta),
        sums, dk, dv, H, H // H_KV, Sq, Sk, pitch, factor, scale, *tiles.limits_of(band, Sq, Sk),
        *strides_of(dk), *strides_of(dv), D=D, num_warps=pairs.NUM_WARPS,
    )  # fmt: skip
    rounding = attention_backward_v07_register_reduction_rounding_kernel
    rounding[(B * H * triton.cdiv(Sq, pairs.BLOCK_M.value),)](
        sums, dq, H, Sq, pitch, scale, *strides_of(dq), D=D, ROWS=pairs.BLOCK_M.value, WIDTH=sums.shape[3], num_warps=8
    )

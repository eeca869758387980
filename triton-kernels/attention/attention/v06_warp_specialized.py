"""attention v06_warp_specialized: a producer fetches ahead, consumers only compute.

Change:   Gluon, the language beneath Triton's, instead of Triton. One warp fetches, into rings of tiles of keys
          and of values; two warpgroups multiply 64 queries each. In v05 the compiler decided when the same warps fetch
          and when they multiply.
Why:      full and empty barriers for each stage, of keys and of values apart, are all that the roles share: one
          warpgroup's softmax runs while the other multiplies, where v05's warps all waited for the same tile. The
          producer gives most of its registers to the consumers, so that scores and results of 64 x 128 each fit into
          one warpgroup.
Counter:  time falls; tensor_pipe rises.
Requires: as v05, and likewise of Q: the copy engine fetches it, too.
Source:   Shah et al., "FlashAttention-3" (2024), section 3.1.
Twin:     cuda-kernels/attention/attention/v06_warp_specialized.cu
"""

from __future__ import annotations

import math

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernel_twins._triton.attention.attention import rings, tiles

CONSUMERS = gl.constexpr(2)  # warpgroups that compute 64 queries each
BLOCK_M = gl.constexpr(128)  # queries
BLOCK_N = gl.constexpr(128)  # keys
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _corner(H, Sq):
    """Batch, head and first row of the program's tile of queries."""
    blocks = gl.cdiv(Sq, BLOCK_M)
    number = gl.program_id(0) // blocks  # of the head, over all batches
    return number // H, number % H, gl.program_id(0) % blocks * BLOCK_M


@gluon.jit
def _produce(q_desc, k_desc, v_desc, queries, q_full, keys, values, H, group, Sq, band):
    batch, head, first_row = _corner(H, Sq)
    walk, masked, count = tiles.walk_of(first_row, Sq, band, BLOCK_M, BLOCK_N)
    if count > 0:
        for consumer in gl.static_range(CONSUMERS):
            row = first_row + consumer * tiles.WARPGROUP_M
            rings.fetch(q_desc, batch, head, row, queries.index(consumer), q_full.index(0))
        for i in range(count):
            key = tiles.tile_at(walk, masked, i) * BLOCK_N
            rings.fetch_into(keys, i, k_desc, batch, head // group, key)
            rings.fetch_into(values, i, v_desc, batch, head // group, key)


@gluon.jit
def _visit(i, total, row_max, row_sum, q_tile, keys, values, walk, masked, row, band, factor, NEGATIVE: gl.constexpr):
    """Results, maxima and sums of the consumer's queries with the i-th tile of keys."""
    k_tile = rings.wait_for(keys, i)
    scores = hopper.warpgroup_mma(
        q_tile, k_tile.permute((1, 0)), tiles.accumulator(BLOCK_N), use_acc=False, is_async=True
    )
    scores = hopper.warpgroup_mma_wait(0, deps=(scores,))  # in all four warps: it ends in a barrier of these
    rings.let_go(keys, i)
    if i < masked:
        scores = tiles.hide(scores, row, tiles.tile_at(walk, masked, i) * BLOCK_N, band, NEGATIVE)
    p, row_max, row_sum, shrink = tiles.exponentiate(scores, row_max, row_sum, factor, NEGATIVE)
    total = tiles.times(total, shrink)
    p = tiles.operand(p, total, q_tile.dtype)
    v_tile = rings.wait_for(values, i)
    total = hopper.warpgroup_mma(p, v_tile, total, is_async=True)
    total = hopper.warpgroup_mma_wait(0, deps=(total,))
    rings.let_go(values, i)
    return total, row_max, row_sum


@gluon.jit
def _consume(
    out, lse, queries, q_full, keys, values, H, Sq, band, factor,
    CONSUMER: gl.constexpr, D: gl.constexpr, NEGATIVE: gl.constexpr,
):  # fmt: skip
    batch, head, first_row = _corner(H, Sq)
    walk, masked, count = tiles.walk_of(first_row, Sq, band, BLOCK_M, BLOCK_N)
    q_tile = rings.matrix(queries.index(CONSUMER))
    total = tiles.accumulator(q_tile.shape[1])
    row_max, row_sum = tiles.no_rows(tiles.accumulator(BLOCK_N))
    row = tiles.rows_from(first_row + CONSUMER * tiles.WARPGROUP_M, row_max)
    if count > 0:
        mbarrier.wait(q_full.index(0), 0)  # for the queries of both consumers
    # One loop, of which a few visits hide keys: with one loop for these and one for the others, twice the code takes
    # more registers.
    for i in range(count):
        total, row_max, row_sum = _visit(
            i, total, row_max, row_sum, q_tile, keys, values, walk, masked, row, band, factor, NEGATIVE
        )
    tiles.store(out, lse, total, row_max, row_sum, batch * H + head, row, Sq, D)


@gluon.jit(do_not_specialize=["H", "group", "Sq", "Sk", "first", "last"])
def attention_v06_warp_specialized_kernel(
    q_desc, k_desc, v_desc, out, lse, H, group, Sq, Sk, factor, first, last, D: gl.constexpr, NEGATIVE: gl.constexpr
):
    # q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], out: [B, H, Sq, D] and lse: [B, H, Sq] contiguous. Query i sees the keys
    # from i + first to i + last.
    stages: gl.constexpr = 4 if D <= 64 else 2
    queries = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS] + q_desc.block_type.shape, q_desc.layout)
    q_full = rings.barriers(1, CONSUMERS)  # a box for each consumer
    keys = rings.ring_of(k_desc, stages, CONSUMERS)
    values = rings.ring_of(v_desc, stages, CONSUMERS)
    hopper.fence_async_shared()  # before the copy engine counts bytes on the barriers
    band = (Sk, first, last)
    gl.warp_specialize(
        [
            (_consume, (out, lse, queries, q_full, keys, values, H, Sq, band, factor, 0, D, NEGATIVE)),
            (_consume, (out, lse, queries, q_full, keys, values, H, Sq, band, factor, 1, D, NEGATIVE)),
            (_produce, (q_desc, k_desc, v_desc, queries, q_full, keys, values, H, group, Sq, band)),
        ],
        worker_num_warps=[4, 1],  # of all but the first, which has the program's own four
        worker_num_regs=[CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def attention_v06_warp_specialized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: tuple[Tensor, Tensor],
    scale: float | None = None,
    band: tuple[int, int] | None = None,
) -> None:
    """out = softmax(scale * q @ k^T + mask) @ v, and the logarithm of each row's sum.

    q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], contiguous rows, bf16 or fp16; out: [B, H, Sq, D] and fp32 [B, H, Sq].
    Query i sees the keys from i + band[0] to i + band[1]. Without them, the scale is 1 / sqrt(D), and it sees all.
    """
    (B, H, Sq, D), (H_KV, Sk) = q.shape, k.shape[1:3]
    if B * H * Sq == 0:
        return
    if Sk == 0:  # nothing that a descriptor could describe
        out[0].zero_()
        out[1].fill_(-math.inf)
        return
    factor = tiles.factor_of(scale, D)
    attention_v06_warp_specialized_kernel[(B * H * triton.cdiv(Sq, BLOCK_M.value),)](
        tiles.describe("q", q, tiles.WARPGROUP_M.value),
        tiles.describe("k", k, BLOCK_N.value),
        tiles.describe("v", v, BLOCK_N.value),
        *out, H, H // H_KV, Sq, Sk, factor, *tiles.limits_of(band, Sq, Sk), D=D, NEGATIVE=factor < 0, num_warps=4,
    )  # fmt: skip

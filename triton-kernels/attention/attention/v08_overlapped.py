"""attention v08_overlapped: a consumer's exponentials run under its own products, too.

Change:   a consumer waits for the next tile's scores alone, and takes their exponentials while its own products with
          this tile's values run. v07 waited for both first. A wait for an mbarrier, long complete, ends the basic block
          before the wait for the products.
Why:      in v07 a whole softmax, with all its latencies, had to fit under the other consumer's turn, or the tensor
          cores idled. Now the maxima and exponentials may also take the time of the consumer's own products; conversion
          and rescaling alone are left for after. Gluon issues the wait where it is written, but ptxas moves it up
          within a basic block, over whatever does not depend on it: over the exponentials.
Counter:  time hardly changes, since turns left little idle time.
Requires: as v07.
Source:   Shah et al., "FlashAttention-3" (2024), section 3.2.
Twin:     cuda-kernels/attention/attention/v08_overlapped.cu
"""

from __future__ import annotations

import math

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernel_twins._triton.attention.attention import rings, tiles, turns

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
        # Values come one tile later than keys: that is when they are needed.
        for i in range(count + 1):
            if i < count:
                key = tiles.tile_at(walk, masked, i) * BLOCK_N
                rings.fetch_into(keys, i, k_desc, batch, head // group, key)
            if i > 0:
                key = tiles.tile_at(walk, masked, i - 1) * BLOCK_N
                rings.fetch_into(values, i - 1, v_desc, batch, head // group, key)


@gluon.jit
def _start_scores(q_tile, k_tile):
    return hopper.warpgroup_mma(
        q_tile, k_tile.permute((1, 0)), tiles.accumulator(BLOCK_N), use_acc=False, is_async=True
    )


@gluon.jit
def _visit(
    i, total, p, row_max, row_sum, q_tile, keys, values, walk, masked, row, band, factor,
    CONSUMER: gl.constexpr, NEGATIVE: gl.constexpr,
):  # fmt: skip
    """Results with the tile of keys before the i-th, whose probabilities are p; probabilities of the i-th."""
    k_tile, v_tile = rings.wait_for(keys, i), rings.wait_for(values, i - 1)
    turns.take(CONSUMER)
    scores = _start_scores(q_tile, k_tile)
    total = hopper.warpgroup_mma(p, v_tile, total, is_async=True)
    turns.give_to((CONSUMER + 1) % CONSUMERS)
    scores = hopper.warpgroup_mma_wait(1, deps=(scores,))
    rings.let_go(keys, i)
    if i < masked:
        scores = tiles.hide(scores, row, tiles.tile_at(walk, masked, i) * BLOCK_N, band, NEGATIVE)
    next_p, row_max, row_sum, shrink = tiles.exponentiate(scores, row_max, row_sum, factor, NEGATIVE)
    rings.wait_for(values, i - 1)  # known to be there: keeps the next wait below the exponentials
    total, p = hopper.warpgroup_mma_wait(0, deps=(total, p))
    rings.let_go(values, i - 1)
    total = tiles.times(total, shrink)
    return total, tiles.operand(next_p, total, q_tile.dtype), row_max, row_sum


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
        if CONSUMER == CONSUMERS - 1:
            turns.give_to(0)  # the first consumer begins
        mbarrier.wait(q_full.index(0), 0)  # for the queries of both consumers
        scores = hopper.warpgroup_mma_wait(0, deps=(_start_scores(q_tile, rings.wait_for(keys, 0)),))
        rings.let_go(keys, 0)
        # As if keys were hidden, whether they are or not.
        scores = tiles.hide(scores, row, tiles.tile_at(walk, masked, 0) * BLOCK_N, band, NEGATIVE)
        p, row_max, row_sum, _ = tiles.exponentiate(scores, row_max, row_sum, factor, NEGATIVE)
        p = tiles.operand(p, total, q_tile.dtype)
        for i in range(1, count):
            total, p, row_max, row_sum = _visit(
                i, total, p, row_max, row_sum, q_tile, keys, values, walk, masked, row, band, factor, CONSUMER, NEGATIVE
            )
        total = hopper.warpgroup_mma(p, rings.wait_for(values, count - 1), total, is_async=True)
        total = hopper.warpgroup_mma_wait(0, deps=(total,))
        if CONSUMER == 0:
            turns.take(0)  # the one that is left: the last was passed on, too
    tiles.store(out, lse, total, row_max, row_sum, batch * H + head, row, Sq, D)


@gluon.jit(do_not_specialize=["H", "group", "Sq", "Sk", "first", "last"])
def attention_v08_overlapped_kernel(
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


def attention_v08_overlapped(
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
    attention_v08_overlapped_kernel[(B * H * triton.cdiv(Sq, BLOCK_M.value),)](
        tiles.describe("q", q, tiles.WARPGROUP_M.value),
        tiles.describe("k", k, BLOCK_N.value),
        tiles.describe("v", v, BLOCK_N.value),
        *out, H, H // H_KV, Sq, Sk, factor, *tiles.limits_of(band, Sq, Sk), D=D, NEGATIVE=factor < 0, num_warps=4,
    )  # fmt: skip

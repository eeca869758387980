"""attention v10_persistent: programs stay, and take tiles of queries from a queue, the heaviest first.

Change:   there are as many programs as SMs. A program's producer draws tiles of queries from a counter, in the order of
          a queue: heads whose keys and values fit into L2 together form a section, and within a section tiles that see
          the most keys come first. Queries have two buffers, and results leave through shared memory, from which the
          copy engine stores them. It goes on from v08, which has a program for each tile.
Why:      a program that ends leaves its SM idle until the next one has set up its barriers and its first tiles have
          come. One that stays fetches the next tile's operands while the last one is multiplied and stored. With heavy
          tiles first, no SM begins a long one when the others are done; a counter deals them out better than fixed
          turns, since only it knows who is free.
Counter:  time falls where heads are short, and more under a causal band; tensor_pipe rises as much.
Requires: as v08; zeroed memory, which is left zero.
Source:   Dao-AILab, FlashAttention-3's tile_scheduler.hpp: the order and the counter.
Twin:     cuda-kernels/attention/attention/v10_persistent.cu, which goes on from three consumers
"""

from __future__ import annotations

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernel_twins._triton.attention.attention import queue, rings, tiles, turns
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.lib.workspace import counter

CONSUMERS = gl.constexpr(2)  # warpgroups that compute 64 queries each
BLOCK_M = gl.constexpr(128)  # queries
BLOCK_N = gl.constexpr(128)  # keys
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _produce(q_desc, k_desc, v_desc, drawn, order, queries, keys, values, H, group, Sq, band):
    q_tiles, q_full, q_empty, numbers = queries
    turn = gl.to_tensor(0)  # the program's tiles of queries
    visits = gl.to_tensor(0)  # its tiles of keys, over all of these
    number = gl.program_id(0)
    while number < order[0]:
        buffer, phase = rings.place(turn, queue.BUFFERS)
        mbarrier.wait(q_empty.index(buffer), phase ^ 1)  # for the buffer's last use
        queue.tell(numbers, buffer, number)
        head, first_row = queue.corner_of(number, order, Sq, BLOCK_M)
        batch, head = head // H, head % H
        walk, masked, count = tiles.walk_of(first_row, Sq, band, BLOCK_M, BLOCK_N)
        for consumer in gl.static_range(CONSUMERS):
            row = first_row + consumer * tiles.WARPGROUP_M
            rings.fetch(q_desc, batch, head, row, q_tiles.index(buffer * CONSUMERS + consumer), q_full.index(buffer))
        # Values come one tile later than keys: that is when they are needed.
        for i in range(count + 1):
            if i < count:
                key = tiles.tile_at(walk, masked, i) * BLOCK_N
                rings.fetch_into(keys, visits + i, k_desc, batch, head // group, key)
            if i > 0:
                key = tiles.tile_at(walk, masked, i - 1) * BLOCK_N
                rings.fetch_into(values, visits + i - 1, v_desc, batch, head // group, key)
        turn += 1
        visits += count
        number = queue.draw(drawn, order)
    buffer, phase = rings.place(turn, queue.BUFFERS)
    mbarrier.wait(q_empty.index(buffer), phase ^ 1)
    queue.tell(numbers, buffer, number)
    mbarrier.arrive(q_full.index(buffer), count=CONSUMERS)


@gluon.jit
def _start_scores(q_tile, k_tile):
    return hopper.warpgroup_mma(
        q_tile, k_tile.permute((1, 0)), tiles.accumulator(BLOCK_N), use_acc=False, is_async=True
    )


@gluon.jit
def _visit(
    i, visit, total, p, row_max, row_sum, q_tile, keys, values, walk, masked, row, band, factor,
    CONSUMER: gl.constexpr, NEGATIVE: gl.constexpr,
):  # fmt: skip
    """Results with the tile of keys before the i-th, whose probabilities are p; probabilities of the i-th.

    Rings count the program's visits to tiles of keys, over all its tiles of queries.
    """
    k_tile, v_tile = rings.wait_for(keys, visit), rings.wait_for(values, visit - 1)
    turns.take(CONSUMER)
    scores = _start_scores(q_tile, k_tile)
    total = hopper.warpgroup_mma(p, v_tile, total, is_async=True)
    turns.give_to((CONSUMER + 1) % CONSUMERS)
    scores = hopper.warpgroup_mma_wait(1, deps=(scores,))
    rings.let_go(keys, visit)
    if i < masked:
        scores = tiles.hide(scores, row, tiles.tile_at(walk, masked, i) * BLOCK_N, band, NEGATIVE)
    next_p, row_max, row_sum, shrink = tiles.exponentiate(scores, row_max, row_sum, factor, NEGATIVE)
    rings.wait_for(values, visit - 1)  # known to be there: keeps the next wait below the exponentials
    total, p = hopper.warpgroup_mma_wait(0, deps=(total, p))
    rings.let_go(values, visit - 1)
    total = tiles.times(total, shrink)
    return total, tiles.operand(next_p, total, q_tile.dtype), row_max, row_sum


@gluon.jit
def _consume(
    out_desc, lse, order, queries, keys, values, staging, H, Sq, band, factor,
    CONSUMER: gl.constexpr, NEGATIVE: gl.constexpr,
):  # fmt: skip
    q_tiles, q_full, q_empty, numbers = queries
    turn = gl.to_tensor(0)
    visits = gl.to_tensor(0)
    if CONSUMER == CONSUMERS - 1:
        turns.give_to(0)  # the first consumer begins
    mbarrier.wait(q_full.index(0), 0)  # for the first tile's queries
    number = queue.hear(numbers, 0)
    while number < order[0]:
        buffer, phase = rings.place(turn, queue.BUFFERS)
        head, first_row = queue.corner_of(number, order, Sq, BLOCK_M)
        walk, masked, count = tiles.walk_of(first_row, Sq, band, BLOCK_M, BLOCK_N)
        q_tile = rings.matrix(q_tiles.index(buffer * CONSUMERS + CONSUMER))
        total = tiles.accumulator(q_tile.shape[1])
        row_max, row_sum = tiles.no_rows(tiles.accumulator(BLOCK_N))
        row = tiles.rows_from(first_row + CONSUMER * tiles.WARPGROUP_M, row_max)
        if count > 0:
            scores = hopper.warpgroup_mma_wait(0, deps=(_start_scores(q_tile, rings.wait_for(keys, visits)),))
            rings.let_go(keys, visits)
            # As if keys were hidden, whether they are or not.
            scores = tiles.hide(scores, row, tiles.tile_at(walk, masked, 0) * BLOCK_N, band, NEGATIVE)
            p, row_max, row_sum, _ = tiles.exponentiate(scores, row_max, row_sum, factor, NEGATIVE)
            p = tiles.operand(p, total, q_tile.dtype)
            for i in range(1, count):
                total, p, row_max, row_sum = _visit(
                    i, visits + i, total, p, row_max, row_sum, q_tile, keys, values, walk, masked, row, band, factor,
                    CONSUMER, NEGATIVE,
                )  # fmt: skip
            last = visits + count - 1
            total = hopper.warpgroup_mma(p, rings.wait_for(values, last), total, is_async=True)
            total = hopper.warpgroup_mma_wait(0, deps=(total,))
            rings.let_go(values, last)
        mbarrier.arrive(q_empty.index(buffer))
        total = tiles.settle(lse, total, row_max, row_sum, head, row, Sq)
        tma.store_wait(0)  # for the copy engine to have read the tile before
        rings.matrix(staging).store(total.to(staging.dtype))
        hopper.fence_async_shared()  # orders the threads' writes before its reads
        corner = [head // H, head % H, first_row + CONSUMER * tiles.WARPGROUP_M, 0]
        tma.async_copy_shared_to_global(out_desc, corner, staging)
        turn += 1
        visits += count
        buffer, phase = rings.place(turn, queue.BUFFERS)
        mbarrier.wait(q_full.index(buffer), phase)  # for the next tile's queries
        number = queue.hear(numbers, buffer)
    if CONSUMER == 0:
        turns.take(0)  # the one that is left: the last was passed on, too
    tma.store_wait(0)  # shared memory ends with the program


@gluon.jit(do_not_specialize=queue.NUMBERS + ["H", "group", "Sq", "Sk", "first", "last"])
def attention_v10_persistent_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, drawn, tile_count, heads, section, before, light, last_first, H, group,
    Sq, Sk, factor, first, last, WIDTH: gl.constexpr, NEGATIVE: gl.constexpr,
):  # fmt: skip
    # q, out: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], lse: [B, H, Sq] contiguous; drawn: 0. Query i sees the keys from
    # i + first to i + last.
    stages: gl.constexpr = 4 if WIDTH == 64 else 2
    box: gl.constexpr = q_desc.block_type.shape
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [queue.BUFFERS * CONSUMERS] + box, q_desc.layout)
    q_full = rings.barriers(queue.BUFFERS, CONSUMERS)  # a box for each consumer
    q_empty = rings.barriers(queue.BUFFERS, CONSUMERS)
    numbers = gl.allocate_shared_memory(gl.int32, [queue.BUFFERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    upper = gl.allocate_shared_memory(out_desc.dtype, box, out_desc.layout)
    lower = gl.allocate_shared_memory(out_desc.dtype, box, out_desc.layout)
    keys = rings.ring_of(k_desc, stages, CONSUMERS)
    values = rings.ring_of(v_desc, stages, CONSUMERS)
    hopper.fence_async_shared()  # before the copy engine counts bytes on the barriers
    band = (Sk, first, last)
    order = (tile_count, heads, section, before, light, last_first)
    queries = (q_tiles, q_full, q_empty, numbers)
    gl.warp_specialize(
        [
            (_consume, (out_desc, lse, order, queries, keys, values, upper, H, Sq, band, factor, 0, NEGATIVE)),
            (_consume, (out_desc, lse, order, queries, keys, values, lower, H, Sq, band, factor, 1, NEGATIVE)),
            (_produce, (q_desc, k_desc, v_desc, drawn, order, queries, keys, values, H, group, Sq, band)),
        ],
        worker_num_warps=[4, 1],  # of all but the first, which has the program's own four
        worker_num_regs=[CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def attention_v10_persistent(
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
    factor, limits = tiles.factor_of(scale, D), tiles.limits_of(band, Sq, Sk)
    programs = sm_count(q.device)
    order = queue.order_of(B * H, H // H_KV, Sq, Sk, D, limits, BLOCK_M.value, programs)
    attention_v10_persistent_kernel[(min(order[0], programs),)](
        tiles.describe("q", q, tiles.WARPGROUP_M.value),
        tiles.describe("k", k, BLOCK_N.value),
        tiles.describe("v", v, BLOCK_N.value),
        tiles.describe("out", out[0], tiles.WARPGROUP_M.value),
        out[1], counter(q.device), *order, H, H // H_KV, Sq, Sk, factor, *limits,
        WIDTH=tiles.padded(D), NEGATIVE=factor < 0, num_warps=4,
    )  # fmt: skip

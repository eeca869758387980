"""attention v13_late_search: exponentials before any search for maxima.

Change:   a consumer takes exponentials under the maxima that its rows have, as soon as the scores are there. It
          searches for new ones only where a thread's sum of exponentials is large, takes the tile's exponentials again
          under these, and rescales its results. The first tile of keys is still searched. It goes on from v11.
Why:      a row's maximum serves while no power under it is large (v11), which the sums tell as well as a comparison of
          all scores. v11 compared them in every tile, before the exponentials. Under a maximum of -inf, where a row has
          seen no key, powers are inf or NaN, and so are their sums: such a row is searched, too. Scores have to outlive
          the vote. Registers hold them beside probabilities that are rounded already, which also puts the rounding
          under the products.
Counter:  instructions and time fall; tensor_pipe rises.
Requires: as v11.
Source:   none.
Twin:     cuda-kernels/attention/attention/v13_late_search.cu, which goes on from v12, with 64 keys a tile
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernel_twins._triton.attention.attention import described, queue, rings, tiles, turns
from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.device import sm_count

CONSUMERS = gl.constexpr(2)  # warpgroups that compute 64 queries each
BLOCK_M = gl.constexpr(128)  # queries
BLOCK_N = gl.constexpr(128)  # keys
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
LARGEST = gl.constexpr(256.0)  # no power below it is more than 8 powers of 2 above its maximum


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
def _exponentiate(scores, p, total, row_max, row_sum, factor, DTYPE: gl.constexpr, NEGATIVE: gl.constexpr):
    """As tiles.exponentiate, with p as tiles.operand rounds it, but under the old maxima while no sum is large.

    One body takes exponentials under old maxima and under new ones: two copies would need more registers.
    """
    base, shrink, sums = row_max, row_max, row_sum
    large = gl.to_tensor(False)
    again = gl.to_tensor(True)
    while again:
        powers = gl.exp2(scores * factor - base[:, None])  # inf or NaN under a maximum of -inf
        p, sums = _hold(tiles.operand(powers, total, DTYPE)), tiles.partial_sums(powers)
        again = (gl.max((sums <= LARGEST).to(gl.int32) ^ 1, None) == 1) & (not large)
        if again:
            # Without the assembly, which is empty, the search moves in front of the exponentials.
            here = gl.inline_asm_elementwise("", "=f,0", [scores], gl.float32, is_pure=False, pack=1)
            new_max = gl.maximum(row_max, tiles.largest(here, factor, NEGATIVE))
            base = gl.where(new_max == -float("inf"), 0.0, new_max)
            shrink = gl.exp2(row_max - base)
            row_sum = tiles.times(row_sum, shrink)
            row_max = new_max
            large = gl.to_tensor(True)
    return p, row_max, row_sum + sums, shrink, large


@gluon.jit
def _hold(p):
    """p, rounded here: the compiler would leave it in fp32 until the products are done, and registers would spill."""
    return gl.inline_asm_elementwise("", "=r,0", [p], p.dtype, is_pure=False, pack=2)


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
    products = hopper.warpgroup_mma(p, v_tile, total, is_async=True)
    turns.give_to((CONSUMER + 1) % CONSUMERS)
    scores = hopper.warpgroup_mma_wait(1, deps=(scores,))
    rings.let_go(keys, visit)
    if i < masked:
        scores = tiles.hide(scores, row, tiles.tile_at(walk, masked, i) * BLOCK_N, band, NEGATIVE)
    next_p, row_max, row_sum, shrink, large = _exponentiate(
        scores, p, total, row_max, row_sum, factor, q_tile.dtype, NEGATIVE
    )
    rings.wait_for(values, visit - 1)  # known to be there: keeps the next wait below the exponentials
    total, p = hopper.warpgroup_mma_wait(0, deps=(products, p))
    rings.let_go(values, visit - 1)
    if large:
        total = tiles.times(total, shrink)
    return total, next_p, row_max, row_sum


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
def attention_v13_late_search_kernel(
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


_plans: dict[tuple[Any, ...], described.Plan] = {}  # the launch cache


def attention_v13_late_search(
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
    key = (
        q.shape, k.shape, q.stride(), k.stride(), v.stride(), out[0].stride(), q.dtype, scale, band,
        plans.alignment(q, k, v, *out), q.get_device(),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is not None:
        plan(q, k, v, *out)
        return
    plan = first_launch(q, k, v, *out, scale, band)
    if plan is not None:
        plans.keep(_plans, key, plan)


def first_launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float | None, band: tuple[int, int] | None
) -> described.Plan | None:
    """Run a problem that is not in a launch cache, and make its plan, unless it is empty, captured or only compiled."""
    (B, H, Sq, D), (H_KV, Sk) = q.shape, k.shape[1:3]
    if B * H * Sq == 0:
        return None
    if Sk == 0:  # nothing that a descriptor could describe
        out.zero_()
        lse.fill_(-math.inf)
        return None
    factor, limits = tiles.factor_of(scale, D), tiles.limits_of(band, Sq, Sk)
    programs = sm_count(q.device)
    order = queue.order_of(B * H, H // H_KV, Sq, Sk, D, limits, BLOCK_M.value, programs)
    return described.launch(
        attention_v13_late_search_kernel, min(order[0], programs), (q, k, v, out, lse), BLOCK_N.value,
        (*order, H, H // H_KV, Sq, Sk, factor, *limits),
        {"WIDTH": tiles.padded(D), "NEGATIVE": factor < 0, "num_warps": 4},
    )  # fmt: skip

"""Softmax of rows that are split over two launches: the numbers of all parts, and then the results.

The programs of the second launch come in the opposite order, and take their tiles in the opposite order, since L2 has
what was read last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_twins._triton.softmax.softmax.v08_cooperative import _result, _scale
from kernel_twins._triton.softmax.split import edges_of, part_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softmax_v13_dispatch_parts_kernel(
    x, numbers, N, stride_xm, PARTS,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    # x: [M, N]; numbers: [M, 2, PARTS], maxima and sums. Offsets and columns have 64 bits: a row may pass 2^31.
    row, part = tl.program_id(0).to(tl.int64) // PARTS, tl.program_id(0).to(tl.int64) % PARTS
    x_start = tl.cdiv(row * stride_xm, VECTOR) * VECTOR
    head = x_start - row * stride_xm if EDGES else 0
    first, end = part_of(N, head, part, PARTS, VECTOR)
    place = tl.arange(0, BLOCK)

    # Each place carries a running maximum and the sum of exponentials relative to it. The maximum of several pieces
    # comes first, so that the sum is scaled once for all of them.
    most = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(first, end, BLOCK * PIECES):
        left = tl.minimum(end - start, BLOCK * PIECES).to(tl.int32)
        tiles = ()
        for piece in tl.static_range(PIECES):
            # The mask is the same for a whole vector, so that it is loaded by one access.
            mask = (place + piece * BLOCK) // VECTOR < left // VECTOR
            tiles += (tl.load(x + x_start + start + piece * BLOCK + place, mask=mask, other=-float("inf")),)
        new = most
        for piece in tl.static_range(PIECES):
            new = tl.maximum(new, tiles[piece].to(tl.float32))
        # While a place has seen only -inf, its sum must stay 0: -inf - -inf would make it NaN.
        base = tl.where(new == -float("inf"), 0.0, new)
        total *= tl.exp2((most - base) * LOG2_E)
        for piece in tl.static_range(PIECES):
            total += tl.exp2((tiles[piece].to(tl.float32) - base) * LOG2_E)
        most = new

    part_max = tl.max(most)
    if EDGES:
        edge_col, edge_mask = edges_of(N, head, part, VECTOR)
        edges = tl.load(x + x_start + edge_col, mask=edge_mask, other=-float("inf")).to(tl.float32)
        part_max = tl.maximum(part_max, tl.max(edges))
    base = tl.where(part_max == -float("inf"), 0.0, part_max)
    part_sum = tl.sum(total * tl.exp2((most - base) * LOG2_E))
    if EDGES:
        part_sum += tl.sum(tl.exp2((edges - base) * LOG2_E))
    tl.store(numbers + row * 2 * PARTS + part, part_max)
    tl.store(numbers + (row * 2 + 1) * PARTS + part, part_sum)


@triton.jit
def softmax_v13_dispatch_rows_kernel(
    x, out, numbers, N, stride_xm, PARTS, LOG: tl.constexpr, SLOTS: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    # x: [M, N], out: [M, N] contiguous; numbers: [M, 2, PARTS], maxima and sums.
    program = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)
    row, part = program // PARTS, program % PARTS
    x_start, out_start = tl.cdiv(row * stride_xm, VECTOR) * VECTOR, tl.cdiv(row * N, VECTOR) * VECTOR
    head = out_start - row * N if EDGES else 0
    first, end = part_of(N, head, part, PARTS, VECTOR)
    place = tl.arange(0, BLOCK)

    slot = tl.arange(0, SLOTS)
    part_maxima = tl.load(numbers + row * 2 * PARTS + slot, mask=slot < PARTS, other=-float("inf"))
    part_sums = tl.load(numbers + (row * 2 + 1) * PARTS + slot, mask=slot < PARTS, other=0.0)
    # Here a row of nothing but -inf becomes NaN, as does one with a NaN or +inf.
    row_max = tl.max(part_maxima)
    scale = _scale(tl.sum(part_sums * tl.exp2((part_maxima - row_max) * LOG2_E)), LOG)

    if EDGES:
        edge_col, edge_mask = edges_of(N, head, part, VECTOR)
        edges = tl.load(x + x_start + edge_col, mask=edge_mask, other=-float("inf")).to(tl.float32)
        tl.store(
            out + out_start + edge_col, _result(edges, row_max, scale, LOG).to(out.dtype.element_ty), mask=edge_mask
        )
    turns = tl.cdiv(end - first, BLOCK * PIECES)
    for turn in tl.range(0, turns):
        start = first + (turns - 1 - turn) * (BLOCK * PIECES)
        left = tl.minimum(end - start, BLOCK * PIECES).to(tl.int32)
        tiles = ()
        for piece in tl.static_range(PIECES):
            mask = (place + piece * BLOCK) // VECTOR < left // VECTOR
            where = x + x_start + start + piece * BLOCK + place
            tiles += (tl.load(where, mask=mask, other=-float("inf"), eviction_policy="evict_first"),)
        for piece in tl.static_range(PIECES):
            mask = (place + piece * BLOCK) // VECTOR < left // VECTOR
            result = _result(tiles[piece].to(tl.float32), row_max, scale, LOG).to(out.dtype.element_ty)
            # Evicted first: elements of x that are still to be read shall stay in L2.
            where = out + out_start + start + piece * BLOCK + place
            tl.store(where, result, mask=mask, eviction_policy="evict_first")

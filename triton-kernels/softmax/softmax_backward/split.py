"""The gradient of softmax for rows that are split over two launches: the sums of all parts, and then the results.

The programs of the second launch come in the opposite order, and take their tiles in the opposite order, since L2 has
what was read last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_twins._triton.softmax.softmax_backward.v05_cooperative import _result, _terms
from kernel_twins._triton.softmax.split import edges_of, part_of


@triton.jit
def softmax_backward_v07_dispatch_parts_kernel(
    dout, y, numbers, N, stride_dm, stride_ym, PARTS, LOG: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    # dout, y: [M, N]; numbers: [M, PARTS], sums. Offsets and columns have 64 bits: a row may pass 2^31.
    row, part = tl.program_id(0).to(tl.int64) // PARTS, tl.program_id(0).to(tl.int64) % PARTS
    dout_start = tl.cdiv(row * stride_dm, VECTOR) * VECTOR
    y_start = tl.cdiv(row * stride_ym, VECTOR) * VECTOR
    head = dout_start - row * stride_dm if EDGES else 0
    first, end = part_of(N, head, part, PARTS, VECTOR)
    place = tl.arange(0, BLOCK)

    # A running sum for each place, and one reduction at the end.
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(first, end, BLOCK * PIECES):
        left = tl.minimum(end - start, BLOCK * PIECES).to(tl.int32)
        dout_tiles, y_tiles = (), ()
        for piece in tl.static_range(PIECES):
            # The mask is the same for a whole vector, so that it is loaded by one access.
            mask = (place + piece * BLOCK) // VECTOR < left // VECTOR
            dout_tiles += (tl.load(dout + dout_start + start + piece * BLOCK + place, mask=mask, other=0.0),)
            y_tiles += (tl.load(y + y_start + start + piece * BLOCK + place, mask=mask, other=0.0),)
        for piece in tl.static_range(PIECES):
            total += _terms(dout_tiles[piece], y_tiles[piece], LOG)
    part_sum = tl.sum(total)
    if EDGES:
        edge_col, edge_mask = edges_of(N, head, part, VECTOR)
        dout_edges = tl.load(dout + dout_start + edge_col, mask=edge_mask, other=0.0)
        y_edges = tl.load(y + y_start + edge_col, mask=edge_mask, other=0.0)
        part_sum += tl.sum(_terms(dout_edges, y_edges, LOG))
    tl.store(numbers + row * PARTS + part, part_sum)


@triton.jit
def softmax_backward_v07_dispatch_rows_kernel(
    dout, y, out, numbers, N, stride_dm, stride_ym, PARTS, LOG: tl.constexpr, SLOTS: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    # dout, y: [M, N], out: [M, N] contiguous; numbers: [M, PARTS], sums.
    program = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)
    row, part = program // PARTS, program % PARTS
    dout_start = tl.cdiv(row * stride_dm, VECTOR) * VECTOR
    y_start = tl.cdiv(row * stride_ym, VECTOR) * VECTOR
    out_start = tl.cdiv(row * N, VECTOR) * VECTOR
    head = out_start - row * N if EDGES else 0
    first, end = part_of(N, head, part, PARTS, VECTOR)
    place = tl.arange(0, BLOCK)

    slot = tl.arange(0, SLOTS)
    row_sum = tl.sum(tl.load(numbers + row * PARTS + slot, mask=slot < PARTS, other=0.0))

    if EDGES:
        edge_col, edge_mask = edges_of(N, head, part, VECTOR)
        dout_edges = tl.load(dout + dout_start + edge_col, mask=edge_mask, other=0.0)
        y_edges = tl.load(y + y_start + edge_col, mask=edge_mask, other=0.0)
        edge_result = _result(dout_edges, y_edges, row_sum, LOG)
        tl.store(out + out_start + edge_col, edge_result.to(out.dtype.element_ty), mask=edge_mask)
    turns = tl.cdiv(end - first, BLOCK * PIECES)
    for turn in tl.range(0, turns):
        start = first + (turns - 1 - turn) * (BLOCK * PIECES)
        left = tl.minimum(end - start, BLOCK * PIECES).to(tl.int32)
        dout_tiles, y_tiles = (), ()
        for piece in tl.static_range(PIECES):
            mask = (place + piece * BLOCK) // VECTOR < left // VECTOR
            where = dout + dout_start + start + piece * BLOCK + place
            dout_tiles += (tl.load(where, mask=mask, other=0.0, eviction_policy="evict_first"),)
            where = y + y_start + start + piece * BLOCK + place
            y_tiles += (tl.load(where, mask=mask, other=0.0, eviction_policy="evict_first"),)
        for piece in tl.static_range(PIECES):
            mask = (place + piece * BLOCK) // VECTOR < left // VECTOR
            result = _result(dout_tiles[piece], y_tiles[piece], row_sum, LOG).to(out.dtype.element_ty)
            # Evicted first: elements of dout and y that are still to be read shall stay in L2.
            where = out + out_start + start + piece * BLOCK + place
            tl.store(where, result, mask=mask, eviction_policy="evict_first")

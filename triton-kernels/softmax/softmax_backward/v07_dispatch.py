"""softmax_backward v07_dispatch: a kernel and a tiling for rows of every length, from one routing table.

Change:   the tiling follows from the rows, by a table (see routes.py), and is no longer the winner of the nearest rows
          that were searched. A tile consists of PIECES, blocks of a power of 2, as softmax's does since v08. A program
          takes as many short rows as its threads have room for, by the widest access that the rows' distances allow.
          Rows that resident programs would share a few at a time are split over two launches: one finds the sums of all
          parts, and one merges them and writes.
Why:      as in softmax's v13. Two rows fill registers twice as fast, so that empty places cost more.
Counter:  time stays at tuned lengths, and falls at others and at few long rows.
Requires: rows whose elements are contiguous, at any distance from each other.
Routes:   up to 4 KiB, or whole blocks: several rows a program
          up to 40 KiB: a row a program, with single elements at the ends of misaligned rows
          longer, more than L2 keeps, two or more at once in the registers of resident programs: shared as in v05
          others: two launches; single elements if the skews of dout, y and out differ
Twin:     cuda-kernels/softmax/softmax_backward/v07_dispatch.cu
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.launch_rows import in_parts
from kernel_twins._triton.softmax.cooperative import as_it_came
from kernel_twins._triton.softmax.launches import Kernels, Prepared, launch
from kernel_twins._triton.softmax.routes import BACKWARD
from kernel_twins._triton.softmax.softmax_backward.split import (
    softmax_backward_v07_dispatch_parts_kernel,
    softmax_backward_v07_dispatch_rows_kernel,
)
from kernel_twins._triton.softmax.softmax_backward.v05_cooperative import _exchange, _result, _terms


@triton.jit
def _sums(dout_tiles, y_tiles, PIECES: tl.constexpr, LOG: tl.constexpr):
    sums = _terms(dout_tiles[0], y_tiles[0], LOG)
    for piece in tl.static_range(1, PIECES):
        sums += _terms(dout_tiles[piece], y_tiles[piece], LOG)
    return sums


@triton.jit
def _piece_of(dout_tile, y_tile, row_sum, LOG: tl.constexpr, ANEW: tl.constexpr):
    if ANEW:
        dout_tile, y_tile = as_it_came(dout_tile), as_it_came(y_tile)
    return _result(dout_tile, y_tile, row_sum, LOG)


@triton.jit
def _short_rows(
    dout, y, out, M, N, stride_dm, stride_ym, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr, WHOLE: tl.constexpr, VECTOR: tl.constexpr, ANEW: tl.constexpr,
):  # fmt: skip
    # The last program's rows end with the last row, so that no row needs a mask: it repeats some of the program before,
    # and stores the same values again. The first row's offset has 64 bits, those within the tile 32.
    first = tl.minimum(tl.program_id(0).to(tl.int64) * ROWS, M - ROWS)
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_N)[None, :]
    # Written so that the compiler sees offsets that are multiples of VECTOR.
    dout_rows = dout + first * (stride_dm // VECTOR) * VECTOR + (row * (stride_dm // VECTOR) * VECTOR + col)
    y_rows = y + first * (stride_ym // VECTOR) * VECTOR + (row * (stride_ym // VECTOR) * VECTOR + col)
    out_rows = out + first * (N // VECTOR) * VECTOR + (row * (N // VECTOR) * VECTOR + col)
    dout_tiles, y_tiles = (), ()
    for piece in tl.static_range(PIECES):
        # The mask is the same for a whole vector, so that it is loaded by one access.
        mask = None if piece < WHOLE else (col + piece * BLOCK_N) // VECTOR < N // VECTOR
        other = None if piece < WHOLE else 0.0
        dout_tiles += (tl.load(dout_rows + piece * BLOCK_N, mask=mask, other=other),)
        y_tiles += (tl.load(y_rows + piece * BLOCK_N, mask=mask, other=other),)
    row_sum = tl.sum(_sums(dout_tiles, y_tiles, PIECES, LOG), axis=1, keep_dims=True)
    for piece in tl.static_range(PIECES):
        mask = None if piece < WHOLE else (col + piece * BLOCK_N) // VECTOR < N // VECTOR
        result = _piece_of(dout_tiles[piece], y_tiles[piece], row_sum, LOG, ANEW)
        tl.store(out_rows + piece * BLOCK_N, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def softmax_backward_v07_dispatch_kernel(
    dout, y, out, counters, M, N, stride_dm, stride_ym, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, VECTOR: tl.constexpr,
    EDGES: tl.constexpr, ANEW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # dout, y: [M, N], out: [M, N] contiguous; counters: words [groups, 2, PARTS], of 64 bits, then tickets [groups],
    # all 0, for rows of several PARTS.
    if ROWS > 1:
        _short_rows(dout, y, out, M, N, stride_dm, stride_ym, LOG, ROWS, BLOCK_N, PIECES, WHOLE, VECTOR, ANEW)
        return

    # PARTS programs form a group, which works on one row at a time.
    part, group, groups = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
    words = counters.to(tl.pointer_type(tl.int64)) + group * (2 * PARTS) if PARTS > 1 else None
    # Columns are counted from the row's first vector of 16 bytes. Each part has `share` vectors, the last one fewer.
    share = tl.cdiv(N // VECTOR, PARTS)
    start = part * (share * VECTOR) + tl.arange(0, BLOCK_N)
    turn = 0
    for index in tl.range(group, group + 1 if PARTS == 1 else M, 1 if PARTS == 1 else groups, num_stages=STAGES):
        # 64-bit offsets, rounded up to whole vectors in a form that the compiler sees.
        row = tl.cast(index, tl.int64)
        dout_row = dout + tl.cdiv(row * stride_dm, VECTOR) * VECTOR
        y_row = y + tl.cdiv(row * stride_ym, VECTOR) * VECTOR
        out_start = tl.cdiv(row * N, VECTOR) * VECTOR
        head = (out_start - row * N).to(tl.int32) if EDGES else 0
        vectors = (N - head) // VECTOR
        if EDGES:
            # The elements before the first vector, in the first VECTOR places, and behind the last one. They are loaded
            # first: after the reduction, which waits for the rest of the row, they would take another memory latency.
            edge = tl.arange(0, 2 * VECTOR)
            edge_col = tl.where(edge < VECTOR, edge - head, vectors * VECTOR + edge - VECTOR)
            edge_mask = (edge_col < tl.where(edge < VECTOR, 0, N - head)) & (part == 0)
            dout_edges = tl.load(dout_row + edge_col, mask=edge_mask, other=0.0)
            y_edges = tl.load(y_row + edge_col, mask=edge_mask, other=0.0)
        end = tl.minimum(part * share + share, vectors)
        dout_tiles, y_tiles = (), ()
        for piece in tl.static_range(PIECES):
            # The mask is the same for a whole vector, so that it is loaded by one access.
            mask = None if piece < WHOLE else (start + piece * BLOCK_N) // VECTOR < end
            other = None if piece < WHOLE else 0.0
            dout_tiles += (tl.load(dout_row + start + piece * BLOCK_N, mask=mask, other=other),)
            y_tiles += (tl.load(y_row + start + piece * BLOCK_N, mask=mask, other=other),)
        row_sum = tl.sum(_sums(dout_tiles, y_tiles, PIECES, LOG))
        if EDGES:
            row_sum += tl.sum(_terms(dout_edges, y_edges, LOG))
        if PARTS > 1:
            row_sum = _exchange(row_sum, words, part, turn, PARTS, SLOTS)
            turn += 1
        for piece in tl.static_range(PIECES):
            mask = None if piece < WHOLE else (start + piece * BLOCK_N) // VECTOR < end
            result = _piece_of(dout_tiles[piece], y_tiles[piece], row_sum, LOG, ANEW)
            tl.store(out + out_start + start + piece * BLOCK_N, result.to(out.dtype.element_ty), mask=mask)
        if EDGES:
            result = _result(dout_edges, y_edges, row_sum, LOG)
            tl.store(out + out_start + edge_col, result.to(out.dtype.element_ty), mask=edge_mask)

    if PARTS > 1:
        # The barrier makes sure that all threads of this program have finished polling. The last program of the group
        # to leave resets words and ticket to 0.
        tl.debug_barrier()
        ticket = counters + 4 * tl.num_programs(0) + group
        if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
            slot = tl.arange(0, 2 * SLOTS)
            tl.store(words + slot, tl.zeros_like(slot).to(tl.int64), mask=slot < 2 * PARTS)
            tl.store(ticket, 0)


KERNELS = Kernels(
    softmax_backward_v07_dispatch_kernel,
    softmax_backward_v07_dispatch_parts_kernel,
    softmax_backward_v07_dispatch_rows_kernel,
    numbers=1,
    by_log=True,
)

_plans: dict[tuple[Any, ...], Prepared] = {}


def softmax_backward_v07_dispatch(dout: Tensor, y: Tensor, *, out: Tensor, log: bool = False) -> None:
    """out = gradient of softmax's input, or of log_softmax's; fp32, bf16 or fp16.

    dout, its result's gradient, and y, its result: [M, N], contiguous rows; out: [M, N].
    """
    aligned = plans.alignment(dout, y, out)
    key = dout.shape, dout.stride(0), y.stride(0), dout.dtype, log, aligned, dout.get_device()
    known = _plans.get(key)
    if known is not None:
        known(dout, y, out)
        return
    if out.numel() == 0 or in_parts(softmax_backward_v07_dispatch, dout, y, out=out, log=log):
        return
    prepared = launch(KERNELS, BACKWARD, (dout, y), out, log)
    if prepared is not None:
        plans.keep(_plans, key, prepared)

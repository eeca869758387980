"""softmax v13_dispatch: a kernel and a tiling for rows of every length, from one routing table.

Change:   the tiling follows from the rows, by a table (see routes.py), and is no longer the winner of the nearest rows
          that were searched. A program takes as many short rows as its threads have room for, in PIECES of a power of 2
          that fill its tile, and by the widest access that the rows' distance allows. Rows that resident programs would
          share a few at a time are split over two launches: one finds the numbers of all parts, and one merges them and
          writes.
Why:      a block of a power of 2 may be half empty, and a tiling that is best for one length may not fit the next one
          into registers. Exchanges through L2 pay where other rows are loaded meanwhile; without others, everybody
          waits. A second launch costs microseconds, and finds in L2 what the first one read last.
Counter:  time stays at tuned lengths, and falls at others and at few long rows.
Requires: rows whose elements are contiguous, at any distance from each other.
Routes:   up to 4 KiB, or whole blocks: several rows a program
          up to 80 KiB: a row a program, with single elements at the ends of misaligned rows
          longer, more than L2 keeps, four or more at once in the registers of resident programs: v08's shared rows
          others: two launches; single elements if x's and out's skews differ
Source:   Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv 1805.02867), for the parts.
Twin:     cuda-kernels/softmax/softmax/v13_dispatch.cu
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.launch_rows import in_parts
from kernel_twins._triton.softmax.launches import Kernels, Prepared, launch
from kernel_twins._triton.softmax.routes import FORWARD
from kernel_twins._triton.softmax.softmax.split import (
    softmax_v13_dispatch_parts_kernel,
    softmax_v13_dispatch_rows_kernel,
)
from kernel_twins._triton.softmax.softmax.v08_cooperative import (
    _powers,
    _result,
    _scale,
    softmax_v08_cooperative_kernel,
)

_long_row = softmax_v08_cooperative_kernel.fn.fn  # the kernel itself, without search and heuristics


@triton.jit
def _short_rows(
    x, out, M, N, stride_xm, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr, WHOLE: tl.constexpr, VECTOR: tl.constexpr, ANEW: tl.constexpr,
):  # fmt: skip
    # The last program's rows end with the last row, so that no row needs a mask: it repeats some of the program before,
    # and stores the same values again. The first row's offset has 64 bits, those within the tile 32.
    first = tl.minimum(tl.program_id(0).to(tl.int64) * ROWS, M - ROWS)
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_N)[None, :]
    # Written so that the compiler sees offsets that are multiples of VECTOR.
    x_rows = x + first * (stride_xm // VECTOR) * VECTOR + (row * (stride_xm // VECTOR) * VECTOR + col)
    out_rows = out + first * (N // VECTOR) * VECTOR + (row * (N // VECTOR) * VECTOR + col)
    tiles = ()
    for piece in tl.static_range(PIECES):
        # The mask is the same for a whole vector, so that it is loaded by one access.
        mask = None if piece < WHOLE else (col + piece * BLOCK_N) // VECTOR < N // VECTOR
        other = None if piece < WHOLE else -float("inf")
        tiles += (tl.load(x_rows + piece * BLOCK_N, mask=mask, other=other),)
    most = tiles[0].to(tl.float32)
    for piece in tl.static_range(1, PIECES):
        most = tl.maximum(most, tiles[piece].to(tl.float32))
    row_max = tl.max(most, axis=1, keep_dims=True)
    # The difference comes first: it is exact for nearby values. A NaN or +inf, and a row of nothing but -inf, make it
    # NaN and with it the sum.
    sums = _powers(tiles[0], row_max, ANEW)
    for piece in tl.static_range(1, PIECES):
        sums += _powers(tiles[piece], row_max, ANEW)
    scale = _scale(tl.sum(sums, axis=1, keep_dims=True), LOG)
    for piece in tl.static_range(PIECES):
        mask = None if piece < WHOLE else (col + piece * BLOCK_N) // VECTOR < N // VECTOR
        result = _result(tiles[piece].to(tl.float32), row_max, scale, LOG)
        tl.store(out_rows + piece * BLOCK_N, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def softmax_v13_dispatch_kernel(
    x, out, counters, M, N, stride_xm, LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, VECTOR: tl.constexpr,
    EDGES: tl.constexpr, ANEW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # x: [M, N], out: [M, N] contiguous; counters: as in v08, for rows of several PARTS.
    if ROWS > 1:
        _short_rows(x, out, M, N, stride_xm, LOG, ROWS, BLOCK_N, PIECES, WHOLE, VECTOR, ANEW)
    else:
        _long_row(
            x, out, counters, M, N, stride_xm, LOG, False, 0, 0, STAGES, ROWS, BLOCK_N, PIECES, WHOLE, PARTS, SLOTS,
            VECTOR, EDGES, ANEW,
        )  # fmt: skip


KERNELS = Kernels(
    softmax_v13_dispatch_kernel,
    softmax_v13_dispatch_parts_kernel,
    softmax_v13_dispatch_rows_kernel,
    numbers=2,
    by_log=False,
)

_plans: dict[tuple[Any, ...], Prepared] = {}


def softmax_v13_dispatch(x: Tensor, *, out: Tensor, log: bool = False) -> None:
    """out = softmax of x's rows, or its logarithm; x: [M, N], contiguous rows; out: [M, N]; fp32, bf16 or fp16."""
    key = x.shape, x.stride(0), x.dtype, log, plans.alignment(x, out), x.get_device()
    known = _plans.get(key)
    if known is not None:
        known(x, out)
        return
    if out.numel() == 0 or in_parts(softmax_v13_dispatch, x, out=out, log=log):
        return
    prepared = launch(KERNELS, FORWARD, (x,), out, log)
    if prepared is not None:
        plans.keep(_plans, key, prepared)

"""cross_entropy of short rows at any distance: a program holds several of them, each in pieces of BLOCK_N elements.

A row of any length fills its lanes, where a tile as long as the next power of 2 leaves up to half of them idle. It has
as few lanes as hold it: each works out the row's loss, and takes part in every shuffle of its reductions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.loss.cross_entropy.v04_rows_per_block import _write
from kernel_twins._triton.loss.lanes import WARPS, lanes_of, rows_of
from kernel_twins._triton.softmax.routes import Rows

LOG2_E = tl.constexpr(1.4426950408889634)

ROW_COST = 16  # elements that a lane computes in the time of what it computes once a row


class Held(NamedTuple):
    """A program has ``rows``, each in ``pieces`` of ``lanes`` accesses of ``vector`` elements."""

    lanes: int
    rows: int
    pieces: int
    vector: int

    @property
    def shares_warps(self) -> bool:
        return self.lanes < 32


@lru_cache(4096)
def held(rows: Rows, sms: int) -> Held | None:
    """How rows lie in lanes; None if a program does not hold one."""
    vector = rows.width
    packs = rows.N // vector
    lanes = lanes_of(packs, vector, rows.itemsize, ROW_COST)
    if lanes is None:
        return None
    pieces = triton.cdiv(packs, lanes)
    return Held(lanes, rows_of(rows.M, lanes, pieces * vector, sms), pieces, vector)


@triton.jit
def cross_entropy_short_rows_kernel(
    logits, target, losses, lse, M: tl.int64, N, stride_lm: tl.int64, ignore_index: tl.int64, smoothing,
    SMOOTHED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr, WHOLE: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    # logits: [M, N]; target, losses: [M]; lse: [M] or None. The first WHOLE pieces of a row are full.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < M
    row_class = tl.load(target + row, mask=mask, other=-1)
    # Rows beyond the last are the last again, so that full pieces need no mask.
    near = tl.minimum(row, M - 1)
    # Written so that the compiler sees a multiple of VECTOR; and one comparison a vector, so that it is loaded as one.
    where = logits + (near * stride_lm // VECTOR * VECTOR)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    inside = ((tl.arange(0, BLOCK_N) + (PIECES - 1) * BLOCK_N) // VECTOR < N // VECTOR)[None, :]
    tiles = ()
    for piece in tl.static_range(PIECES):
        if piece < WHOLE:
            tiles += (tl.load(where + piece * BLOCK_N),)
        else:  # elements beyond a row count as -inf: no maximum, and 0 in the sum
            tiles += (tl.load(where + piece * BLOCK_N, mask=inside, other=-float("inf")),)
    # The loss of a target that is no class is NaN.
    is_class = (row_class >= 0) & (row_class < N)
    logit = tl.load(logits + near * stride_lm + row_class, mask=is_class, other=float("nan")).to(tl.float32)

    largest = tiles[0].to(tl.float32)
    for piece in tl.static_range(1, PIECES):
        largest = tl.maximum(largest, tiles[piece].to(tl.float32))
    row_max = tl.max(largest, axis=1)
    # A row of nothing but -inf must have the sum 0; -inf - -inf would make it NaN. A NaN or +inf makes it NaN.
    base = tl.where(row_max == -float("inf"), 0.0, row_max)
    powers, values = tl.zeros_like(largest), tl.zeros_like(largest)
    for piece in tl.static_range(PIECES):
        tile = tiles[piece].to(tl.float32)
        powers += tl.exp2((tile - base[:, None]) * LOG2_E)
        if SMOOTHED:  # for smoothing alone: masked logits make the sum -inf
            values += tile if piece < WHOLE else tl.where(inside, tile, 0.0)
    total = tl.sum(values, axis=1) if SMOOTHED else 0.0
    _write(
        losses, lse, row, mask, row_class, ignore_index, logit, row_max, tl.sum(powers, axis=1), total, N, smoothing,
        SMOOTHED,
    )  # fmt: skip


def cross_entropy_short_rows(
    way: Held, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], options: tuple[int, float]
) -> plans.Plan | None:
    """Launch the kernel on logits, target, losses and lse, and return the plan of it.

    ``sizes``: M, N and the distance of rows; ``options``: the ignored class and the smoothing.
    """
    M, N, _ = sizes
    block = way.lanes * way.vector
    constants = {
        "SMOOTHED": options[1] > 0, "ROWS": way.rows, "BLOCK_N": block, "PIECES": way.pieces, "WHOLE": N // block,
        "VECTOR": way.vector, "num_warps": WARPS,
    }  # fmt: skip
    grid = (triton.cdiv(M, way.rows),)
    return plans.launch(cross_entropy_short_rows_kernel, grid, tensors, (*sizes, *options), constants)

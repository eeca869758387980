"""How rows lie in lanes of a program: a row has few lanes, which work out its numbers, and a lane has few rows."""

from __future__ import annotations

import triton

WARPS = 4
THREADS = 32 * WARPS
HELD = 32  # elements of a lane at most
AT_ONCE = 16  # elements that a lane shall have under way at least, if rows are many
MOST_TURNS = 4  # rows of a lane, whose numbers take registers
LEAST_LANES = 4  # of a row, for accesses of 16 bytes to fill lines
SECTOR_BYTES = 32  # that the lanes of a row shall cover by narrower ones
PROGRAMS_PER_SM = 8


def lanes_of(packs: int, vector: int, itemsize: int, row_cost: int) -> int | None:
    """The lanes of a row of so many packs of ``vector`` elements that take the least time; None if none hold it.

    ``row_cost``: elements that a lane computes in the time of what it computes once a row.
    """
    least = max(SECTOR_BYTES // (vector * itemsize), LEAST_LANES)
    fits = [
        lanes
        for lanes in (2**i for i in range(THREADS.bit_length()))
        if lanes >= least and triton.cdiv(packs, lanes) * vector <= HELD
    ]
    return min(fits, key=lambda each: each * (row_cost + triton.cdiv(packs, each) * vector), default=None)


def rows_of(M: int, lanes: int, elements: int, sms: int) -> int:
    """The rows of a program, of M; ``elements``: of a lane in a row."""
    turns = 2 ** (min(max(AT_ONCE // elements, 1), MOST_TURNS).bit_length() - 1)
    while turns > 1 and triton.cdiv(M * lanes, THREADS * turns) < PROGRAMS_PER_SM * sms:
        turns //= 2
    return THREADS // lanes * turns

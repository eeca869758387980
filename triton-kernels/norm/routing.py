"""Which kernel takes the rows of a norm, and with which configuration: from their number, length and alignment.

Held rows: in chunks of a few warps' registers, in a backward pass with the sums of their columns. Skewed rows: held,
with single elements at the ends of misaligned rows alone. Cooperative rows: programs of one launch share a row, see
configurations.py. Split rows: two launches, for rows that are too long for all programs which run at once, or so few
that one launch would use a part of the GPU and wait for every exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernel_twins._triton.lib.device import shared_bytes, sm_count
from kernel_twins._triton.norm.configurations import LANES, MOST_REGISTERS, REGISTERS, VECTOR_BYTES, cooperative
from kernel_twins._triton.norm.layer_norm import cooperative_tiles as forward_tiles
from kernel_twins._triton.norm.layer_norm_backward import cooperative_tiles as backward_tiles

WORD_BYTES = 4

# ----------------------------------------------------------------------------------------------------------------------
# Held rows
# ----------------------------------------------------------------------------------------------------------------------

HELD = 64  # elements that a lane holds at most, of all matrices
AT_ONCE = 16  # elements that a lane shall have under way at least, if rows are many
APART_BYTES = 8  # of an access that writes rows which are read by less: single loads beside it reach few lines
MOST_CHUNKS = 5  # of a row that shares its warp
WARPS = 4
MOST_WARPS = 8  # of a row
MOST_UNSHARED_WARPS = 16  # of a row that no vectors and no second matrix come with,
MOST_UNSHARED = 48 * 1024  # and its bytes, for registers to hold the rows of two programs of an SM
PROGRAMS_PER_SM = 16


class Held(NamedTuple):
    """``lanes`` hold a row, ``rows`` are side by side, and a program takes ``turns`` of them.

    A lane holds ``width`` elements side by side.
    """

    lanes: int
    rows: int
    turns: int
    width: int

    @property
    def warps(self) -> int:
        return self.lanes * self.rows // LANES

    def programs(self, M: int) -> int:
        return triton.cdiv(M, self.rows * self.turns)

    def slots(self, N: int, vector: int) -> int:
        """Places for a row of N elements, some of which may be empty."""
        return triton.cdiv(N, self.lanes * vector) * self.lanes * vector

    def constants(self, N: int, vector: int) -> dict[str, int]:
        """The kernel's, for rows of N elements: CHUNKS tiles of BLOCK_N columns, of which FULL need no mask."""
        block = self.lanes * vector
        return {
            "ROWS": self.rows, "TURNS": self.turns, "CHUNKS": triton.cdiv(N, block), "BLOCK_N": block,
            "FULL": N // block, "VECTOR": vector, "num_warps": self.warps,
        }  # fmt: skip


def held(M: int, N: int, vector: int, matrices: int, most_warps: int, sms: int) -> Held | None:
    """How rows of N elements lie in lanes; None if ``most_warps`` do not hold a row of so many matrices."""
    packs = triton.cdiv(N, vector)
    lanes = _lanes(packs, HELD // matrices // vector, most_warps)
    if lanes is None:
        return None
    rows = max(WARPS * LANES // lanes, 1)
    return Held(lanes, rows, _turns(M, rows, triton.cdiv(packs, lanes) * vector * matrices, sms), vector)


def held_apart(M: int, N: int, width: int, sms: int) -> Held | None:
    """The same of short rows that are written by ``width`` elements, while less is read at once; None if they are long.

    The lanes of a row have one access each: where they had several, each would write a part of every sector.
    """
    lanes = triton.next_power_of_2(triton.cdiv(N, width))
    if lanes >= LANES:
        return None
    rows = WARPS * LANES // lanes
    return Held(lanes, rows, _turns(M, rows, width, sms), width)


def _turns(M: int, rows: int, elements: int, sms: int) -> int:
    """How often a program takes ``rows``, of which a lane has so many ``elements`` each time."""
    turns = 2 ** (max(AT_ONCE // elements, 1).bit_length() - 1)
    while turns > 1 and triton.cdiv(M, rows * turns) < PROGRAMS_PER_SM * sms:
        turns //= 2
    return turns


def _lanes(packs: int, room: int, most_warps: int, fewest: int = 1) -> int | None:
    """The lanes of a row of so many packs, of which each has up to ``room``; None if ``most_warps`` are too few."""
    wider = [LANES * 2**i for i in range(most_warps.bit_length()) if triton.cdiv(packs, LANES * 2**i) <= room]
    if not wider:
        return None
    # Rows share a warp if that leaves fewer lanes idle.
    narrow = [2**i for i in range(LANES.bit_length() - 1) if 2**i >= fewest]
    shared = [lanes for lanes in narrow if triton.cdiv(packs, lanes) <= min(MOST_CHUNKS, room)]
    return min(shared + wider[:1], key=lambda lanes: (triton.cdiv(packs, lanes) * lanes, -lanes))


# ----------------------------------------------------------------------------------------------------------------------
# Skewed rows: held rows of 16-bit elements that start at every skew
# ----------------------------------------------------------------------------------------------------------------------

SKEWED_PACKS = 8  # of a lane, of one row
TURN_PACKS = 4  # of a lane, of all its rows, if they are several
LEAST_SKEWED = {"layer_norm": 768, "rms_norm": 512}  # bytes: a shorter row is mostly its ends


class Skewed(NamedTuple):
    """``lanes`` hold a row, ``rows`` are side by side, and a program takes ``turns`` of them; ``vector``: of a pack."""

    lanes: int
    rows: int
    turns: int
    vector: int

    def programs(self, M: int) -> int:
        return triton.cdiv(M, self.vector * self.turns) * (self.vector // self.rows)

    def constants(self, N: int) -> dict[str, int]:
        """The kernel's, for rows of N elements: CHUNKS tiles of BLOCK_N columns, of which FULL need no mask."""
        block = self.lanes * self.vector
        return {
            "ROWS": self.rows, "TURNS": self.turns, "CHUNKS": triton.cdiv(N // self.vector, self.lanes),
            "BLOCK_N": block, "FULL": (N - self.vector + 1) // self.vector // self.lanes, "VECTOR": self.vector,
            "num_warps": self.lanes * self.rows // LANES,
        }  # fmt: skip


def skewed(M: int, N: int, itemsize: int, sms: int) -> Skewed | None:
    """How rows of N elements lie in lanes that take rows of one skew; None if a warp does not hold a row."""
    vector = VECTOR_BYTES // itemsize
    # Single elements at the ends have a lane each, and the rows side by side have different skews.
    lanes = _lanes(N // vector, SKEWED_PACKS, 1, max(2 * vector, WARPS * LANES // vector))
    if lanes is None:
        return None
    turns = max(1, TURN_PACKS // triton.cdiv(N // vector, lanes))
    turns = 2 ** (turns.bit_length() - 1)
    while turns > 1 and triton.cdiv(M * lanes, WARPS * LANES * turns) < PROGRAMS_PER_SM * sms:
        turns //= 2
    return Skewed(lanes, WARPS * LANES // lanes, turns, vector)


# ----------------------------------------------------------------------------------------------------------------------
# Held rows of which columns are summed
# ----------------------------------------------------------------------------------------------------------------------

OTHER_REGISTERS = 84  # of a thread, beside those of its elements
EDGE_REGISTERS = 16  # of a thread, for the single elements at the ends of misaligned rows
MOST_AHEAD = 144  # bytes that travel ahead for a lane in each stage of a matrix, for two programs of an SM to fit
MOST_STAYING = 4  # programs of an SM
SUMMED_STAGES = 3
OTHER_SHARED = 4096  # bytes of a program, beside the rows that travel ahead


class Summed(NamedTuple):
    """``lanes`` hold a row, ``rows`` are side by side; ``per_sm`` programs stay. ``vector``: elements of 16 bytes."""

    lanes: int
    rows: int
    per_sm: int
    stages: int
    vector: int

    def has_edges(self, N: int) -> bool:
        return N % self.vector > 0

    def slots(self, N: int) -> int:
        """Places for a row of N elements, some of which may be empty."""
        block = self.lanes * self.vector
        return triton.cdiv(N // self.vector * self.vector, block) * block

    def programs(self, M: int, N: int, sms: int) -> int:
        """So many that each takes as many rows as the others, but for the last round."""
        tiles = triton.cdiv(M, self.rows)
        rounds = triton.cdiv(tiles, self.per_sm * sms)
        # A line goes from a row to the next one of the same skew.
        period = self.vector // math.gcd(self.vector, N * self.rows) if rounds > 1 else 1
        return triton.cdiv(triton.cdiv(tiles, rounds), period) * period

    def constants(self, N: int) -> dict[str, int | bool]:
        """The kernel's, for rows of N elements: CHUNKS tiles of BLOCK_N columns, of which FULL need no mask."""
        block, warps = self.lanes * self.vector, self.lanes * self.rows // LANES
        least = (N - self.vector + 1) // self.vector * self.vector if self.has_edges(N) else N
        return {
            "ROWS": self.rows, "CHUNKS": self.slots(N) // block, "BLOCK_N": block, "FULL": least // block,
            "VECTOR": self.vector, "EDGES": self.has_edges(N), "STAGES": self.stages, "num_warps": warps,
            "maxnreg": min(REGISTERS // (self.per_sm * warps * LANES) // 8 * 8, MOST_REGISTERS),
        }  # fmt: skip


def summed(N: int, itemsize: int, sums: int, device: torch.device) -> Summed | None:
    """How rows of N elements lie in lanes that keep the sums of their columns, too; None if these do not hold them.

    ``sums``: how many of every column, 1 or 2. Rows have the same skew in all matrices.
    """
    vector = VECTOR_BYTES // itemsize
    each = 4 * sums + 3 * itemsize  # bytes of an element: beside sums those of weight, x and dout
    others = OTHER_REGISTERS + (EDGE_REGISTERS if N % vector else 0)
    most = min((MOST_REGISTERS - others) * 4 // each, MOST_AHEAD // itemsize)
    # Single elements at the ends have a lane each.
    found = _lanes(N // vector, most // vector, MOST_WARPS, 2 * vector if N % vector else 1)
    if found is None:
        return None
    rows = max(WARPS * LANES // found, 1)
    elements = triton.cdiv(N // vector, found) * vector
    threads, held = rows * found, triton.cdiv(elements * each, 4) + others
    ahead = 3 * (SUMMED_STAGES - 1) * elements * threads * itemsize + OTHER_SHARED  # of dout, x and dadded
    per_sm = min(REGISTERS // (threads * triton.cdiv(held, 8) * 8), shared_bytes(device) // ahead, MOST_STAYING)
    return Summed(found, rows, per_sm, SUMMED_STAGES, vector) if per_sm > 1 else None  # one would wait for its threads


# ----------------------------------------------------------------------------------------------------------------------
# Split rows
# ----------------------------------------------------------------------------------------------------------------------

TILE_BYTES = 4096
MOST_SINGLE = 1024  # elements of a tile that is read one by one: their addresses take registers
NUM_WARPS = 4
STAGES = 3
PARTS_PER_SM = 16
MOST_PARTS = 512  # of a row, as every program of the second launch reads the numbers of all,
MOST_PARTS_BACKWARD = 256  # and of all rows where it has columns
COLUMNS_PER_SM = 4  # programs with sums of columns: more would take slices of rows, whose sums are added again
# The model that chooses between one cooperative launch and two: rates of an H100, of which the ratios matter.
BYTES_PER_US = 2.9e6
L2_BYTES = 25e6  # of what the first launch has read, that the second one still finds in L2
LAUNCH_US = 2.5
EXCHANGE_US = 3.3  # for which all programs of a row wait; other rows on the same SM hide it


class Split(NamedTuple):
    """Every row is split into ``parts`` of ``share_tiles`` tiles of ``block`` elements; the last one may be shorter."""

    parts: int
    share_tiles: int
    block: int

    @property
    def slots(self) -> int:
        """Places for the parts' numbers."""
        return triton.next_power_of_2(self.parts)

    def sliced(self, M: int, N: int, has_sums: bool, sms: int) -> tuple[int, int]:
        """How many slices of rows make enough programs where each has a block of columns, and the rows of a slice.

        ``has_sums``: whether columns are added up.
        """
        wanted = (COLUMNS_PER_SM if has_sums else PARTS_PER_SM) * sms
        slices = max(wanted // triton.cdiv(N, self.block), 1)
        slice_rows = triton.cdiv(M, slices)
        return triton.cdiv(M, slice_rows), slice_rows


def split(M: int, N: int, itemsize: int, vector: int, most_parts: int, sms: int) -> Split:
    """As many parts as give every SM its programs, of whole tiles."""
    block = TILE_BYTES // itemsize if vector > 1 else min(TILE_BYTES // itemsize, MOST_SINGLE)
    tiles = triton.cdiv(N, block)
    share = triton.cdiv(tiles, min(triton.cdiv(PARTS_PER_SM * sms, M), most_parts))
    return Split(triton.cdiv(tiles, share), share, block)


class Moved(NamedTuple):
    """Matrices that one launch moves, that two launches move, and of these the ones that the second reads again."""

    once: int
    twice: int
    again: int


def split_is_faster(M: int, row_bytes: int, groups: int, busy: float, moved: Moved) -> bool:
    """Whether two launches take less time than a cooperative one, in which ``groups`` of programs share rows.

    ``busy`` is the share of the programs that can run at once which these groups are.
    """
    matrix = M * row_bytes
    rounds = triton.cdiv(M, groups)
    shared = LAUNCH_US + matrix * moved.once / BYTES_PER_US / busy + EXCHANGE_US * rounds / groups
    apart = 2 * LAUNCH_US + (matrix * moved.twice - min(matrix * moved.again, L2_BYTES)) / BYTES_PER_US
    return apart < shared


# ----------------------------------------------------------------------------------------------------------------------
# The route
# ----------------------------------------------------------------------------------------------------------------------

Route = Held | Split | dict[str, Any]  # the last is the configuration of cooperative rows


def forward(
    op: str, x: Tensor, has_residual: bool, vector: int, written: int, wide: bool, has_weight: bool = True
) -> Route | Skewed:
    """The route of x's rows, by accesses of ``vector`` elements, and of results by such of ``written``; wide: below."""
    (M, N), itemsize, device = x.shape, x.element_size(), x.device
    if wide and vector * itemsize < WORD_BYTES and N * itemsize >= LEAST_SKEWED[op]:
        in_packs = skewed(M, N, itemsize, sm_count(device))
        if in_packs is not None:
            return in_packs
    width = min(written, APART_BYTES // itemsize)
    if N and vector < width:
        in_lanes = held_apart(M, N, width, sm_count(device))
        if in_lanes is not None:
            return in_lanes
    if N and vector * itemsize < VECTOR_BYTES:
        in_lanes = held(M, N, vector, 1, 1, sm_count(device))
        if in_lanes is None and vector < written:  # neighbours that are written at once, though read one by one
            in_lanes = held(M, N, written, 1, MOST_WARPS, sm_count(device))
        if in_lanes is not None:
            return in_lanes
    config = cooperative(op, N, itemsize)
    if vector * itemsize == VECTOR_BYTES and N * itemsize >= VECTOR_BYTES * LANES:
        tiles = forward_tiles.divided(N, itemsize, True, 0, 1, config, device)
        in_lanes = held(M, N, vector, 1, WARPS, sm_count(device))
        slots = tiles["PARTS"] * tiles["CHUNKS"] * tiles["BLOCK_N"]
        # Rows that leave places empty either way are a warp's, whose sums need no barrier.
        most = slots if in_lanes is not None and in_lanes.lanes <= LANES and slots > N else slots - 1
        if in_lanes is not None and in_lanes.slots(N, vector) <= most:
            return in_lanes
        # Programs that share a row wait for each other at every row, which full tiles hide better than partial ones.
        unshared = M // sm_count(device) >= 2 and N * itemsize <= MOST_UNSHARED
        if tiles["PARTS"] > 1 and unshared and not (has_residual or has_weight):
            return held(M, N, vector, 1, MOST_UNSHARED_WARPS, sm_count(device)) or config
    matrices = 2 if has_residual else 1
    moved = Moved(4, 5, 1) if has_residual else Moved(2, 3, 1)
    period = forward_tiles.period_of(N, itemsize) if N * itemsize % VECTOR_BYTES else 1
    if _shares(M, N * itemsize, config, forward_tiles.resident(config, matrices, device), period, moved):
        return config
    return split(M, N, itemsize, vector, MOST_PARTS, sm_count(device))


def backward(
    op: str, dout: Tensor, has_weight: bool, has_dadded: bool, vector: int, wide: bool, shifted: int
) -> Route | Summed:
    """The route of the rows of dout, which accesses of ``vector`` elements take.

    ``wide``: each row has the same skew in all matrices, and may be taken by accesses of 16 bytes but for its ends.
    ``shifted``: the matrices with rows of other skews than dx's, if these may be taken so.
    """
    (M, N), itemsize, device = dout.shape, dout.element_size(), dout.device
    if not has_weight:  # no column sums, for which programs would stay
        in_lanes = held(M, N, vector, 2, MOST_WARPS, sm_count(device))
        if in_lanes is not None:
            return in_lanes
    config = cooperative(op, N, itemsize, shifted > 0)
    if has_weight and wide and N * itemsize >= VECTOR_BYTES * LANES:
        tiles = backward_tiles.divided(N, itemsize, True, 0, config, device)
        staying = summed(N, itemsize, 1 if op == "rms_norm_backward" else 2, device)
        whole = tiles["VECTOR"] > 1  # with accesses of 16 bytes
        if staying is not None and (not whole or staying.slots(N) < tiles["PARTS"] * tiles["BLOCK_N"]):
            return staying
    moved = Moved(4, 6, 2) if has_dadded else Moved(3, 5, 2)
    has_ends = wide and N * itemsize % VECTOR_BYTES > 0
    period = backward_tiles.period_of(N, VECTOR_BYTES // itemsize) if has_ends or shifted else 1
    # Where rows have ends, the compiler loads none ahead unless there is a weight.
    ahead = has_weight or not has_ends or N * itemsize <= config["TILE_BYTES"]
    if ahead and _shares(M, N * itemsize, config, backward_tiles.sharing(config, shifted, device), period, moved):
        return config
    return split(M, N, itemsize, vector, MOST_PARTS_BACKWARD, sm_count(device))


def _shares(M: int, row_bytes: int, config: dict[str, Any], resident: int, period: int, moved: Moved) -> bool:
    """Whether rows are left to a cooperative launch, of which so many programs can run at once.

    Groups of programs take rows of one skew, if there are as many groups as skews: every ``period``-th row.
    """
    parts = triton.cdiv(row_bytes, config["TILE_BYTES"])
    if parts <= 1:
        return True
    groups = resident // parts
    if groups == 0:
        return False
    if groups >= period:
        groups = groups // period * period
    groups = triton.cdiv(M, triton.cdiv(M, groups))
    return not split_is_faster(M, row_bytes, groups, groups * parts / resident, moved)


# ----------------------------------------------------------------------------------------------------------------------
# Alignment
# ----------------------------------------------------------------------------------------------------------------------


def vector_of(N: int, strides: Sequence[int], itemsize: int, tensors: Sequence[Tensor | None]) -> int:
    """The elements of the widest access that is aligned in every row: N and all strides are multiples of it.

    1 where an address is no multiple of 16: the compiler knows of no smaller one.
    """
    if any(each is not None and each.data_ptr() % VECTOR_BYTES for each in tensors):
        return 1
    return math.gcd(VECTOR_BYTES // itemsize, N, *strides)

"""Which kernel takes the rows of a norm, and with which configuration: from their number, length and alignment.

Held rows: short rows in chunks of a warp's registers. Cooperative rows: the kernels of the cooperative steps, with a
configuration from TABLE, by the rows' length. Split rows: two launches, for rows that are too long for all programs
which run at once, or so few that one launch would use a part of the GPU and wait for every exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor

from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.norm.layer_norm import v06_cooperative as forward_step
from kernel_twins._triton.norm.layer_norm_backward import v05_cooperative as backward_step

VECTOR_BYTES = 16
LANES = 32  # of a warp

# ----------------------------------------------------------------------------------------------------------------------
# Cooperative rows: the winners of the searches of the cooperative steps on an H100 (tuned/), by the length of rows
# ----------------------------------------------------------------------------------------------------------------------

Config = tuple[int, int, int, int]  # TILE_BYTES, PER_SM, STAGES, warps
ANY = math.inf
KIB = 1024

# By operation and bytes of an element: the longest row in bytes, the configuration where its bytes are a multiple of
# 16, and elsewhere, where rows have every alignment.
TABLE: dict[tuple[str, int], tuple[tuple[float, Config, Config], ...]] = {
    ("layer_norm", 2): (
        (1 * KIB, (32768, 2, 1, 16), (10240, 8, 1, 4)),
        (4 * KIB, (32768, 2, 1, 8), (10240, 8, 1, 4)),
        (10 * KIB, (32768, 2, 1, 16), (10240, 8, 1, 4)),
        (12_800, (12800, 4, 3, 4), (12800, 4, 3, 4)),
        (16 * KIB, (32768, 2, 1, 16), (12800, 4, 3, 4)),
        (28 * KIB, (32768, 2, 1, 8), (12800, 4, 3, 4)),
        (64 * KIB, (32768, 2, 1, 16), (12800, 4, 3, 4)),
        (ANY, (16384, 3, 3, 4), (12800, 4, 3, 4)),
    ),
    ("layer_norm", 4): ((64 * KIB, (32768, 2, 1, 16), (32768, 2, 1, 16)), (ANY, (32768, 2, 1, 8), (32768, 2, 1, 8))),
    ("rms_norm", 2): (
        (1 * KIB, (32768, 2, 1, 16), (10240, 8, 1, 4)),
        (4 * KIB, (32768, 2, 1, 8), (10240, 8, 1, 4)),
        (10 * KIB, (32768, 2, 1, 16), (10240, 8, 1, 4)),
        (12_800, (12800, 4, 3, 4), (12800, 4, 3, 4)),
        (28 * KIB, (32768, 2, 1, 16), (12800, 4, 3, 4)),
        (64 * KIB, (32768, 2, 1, 8), (12800, 4, 3, 4)),
        (256 * KIB, (8192, 4, 3, 4), (12800, 4, 3, 4)),
        (ANY, (16384, 3, 3, 4), (12800, 4, 3, 4)),
    ),
    ("rms_norm", 4): ((64 * KIB, (32768, 2, 1, 16), (32768, 2, 1, 16)), (ANY, (16384, 2, 3, 4), (16384, 2, 3, 4))),
    ("layer_norm_backward", 2): (
        (1 * KIB, (4096, 4, 2, 4), (4096, 4, 2, 4)),
        (4 * KIB, (2048, 8, 3, 1), (2048, 8, 3, 1)),
        (16 * KIB, (4096, 4, 3, 2), (2048, 8, 3, 1)),
        (64 * KIB, (4096, 4, 3, 4), (4096, 4, 3, 2)),
        (256 * KIB, (8192, 2, 3, 4), (4096, 4, 3, 2)),
        (ANY, (4096, 4, 3, 4), (4096, 4, 3, 2)),
    ),
    ("layer_norm_backward", 4): (
        (64 * KIB, (4096, 4, 3, 2), (4096, 4, 3, 2)),
        (ANY, (16384, 1, 3, 8), (16384, 1, 3, 8)),
    ),
    ("rms_norm_backward", 2): (
        (4 * KIB, (4096, 4, 2, 4), (4096, 4, 2, 4)),
        (16 * KIB, (4096, 4, 3, 2), (2048, 12, 3, 1)),
        (64 * KIB, (4096, 4, 3, 4), (4096, 6, 3, 2)),
        (256 * KIB, (8192, 2, 3, 8), (4096, 6, 3, 2)),
        (ANY, (4096, 4, 3, 4), (4096, 6, 3, 2)),
    ),
    ("rms_norm_backward", 4): (
        (64 * KIB, (4096, 4, 3, 2), (4096, 4, 3, 2)),
        (ANY, (16384, 1, 3, 8), (16384, 1, 3, 8)),
    ),
}


def cooperative(op: str, N: int, itemsize: int, configs: Sequence[triton.Config]) -> dict[str, Any]:
    """The configuration of rows of N elements, one of the cooperative step's ``configs``."""
    row = N * itemsize
    whole, ragged = next((even, odd) for longest, even, odd in TABLE[op, itemsize] if row <= longest)
    size, per_sm, stages, warps = ragged if row % VECTOR_BYTES else whole
    wanted = {"TILE_BYTES": size, "PER_SM": per_sm, "STAGES": stages}, warps
    return next(each.all_kwargs() for each in configs if (each.kwargs, each.num_warps) == wanted)


# ----------------------------------------------------------------------------------------------------------------------
# Held rows
# ----------------------------------------------------------------------------------------------------------------------

HELD = 64  # elements that a lane holds at most, of all matrices
AT_ONCE = 16  # elements that a lane shall have under way at least, if rows are many
MOST_CHUNKS = 5  # of a row that shares its warp
WARPS = 4
MOST_WARPS = 8  # of a row
PROGRAMS_PER_SM = 16


class Held(NamedTuple):
    """``lanes`` hold a row, ``rows`` are side by side, and a program takes ``turns`` of them."""

    lanes: int
    rows: int
    turns: int

    @property
    def warps(self) -> int:
        return self.lanes * self.rows // LANES

    def programs(self, M: int) -> int:
        return triton.cdiv(M, self.rows * self.turns)

    def constants(self, N: int, vector: int) -> dict[str, int]:
        """The kernel's, for rows of N elements: CHUNKS tiles of BLOCK_N columns, of which FULL need no mask."""
        block = self.lanes * vector
        return {
            "ROWS": self.rows, "TURNS": self.turns, "CHUNKS": triton.cdiv(N, block), "BLOCK_N": block,
            "FULL": N // block, "VECTOR": vector, "num_warps": self.warps,
        }  # fmt: skip


def held(M: int, N: int, vector: int, matrices: int, most_warps: int, sms: int) -> Held | None:
    """How rows of N elements lie in lanes; None if ``most_warps`` do not hold a row of so many matrices."""
    packs, room = triton.cdiv(N, vector), HELD // matrices // vector
    wider = [LANES * 2**i for i in range(most_warps.bit_length()) if triton.cdiv(packs, LANES * 2**i) <= room]
    if not wider:
        return None
    # Rows share a warp if that leaves fewer lanes idle.
    shared = [2**i for i in range(LANES.bit_length() - 1) if triton.cdiv(packs, 2**i) <= min(MOST_CHUNKS, room)]
    lanes = min(shared + wider[:1], key=lambda lanes: (triton.cdiv(packs, lanes) * lanes, -lanes))
    rows = max(WARPS * LANES // lanes, 1)
    turns = max(AT_ONCE // (triton.cdiv(packs, lanes) * vector * matrices), 1)
    turns = 2 ** (turns.bit_length() - 1)
    while turns > 1 and triton.cdiv(M, rows * turns) < PROGRAMS_PER_SM * sms:
        turns //= 2
    return Held(lanes, rows, turns)


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


def forward(op: str, x: Tensor, has_residual: bool, vector: int) -> Route:
    """The route of the rows of x, which accesses of ``vector`` elements take."""
    (M, N), itemsize, device = x.shape, x.element_size(), x.device
    if N and vector * itemsize < VECTOR_BYTES:
        in_lanes = held(M, N, vector, 1, 1, sm_count(device))
        if in_lanes is not None:
            return in_lanes
    config = cooperative(op, N, itemsize, forward_step.CONFIGS)
    matrices = 2 if has_residual else 1
    moved = Moved(4, 5, 1) if has_residual else Moved(2, 3, 1)
    period = forward_step.period_of(N, itemsize) if N * itemsize % VECTOR_BYTES else 1
    if _shares(M, N * itemsize, config, forward_step.resident(config, matrices, device), period, moved):
        return config
    return split(M, N, itemsize, vector, MOST_PARTS, sm_count(device))


def backward(op: str, dout: Tensor, has_weight: bool, has_dadded: bool, vector: int, wide: bool) -> Route:
    """The route of the rows of dout, which accesses of ``vector`` elements take.

    ``wide``: each row has the same skew in all matrices, and may be taken by accesses of 16 bytes but for its ends.
    """
    (M, N), itemsize, device = dout.shape, dout.element_size(), dout.device
    if not has_weight:  # no column sums, for which programs would stay
        in_lanes = held(M, N, vector, 2, MOST_WARPS, sm_count(device))
        if in_lanes is not None:
            return in_lanes
    config = cooperative(op, N, itemsize, backward_step.CONFIGS)
    moved = Moved(4, 6, 2) if has_dadded else Moved(3, 5, 2)
    has_ends = wide and N * itemsize % VECTOR_BYTES > 0
    period = VECTOR_BYTES // itemsize if has_ends else 1
    # Where rows have ends, the compiler loads none ahead unless there is a weight.
    ahead = has_weight or not has_ends or N * itemsize <= config["TILE_BYTES"]
    if ahead and _shares(M, N * itemsize, config, backward_step.sharing(config, device), period, moved):
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

"""The routing table of softmax's and softmax_backward's last Triton steps: which kernel and which tiling rows get.

    rows                                                     kernel
    up to 4 KiB, or whole blocks of vectors                  several rows a program, in registers
    up to 80 KiB (backward: 40 KiB)                          a row a program, in registers
    longer, more of them than L2 keeps, of which the
      programs of a cooperative launch hold enough at once  a row shared by resident programs
    all others                                               a row split over two launches

A tiling follows from the rows alone. At the lengths that the steps before were searched for it is their winner, or
nearly so. At others the nearest winner would leave tiles half empty.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton

from kernel_twins._triton.lib.device import shared_bytes, sm_count
from kernel_twins._triton.lib.workspace import SIZE

VECTOR_BYTES = 16
REGISTERS = 65_536  # an SM
SHORT_BYTES = 4_096  # rows up to which a program takes several, whatever their length
LEAST_REGISTERS, MOST_REGISTERS = 12, 40  # a thread, of its 64, for a long row: of each matrix, and of all
SINGLE = 16  # elements a thread of short rows that are loaded by less than a vector
LEAST_PROGRAMS = 2  # an SM, before a program takes more rows
KEPT_IN_L2 = 28 * 2**20  # bytes that a second launch finds in L2
PARTS = 1_024  # most parts of a split row: every program of the second launch reads all their numbers
# Programs an SM that a split aims at, and the bytes of a part: many programs end evenly, long parts start rarely.
SPLITS = ((32, 32_768), (8, 8_192))
WARPS = (16, 8, 4, 2, 1)
PROGRAMS = {16: 2, 8: 2, 4: 8, 2: 16, 1: 16}  # an SM, by warps: several rows a program


class Rows(NamedTuple):
    """M rows of N elements; how far the rows of each input lie apart; whether all addresses are multiples of 16."""

    M: int
    N: int
    itemsize: int
    strides: tuple[int, ...]
    aligned: bool

    @property
    def vector(self) -> int:
        """The elements of a vector of 16 bytes."""
        return VECTOR_BYTES // self.itemsize

    @property
    def together(self) -> bool:
        """True if a row has the same skew in all tensors, so that vectors can be counted from its first whole one.

        A row shorter than a vector may have none.
        """
        return self._alike(self.N)

    @property
    def inputs_together(self) -> bool:
        """The same of the inputs alone."""
        return self._alike(self.strides[0])

    def _alike(self, stride: int) -> bool:
        """Whether the inputs' rows have the skew of rows that lie ``stride`` elements apart."""
        return self.aligned and self.vector <= self.N and all((s - stride) % self.vector == 0 for s in self.strides)

    @property
    def width(self) -> int:
        """The elements of the widest access that every row is a whole number of."""
        return math.gcd(self.vector, self.N, *self.strides) if self.aligned else 1


class Shared(NamedTuple):
    """A configuration of a cooperative launch."""

    TILE_BYTES: int
    PER_SM: int
    STAGES: int
    num_warps: int


class Limits(NamedTuple):
    """What one of the two operations may hold, for each matrix that it reads."""

    matrices: int
    converted: int  # elements a thread that are kept as fp32, or as they came and as results
    kept_bytes: int  # a thread's, of several rows
    far: int  # bytes of the longest rows that are near
    groups: int  # rows that a cooperative launch must hold at once, for loads of one to overlap another's exchange
    shared: Shared  # of near rows
    shared_single: Shared  # of those whose ends share vectors with their neighbours
    shared_far: Shared  # of longer rows


FORWARD = Limits(1, 32, 64, 192 * 1024, 4, Shared(8192, 8, 1, 4), Shared(8192, 8, 1, 4), Shared(8192, 8, 3, 4))
BACKWARD = Limits(2, 16, 64, 384 * 1024, 2, Shared(8192, 4, 1, 8), Shared(4096, 8, 1, 4), Shared(16384, 2, 3, 8))


class Tiling(NamedTuple):
    """A launch of the step's own kernel: ROWS a program, or PARTS a row, each of PIECES of BLOCK_N elements.

    The first WHOLE pieces are full and need no mask. VECTOR elements are an access. With EDGES the elements before a
    row's first vector and behind its last one are loaded one by one. ANEW: elements are kept as they came.
    """

    programs: int
    ROWS: int
    BLOCK_N: int
    PIECES: int
    WHOLE: int
    PARTS: int
    SLOTS: int
    VECTOR: int
    EDGES: bool
    ANEW: bool
    STAGES: int
    num_warps: int
    maxnreg: int

    def constants(self) -> dict[str, Any]:
        """The kernel's constants and its launch's options."""
        constants = self._asdict()
        del constants["programs"]
        if triton.knobs.runtime.interpret:  # which has no inline assembly, and no registers to save
            constants["ANEW"] = False
        return constants | ({"launch_cooperative_grid": True} if self.PARTS > 1 else {})


class Split(NamedTuple):
    """Two launches of ``parts`` programs a row; WIDE: by vectors of 16 bytes."""

    parts: int
    WIDE: bool


def route(rows: Rows, limits: Limits, device: torch.device) -> Tiling | Split:
    """The first kernel of the table that takes the rows, and how."""
    sms = sm_count(device)
    return several(rows, limits, sms) or _one(rows, limits) or _shared(rows, limits, device) or split(rows, sms)


def split(rows: Rows, sms: int) -> Split:
    """As many parts as SPLITS asks for, where those are longer, and at least one."""
    size = rows.N * rows.itemsize
    parts = max(min(programs * sms // rows.M, size // least) for programs, least in SPLITS)
    return Split(max(min(parts, PARTS), 1), rows.together)


def several(rows: Rows, limits: Limits, sms: int) -> Tiling | None:
    """Several rows a program; None if only one fits, or they are too long and no whole number of blocks."""
    M, N, vector = rows.M, rows.N, rows.width
    long, wide = N * rows.itemsize > SHORT_BYTES, vector == rows.vector
    most = min(limits.converted, limits.kept_bytes // rows.itemsize) if wide else SINGLE
    for warps in WARPS[(0 if N * rows.itemsize >= SHORT_BYTES or limits.matrices > 1 else 1) if wide else 2 :]:
        # The fewest warps for a row are best at filling blocks, the most at keeping its elements in few registers. The
        # widest of equally full blocks; where accesses are narrow, of those that give a thread enough of them.
        blocks = [min(triton.next_power_of_2(N), 32 * each * vector) for each in WARPS if each <= warps]
        bound = most if long else MOST_REGISTERS
        blocks = [block for block in blocks if triton.cdiv(N, block) * vector <= bound]
        slots = [triton.cdiv(N, block) * block for block in blocks]
        if not blocks or (long and not (wide and 8 * min(slots) <= 9 * N)):
            return None
        full = [block for block, size in zip(blocks, slots, strict=True) if 16 * size <= 17 * min(slots)]
        busy = (block for block in full if wide or triton.cdiv(N, block) * vector >= SINGLE)
        block = next(busy, full[-1])
        pieces = triton.cdiv(N, block)
        least = 32 * warps * vector // block  # rows that fill the threads once
        if wide and limits.matrices > 1 and warps == 16 and pieces * vector > most:
            continue  # 64 registers a thread do not hold two matrices' rows
        turns = 1 << (max(most // (pieces * vector), 1).bit_length() - 1)
        while turns > 1 and LEAST_PROGRAMS * sms * turns * least > M:
            turns //= 2
        if warps > 1 and least > 1 and LEAST_PROGRAMS * sms * least > M:
            continue
        count = min(turns * least, 1 << (M.bit_length() - 1))
        if count == 1 or count * max(*rows.strides, N) >= 2**31:
            return None
        return Tiling(
            triton.cdiv(M, count), count, block, pieces, N // block, 1, 32 * warps, vector, False,
            pieces * vector > limits.converted, 1, warps, registers(PROGRAMS[warps], warps),
        )  # fmt: skip
    return None


def _one(rows: Rows, limits: Limits) -> Tiling | None:
    """One row a program; None if the registers do not hold it."""
    N, vector = rows.N, rows.vector if rows.together else rows.width
    edges = N % vector > 0
    words = max(vector * rows.itemsize // 4, 1) * limits.matrices  # registers of a thread's vectors
    found = []
    for warps in WARPS:
        block = min(triton.next_power_of_2(N), 32 * warps * vector)
        pieces = triton.cdiv(N // vector * vector, block) if vector <= N else 1
        if pieces * words <= MOST_REGISTERS - 4 * edges and (warps == 1 or 16 * warps * vector < N):
            found.append((warps, block, pieces))
    if not found:
        return None
    fewest = min(block * pieces for _, block, pieces in found)
    spare = 4 if edges else 8  # more warps share the work at the ends
    full = [each for each in found if spare * each[1] * each[2] <= (spare + 1) * fewest]
    # As many warps as have enough in flight each, or the fewest.
    busy = (each for each in full if each[2] * words >= LEAST_REGISTERS * limits.matrices)
    warps, block, pieces = next(busy, full[-1])
    whole = max(N - edges * (vector - 1), 0) // vector * vector // block
    anew = pieces * vector > limits.converted
    return Tiling(
        rows.M, 1, block, pieces, whole, 1, 32 * warps, vector, edges, anew, 1, warps,
        registers(32 // max(warps, 2), warps),
    )  # fmt: skip


def _shared(rows: Rows, limits: Limits, device: torch.device) -> Tiling | None:
    """A row shared by resident programs; None if L2 keeps all rows, or too few are held at once."""
    M, N, size = rows.M, rows.N, rows.N * rows.itemsize
    vector = rows.vector if rows.together else 1
    edges = N % vector > 0
    near = limits.shared_single if edges or vector == 1 else limits.shared
    way = limits.shared_far if size > limits.far else near
    parts = triton.cdiv(size, way.TILE_BYTES)
    held = resident(way.TILE_BYTES, way.PER_SM, way.STAGES, limits.matrices, device)
    groups = held // parts
    if M * size * limits.matrices <= KEPT_IN_L2 or groups < limits.groups:
        return None
    share = triton.cdiv(N // vector, parts)
    least = (N - edges * (vector - 1)) // vector - (parts - 1) * share  # of the last part, in a misaligned row
    threads = 32 * way.num_warps
    pieces = triton.cdiv(share, threads)
    # All groups take the same number of rows, except in the last round, so that none ends a whole row late.
    groups = triton.cdiv(M, triton.cdiv(M, groups))
    return Tiling(
        groups * parts, 1, vector * threads, pieces, max(least, 0) // threads, parts,
        max(triton.next_power_of_2(parts), threads), vector, edges, True, way.STAGES, way.num_warps,
        registers(way.PER_SM, way.num_warps),
    )  # fmt: skip


def resident(tile_bytes: int, per_sm: int, stages: int, matrices: int, device: torch.device) -> int:
    """The number of programs that can be resident; 1 in the interpreter, which runs one after the other."""
    if device.type == "cpu":
        return 1
    # Beside the stages, the reductions take some shared memory, and CUDA reserves 1 KiB.
    shared = matrices * (stages - 1) * tile_bytes + 4096
    return min(sm_count(device) * min(per_sm, shared_bytes(device) // shared), SIZE // 5)


def registers(per_sm: int, warps: int) -> int:
    """The registers of a thread that leave room for so many programs; the hardware allocates them in eights."""
    return min(REGISTERS // (per_sm * warps * 32) // 8 * 8, 248)

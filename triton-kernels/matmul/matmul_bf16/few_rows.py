"""Which products have few rows or columns, with what tile and how many programs: for v18, and for linear's v02.

The lines of an operand run along K: they are a's rows and b's columns. One operand has few, the other one is wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from triton import cdiv, next_power_of_2

from kernel_twins._triton.lib.workspace import COUNTERS
from kernel_twins._triton.matmul.matmul_bf16.v17_prologue import LARGEST_SIZE

BLOCK_WIDE = 128
BLOCK_K = 64
MOST_FEW = 16  # lines, of which more are v17's
LEAST_FEW = 16  # columns of a tile
PIECE = 32  # columns of a tile that leave registers at a time
LEAST_UNITS = 16  # of a program's share: fewer cost less than to add up one more part
TICKETS = 3  # of a program, for the tile that its share ends in and for two groups of a tile's parts

SHARED_BYTES = 227 * 1024  # of a block, at most
MOST_STAGES = 8
MBARRIER_BYTES = 2 * 8  # of a stage, for both operands


@dataclass(frozen=True, slots=True)
class Choice:
    """A tile, and how many programs share all tiles' blocks of K."""

    transposed: bool  # the few lines are a's rows, else b's columns
    block_few: int
    programs: int

    @property
    def a_block(self) -> list[int]:
        """The block of a that is copied at a time, rows first."""
        return [self.block_few if self.transposed else BLOCK_WIDE, BLOCK_K]

    @property
    def b_block(self) -> list[int]:
        """The block of b, rows first."""
        return [BLOCK_K, BLOCK_WIDE if self.transposed else self.block_few]

    @property
    def out_block(self) -> list[int]:
        """The block of the result that is stored at a time, rows first."""
        return [self.piece, BLOCK_WIDE] if self.transposed else [BLOCK_WIDE, self.piece]

    @property
    def piece(self) -> int:
        """Columns of a tile that leave registers at a time."""
        return min(PIECE, self.block_few)

    @property
    def sums(self) -> int:
        """Elements of the workspace: two tiles of a program."""
        return self.programs * 2 * BLOCK_WIDE * self.block_few

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's constants, its warps and its stages."""
        stage_bytes = (BLOCK_WIDE + self.block_few) * BLOCK_K * 2 + MBARRIER_BYTES
        # Two pieces are kept beside the stages: one that changes threads, and one that waits for its store.
        left_bytes = SHARED_BYTES - 2 * BLOCK_WIDE * self.piece * 4
        return {
            "TRANSPOSED": self.transposed, "BLOCK_WIDE": BLOCK_WIDE, "BLOCK_FEW": self.block_few, "BLOCK_K": BLOCK_K,
            "PIECE": self.piece, "num_warps": 4,
            "num_stages": min(MOST_STAGES, left_bytes // stage_bytes),
        }  # fmt: skip


@lru_cache(4096)
def choice(M: int, N: int, K: int, sms: int) -> Choice | None:
    """The tile and the programs for a product on a GPU of so many SMs; None if v17 computes it."""
    few, wide = min(M, N), max(M, N)
    block_few = max(LEAST_FEW, next_power_of_2(few))
    units = cdiv(wide, BLOCK_WIDE) * cdiv(few, block_few) * cdiv(K, BLOCK_K)
    if few > MOST_FEW or units == 0 or max(wide, K, units) >= LARGEST_SIZE:
        return None
    tiles = cdiv(wide, BLOCK_WIDE) * cdiv(few, block_few)
    # Whole parts of tiles where programs are more than those: a share of two tiles is added up twice.
    programs = tiles * max(1, min(sms // tiles, cdiv(K, BLOCK_K) // LEAST_UNITS)) if tiles < sms else sms
    if programs < sms // 2:  # v17's smaller tiles keep more SMs, and so memory, busy
        return None
    programs = min(programs, COUNTERS // TICKETS)
    return Choice(transposed=M <= N, block_few=block_few, programs=programs)

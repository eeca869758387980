"""Which products have few rows or columns, and how many programs compute them: for v18, and for linear's v02.

The lines of an operand run along K: they are a's rows and b's columns. One operand has few, the other one is wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from triton import cdiv

from kernel_twins._triton.lib.workspace import COUNTERS
from kernel_twins._triton.matmul.matmul_bf16.v17_prologue import LARGEST_SIZE

BLOCK_WIDE = 128
BLOCK_FEW = 16  # columns of a tile; products with more lines are v17's
BLOCK_K = 64
LEAST_UNITS = 16  # of a part of a tile: fewer cost less than to add up one more part
TICKETS = 3  # of a program, for the tile that its share ends in and for two groups of a tile's parts


@dataclass(frozen=True, slots=True)
class Choice:
    """Which lines are few, and how many programs share all tiles' blocks of K."""

    transposed: bool  # the few lines are a's rows, else b's columns
    programs: int

    @property
    def a_block(self) -> list[int]:
        """The block of a that is copied at a time, rows first."""
        return [BLOCK_FEW if self.transposed else BLOCK_WIDE, BLOCK_K]

    @property
    def b_block(self) -> list[int]:
        """The block of b, rows first."""
        return [BLOCK_K, BLOCK_WIDE if self.transposed else BLOCK_FEW]

    @property
    def out_block(self) -> list[int]:
        """The block of the result, rows first."""
        return [BLOCK_FEW, BLOCK_WIDE] if self.transposed else [BLOCK_WIDE, BLOCK_FEW]

    @property
    def sums(self) -> int:
        """Elements of the workspace: two tiles of a program."""
        return self.programs * 2 * BLOCK_WIDE * BLOCK_FEW

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's constants, its warps and its stages."""
        return {
            "TRANSPOSED": self.transposed, "BLOCK_WIDE": BLOCK_WIDE, "BLOCK_FEW": BLOCK_FEW, "BLOCK_K": BLOCK_K,
            "num_warps": 4, "num_stages": 8,
        }  # fmt: skip


@lru_cache(4096)
def choice(M: int, N: int, K: int, sms: int) -> Choice | None:
    """What a GPU of so many SMs computes a product with; None if v17 computes it."""
    few, wide = min(M, N), max(M, N)
    tiles, units_of_tile = cdiv(wide, BLOCK_WIDE), cdiv(K, BLOCK_K)
    if few > BLOCK_FEW or min(few, K) == 0 or max(wide, K, tiles * units_of_tile) >= LARGEST_SIZE:
        return None
    # Whole parts of tiles where tiles are fewer than SMs: a share of two tiles is added up twice.
    programs = tiles * max(1, min(sms // tiles, units_of_tile // LEAST_UNITS)) if tiles < sms else sms
    if programs < sms // 2:  # v17's smaller tiles keep more SMs, and so memory, busy
        return None
    return Choice(transposed=M <= N, programs=min(programs, COUNTERS // TICKETS))

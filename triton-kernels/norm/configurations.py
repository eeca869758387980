"""The configurations of cooperative rows of a norm: the winners of searches on an H100, by the length of rows."""

from __future__ import annotations

import math
from typing import Any

VECTOR_BYTES = 16
LANES = 32  # of a warp
REGISTERS = 65_536  # of an SM
MOST_REGISTERS = 248  # of a thread: they are allotted in units of 8

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


def cooperative(op: str, N: int, itemsize: int, has_ends: bool = False) -> dict[str, Any]:
    """The configuration of rows of N elements; ``has_ends``: of rows that have ends although N is whole packs."""
    row = N * itemsize
    whole, ragged = next((even, odd) for longest, even, odd in TABLE[op, itemsize] if row <= longest)
    size, per_sm, stages, warps = ragged if has_ends or row % VECTOR_BYTES else whole
    # Registers are rationed for PER_SM programs.
    registers = min(REGISTERS // (per_sm * warps * LANES) // 8 * 8, MOST_REGISTERS)
    return {"TILE_BYTES": size, "PER_SM": per_sm, "STAGES": stages, "num_warps": warps, "maxnreg": registers}

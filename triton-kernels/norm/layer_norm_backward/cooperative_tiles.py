"""Cooperative rows of a norm's backward pass: how rows become tiles, parts and programs.

A configuration is TILE_BYTES of a row for each program, PER_SM persistent programs an SM, and STAGES, in which rows
travel ahead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kernel_twins._triton.lib.device import shared_bytes, sm_count
from kernel_twins._triton.lib.workspace import SIZE

VECTOR_BYTES = 16
TURNS = tl.constexpr(4)  # slots for rows' words
IDLE_SHARE = 10  # one group in so many may be left out


def shifted_matrices(N: int, strides: Sequence[int], itemsize: int) -> int:
    """Which of dout, x and dadded, if it is there, have rows of other skews than dx's, as bits 0, 1 and 2."""
    apart = [(stride - N) * itemsize % VECTOR_BYTES > 0 for stride in strides]
    return sum(1 << bit for bit, is_shifted in enumerate(apart) if is_shifted)


def resident(config: dict[str, Any], shifted: int, device: torch.device) -> int:
    """How many programs can run at once."""
    # The stages of three matrices, with dadded, and once more of those that are shifted, whose packs are in two of
    # memory's; reductions take a little more, and CUDA reserves 1 KiB.
    matrices = 3 + shifted.bit_count()
    shared = matrices * (config["STAGES"] - 1) * config["TILE_BYTES"] + 4096
    return sm_count(device) * min(config["PER_SM"], shared_bytes(device) // shared)


def sharing(config: dict[str, Any], shifted: int, device: torch.device) -> int:
    """How many programs can share rows: 1 in the interpreter, where they run one after the other."""
    if device.type == "cpu":
        return 1
    return min(resident(config, shifted, device), SIZE // (2 * TURNS.value + 1))  # words of two counters, and a ticket


def period_of(N: int, vector: int) -> int:
    """How many rows apart two rows of dx have the same skew within a vector."""
    return vector // math.gcd(N, vector)


def divided(
    N: int, itemsize: int, wide: bool, shifted: int, config: dict[str, Any], device: torch.device
) -> dict[str, int]:
    """How rows of N elements become tiles: ROWS side by side, or PARTS of one.

    ``wide``: each row has the same skew in all matrices; ``shifted``: shifted_matrices, of addresses that are multiples
    of 16 bytes.
    """
    tile, vector = config["TILE_BYTES"] // itemsize, VECTOR_BYTES // itemsize
    parts, ragged = triton.cdiv(N, tile), N % vector > 0
    # A misaligned row may touch one vector more. A group is needed for every skew.
    edge_parts = triton.cdiv(triton.cdiv(N, vector) + 1, tile // vector) if ragged else parts
    groups, period = sharing(config, shifted, device) // edge_parts, period_of(N, vector)
    # Shifted rows stay with single elements where whole periods of groups would leave much of the GPU idle.
    fits = groups >= period and (wide or groups % period * IDLE_SHARE <= groups)
    edges = parts > 1 and ((wide and ragged) or shifted > 0) and fits
    if edges:
        parts = edge_parts
    block = min(triton.next_power_of_2(N), tile)
    return {
        "ROWS": tile // block, "BLOCK_N": block, "PARTS": parts, "SLOTS": triton.next_power_of_2(parts),
        "VECTOR": vector if edges or (wide and not ragged) else 1, "EDGES": edges,
        "EVEN": parts * block == N and not edges,
    }  # fmt: skip


def launched(args: dict[str, Any]) -> dict[str, int]:
    return divided(
        args["N"], args["dout"].element_size(), args["WIDE"], args["SHIFTED"], args, args["dout"].device
    )  # fmt: skip


DIVIDED: dict[str, Any] = {
    name: lambda args, name=name: launched(args)[name]
    for name in ("ROWS", "BLOCK_N", "PARTS", "SLOTS", "VECTOR", "EDGES", "EVEN")
}
if not triton.knobs.runtime.interpret:
    DIVIDED["launch_cooperative_grid"] = lambda args: args["PARTS"] > 1


def grid_of(M: int, N: int, shifted: int, config: dict[str, Any], device: torch.device) -> tuple[int, int, int]:
    """All programs that can run at once, in groups of PARTS, or fewer that need as many rounds."""
    tiles, parts, vector = triton.cdiv(M, config["ROWS"]), config["PARTS"], config["VECTOR"]
    most = resident(config, shifted, device) if parts == 1 else sharing(config, shifted, device) // parts
    period = period_of(N, vector) if config["EDGES"] else 1
    rounds = triton.cdiv(tiles, most // period * period)
    groups = triton.cdiv(tiles, rounds)
    if rounds > 1:  # all rows of a group have the same skew
        groups = triton.cdiv(groups, period) * period
    return groups * parts, 1, 1

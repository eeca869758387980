"""Cooperative rows of a norm's backward pass: how rows become tiles, parts and programs.

A configuration is TILE_BYTES of a row for each program, PER_SM persistent programs an SM, and STAGES, in which rows
travel ahead.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernel_twins._triton.lib.device import shared_bytes, sm_count
from kernel_twins._triton.lib.workspace import SIZE

VECTOR_BYTES = 16
TURNS = tl.constexpr(4)  # slots for rows' words


def resident(config: dict[str, Any], device: torch.device) -> int:
    """How many programs can run at once."""
    # The stages of three matrices, with dadded; reductions take a little more, and CUDA reserves 1 KiB.
    shared = 3 * (config["STAGES"] - 1) * config["TILE_BYTES"] + 4096
    return sm_count(device) * min(config["PER_SM"], shared_bytes(device) // shared)


def sharing(config: dict[str, Any], device: torch.device) -> int:
    """How many programs can share rows: 1 in the interpreter, where they run one after the other."""
    if device.type == "cpu":
        return 1
    return min(resident(config, device), SIZE // (2 * TURNS.value + 1))  # words of two counters, and a ticket


def divided(N: int, itemsize: int, wide: bool, config: dict[str, Any], device: torch.device) -> dict[str, int]:
    """How rows of N elements become tiles: ROWS side by side, or PARTS of one."""
    tile, vector = config["TILE_BYTES"] // itemsize, VECTOR_BYTES // itemsize
    parts = triton.cdiv(N, tile)
    # A misaligned row may touch one vector more. A group is needed for every skew.
    ragged_parts = triton.cdiv(triton.cdiv(N, vector) + 1, tile // vector)
    edges = wide and parts > 1 and N % vector > 0 and ragged_parts * vector <= sharing(config, device)
    if edges:
        parts = ragged_parts
    block = min(triton.next_power_of_2(N), tile)
    return {
        "ROWS": tile // block, "BLOCK_N": block, "PARTS": parts, "SLOTS": triton.next_power_of_2(parts),
        "VECTOR": vector if edges or (wide and N % vector == 0) else 1, "EDGES": edges, "EVEN": parts * block == N,
    }  # fmt: skip


def launched(args: dict[str, Any]) -> dict[str, int]:
    return divided(args["N"], args["dout"].element_size(), args["WIDE"], args, args["dout"].device)


DIVIDED: dict[str, Any] = {
    name: lambda args, name=name: launched(args)[name]
    for name in ("ROWS", "BLOCK_N", "PARTS", "SLOTS", "VECTOR", "EDGES", "EVEN")
}
if not triton.knobs.runtime.interpret:
    DIVIDED["launch_cooperative_grid"] = lambda args: args["PARTS"] > 1


def grid_of(M: int, config: dict[str, Any], device: torch.device) -> tuple[int, int, int]:
    """All programs that can run at once, in groups of PARTS, or fewer that need as many rounds."""
    tiles, parts, vector = triton.cdiv(M, config["ROWS"]), config["PARTS"], config["VECTOR"]
    most = resident(config, device) if parts == 1 else sharing(config, device) // parts
    if config["EDGES"]:
        most = most // vector * vector
    rounds = triton.cdiv(tiles, most)
    groups = triton.cdiv(tiles, rounds)
    if config["EDGES"] and rounds > 1:  # all rows of a group have the same skew
        groups = triton.cdiv(groups, vector) * vector
    return groups * parts, 1, 1

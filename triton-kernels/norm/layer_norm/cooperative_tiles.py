"""Cooperative rows of a norm: how rows become tiles, parts and programs.

A configuration is TILE_BYTES of a row for each program, PER_SM programs an SM, and STAGES. With several stages the
kernel is persistent, and rows travel ahead; with one, every row that is not split gets a program of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kernel_twins._triton.lib.device import shared_bytes, sm_count
from kernel_twins._triton.lib.workspace import SIZE

VECTOR_BYTES = 16
SECTOR_BYTES = 32  # in which memory is fetched
OTHER_REGISTERS = 32  # of a thread, beside those of its elements, weight and bias


def divided(
    N: int, itemsize: int, wide: bool, vectors: int, matrices: int, config: dict[str, Any], device: torch.device
) -> dict[str, int]:
    """How rows of N elements become tiles: ROWS side by side, or PARTS of one, each of which is CHUNKS of BLOCK_N.

    ``wide``: each row has the same skew in all matrices; ``vectors``: how many of weight and bias there are;
    ``matrices``: how many of x and residual.
    """
    tile, threads, vector = config["TILE_BYTES"] // itemsize, 32 * config["num_warps"], VECTOR_BYTES // itemsize
    block, chunk = triton.next_power_of_2(max(N, 1)), threads * vector
    edges = wide and N % vector > 0
    # Rows side by side: as many as half of the registers hold in fp32.
    several = min(tile, threads * config["maxnreg"] // 2) // block
    if several > 1 and block <= chunk and (chunk > N or not edges):
        return {
            "ROWS": 1 << several.bit_length() - 1, "BLOCK_N": block, "AT_ONCE": chunk // block, "CHUNKS": 1, "PARTS": 1,
            "SLOTS": 1, "VECTOR": vector if wide and not edges else 1, "EDGES": False, "FULL": int(block == N),
            "HELD": True,
        }  # fmt: skip
    vector = vector if wide else 1
    parts, least = triton.cdiv(max(N, 1), tile), N // vector
    share = triton.cdiv(least, parts)
    if edges:  # see _inside
        least = (N - 2 * vector + 1) // vector - 1
    registers = (1 + vectors) * triton.cdiv(share * vector, chunk) * VECTOR_BYTES // 4 + OTHER_REGISTERS
    # A persistent program with edges can hold weight and bias if all of its rows have the same skew.
    stays = parts > 1 or config["STAGES"] > 1
    alike = not edges or (stays and resident(config, matrices, device) // parts >= period_of(N, itemsize))
    return {
        "ROWS": 1, "BLOCK_N": chunk, "AT_ONCE": 1, "CHUNKS": max(triton.cdiv(share * vector, chunk), 1), "PARTS": parts,
        "SLOTS": triton.next_power_of_2(parts), "VECTOR": vector, "EDGES": edges,
        # Chunks that need no mask in any part; the last part has the fewest elements.
        "FULL": max(least - (parts - 1) * share, 0) * vector // chunk,
        "HELD": alike and (config["STAGES"] > 1 or registers <= config["maxnreg"]),
    }  # fmt: skip


def launched(args: dict[str, Any]) -> dict[str, int]:
    vectors = (args["weight"] is not None) + (args.get("bias") is not None)
    matrices = 1 + (args["residual"] is not None)
    return divided(args["N"], args["x"].element_size(), args["WIDE"], vectors, matrices, args, args["x"].device)


DIVIDED: dict[str, Any] = {
    name: lambda args, name=name: launched(args)[name]
    for name in ("ROWS", "BLOCK_N", "AT_ONCE", "CHUNKS", "PARTS", "SLOTS", "VECTOR", "EDGES", "FULL", "HELD")
}
if not triton.knobs.runtime.interpret:
    DIVIDED["launch_cooperative_grid"] = lambda args: args["PARTS"] > 1


def resident(config: dict[str, Any], matrices: int, device: torch.device) -> int:
    """How many programs can run at once; 1 in the interpreter, where they run one after the other."""
    if device.type == "cpu":
        return 1
    # Beside the stages, shared memory serves changes of chunks' layout, and CUDA reserves 1 KiB of it.
    shared = (config["STAGES"] - 1) * config["TILE_BYTES"] * matrices + 10_240
    per_sm = min(config["PER_SM"], shared_bytes(device) // shared)
    return min(sm_count(device) * per_sm, SIZE // 5)  # a program has up to 5 of the counters


def period_of(N: int, itemsize: int) -> int:
    """How many rows apart two rows have the same skew within a sector."""
    sector = SECTOR_BYTES // itemsize
    return sector // math.gcd(N, sector)


def grid_of(x: Tensor, matrices: int, config: dict[str, Any]) -> tuple[int, int, int]:
    """All programs that can run at once, in groups of PARTS; one for each tile where programs are not persistent."""
    M, N = x.shape
    tiles = triton.cdiv(M, config["ROWS"])
    if config["PARTS"] == 1 and config["STAGES"] == 1:
        return tiles, 1, 1
    groups = resident(config, matrices, x.device) // config["PARTS"]
    # A group with edges that holds its weight goes from a row to the next one of the same skew.
    period = period_of(N, x.element_size()) if config["EDGES"] and config["HELD"] and tiles > groups else 1
    # All groups take the same number of tiles, but for the last round, so that none ends a tile late.
    rounds = triton.cdiv(tiles, groups // period * period)
    return triton.cdiv(triton.cdiv(tiles, rounds), period) * period * config["PARTS"], 1, 1

"""How many blocks an SM holds at once, from what the compiler and the launch ask for."""

from __future__ import annotations

from kernel_twins.compiler.disassembly import RESERVED_SHARED


def occupancy(registers: int, shared_bytes: int, threads: int) -> tuple[int, str]:
    """Blocks that an SM of compute capability 9.0 holds at once, and what limits them (all of them, where several do).

    Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Units of allocation:
    cuda_occupancy.h of the toolkit: a warp gets registers by 256, from one of the SM's four parts; a block gets shared
    memory by 128 bytes, CUDA's own 1 KiB included. ``shared_bytes`` is static and dynamic together. 0: none fits.
    """
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads is {threads}; a block has 1 to 1024")
    warps = -(-threads // 32)
    warps_by_registers = 4 * (65536 // 4 // (256 * -(-max(1, registers) // 8)))
    shared = 128 * -(-(shared_bytes + RESERVED_SHARED) // 128)
    limits = {
        "registers": warps_by_registers // warps,
        "shared memory": 233_472 // shared,
        "warps": 64 // warps,
        "blocks": 32,
    }
    blocks = min(limits.values())
    return blocks, " and ".join(name for name, limit in limits.items() if limit == blocks)

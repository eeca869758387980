"""Rings of tiles that a producer fetches and consumers multiply, for the attention steps in Gluon.

A ring is (tiles, full, empty): tiles are [STAGES, 1, 1, rows, D] in shared memory, full and empty a barrier for each
stage. The n-th tile lies in stage n % STAGES. Both sides count tiles from 0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which completes with so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def ring_of(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring for a descriptor's boxes. A stage is full when a box has come, empty when all consumers have let it go."""
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)
    return tiles, barriers(STAGES, 1), barriers(STAGES, CONSUMERS)


@gluon.jit
def place(count, STAGES: gl.constexpr):
    """The stage of the tile with this number, and the parity of its barriers' phase."""
    count = gl.to_tensor(count).to(gl.uint32)  # both are bits of the count
    return (count % STAGES).to(gl.int32), (count // STAGES % 2).to(gl.int32)


@gluon.jit
def fetch(desc, batch, head, row, tile, full):
    """Starts the copy of a box of a head's rows, and arrives at its barrier, which completes when the bytes have."""
    mbarrier.expect(full, desc.block_type.nbytes)  # what lies outside the tensor is zero, and counts as well
    tma.async_copy_global_to_shared(desc, [batch, head, row, 0], full, tile)


@gluon.jit
def fetch_into(ring, number, desc, batch, head, row):
    """Fetches the ring's tile with this number once its stage is empty; a stage that was never full counts as empty."""
    tiles, full, empty = ring
    stage, phase = place(number, tiles.shape[0])
    mbarrier.wait(empty.index(stage), phase ^ 1)
    fetch(desc, batch, head, row, tiles.index(stage), full.index(stage))


@gluon.jit
def wait_for(ring, number):
    """Waits for the tile with this number, and returns it as [rows, D]."""
    tiles, full, _ = ring
    stage, phase = place(number, tiles.shape[0])
    mbarrier.wait(full.index(stage), phase)
    return matrix(tiles.index(stage))


@gluon.jit
def let_go(ring, number):
    """A consumer's arrival: it has multiplied this tile."""
    tiles, _, empty = ring
    stage, _ = place(number, tiles.shape[0])
    mbarrier.arrive(empty.index(stage))


@gluon.jit
def matrix(tile):
    """[1, 1, rows, D] in shared memory as [rows, D]."""
    return tile.reshape([tile.shape[2], tile.shape[3]])

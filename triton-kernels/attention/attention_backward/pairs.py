"""What the steps of attention's backward pass in Gluon have in common: tiles of pairs of keys and queries.

A program owns BLOCK_N keys, whose scores are rows: two warpgroups have 64 of them each. D is padded with zeros to 64 or
128 by the copy engine. ``band`` is (Sq, Sk, first, last) throughout: query i sees the keys from i + first to i + last.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernel_twins._triton.attention.attention import rings, tiles
from kernel_twins._triton.attention.attention_backward.rounding import PACK

BLOCK_M = gl.constexpr(64)  # queries
BLOCK_N = gl.constexpr(128)  # keys
STAGES = gl.constexpr(2)
NUM_WARPS = 8  # that compute: two warpgroups
MOVER_REGISTERS = gl.constexpr(24)  # of a warp that moves data
FLAT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1))
SUMS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4))
PAIRS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


def describe_rows(rows: Tensor) -> TensorDescriptor:
    """lse2 or delta for the copy engine, in boxes of a tile's queries."""
    return TensorDescriptor(rows, [rows.numel()], [1], [BLOCK_M.value], FLAT.value)


def describe_sums(sums: Tensor) -> TensorDescriptor:
    """The sums of dq, [B, H, pitch, D], for the copy engine, in boxes of a tile's queries."""
    box = [1, 1, BLOCK_M.value, tiles.padded(sums.shape[3])]
    return TensorDescriptor(sums, list(sums.shape), list(sums.stride()), box, SUMS.value)


@builtin
def add_to_global(desc: Any, coordinates: Any, tile: Any, _semantic: Any = None) -> None:
    """Starts the addition of a tile in shared memory to a box in global memory. Gluon itself has no name for it."""
    place = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, place, tile.handle)


@gluon.jit
def corner(kv_heads, band):
    """Batch, head of keys and first key of the program."""
    blocks = gl.cdiv(band[1], BLOCK_N)
    number = gl.program_id(0) // blocks  # of the head, over all batches
    return number // kv_heads, number % kv_heads, gl.program_id(0) % blocks * BLOCK_N


@gluon.jit
def walk_of(first_key, group, band):
    """The first tile of queries of which some see a key, how many there are, and how many over all heads."""
    Sq, Sk, first, last = band
    last_key = gl.minimum(first_key + BLOCK_N, Sk) - 1
    low = gl.maximum(first_key - last, 0)
    high = gl.minimum(last_key - first, Sq - 1)
    begin = low // BLOCK_M
    count = gl.where(low <= high, high // BLOCK_M + 1 - begin, 0)
    return begin, count, count * group


@gluon.jit
def visit_of(i, walk):
    """Of the i-th visit, the head in its group, and the first query."""
    begin, count, _ = walk
    return i // count, (begin + i % count) * BLOCK_M


@gluon.jit
def hides(row, first_key, band):
    """Whether some query of the tile does not see some key, or some key is behind the last one."""
    Sq, Sk, first, last = band
    last_row = gl.minimum(row + BLOCK_M, Sq) - 1
    last_key = first_key + BLOCK_N - 1
    return (last_key >= Sk) | (row + last < last_key) | (last_row + first > first_key)


@gluon.jit
def hide(pairs, row, first_key, band, HIDDEN: gl.constexpr):
    """pairs, but HIDDEN where a query does not see a key, and for keys behind the last one."""
    _, Sk, first, last = band
    key = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, pairs.type.layout))
    query = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, pairs.type.layout))[None, :]
    low = (key - last)[:, None]
    high = gl.where(key < Sk, key - first, -1)[:, None]
    return gl.where((query >= low) & (query <= high), pairs, HIDDEN)


@gluon.jit
def shared_memory(q_desc, k_desc, v_desc, lse2_desc):
    """The program's own keys and values, a ring of queries, and ds.

    A stage of the ring has q, dout, lse2 and delta, and is empty when the consumers have let it go.
    """
    keys = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_type.shape, k_desc.layout)
    values = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_type.shape, q_desc.layout)
    lse2_tiles = gl.allocate_shared_memory(gl.float32, [STAGES] + lse2_desc.block_type.shape, lse2_desc.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES] + lse2_desc.block_type.shape, lse2_desc.layout)
    ds_tile = gl.allocate_shared_memory(q_desc.dtype, [BLOCK_N, BLOCK_M], PAIRS)
    own = (keys, values, rings.barriers(1, 2))  # a box of each
    ring = (q_tiles, dout_tiles, lse2_tiles, delta_tiles, rings.barriers(STAGES, 3), rings.barriers(STAGES, 1))
    return own, ring, ds_tile


@gluon.jit
def handover_of(sums_desc):
    """A part of dq in shared memory, and the barriers that complete when it is there, and when it has left again."""
    part = gl.allocate_shared_memory(gl.float32, sums_desc.block_type.shape, sums_desc.layout)
    return part, rings.barriers(1, 1), rings.barriers(1, 1)


@gluon.jit
def products(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """[ROWS, COLUMNS] of zeros, laid out as the consumers' wgmma writes its results: each warp has 16 rows of BLOCK_N.

    Of BLOCK_M rows each warpgroup has half of the columns.
    """
    warps: gl.constexpr = [8, 1] if ROWS == BLOCK_N else [4, 2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps, [16, COLUMNS // warps[1], 16])
    return gl.zeros((ROWS, COLUMNS), gl.float32, layout)


@gluon.jit
def multiply(left, right, ROWS: gl.constexpr):
    """Starts left @ right, of operands in shared memory."""
    return hopper.warpgroup_mma(left, right, products(ROWS, right.shape[1]), use_acc=False, is_async=True)


@gluon.jit
def of_columns(numbers, scores):
    """A number for each query, from shared memory, laid out as columns of scores."""
    return numbers.load(gl.SliceLayout(0, scores.type.layout))[None, :]


@gluon.jit
def produce(described, own, ring, H, group, pitch, band):
    """Fetches the program's keys and values, and all tiles of queries that see some."""
    q_desc, dout_desc, k_desc, v_desc, lse2_desc, delta_desc = described
    keys, values, own_full = own
    q_tiles, dout_tiles, lse2_tiles, delta_tiles, full, empty = ring
    batch, kv_head, first_key = corner(H // group, band)
    walk = walk_of(first_key, group, band)
    if walk[2] > 0:
        rings.fetch(k_desc, batch, kv_head, first_key, keys, own_full.index(0))
        rings.fetch(v_desc, batch, kv_head, first_key, values, own_full.index(0))
    for i in range(walk[2]):
        stage, phase = rings.place(i, STAGES)
        head, row = visit_of(i, walk)
        head += kv_head * group
        mbarrier.wait(empty.index(stage), phase ^ 1)  # for the stage's last use
        rings.fetch(q_desc, batch, head, row, q_tiles.index(stage), full.index(stage))
        rings.fetch(dout_desc, batch, head, row, dout_tiles.index(stage), full.index(stage))
        at = (batch * H + head) * pitch + row
        mbarrier.expect(full.index(stage), 2 * lse2_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(lse2_desc, [at], full.index(stage), lse2_tiles.index(stage))
        tma.async_copy_global_to_shared(delta_desc, [at], full.index(stage), delta_tiles.index(stage))


@gluon.jit
def add_parts(sums_desc, handover, H, group, band):
    """Adds the consumers' parts of dq to its sums."""
    part, part_full, part_empty = handover
    batch, kv_head, first_key = corner(H // group, band)
    walk = walk_of(first_key, group, band)
    for i in range(walk[2]):
        head, row = visit_of(i, walk)
        mbarrier.wait(part_full.index(0), i & 1)
        add_to_global(sums_desc, [batch, kv_head * group + head, row, 0], part)
        tma.store_wait(0)  # for the part to have left shared memory
        mbarrier.arrive(part_empty.index(0))


@gluon.jit
def store_rows(out, strides, total, factor, place, Sk, D: gl.constexpr):
    """Stores the gradients of the program's keys, times a factor; place is their batch, head and first row."""
    batch, head, first_key = place
    key = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, total.type.layout))[:, None]
    column = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))[None, :]
    packs = batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1] + key.to(gl.int64) * strides[2]
    rows = out + packs * PACK
    gl.store(rows + column, (total * factor).to(out.dtype.element_ty), mask=(key < Sk) & (column < D))

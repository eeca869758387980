"""The queue of tiles of queries that persistent programs draw from, for the attention steps in Gluon.

An order is (tiles, heads, section, before, light, last_first): all tiles, heads over all batches, heads whose keys and
values fit into L2 together, heads before those whose lightest tiles come at the end, how many of each head these are,
and whether a head's last tile sees the most keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SECTION_BYTES = 32 << 20  # of keys and values: part of L2's 50 MB
LAST_TILES = 2  # for each program, of the heads that leave the end light
BUFFERS = gl.constexpr(2)  # for queries, and for the number of their tile

Order = tuple[int, int, int, int, int, int]
NUMBERS = ["tile_count", "heads", "section", "before", "light", "last_first"]  # an order's, as kernels name them


def order_of(
    heads: int, group: int, Sq: int, Sk: int, D: int, limits: tuple[int, int], block_m: int, programs: int
) -> Order:
    """Sections of heads; where a head's first or last tiles see the most keys, these come first, one of each head.

    A heavy tile that is drawn late keeps the other programs waiting: so the lighter halves of the last heads come after
    all else.
    """
    blocks = -(-Sq // block_m)
    section = SECTION_BYTES // (4 * Sk * D) * group  # 2 bytes for each element of k and v
    section = min(max(section, group), heads)
    last, first = (_keys_of(row, Sq, Sk, limits, block_m) for row in ((blocks - 1) * block_m, 0))
    if last == first:
        return heads * blocks, heads, section, 0, 0, 0
    before = max(heads - -(-LAST_TILES * programs // blocks), 0) // section * section
    return heads * blocks, heads, section, before, blocks // 2, int(last > first)


def _keys_of(first_row: int, Sq: int, Sk: int, limits: tuple[int, int], block_m: int) -> int:
    """How many keys the queries from first_row on see."""
    last_row = min(first_row + block_m, Sq) - 1
    return max(min(last_row + limits[1], Sk - 1) - max(first_row + limits[0], 0) + 1, 0)


@gluon.jit
def corner_of(number, order, Sq, BLOCK_M: gl.constexpr):
    """The head, over all batches, and the first row of the tile with this number."""
    tiles, heads, section, before, light, last_first = order
    blocks = gl.cdiv(Sq, BLOCK_M)
    last_heads = heads - before
    at_end = number - (tiles - last_heads * light)
    early = number < before * blocks
    start = gl.where(early, 0, before)
    each = gl.where(early, blocks, blocks - light)  # tiles of a head in a section
    in_part = number - start * blocks
    # Of the section, or of the end: its first head, its heads, and the tile's number.
    at = gl.where(at_end < 0, start + in_part // (section * each) * section, before)
    here = gl.where(at_end < 0, gl.minimum(section, heads - at), last_heads)
    within = gl.where(at_end < 0, in_part - (at - start) * each, at_end + each * last_heads)
    block = within // here
    return at + within % here, gl.where(last_first != 0, blocks - 1 - block, block) * BLOCK_M


@gluon.jit
def draw(drawn, order):
    """The number of the program's next tile, no less than all tiles' count if none is left.

    Programs draw until they are behind the last tile. So they draw as often as there are tiles, and the last one leaves
    the counter 0.
    """
    before = gl.atomic_add(drawn, 1, sem="relaxed")
    if before == order[0] - 1:
        gl.store(drawn, 0)
    return before + gl.num_programs(0)


@gluon.jit
def tell(numbers, buffer, number):
    """The producer's side of what hear reads, once a barrier has completed at which the producer arrives after it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    numbers.index(buffer).store(gl.full((1,), 0, gl.int32, layout) + number)
    gl.thread_barrier()


@gluon.jit
def hear(numbers, buffer):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(numbers.index(buffer).load(layout), 0)  # of one

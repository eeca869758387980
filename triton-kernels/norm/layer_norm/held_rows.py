"""A norm of rows that a few warps hold: chunks of a row lie side by side in their registers.

A row is held in CHUNKS tiles, each as wide as the row's lanes reach with one access of VECTOR elements. So a row of any
length fills its lanes, where a tile as long as the next power of 2 leaves up to half of them idle. Where a warp has
whole rows, sums need shuffles and no barrier. READ elements of x and of the residual are read at once, VECTOR of
weights and results. Single elements are held in fp32 and are few, for their addresses take registers, too; packs of 16
bytes are held as they are in memory, in half of the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.norm.routing import Held

AHEAD_BYTES = 32  # of weight, and as many of bias, that a lane loads before it stores

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def as_it_came(tile, VECTOR: tl.constexpr):
    # Defeats common subexpression elimination (CSE): the asm makes packs of 16-bit elements look new, so the compiler
    # converts them to fp32 again instead of keeping the results, which would take twice the registers.
    if COMPILED and (VECTOR > 1 and tile.dtype.primitive_bitwidth == 16):
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, is_pure=False, pack=2)
    return tile.to(tl.float32)


@triton.jit
def load_chunk(pointers, chunk: tl.constexpr, mask, FULL: tl.constexpr, POLICY: tl.constexpr):
    # One of a row's tiles in memory's type; only the tile with the row's end, the one behind FULL others, has a mask.
    pointers += chunk * pointers.shape[1]
    if chunk < FULL:
        return tl.load(pointers, eviction_policy=POLICY)
    else:  # noqa: RET505  # Triton would compile what follows all the same
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def store_chunk(pointers, chunk: tl.constexpr, values, mask, FULL: tl.constexpr):
    pointers += chunk * pointers.shape[1]
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=None if chunk < FULL else mask)


@triton.jit
def rows_at(first, M, ROWS: tl.constexpr):
    # The numbers of ROWS rows, in 64 bits. Rows beyond the last are the last again, to which the same is written again.
    return tl.minimum(first + tl.arange(0, ROWS)[:, None], M - 1)


@triton.jit
def store_number(vector, row, numbers, BLOCK_N: tl.constexpr):
    # A number of each row, by the lane that has the row's first column. Addresses count columns, too, of which only the
    # first is written: so they are laid out as the row is, and no thread has to pass its number on.
    col = tl.arange(0, BLOCK_N)[None, :]
    tl.store(vector + row + col, numbers.broadcast_to((row.shape[0], BLOCK_N)), mask=col == 0)


@triton.jit
def store_numbers(vector, row, numbers, BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr):
    # TOGETHER: of so many rows that their numbers fill the lanes, once they have passed through shared memory.
    if TOGETHER:
        tl.store(vector + row.reshape([row.shape[0]]), numbers.reshape([row.shape[0]]))
    else:
        store_number(vector, row, numbers, BLOCK_N)


@triton.jit
def row_pointers(matrix, row, stride, col, VECTOR: tl.constexpr):
    # Written so that the compiler sees a multiple of VECTOR.
    return matrix + row * stride // VECTOR * VECTOR + col


@triton.jit
def _chunks(pointers, mask, CHUNKS: tl.constexpr, FULL: tl.constexpr):
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        tiles += (load_chunk(pointers, chunk, mask, FULL, ""),)
    return tiles


@triton.jit
def _added(tiles, terms, pointers, mask, FULL: tl.constexpr):
    # The sums of x and residual, rounded as they are returned.
    sums = ()
    for chunk in tl.static_range(len(tiles)):
        total = (tiles[chunk].to(tl.float32) + terms[chunk].to(tl.float32)).to(tiles[chunk].dtype)
        store_chunk(pointers, chunk, total, mask, FULL)
        sums += (total,)
    return sums


@triton.jit
def _spread(vector, col, BEGIN: tl.constexpr, END: tl.constexpr, mask, ROWS: tl.constexpr, FULL: tl.constexpr):
    # Some chunks of weight or bias, repeated for each of the rows.
    pointers, tiles = (vector + col).broadcast_to((ROWS, col.shape[1])), ()
    for chunk in tl.static_range(BEGIN, END):
        tiles += (load_chunk(pointers, chunk, mask, FULL, "evict_last"),)
    return tiles


@triton.jit
def _statistics(tiles, N, eps, mask, CENTERED: tl.constexpr, FULL: tl.constexpr, VECTOR: tl.constexpr):
    CHUNKS: tl.constexpr = len(tiles)
    mean = 0.0
    if CENTERED:
        total = as_it_came(tiles[0], VECTOR)
        for chunk in tl.static_range(1, CHUNKS):
            total += as_it_came(tiles[chunk], VECTOR)
        mean = tl.sum(total, axis=1, keep_dims=True) / N
    squares = tl.zeros_like(tiles[0]).to(tl.float32)
    for chunk in tl.static_range(CHUNKS):
        distance = as_it_came(tiles[chunk], VECTOR) - mean
        if CENTERED and chunk >= FULL:  # elements behind the row were read as 0: their distance must not count
            distance = tl.where(mask, distance, 0.0)
        squares += distance * distance
    return mean, 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1, keep_dims=True) / N + eps)


@triton.jit
def norm_held_rows_kernel(
    x, weight, bias, residual, out, mean, rstd, added, M: tl.int64, N, stride_xm: tl.int64, stride_rm: tl.int64, eps,
    CENTERED: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
    FULL: tl.constexpr, VECTOR: tl.constexpr, READ: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # x, residual: [M, N]; weight, bias: [N]; out, added: [M, N] contiguous; mean, rstd: [M]. Missing tensors are None.
    # A program takes ROWS rows at once, TURNS times, and asks for all of them before it computes.
    first = tl.program_id(0).to(tl.int64) * (ROWS * TURNS)
    col = tl.arange(0, BLOCK_N)[None, :]
    # One comparison a vector, so that it is loaded as one.
    mask = (col + (CHUNKS - 1) * BLOCK_N) // VECTOR < N // VECTOR
    rows, held, terms, means, rstds = (), (), (), (), ()
    for turn in tl.static_range(TURNS):
        row = rows_at(first + turn * ROWS, M, ROWS)
        rows += (row,)
        held += (_chunks(row_pointers(x, row, stride_xm, col, READ), mask, CHUNKS, FULL),)
        if residual is not None:
            terms += (_chunks(row_pointers(residual, row, stride_rm, col, READ), mask, CHUNKS, FULL),)
    if residual is not None:
        # No load comes behind a store: the compiler, which does not know that they are apart, would have it wait.
        sums = ()
        for turn in tl.static_range(TURNS):
            sums += (_added(held[turn], terms[turn], row_pointers(added, rows[turn], N, col, VECTOR), mask, FULL),)
        held = sums
    for turn in tl.static_range(TURNS):
        row_mean, row_rstd = _statistics(held[turn], N, eps, mask, CENTERED, FULL, VECTOR)
        means += (row_mean,)
        rstds += (row_rstd,)
    for begin in tl.static_range(0, CHUNKS, AHEAD):
        # Read for every row alike, so that each lane has the weights of its elements, and once for all turns; of AHEAD
        # chunks at once, since a load waits for the stores before it.
        weights = () if weight is None else _spread(weight, col, begin, min(begin + AHEAD, CHUNKS), mask, ROWS, FULL)
        biases = () if bias is None else _spread(bias, col, begin, min(begin + AHEAD, CHUNKS), mask, ROWS, FULL)
        for chunk in tl.static_range(begin, min(begin + AHEAD, CHUNKS)):
            for turn in tl.static_range(TURNS):
                # Subtracts first: the difference is exact where the mean is large.
                values = (as_it_came(held[turn][chunk], VECTOR) - means[turn]) * rstds[turn]
                if weight is not None:
                    values *= weights[chunk - begin].to(tl.float32)
                if bias is not None:
                    values += biases[chunk - begin].to(tl.float32)
                store_chunk(row_pointers(out, rows[turn], N, col, VECTOR), chunk, values, mask, FULL)
    for turn in tl.static_range(TURNS):  # last: packs of a row have another layout, and their warps wait here
        if CENTERED:
            store_numbers(mean, rows[turn], means[turn], BLOCK_N, READ < VECTOR)
        store_numbers(rstd, rows[turn], rstds[turn], BLOCK_N, READ < VECTOR)


def norm_held_rows(
    route: Held, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], eps: float, vector: int
) -> plans.Plan | None:
    """Launch the kernel on x, weight, bias, residual, y, mean, rstd and the sum, and return the plan of it.

    ``sizes``: M, N, and the strides of rows of x and residual; ``vector``: elements of an access that reads these, of
    which N and the strides are multiples.
    """
    (M, N, *_), x = sizes, tensors[0]
    assert x is not None
    constants = {"CENTERED": tensors[5] is not None, **route.constants(N, route.width), "READ": vector}
    constants["AHEAD"] = max(AHEAD_BYTES // (route.width * x.element_size()), 1)
    if vector < route.width:  # all rows of a program are one tile, so that their numbers are stored together
        constants |= {"ROWS": route.rows * route.turns, "TURNS": 1}
    return plans.launch(norm_held_rows_kernel, (route.programs(M),), tensors, (*sizes, eps), constants)

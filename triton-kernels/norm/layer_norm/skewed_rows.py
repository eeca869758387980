"""A norm of short rows whose length is no multiple of a pack: packs between a row's ends, single elements at the ends.

As held_rows.py, but rows start at every skew. The rows that a lane takes one after the other are VECTOR apart, so they
have the same skew, and the lane has the same columns of all of them: it loads weight and bias once for all turns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.norm.layer_norm.held_rows import as_it_came
from kernel_twins._triton.norm.routing import Skewed


@triton.jit
def _start(row, stride, VECTOR: tl.constexpr):
    # Of a row's first whole pack, written so that the compiler sees a multiple of VECTOR.
    return tl.cdiv(row * stride, VECTOR) * VECTOR


@triton.jit
def _added(tile, term, pointers, mask):
    # The sum of x and residual, rounded as it is returned.
    total = (tile.to(tl.float32) + term.to(tl.float32)).to(tile.dtype)
    tl.store(pointers, total, mask=mask)
    return total


@triton.jit
def _row_sum(places, edges, VECTOR: tl.constexpr):
    # A lane's single element is added to the first of its places, where -0.0 leaves the others as they are. So a row
    # has one sum, in the layout of its packs, and elements stay in their lanes.
    place = tl.arange(0, VECTOR)[None, None, :]
    edges = tl.where(place == 0, tl.expand_dims(edges, 2), -0.0)
    return tl.sum(places + edges.reshape(places.shape), axis=1, keep_dims=True)


@triton.jit
def _store_number(vector, row, M, numbers, lane):
    # A number of each row, by the row's first lane. Addresses count lanes, too, of which only the first one writes: so
    # they are laid out as the row is, and no thread has to pass its number on.
    numbers = numbers.broadcast_to((row.shape[0], lane.shape[1]))
    tl.store(vector + row + lane, numbers, mask=(lane == 0) & (row < M))


@triton.jit
def _statistics(
    tiles, edges, N, eps, masks, edge_mask, CENTERED: tl.constexpr, FULL: tl.constexpr, VECTOR: tl.constexpr
):
    CHUNKS: tl.constexpr = len(tiles)
    edge_values = edges.to(tl.float32)
    mean = 0.0
    if CENTERED:
        total = as_it_came(tiles[0], VECTOR)
        for chunk in tl.static_range(1, CHUNKS):
            total += as_it_came(tiles[chunk], VECTOR)
        mean = _row_sum(total, edge_values, VECTOR) / N
    squares = tl.zeros_like(tiles[0]).to(tl.float32)
    for chunk in tl.static_range(CHUNKS):
        distance = as_it_came(tiles[chunk], VECTOR) - mean
        if CENTERED and chunk >= FULL:  # places behind the row were read as 0: their distance must not count
            distance = tl.where(masks[chunk - FULL], distance, 0.0)
        squares += distance * distance
    edge_distance = tl.where(edge_mask, edge_values - mean, 0.0) if CENTERED else edge_values
    return mean, 1.0 / tl.sqrt_rn(_row_sum(squares, edge_distance * edge_distance, VECTOR) / N + eps)


@triton.jit
def norm_skewed_rows_kernel(
    x, weight, bias, residual, out, mean, rstd, added, M: tl.int64, N, stride_xm: tl.int64, stride_rm: tl.int64, eps,
    CENTERED: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr,
    FULL: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    # x, residual: [M, N]; weight, bias: [N]; out, added: [M, N] contiguous; mean, rstd: [M]. Missing tensors are None.
    # VECTOR // ROWS programs share VECTOR * TURNS rows; each takes ROWS at once, TURNS times, and asks for all of them
    # before it computes.
    LANES: tl.constexpr = BLOCK_N // VECTOR  # of a row
    TOGETHER: tl.constexpr = VECTOR // ROWS
    program = tl.program_id(0).to(tl.int64)
    first = program // TOGETHER * (VECTOR * TURNS) + program % TOGETHER * ROWS + tl.arange(0, ROWS)[:, None]
    col, edge = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, LANES)[None, :]
    # Columns count from the row's first whole pack, before which it has `head` elements.
    head = ((VECTOR - first * N % VECTOR) % VECTOR).to(tl.int32)
    packs = (N - head) // VECTOR
    masks = ()
    for chunk in tl.static_range(FULL, CHUNKS):  # one comparison a pack, so that it is loaded as one
        masks += ((col + chunk * BLOCK_N) // VECTOR < packs,)
    # VECTOR places before the first pack, VECTOR behind the last one, and the other lanes of the row idle.
    edge_col = tl.where(edge < VECTOR, edge - head, packs * VECTOR + edge - VECTOR)
    edge_mask = edge_col < tl.where(edge < VECTOR, 0, N - head)

    held, held_edges, terms, edge_terms, means, rstds = (), (), (), (), (), ()
    # The single elements come first: Triton then has the sums of a row in the layout of its packs, without a barrier.
    for turn in tl.static_range(TURNS):
        row = first + turn * VECTOR
        inside = (row < M) & edge_mask
        held_edges += (tl.load(x + _start(row, stride_xm, VECTOR) + edge_col, mask=inside, other=0.0),)
        if residual is not None:
            edge_terms += (tl.load(residual + _start(row, stride_rm, VECTOR) + edge_col, mask=inside, other=0.0),)
    for turn in tl.static_range(TURNS):
        row, tiles, of_residual = first + turn * VECTOR, (), ()
        for chunk in tl.static_range(CHUNKS):
            place = col + chunk * BLOCK_N
            inside = row < M if chunk < FULL else (row < M) & masks[chunk - FULL]
            tiles += (tl.load(x + _start(row, stride_xm, VECTOR) + place, mask=inside, other=0.0),)
            if residual is not None:
                of_residual += (tl.load(residual + _start(row, stride_rm, VECTOR) + place, mask=inside, other=0.0),)
        held += (tiles,)
        terms += (of_residual,)
    if residual is not None:
        # No load comes behind a store: the compiler, which does not know that they are apart, would have it wait.
        sums, edge_sums = (), ()
        for turn in tl.static_range(TURNS):
            row, tiles = first + turn * VECTOR, ()
            inside = (row < M) & edge_mask
            added_row = added + _start(row, N, VECTOR)
            edge_sums += (_added(held_edges[turn], edge_terms[turn], added_row + edge_col, inside),)
            for chunk in tl.static_range(CHUNKS):
                inside = row < M if chunk < FULL else (row < M) & masks[chunk - FULL]
                pointers = added_row + (col + chunk * BLOCK_N)
                tiles += (_added(held[turn][chunk], terms[turn][chunk], pointers, inside),)
            sums += (tiles,)
        held, held_edges = sums, edge_sums
    for turn in tl.static_range(TURNS):
        row_mean, row_rstd = _statistics(held[turn], held_edges[turn], N, eps, masks, edge_mask, CENTERED, FULL, VECTOR)
        means += (row_mean,)
        rstds += (row_rstd,)
    for chunk in tl.static_range(CHUNKS):
        place = col + chunk * BLOCK_N
        known = place // VECTOR < packs
        if weight is not None:
            weights = tl.load(weight + (head + place), mask=known, other=0.0, eviction_policy="evict_last")
        if bias is not None:
            biases = tl.load(bias + (head + place), mask=known, other=0.0, eviction_policy="evict_last")
        for turn in tl.static_range(TURNS):
            row = first + turn * VECTOR
            # Subtracts first: the difference is exact where the mean is large.
            values = (as_it_came(held[turn][chunk], VECTOR) - means[turn]) * rstds[turn]
            if weight is not None:
                values *= weights.to(tl.float32)
            if bias is not None:
                values += biases.to(tl.float32)
            inside = row < M if chunk < FULL else (row < M) & masks[chunk - FULL]
            tl.store(out + _start(row, N, VECTOR) + place, values.to(out.dtype.element_ty), mask=inside)
    if weight is not None:
        edge_weights = tl.load(weight + (head + edge_col), mask=edge_mask, other=0.0, eviction_policy="evict_last")
    if bias is not None:
        edge_biases = tl.load(bias + (head + edge_col), mask=edge_mask, other=0.0, eviction_policy="evict_last")
    for turn in tl.static_range(TURNS):
        row = first + turn * VECTOR
        values = (held_edges[turn].to(tl.float32) - means[turn]) * rstds[turn]
        if weight is not None:
            values *= edge_weights.to(tl.float32)
        if bias is not None:
            values += edge_biases.to(tl.float32)
        out_row = out + _start(row, N, VECTOR)
        tl.store(out_row + edge_col, values.to(out.dtype.element_ty), mask=(row < M) & edge_mask)
        if CENTERED:
            _store_number(mean, row, M, means[turn], edge)
        _store_number(rstd, row, M, rstds[turn], edge)


def norm_skewed_rows(
    route: Skewed, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], eps: float
) -> plans.Plan | None:
    """Launch the kernel on x, weight, bias, residual, y, mean, rstd and the sum, and return the plan of it.

    ``sizes``: M, N, and the strides of rows of x and residual. Rows have the same skew in all matrices.
    """
    M, N, *_ = sizes
    constants = {"CENTERED": tensors[5] is not None, **route.constants(N)}
    return plans.launch(norm_skewed_rows_kernel, (route.programs(M),), tensors, (*sizes, eps), constants)

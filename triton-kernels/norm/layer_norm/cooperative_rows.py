"""A norm of cooperative rows: resident programs of a cooperative launch share a row that is longer than a tile.

The program of each of a row's PARTS computes its mean and the squared distances from it, publishes both in one word,
waits for the words of the others, merges them, and writes its part. A cooperative launch promises that all programs run
at once, so one may wait for another's numbers. Shorter rows lie side by side in a tile, or have a program each.

A row takes as many packs a thread as it needs, not a power of 2. Where N is no multiple of a pack, rows have every skew
(EDGES): the elements at both ends are taken one by one, and packs in between. A persistent program takes rows of the
same skew, and so has the same columns of them; other programs realign weight and bias from two loads.

Source: to merge: as v02. A value and its flag in one word that others wait for: Merrill and Garland, "Single-pass
Parallel Prefix Scan with Decoupled Look-back" (NVIDIA technical report NVR-2016-002).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_twins._triton.norm.shifted_packs import WORDS, shift_packs

# Waits until bit 31 of the word at an address is as given, and returns the word; 0 for address 0.
AWAIT = tl.constexpr("""{
    .reg .pred %done;
    .reg .b64 %unlike;
    mov.b64 $0, 0;
    setp.eq.b64 %done, $1, 0;
AGAIN:
    @%done bra END;
    ld.relaxed.gpu.global.b64 $0, [$1];
    xor.b64 %unlike, $0, $2;
    and.b64 %unlike, %unlike, 0x80000000;
    setp.eq.b64 %done, %unlike, 0;
    bra AGAIN;
END:
}""")

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
# Two bf16 to two fp32, in three ways, against common-subexpression elimination (CSE): a compiler that recognises a
# conversion it has already done keeps the result, in twice the registers. Triton does not look into asm; ptxas does,
# and recognises multiplications and other logical operations as the same, but not these three.
WIDEN = tl.constexpr("prmt.b32 $0, 0, $2, 0x5400; prmt.b32 $1, 0, $2, 0x7600;")
WIDEN_AGAIN = tl.constexpr("prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;")
WIDEN_LAST = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


@triton.jit
def _load(pointers, mask, FULL: tl.constexpr, POLICY: tl.constexpr):
    if FULL:
        return tl.load(pointers, eviction_policy=POLICY)
    else:  # noqa: RET505  # Triton would compile what follows all the same
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def _chunks(pointers, masks, FULL: tl.constexpr, POLICY: tl.constexpr):
    # A tuple of tiles, one for each mask, one behind the other in memory.
    tiles = ()
    for chunk in tl.static_range(len(masks)):
        tiles += (_load(pointers + chunk * pointers.shape[0], masks[chunk], chunk < FULL, POLICY),)
    return tiles


@triton.jit
def _rows(x, residual, added, masks, FULL: tl.constexpr):
    # What is normalised: x, or its sum with the residual, rounded as it is returned.
    tiles = _chunks(x, masks, FULL, "")
    if residual is not None:
        terms = _chunks(residual, masks, FULL, "")
        sums = ()
        for chunk in tl.static_range(len(masks)):
            total = (tiles[chunk].to(tl.float32) + terms[chunk].to(tl.float32)).to(x.dtype.element_ty)
            tl.store(added + chunk * added.shape[0], total, mask=None if chunk < FULL else masks[chunk])
            sums += (total,)
        tiles = sums
    return tiles


@triton.jit
def _wide(tile, HOW: tl.constexpr):
    # To fp32 by instructions of its own (HOW), which defeats CSE.
    if COMPILED and (tile.dtype == tl.bfloat16 and tile.shape[-1] > 1):
        tile = tl.inline_asm_elementwise(HOW, "=r,=r,r", [tile], tl.float32, is_pure=False, pack=2)
    return tile.to(tl.float32)


@triton.jit
def _rsqrt(x):
    # Triton's own flushes inputs below 1e-38 to 0.
    if COMPILED:
        return tl.inline_asm_elementwise("rsqrt.approx.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505  # Triton would compile what follows all the same
        return tl.rsqrt(x)


@triton.jit
def _total(tiles):
    # The sum of each place's elements.
    total = _wide(tiles[0], WIDEN)
    for chunk in tl.static_range(1, len(tiles)):
        total += _wide(tiles[chunk], WIDEN)
    return total


@triton.jit
def _squares(tiles, mean, masks, FULL: tl.constexpr, CENTERED: tl.constexpr):
    # Each place's sum of squared distances. Elements behind the row were read as 0: their distance must not count.
    squares = tl.zeros_like(tiles[0]).to(tl.float32)
    for chunk in tl.static_range(len(tiles)):
        distance = _wide(tiles[chunk], WIDEN_AGAIN) - mean
        if CENTERED and chunk >= FULL:
            distance = tl.where(masks[chunk], distance, 0.0)
        squares += distance * distance
    return squares


@triton.jit
def _masks(limit, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr):
    masks = ()
    for chunk in tl.static_range(CHUNKS):
        # One comparison a vector, so that it is loaded as one.
        masks += ((chunk * BLOCK_N + tl.arange(0, BLOCK_N)) // VECTOR < limit,)
    return masks


@triton.jit
def _from_two(vector, start, limit, FULL: tl.constexpr, VECTOR: tl.constexpr, BLOCK_N: tl.constexpr):
    # Realigns [BLOCK_N] elements, and returns them in fp32. The first may have any skew.
    PER_WORD: tl.constexpr = VECTOR // WORDS
    index = tl.arange(0, BLOCK_N // VECTOR)[:, None]
    words = vector.to(tl.pointer_type(tl.uint32)) + (start // VECTOR + index) * WORDS + tl.arange(0, WORDS)[None, :]
    first = _load(words, index < limit, FULL, "evict_last")
    values = shift_packs(first, _load(words + WORDS, index < limit, FULL, "evict_last"), start % VECTOR, PER_WORD)
    if PER_WORD == 2:
        values = tl.join(values.to(tl.uint16), (values >> 16).to(tl.uint16))
    return values.reshape((BLOCK_N,)).to(vector.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def _vector(
    vector, chunk: tl.constexpr, start, limit, mask,
    FULL: tl.constexpr, HELD: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    # A chunk of weight or bias in fp32: from registers if HELD, else from memory.
    BLOCK_N: tl.constexpr = mask.shape[0]
    if HELD:
        return _wide(vector[chunk], WIDEN_AGAIN)
    elif EDGES:  # noqa: RET505  # Triton would compile what follows all the same
        limit -= chunk * (BLOCK_N // VECTOR)
        return _from_two(vector, start + chunk * BLOCK_N, limit, chunk < FULL, VECTOR, BLOCK_N)
    else:
        pointers = vector + start + chunk * BLOCK_N + tl.arange(0, BLOCK_N)
        return _load(pointers, mask, chunk < FULL, "evict_last").to(tl.float32)


@triton.jit
def _write(
    out, tiles, mean, rstd, weight, bias, start, limit, masks,
    FULL: tl.constexpr, HELD: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    for chunk in tl.static_range(len(tiles)):
        # Subtracts first: the difference is exact where the mean is large.
        values = (_wide(tiles[chunk], WIDEN_LAST) - mean) * rstd
        if weight is not None:
            values *= _vector(weight, chunk, start, limit, masks[chunk], FULL, HELD, VECTOR, EDGES)
        if bias is not None:
            values += _vector(bias, chunk, start, limit, masks[chunk], FULL, HELD, VECTOR, EDGES)
        values = values.to(out.dtype.element_ty)
        tl.store(out + chunk * out.shape[0], values, mask=None if chunk < FULL else masks[chunk])


@triton.jit
def _exchange(
    part_mean, part_squares, words, part, turn, share, vectors, N,
    CENTERED: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    # words: [2, PARTS], each a part's mean and, in the lower half, its squared distances, whose sign bit tags the turn
    # that the word is of: turns alternate between the two rows of words, and each row between the two signs. At first
    # all words are 0. A word is never overwritten early: a part that publishes for turn + 2 has read all words of turn
    # + 1, and every part published those after it had read the words of turn.
    tag = ((turn // 2 + 1) % 2).to(tl.int64) << 31
    words += turn % 2 * PARTS
    word = part_mean.to(tl.uint32, bitcast=True).to(tl.int64) << 32
    word |= (part_squares.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.int64) | tag
    # Relaxed: the word is all that others read, so no other write has to be ordered with it.
    tl.atomic_xchg(words + part, word, sem="relaxed", scope="gpu")

    # One thread waits for each part's word.
    slot = tl.arange(0, SLOTS)
    address = tl.where(slot < PARTS, (words + slot).to(tl.int64), 0)
    word = tl.inline_asm_elementwise(AWAIT, "=&l,l,l", [address, tag], tl.int64, is_pure=False, pack=1)
    squares = (word & 0x7FFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    row_mean = part_mean
    if CENTERED:
        # Chan's formula, for all parts at once.
        counts = tl.where(slot < PARTS, _count(slot, share, vectors, N, VECTOR), 0.0)
        means = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        row_mean = tl.sum(counts * means) / N
        squares += counts * (means - row_mean) * (means - row_mean)
    return row_mean, tl.sum(squares)


@triton.jit
def _count(part, share, vectors, N, VECTOR: tl.constexpr):
    # Elements of a part; the first part has the edges, too.
    count = tl.maximum(tl.minimum(share, vectors - part * share), 0) * VECTOR
    return (count + tl.where(part == 0, N - vectors * VECTOR, 0)).to(tl.float32)


@triton.jit
def _spread(vector, col, mask, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr, FULL: tl.constexpr):
    # Repeated for as many rows as the threads cover with 16 bytes each: then it is laid out as the tile is, and further
    # rows only repeat registers.
    pointers = (vector + col).broadcast_to((AT_ONCE, BLOCK_N))
    values = _load(pointers, mask.broadcast_to((AT_ONCE, BLOCK_N)), FULL, "evict_last").to(tl.float32)
    return values[None, :, :].broadcast_to((ROWS // AT_ONCE, AT_ONCE, BLOCK_N)).reshape((ROWS, BLOCK_N))


@triton.jit
def _short_rows(
    x, weight, bias, residual, out, mean, rstd, added, M, N, stride_xm, stride_rm, eps, CENTERED: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr, VECTOR: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK_N)[None, :]
    # One comparison a vector, so that it is loaded as one.
    mask = col // VECTOR < N // VECTOR
    weights = None if weight is None else (_spread(weight, col, mask, ROWS, BLOCK_N, AT_ONCE, FULL),)
    biases = None if bias is None else (_spread(bias, col, mask, ROWS, BLOCK_N, AT_ONCE, FULL),)
    # Rows are numbered, and their offsets computed, in 64 bits; offsets in out within a tile have 32.
    start, step = tl.program_id(0).to(tl.int64) * ROWS, tl.num_programs(0).to(tl.int64) * ROWS
    for first in tl.range(start, start + 1 if STAGES == 1 else M, 1 if STAGES == 1 else step, num_stages=STAGES):
        # Rows beyond the last are the last row again, to which the same values are written again.
        row = tl.minimum(tl.arange(0, ROWS)[:, None], tl.minimum(M - 1 - first, ROWS).to(tl.int32))
        # Written so that the compiler sees a multiple of VECTOR.
        x_rows = x + (first + row) * stride_xm // VECTOR * VECTOR + col
        place = row * N // VECTOR * VECTOR + col
        residual_rows = None if residual is None else residual + (first + row) * stride_rm // VECTOR * VECTOR + col
        added_rows = None if residual is None else added + first * N // VECTOR * VECTOR + place
        tiles = _rows(x_rows, residual_rows, added_rows, (mask,), FULL)
        row_mean = tl.sum(_total(tiles), axis=1, keep_dims=True) * (1.0 / N) if CENTERED else 0.0
        squares = tl.sum(_squares(tiles, row_mean, (mask,), FULL, CENTERED), axis=1, keep_dims=True)
        row_rstd = _rsqrt(squares * (1.0 / N) + eps)
        out_rows = out + first * N // VECTOR * VECTOR + place
        _write(out_rows, tiles, row_mean, row_rstd, weights, biases, 0, 0, (mask,), FULL, True, VECTOR, False)
        if CENTERED:
            tl.store(mean + first + row, row_mean)
        tl.store(rstd + first + row, row_rstd)


@triton.jit
def _inside(row, N, EDGES: tl.constexpr, VECTOR: tl.constexpr):
    # The elements before a row's first vector, and the number of whole vectors. With EDGES the last whole vector
    # belongs to the edge, so that weight and bias are not read behind their ends.
    ALIGN: tl.constexpr = 2 * VECTOR
    start = tl.cast(row, tl.int64) * N
    head = (tl.cdiv(start, ALIGN) * ALIGN - start).to(tl.int32) if EDGES else 0
    return head, ((N - head) // VECTOR - 1 if EDGES else N // VECTOR)


@triton.jit
def _edges(head, vectors, part, N, VECTOR: tl.constexpr):
    # ALIGN places before the first vector, and ALIGN places behind the last one. The first part takes both.
    ALIGN: tl.constexpr = 2 * VECTOR
    edge = tl.arange(0, 2 * ALIGN)
    col = tl.where(edge < ALIGN, edge, head + vectors * VECTOR + edge - ALIGN)
    return col, ((col < tl.where(edge < ALIGN, head, N)) & (part == 0),)


@triton.jit
def norm_rows(
    x, weight, bias, residual, out, mean, rstd, added, counters, M, N, stride_xm, stride_rm, eps,
    CENTERED: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr,
    CHUNKS: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr,
    FULL: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    # x, residual: [M, N]; weight, bias: [N]; out, added: [M, N] contiguous; mean, rstd: [M]. Missing tensors are None.
    # counters: words [groups, 2, PARTS], of 64 bits, then tickets [groups], all 0.
    if ROWS > 1:
        _short_rows(
            x, weight, bias, residual, out, mean, rstd, added, M, N, stride_xm, stride_rm, eps,
            CENTERED, STAGES, ROWS, BLOCK_N, AT_ONCE, VECTOR, FULL,
        )  # fmt: skip
        return

    # PARTS programs are a group, which takes one row at a time.
    part, group, groups = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
    words = counters.to(tl.pointer_type(tl.int64)) + group * (2 * PARTS) if PARTS > 1 else None
    # Columns count from the row's first vector, which starts at a multiple of ALIGN elements: with EDGES, of a sector
    # of 32 bytes. Every part has `share` vectors, but for the last.
    ALIGN: tl.constexpr = 2 * VECTOR if EDGES else VECTOR
    share = tl.cdiv(N // VECTOR, PARTS)
    start = part * (share * VECTOR)
    col = start + tl.arange(0, BLOCK_N)
    if HELD:  # all rows of the group have the skew of the first
        head, vectors = _inside(group, N, EDGES, VECTOR)
        masks = _masks(tl.minimum(share, vectors - part * share), CHUNKS, BLOCK_N, VECTOR)
        if EDGES:
            edge_col, edge_masks = _edges(head, vectors, part, N, VECTOR)
            edge_weight = None if weight is None else _chunks(weight + edge_col, edge_masks, 0, "evict_last")
            edge_bias = None if bias is None else _chunks(bias + edge_col, edge_masks, 0, "evict_last")
        weight = None if weight is None else _chunks(weight + head + col, masks, FULL, "evict_last")
        bias = None if bias is None else _chunks(bias + head + col, masks, FULL, "evict_last")
    turn = 0
    ONE: tl.constexpr = PARTS == 1 and STAGES == 1
    # Loads of weight and bias in the loop must not travel ahead, so rows travel ahead only if these are HELD.
    AHEAD: tl.constexpr = STAGES if HELD else 1
    for index in tl.range(group, group + 1 if ONE else M, 1 if ONE else groups, num_stages=AHEAD):
        # Offsets in 64 bits, rounded up to whole vectors so that the compiler sees it.
        row = tl.cast(index, tl.int64)
        place = tl.cdiv(row * N, ALIGN) * ALIGN
        if not HELD:
            head, vectors = _inside(row, N, EDGES, VECTOR)
        limit = tl.minimum(share, vectors - part * share)
        masks = _masks(limit, CHUNKS, BLOCK_N, VECTOR)
        x_row = x + tl.cdiv(row * stride_xm, ALIGN) * ALIGN + col
        residual_row = None if residual is None else residual + tl.cdiv(row * stride_rm, ALIGN) * ALIGN + col
        added_row = None if residual is None else added + place + col
        tiles = _rows(x_row, residual_row, added_row, masks, FULL)
        total = tl.sum(_total(tiles)) if CENTERED else 0.0
        if EDGES:
            if not HELD:
                edge_col, edge_masks = _edges(head, vectors, part, N, VECTOR)
            residual_edges = None if residual is None else residual + row * stride_rm + edge_col
            added_edges = None if residual is None else added + row * N + edge_col
            edges = _rows(x + row * stride_xm + edge_col, residual_edges, added_edges, edge_masks, 0)
            total += tl.sum(_total(edges)) if CENTERED else 0.0
        row_mean = total / tl.maximum(_count(part, share, vectors, N, VECTOR), 1.0) if PARTS > 1 else total / N
        squares = tl.sum(_squares(tiles, row_mean, masks, FULL, CENTERED))
        if EDGES:
            squares += tl.sum(_squares(edges, row_mean, edge_masks, 0, CENTERED))
        if PARTS > 1:
            row_mean, squares = _exchange(
                row_mean, squares, words, part, turn, share, vectors, N, CENTERED, PARTS, SLOTS, VECTOR
            )
            turn += 1
        row_rstd = _rsqrt(squares * (1.0 / N) + eps)
        _write(
            out + place + col, tiles, row_mean, row_rstd, weight, bias, head + start, limit, masks,
            FULL, HELD, VECTOR, EDGES,
        )  # fmt: skip
        if EDGES:
            if not HELD:
                edge_weight = None if weight is None else _chunks(weight + edge_col, edge_masks, 0, "evict_last")
                edge_bias = None if bias is None else _chunks(bias + edge_col, edge_masks, 0, "evict_last")
            edges_out = out + row * N + edge_col
            _write(
                edges_out, edges, row_mean, row_rstd, edge_weight, edge_bias, 0, 0, edge_masks, 0, True, VECTOR, False
            )
        if CENTERED:
            tl.store(mean + row, row_mean, mask=part == 0)
        tl.store(rstd + row, row_rstd, mask=part == 0)

    if PARTS > 1:
        # For all threads of this program to have read the words. The last program of a group to leave resets all to 0.
        tl.debug_barrier()
        ticket = counters + 4 * tl.num_programs(0) + group
        if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
            slot = tl.arange(0, 2 * SLOTS)
            tl.store(words + slot, tl.zeros_like(slot).to(tl.int64), mask=slot < 2 * PARTS)
            tl.store(ticket, 0)

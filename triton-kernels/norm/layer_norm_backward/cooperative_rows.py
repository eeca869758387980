"""A norm's backward pass for cooperative rows: resident programs share a row that is longer than a tile.

The program of each of a row's PARTS publishes its two sums and goes on with the next row; only then it waits for the
sums of the others, and writes its part of the row before. A cooperative launch promises that all programs run at once,
so one may wait for another's numbers. The exchange through L2 takes about as long as a program's work on a row, and is
hidden behind one. Shorter rows lie side by side in a tile.

Where N is no multiple of a pack, a group of programs takes rows of the same skew (EDGES), so that a thread has the same
columns of all of them: packs, and single elements at both ends. Skews and packs are dx's. A matrix whose rows have
others than dx's is SHIFTED: its packs are shifted in registers, and rows have EDGES whatever N is.

Source: a value and its flag in one word that others wait for: Merrill and Garland, "Single-pass Parallel Prefix Scan
with Decoupled Look-back" (NVIDIA technical report NVR-2016-002).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_twins._triton.norm.layer_norm_backward.cooperative_tiles import TURNS
from kernel_twins._triton.norm.layer_norm_backward.v02_persistent import row_sums
from kernel_twins._triton.norm.shifted_packs import WORDS, shift_packs

# Waits until the lowest bit of the word at an address is as given, and returns the word; 0 for address 0.
AWAIT = tl.constexpr("""{
    .reg .pred %done;
    .reg .b32 %low, %high;
    mov.b64 $0, 0;
    setp.eq.b64 %done, $1, 0;
AGAIN:
    @%done bra END;
    ld.relaxed.gpu.global.b64 $0, [$1];
    mov.b64 {%low, %high}, $0;
    xor.b32 %low, %low, $2;
    and.b32 %low, %low, 1;
    setp.eq.b32 %done, %low, 0;
    bra AGAIN;
END:
}""")


@triton.jit
def _sums(gradient, xhat, CENTERED: tl.constexpr):
    # The sums of every row: of gradient * xhat, and of gradient, which only layer_norm needs.
    product = gradient * xhat
    if CENTERED:
        product_sum, gradient_sum = row_sums(product, gradient)
    else:
        product_sum = tl.sum(product, axis=1, keep_dims=True)
        gradient_sum = tl.zeros_like(product_sum)
    return product_sum, gradient_sum


@triton.jit
def _weighted(gradient, xhat, weights, dweight, dbias, CENTERED: tl.constexpr):
    # The gradient of xhat, and the column sums with this tile's terms added.
    if weights is not None:
        dweight += gradient * xhat
        if CENTERED:
            dbias += gradient
        gradient *= weights
    return gradient, dweight, dbias


@triton.jit
def _store_sums(place, dweight, dbias, distance, mask, CENTERED: tl.constexpr):
    tl.store(place, dweight, mask=mask)
    if CENTERED:
        tl.store(place + distance, dbias, mask=mask)


@triton.jit
def _rounded_up(start, VECTOR: tl.constexpr):
    # Up to whole vectors, written so that the compiler sees it.
    return tl.cdiv(start, VECTOR) * VECTOR


@triton.jit
def _words(
    matrix, start, head, first, word, mask, VECTOR: tl.constexpr, PAIR: tl.constexpr, SHIFTED: tl.constexpr
):  # fmt: skip
    # A row's words behind its head and `first` columns, as they lie in memory; with PAIR = 2, two elements of 16 bits
    # in a word of 32. Carried from one row to the next, an element of its own would take a register.
    if SHIFTED:
        start += head + first
        pointers = matrix.to(tl.pointer_type(tl.uint32)) + start // VECTOR * WORDS + word
        packs, behind = tl.load(pointers, mask=mask, other=0), tl.load(pointers + WORDS, mask=mask, other=0)
        words = shift_packs(packs, behind, (start % VECTOR).to(tl.int32), PAIR).reshape(packs.shape)
    else:
        if PAIR > 1:
            matrix = matrix.to(tl.pointer_type(tl.uint32))
        words = tl.load(matrix + (first + _rounded_up(start, VECTOR)) // PAIR + word, mask=mask, other=0)
    return words


@triton.jit
def _values(words, dtype: tl.constexpr, PAIR: tl.constexpr):
    # The elements of words, in fp32.
    if PAIR == 1:
        values = words.to(tl.float32)
    elif dtype == tl.bfloat16:
        even, odd = (words << 16).to(tl.float32, bitcast=True), (words & 0xFFFF0000).to(tl.float32, bitcast=True)
        values = tl.reshape(tl.join(even, odd), (1, 2 * words.shape[1]))
    else:
        pairs = tl.join((words & 0xFFFF).to(tl.uint16), (words >> 16).to(tl.uint16))
        values = tl.reshape(pairs, (1, 2 * words.shape[1])).to(dtype, bitcast=True).to(tl.float32)
    return values


@triton.jit
def _edges(row, col, mask):
    return tl.load(row + col, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _publish(product_sum, gradient_sum, words, part, turn, PARTS: tl.constexpr):
    # words: [TURNS, PARTS], each a part's two sums. The lowest bit tags the turn that the word is of: it alternates
    # from one use of the word to the next, and at first all words are 0. Relaxed: the word is all that others read, so
    # no other write has to be ordered with it.
    high = product_sum.to(tl.uint32, bitcast=True).to(tl.int64) << 32
    low = (gradient_sum.to(tl.uint32, bitcast=True) & 0xFFFFFFFE).to(tl.int64)
    place = words + turn % TURNS * PARTS + part + tl.zeros((1, 1), dtype=tl.int32)
    tl.atomic_xchg(place, high | low | turn // TURNS % 2, sem="relaxed", scope="gpu")


@triton.jit
def _await(words, turn, PARTS: tl.constexpr, SLOTS: tl.constexpr):
    # Waits for the sums of all parts. A word is never overwritten early: a part that publishes for turn + TURNS has
    # read all words of turn + 2, and every part published those after it had read the words of turn.
    slot = tl.arange(0, SLOTS)[None, :]
    address = tl.where(slot < PARTS, (words + turn % TURNS * PARTS + slot).to(tl.int64), 0)
    tag = turn // TURNS % 2
    word = tl.inline_asm_elementwise(AWAIT, "=&l,l,r", [address, tag], tl.int64, is_pure=False, pack=1)
    product_sums = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    gradient_sums = (word & 0xFFFFFFFE).to(tl.int32).to(tl.float32, bitcast=True)
    return row_sums(product_sums, gradient_sums)


@triton.jit
def _leave(counters, words, group, PARTS: tl.constexpr, SLOTS: tl.constexpr):
    # For all threads of this program to have read the words. The last program of a group to leave resets all to 0.
    tl.debug_barrier()
    ticket = counters + 2 * TURNS * tl.num_programs(0) + group
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        slot = tl.arange(0, TURNS * SLOTS)
        tl.store(words + slot, tl.zeros_like(slot).to(tl.int64), mask=slot < TURNS * PARTS)
        tl.store(ticket, 0)


@triton.jit
def _shared_rows(
    dout, x, mean, rstd, weight, dadded, dx, partials, counters, M, N, stride_dm, stride_xm, stride_am,
    STAGES: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, VECTOR: tl.constexpr,
    EDGES: tl.constexpr, EVEN: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    CENTERED: tl.constexpr = mean is not None
    dtype: tl.constexpr = x.dtype.element_ty
    PAIR: tl.constexpr = 2 if dtype.primitive_bitwidth == 16 and VECTOR > 1 else 1
    # PARTS programs are a group, which takes one row at a time.
    part, group = tl.program_id(0) % PARTS, (tl.program_id(0) // PARTS).to(tl.int64)
    groups = (tl.num_programs(0) // PARTS).to(tl.int64)
    words = counters.to(tl.pointer_type(tl.int64)) + group * (TURNS * PARTS)
    # Packs count from the first whole one of dx's row, before which it has `head` elements. All rows of the group have
    # the same skew there. Every part has `share` packs, but for the last. The last whole pack of a row belongs to the
    # edge if any are SHIFTED, so that none are read behind a matrix.
    DOUT: tl.constexpr = SHIFTED % 2 > 0
    X: tl.constexpr = SHIFTED // 2 % 2 > 0
    DADDED: tl.constexpr = SHIFTED // 4 > 0
    head = ((VECTOR - group * N % VECTOR) % VECTOR).to(tl.int32) if EDGES else 0
    share, vectors = tl.cdiv(N // VECTOR, PARTS), (N - head) // VECTOR - (1 if SHIFTED else 0)
    mine, first = tl.minimum(share, vectors - part * share), part * (share * VECTOR)
    place, word = tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_N // PAIR)[None, :]
    # One comparison a vector, so that it is loaded as one.
    held, held_words = place // VECTOR < mine, word // (VECTOR // PAIR) < mine
    weights = None if weight is None else tl.load(weight + (head + first) + place, mask=held, other=0.0).to(tl.float32)
    dweight, dbias = tl.zeros((1, BLOCK_N), dtype=tl.float32), tl.zeros((1, BLOCK_N), dtype=tl.float32)
    if EDGES:
        # The first part has the edges, too: VECTOR places before the first vector, and the others behind the last one.
        # They are too narrow for an asynchronous copy, so registers load them a row ahead.
        PLACES: tl.constexpr = (4 if SHIFTED else 2) * VECTOR
        edge = tl.arange(0, PLACES)[None, :]
        edge_col = tl.where(edge < VECTOR, edge, head + vectors * VECTOR + edge - VECTOR)
        edge_held = (edge_col < tl.where(edge < VECTOR, head, N)) & (part == 0)
        edge_weights = None if weight is None else _edges(weight, edge_col, edge_held)
        edge_dout = _edges(dout + group * stride_dm, edge_col, edge_held & (group < M))
        edge_x = _edges(x + group * stride_xm, edge_col, edge_held & (group < M))
        nothing = tl.zeros((1, PLACES), dtype=tl.float32)
        edge_dweight, edge_dbias, edge_before, edge_xhat_before = nothing, nothing, nothing, nothing

    # The row before, which is written when the sums of all parts have arrived. The first row has none before it.
    nowhere = tl.zeros((1, BLOCK_N // PAIR), dtype=tl.uint32 if PAIR > 1 else dtype)
    dout_before, x_before = nowhere, nowhere
    mean_before, rstd_before = tl.zeros((1, 1), dtype=tl.float32), tl.zeros((1, 1), dtype=tl.float32)
    turn = TURNS  # the words of the turn before are 0, and so have its tag
    for row in tl.range(group, M + groups, groups, num_stages=STAGES):
        # Offsets have 64 bits. A row of zeros follows the last row, which is written in that turn.
        inside = row < M
        mask = inside if EVEN else held_words & inside
        dout_words = _words(dout, row * stride_dm, head, first, word, mask, VECTOR, PAIR, DOUT)
        x_words = _words(x, row * stride_xm, head, first, word, mask, VECTOR, PAIR, X)
        one = row + tl.zeros((1, 1), dtype=tl.int64)  # a tensor, so that its loads travel ahead, too
        row_mean = tl.load(mean + one, mask=inside, other=0.0) if CENTERED else 0.0
        row_rstd = tl.load(rstd + one, mask=inside, other=0.0)
        xhat = (_values(x_words, dtype, PAIR) - row_mean) * row_rstd
        gradient = _values(dout_words, dtype, PAIR)
        gradient, dweight, dbias = _weighted(gradient, xhat, weights, dweight, dbias, CENTERED)
        product_sum, gradient_sum = _sums(gradient, xhat, CENTERED)
        if EDGES:
            edge_xhat = (edge_x - row_mean) * row_rstd
            edge_gradient, edge_dweight, edge_dbias = _weighted(
                edge_dout, edge_xhat, edge_weights, edge_dweight, edge_dbias, CENTERED
            )
            product_sum += tl.sum(edge_gradient * edge_xhat)
            if CENTERED:
                gradient_sum += tl.sum(edge_gradient)
            ahead = row + groups
            edge_dout = _edges(dout + ahead * stride_dm, edge_col, edge_held & (ahead < M))
            edge_x = _edges(x + ahead * stride_xm, edge_col, edge_held & (ahead < M))
        _publish(product_sum, gradient_sum, words, part, turn, PARTS)

        product_sum, gradient_sum = _await(words, turn - 1, PARTS, SLOTS)
        product_mean, gradient_mean = product_sum / N, gradient_sum / N
        xhat = (_values(x_before, dtype, PAIR) - mean_before) * rstd_before
        gradient = _values(dout_before, dtype, PAIR)
        if weight is not None:
            gradient *= weights
        result = rstd_before * (gradient - gradient_mean - xhat * product_mean)
        before = row - groups
        mask = before >= 0 if EVEN else held & (before >= 0)
        if dadded is not None:
            inside = before >= 0 if EVEN else held_words & (before >= 0)
            added = _words(dadded, before * stride_am, head, first, word, inside, VECTOR, PAIR, DADDED)
            result += _values(added, dtype, PAIR)
        tl.store(dx + (first + _rounded_up(before * N, VECTOR)) + place, result.to(dtype), mask=mask)
        if EDGES:
            mask = edge_held & (before >= 0)
            result = rstd_before * (edge_before - gradient_mean - edge_xhat_before * product_mean)
            if dadded is not None:
                result += _edges(dadded + before * stride_am, edge_col, mask)
            tl.store(dx + before * N + edge_col, result.to(dtype), mask=mask)
            edge_before, edge_xhat_before = edge_gradient, edge_xhat
        dout_before, x_before, rstd_before = dout_words, x_words, row_rstd
        mean_before = row_mean if CENTERED else mean_before
        turn += 1

    if weight is not None:
        partials += group * N
        _store_sums(partials + (head + first) + place, dweight, dbias, groups * N, held, CENTERED)
        if EDGES:
            _store_sums(partials + edge_col, edge_dweight, edge_dbias, groups * N, edge_held, CENTERED)
    _leave(counters, words, group, PARTS, SLOTS)


@triton.jit
def _whole_rows(
    dout, x, mean, rstd, weight, dadded, dx, partials, M, N, stride_dm, stride_xm, stride_am,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    CENTERED: tl.constexpr = mean is not None
    program, count = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    col = tl.broadcast_to(tl.arange(0, BLOCK_N)[None, :], (ROWS, BLOCK_N))
    held = col // VECTOR < N // VECTOR
    # Repeated for every row of the tile, so that threads hold it in the layout of the rows.
    weights = None if weight is None else tl.load(weight + col, mask=held, other=0.0).to(tl.float32)
    dweight, dbias = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32), tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for first in tl.range(program * ROWS, M, count * ROWS, num_stages=STAGES):
        # Offsets in 64 bits, as multiples of VECTOR so that the compiler sees it.
        row = first + tl.arange(0, ROWS)[:, None]
        inside = row < M
        mask = inside if EVEN else inside & held
        gradient = tl.load(dout + row * stride_dm // VECTOR * VECTOR + col, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(x + row * stride_xm // VECTOR * VECTOR + col, mask=mask, other=0.0).to(tl.float32)
        row_mean = tl.load(mean + row, mask=inside, other=0.0) if CENTERED else 0.0
        row_rstd = tl.load(rstd + row, mask=inside, other=0.0)
        xhat = (values - row_mean) * row_rstd
        gradient, dweight, dbias = _weighted(gradient, xhat, weights, dweight, dbias, CENTERED)
        product_sum, gradient_sum = _sums(gradient, xhat, CENTERED)
        result = row_rstd * (gradient - gradient_sum / N - xhat * (product_sum / N))
        if dadded is not None:
            more = tl.load(dadded + row * stride_am // VECTOR * VECTOR + col, mask=mask, other=0.0)
            result += more.to(tl.float32)
        tl.store(dx + row * N // VECTOR * VECTOR + col, result.to(dx.dtype.element_ty), mask=mask)
    if weight is not None:
        place = tl.arange(0, BLOCK_N)
        partials += program * N + place
        _store_sums(partials, tl.sum(dweight, axis=0), tl.sum(dbias, axis=0), count * N, place < N, CENTERED)


@triton.jit
def backward_rows(
    dout, x, mean, rstd, weight, dadded, dx, partials, counters, M, N, stride_dm, stride_xm, stride_am,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, EVEN: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    # dout, x, dadded: [M, N]; mean, rstd: [M]; weight: [N]; dx: [M, N] contiguous; partials: [1 or 2, groups, N], of
    # dweight and, if there is a mean, of dbias; counters: words [groups, TURNS, PARTS], of 64 bits, then tickets
    # [groups], all 0. Missing tensors are None. SHIFTED: see shifted_matrices.
    if PARTS > 1:
        _shared_rows(
            dout, x, mean, rstd, weight, dadded, dx, partials, counters, M, N, stride_dm, stride_xm, stride_am,
            STAGES, BLOCK_N, PARTS, SLOTS, VECTOR, EDGES, EVEN, SHIFTED if EDGES else 0,
        )  # fmt: skip
    else:
        _whole_rows(
            dout, x, mean, rstd, weight, dadded, dx, partials, M, N, stride_dm, stride_xm, stride_am,
            STAGES, ROWS, BLOCK_N, VECTOR, EVEN,
        )  # fmt: skip

"""softmax v08_cooperative: a split row, shared by programs that are all resident.

Change:   a row longer than a program's tile is split into PARTS. The program of each part finds its maximum and sum,
          publishes both in one word, waits for the words of the others, and writes its part. Shorter rows are treated
          as in v05 or v06, whichever the search finds faster. A tile consists of PIECES, blocks of 16 bytes a thread,
          as many as the row needs, since one block of a power of 2 may be half empty. If a row is not a whole number of
          vectors, the next one is misaligned: a few elements at both ends are taken one by one, and vectors of 16 bytes
          in between.
Why:      a cooperative launch guarantees that all programs run at once, so one may wait for another's numbers. The
          registers of the whole GPU then bound the length of a row. While a program waits, its next part travels to
          shared memory.
Counter:  time falls at rows of 65,536 and at odd N; at rows of 4096 it stays v05's.
Requires: rows whose elements are contiguous, at any distance from each other.
Routes:   up to a tile: as in v05 or v06; single elements if a row is not a whole number of vectors
          longer, if all programs of a row can be resident: split; single elements if x's and out's skews differ
          longer still: v02's kernel
Source:   a value and its flag in one word that others poll: Merrill and Garland, "Single-pass Parallel Prefix Scan with
          Decoupled Look-back" (NVIDIA technical report NVR-2016-002).
Twin:     none, see the spec
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import tuning
from kernel_twins._triton.lib.launch_rows import in_parts
from kernel_twins._triton.softmax.cooperative import (
    Cooperative,
    Known,
    as_it_came,
    configurations,
    fitting,
    heuristics,
    launch,
    leave,
)
from kernel_twins._triton.softmax.routes import VECTOR_BYTES
from kernel_twins._triton.softmax.softmax.v02_online import softmax_v02_online

KEPT_CONVERTED = 32  # elements a thread, up to which it keeps them as fp32

LOG2_E = tl.constexpr(1.4426950408889634)
# Polls the 64-bit word at an address until its bit 31 has the given value, and returns it; returns 0 for address 0.
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

CONFIGS = configurations(
    (
        (8192, 8, 1, 4), (2048, 16, 1, 1), (4096, 8, 1, 4), (16384, 4, 1, 8), (32768, 2, 1, 8), (32768, 2, 1, 16),
        (65536, 2, 1, 16), (10240, 7, 1, 4),
        (8192, 8, 3, 4), (16384, 4, 3, 8), (16384, 3, 4, 8), (32768, 2, 3, 16), (65536, 1, 3, 16),
    )
)  # fmt: skip


def divided(N: int, itemsize: int, wide: bool, config: dict[str, Any]) -> dict[str, int]:
    """The tiling of rows of N elements: ROWS a tile, or PARTS a row, each of PIECES of BLOCK_N elements.

    The first WHOLE pieces of every part are full and need no mask.
    """
    tile, threads, vector = config["TILE_BYTES"] // itemsize, 32 * config["num_warps"], VECTOR_BYTES // itemsize
    block, parts = min(triton.next_power_of_2(N), tile), triton.cdiv(N, tile)
    if block < tile:
        tile = max(block, min(1 << (tile.bit_length() - 1), KEPT_CONVERTED * threads))  # a power of 2
    rows, wide = tile // block, wide and (N % vector == 0 or block == tile)
    edges, unit = wide and N % vector > 0, vector if wide else 1
    if rows == 1:
        block = min(block, vector * threads)
    share = triton.cdiv(N // unit, parts)
    least = (N - edges * (unit - 1)) // unit - (parts - 1) * share  # of the last part, in a misaligned row
    pieces = triton.cdiv(share * unit, block)
    return {
        "ROWS": rows, "BLOCK_N": block, "PIECES": pieces, "WHOLE": max(least, 0) * unit // block, "PARTS": parts,
        "SLOTS": max(triton.next_power_of_2(parts), threads), "VECTOR": unit, "EDGES": edges,
        "ANEW": parts > 1 or rows * pieces * block > KEPT_CONVERTED * threads,
    }  # fmt: skip


DIVIDED = heuristics(divided, "x", ("ROWS", "BLOCK_N", "PIECES", "WHOLE", "PARTS", "SLOTS", "VECTOR", "EDGES", "ANEW"))


@triton.jit
def _powers(tile, base, ANEW: tl.constexpr):
    tile = as_it_came(tile) if ANEW else tile
    return tl.exp2((tile.to(tl.float32) - base) * LOG2_E)


@triton.jit
def _scale(row_sum, LOG: tl.constexpr):
    return tl.log(row_sum) if LOG else 1.0 / row_sum


@triton.jit
def _result(values, row_max, scale, LOG: tl.constexpr):
    return (values - row_max) - scale if LOG else tl.exp2((values - row_max) * LOG2_E) * scale


@triton.jit
def _exchange(part_max, part_sum, words, part, turn, PARTS: tl.constexpr, SLOTS: tl.constexpr):
    # words: [2, PARTS], each with a part's maximum in the upper half and its sum in the lower. The sum's sign bit is
    # the flag: it says for which turn the word is. Turns alternate between the two rows of words, and in each row the
    # flag alternates, starting from words of 0. No word is overwritten too early: a program that publishes for turn + 2
    # has seen all words of turn + 1, so all programs have read those of turn.
    tag = ((turn // 2 + 1) % 2).to(tl.int64) << 31
    words += turn % 2 * PARTS
    word = part_max.to(tl.uint32, bitcast=True).to(tl.int64) << 32
    word |= (part_sum.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.int64) | tag
    # Relaxed: readers need nothing but the word itself, so there is nothing to release or acquire.
    tl.atomic_xchg(words + part, word, sem="relaxed", scope="gpu")

    # Each part's word is polled by one thread.
    slot = tl.arange(0, SLOTS)
    address = tl.where(slot < PARTS, (words + slot).to(tl.int64), 0)
    word = tl.inline_asm_elementwise(AWAIT, "=&l,l,l", [address, tag], tl.int64, is_pure=False, pack=1)
    maxima = tl.where(slot < PARTS, (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    sums = (word & 0x7FFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    row_max = tl.max(maxima)
    return row_max, tl.sum(sums * tl.exp2((maxima - row_max) * LOG2_E))


@triton.jit
def _short_rows(
    x, out, M, N, stride_xm, LOG: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK_N)[None, :]
    mask = None if EVEN else col // VECTOR < N // VECTOR
    start = tl.program_id(0) * ROWS
    for first in tl.range(start, start + 1 if STAGES == 1 else M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        # Places beyond the last row repeat it, and store the same values again. Offsets have 64 bits.
        row = tl.minimum(first + tl.arange(0, ROWS)[:, None], M - 1).to(tl.int64)
        # Written so that the compiler sees offsets that are multiples of VECTOR.
        x_rows, out_rows = x + row * stride_xm // VECTOR * VECTOR, out + row * N // VECTOR * VECTOR
        values = tl.load(x_rows + col, mask=mask, other=None if EVEN else -float("inf")).to(tl.float32)
        row_max = tl.max(values, axis=1, keep_dims=True)
        row_sum = tl.sum(tl.exp2((values - row_max) * LOG2_E), axis=1, keep_dims=True)
        result = _result(values, row_max, _scale(row_sum, LOG), LOG)
        tl.store(out_rows + col, result.to(out.dtype.element_ty), mask=mask)


@triton.autotune(CONFIGS, ["N"], prune_configs_by=fitting("x", 1), cache_results=True, do_bench=tuning.bench)
@triton.heuristics(DIVIDED)
@triton.jit
def softmax_v08_cooperative_kernel(
    x, out, counters, M, N, stride_xm, LOG: tl.constexpr, WIDE: tl.constexpr,
    TILE_BYTES: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr,
    SLOTS: tl.constexpr, VECTOR: tl.constexpr, EDGES: tl.constexpr, ANEW: tl.constexpr,
):  # fmt: skip
    # x: [M, N], out: [M, N] contiguous; counters: words [groups, 2, PARTS], of 64 bits, then tickets [groups], all 0.
    if ROWS > 1:
        _short_rows(x, out, M, N, stride_xm, LOG, STAGES, ROWS, BLOCK_N, VECTOR, WHOLE == 1)
        return

    # PARTS programs form a group, which works on one row at a time.
    part, group, groups = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
    words = counters.to(tl.pointer_type(tl.int64)) + group * (2 * PARTS) if PARTS > 1 else None
    # Columns are counted from the row's first vector of 16 bytes. Each part has `share` vectors, the last one fewer.
    share = tl.cdiv(N // VECTOR, PARTS)
    start = part * (share * VECTOR) + tl.arange(0, BLOCK_N)
    turn = 0
    ONE: tl.constexpr = PARTS == 1 and STAGES == 1
    for index in tl.range(group, group + 1 if ONE else M, 1 if ONE else groups, num_stages=STAGES):
        # 64-bit offsets, rounded up to whole vectors in a form that the compiler sees.
        row = tl.cast(index, tl.uint64)
        x_row = x + tl.cdiv(row * stride_xm, VECTOR) * VECTOR
        out_start = tl.cdiv(row * N, VECTOR) * VECTOR
        head = (out_start - row * N).to(tl.int32) if EDGES else 0
        out_row = out + out_start
        vectors = (N - head) // VECTOR
        if EDGES:
            # The elements before the first vector, in the first VECTOR places, and behind the last one. They are loaded
            # and used first: otherwise the compiler makes the program wait for the rest of the row before it loads
            # them.
            edge = tl.arange(0, 2 * VECTOR)
            edge_col = tl.where(edge < VECTOR, edge - head, vectors * VECTOR + edge - VECTOR)
            edge_mask = (edge_col < tl.where(edge < VECTOR, 0, N - head)) & (part == 0)
            edges = tl.load(x_row + edge_col, mask=edge_mask, other=-float("inf")).to(tl.float32)
        end = tl.minimum(part * share + share, vectors)
        tiles = ()
        for piece in tl.static_range(PIECES):
            col = start + piece * BLOCK_N
            # The mask is the same for a whole vector, so that it is loaded by one access.
            mask = None if piece < WHOLE else col // VECTOR < end
            tiles += (tl.load(x_row + col, mask=mask, other=None if piece < WHOLE else -float("inf")),)

        most = tiles[0].to(tl.float32)
        if EDGES:
            most = tl.maximum(most, tl.max(edges))
        for piece in tl.static_range(1, PIECES):
            most = tl.maximum(most, tiles[piece].to(tl.float32))
        row_max = tl.max(most)
        # A part of nothing but -inf must have the sum 0; -inf - -inf would make it NaN, which only a whole such row may
        # be.
        base = tl.where(row_max == -float("inf"), 0.0, row_max) if PARTS > 1 else row_max
        sums = _powers(tiles[0], base, ANEW)
        for piece in tl.static_range(1, PIECES):
            sums += _powers(tiles[piece], base, ANEW)
        row_sum = tl.sum(sums)
        if EDGES:
            row_sum += tl.sum(tl.exp2((edges - base) * LOG2_E))
        if PARTS > 1:
            row_max, row_sum = _exchange(row_max, row_sum, words, part, turn, PARTS, SLOTS)
            turn += 1
        scale = _scale(row_sum, LOG)
        for piece in tl.static_range(PIECES):
            col = start + piece * BLOCK_N
            tile = as_it_came(tiles[piece]) if ANEW else tiles[piece]
            result = _result(tile.to(tl.float32), row_max, scale, LOG).to(out.dtype.element_ty)
            tl.store(out_row + col, result, mask=None if piece < WHOLE else col // VECTOR < end)
        if EDGES:
            result = _result(edges, row_max, scale, LOG)
            tl.store(out_row + edge_col, result.to(out.dtype.element_ty), mask=edge_mask)

    if PARTS > 1:
        leave(words, counters, group, PARTS, SLOTS)


STEP = Cooperative(softmax_v08_cooperative_kernel, "softmax/v08_cooperative", 1, divided, softmax_v02_online)
_known: dict[tuple[Any, ...], Known] = {}


def softmax_v08_cooperative(x: Tensor, *, out: Tensor, log: bool = False) -> None:
    """out = softmax of x's rows, or its logarithm; x: [M, N], contiguous rows; out: [M, N]; fp32, bf16 or fp16."""
    if not in_parts(softmax_v08_cooperative, x, out=out, log=log):
        launch(STEP, _known, (x,), out, log)

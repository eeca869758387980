"""softmax_backward v05_cooperative: split rows, shared by programs that are all resident.

Change:   a row longer than a program's tile is split into PARTS. The program of each part finds its sum, publishes it,
          waits for the sums of the others, and writes its part. Shorter rows are treated as in v03, or by persistent
          programs as in softmax's v06, whichever the search finds faster. If a row is not a whole number of vectors,
          the next one is misaligned: a few elements at both ends are taken one by one, and vectors of 16 bytes in
          between.
Why:      as in softmax's v08: a cooperative launch guarantees that all programs run at once, so one may wait for
          another's number. The registers of the whole GPU then bound the length of a row. While a program waits, its
          next part travels to shared memory.
Counter:  time stays at short rows, and falls at long or odd ones.
Requires: rows whose elements are contiguous, at any distance from each other.
Routes:   up to a tile: as in v03 or softmax's v06; single elements if a row is not a whole number of vectors
          longer, if all programs of a row can be resident: split; single elements if the skews of dout, y and out
            differ
          longer still: v01's kernel
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
from kernel_twins._triton.softmax.softmax_backward.v01_two_passes import softmax_backward_v01_two_passes

KEPT_CONVERTED = 16  # elements a thread, of each matrix, up to which it keeps them as fp32

LOG2_E = tl.constexpr(1.4426950408889634)
# Polls the 64-bit word at an address until its lower half has the given value, and returns it; returns 0 for address 0.
AWAIT = tl.constexpr("""{
    .reg .pred %done;
    .reg .b32 %low, %high;
    mov.b64 $0, 0;
    setp.eq.b64 %done, $1, 0;
AGAIN:
    @%done bra END;
    ld.relaxed.gpu.global.b64 $0, [$1];
    mov.b64 {%low, %high}, $0;
    setp.eq.b32 %done, %low, $2;
    bra AGAIN;
END:
}""")

CONFIGS = configurations(
    (
        (4096, 8, 1, 4), (1024, 16, 1, 1), (2048, 16, 1, 1), (8192, 4, 1, 8), (8192, 4, 1, 4), (16384, 2, 1, 16),
        (16384, 2, 1, 8), (32768, 2, 1, 16),
        (4096, 8, 3, 4), (8192, 4, 3, 8), (8192, 4, 3, 4), (16384, 2, 3, 16), (16384, 2, 3, 8), (32768, 1, 3, 16),
    )
)  # fmt: skip


def divided(N: int, itemsize: int, wide: bool, config: dict[str, Any]) -> dict[str, int]:
    """The tiling of rows of N elements: ROWS a tile, or PARTS a row."""
    tile, threads, vector = config["TILE_BYTES"] // itemsize, 32 * config["num_warps"], VECTOR_BYTES // itemsize
    block, parts = min(triton.next_power_of_2(N), tile), triton.cdiv(N, tile)
    if block < tile:
        tile = max(block, min(tile, KEPT_CONVERTED * threads))
    wide = wide and (N % vector == 0 or block == tile)
    return {
        "ROWS": tile // block, "BLOCK_N": block, "PARTS": parts, "SLOTS": max(triton.next_power_of_2(parts), threads),
        "VECTOR": vector if wide else 1, "EDGES": wide and N % vector > 0, "EVEN": parts * block == N,
        "ANEW": parts > 1 or tile > KEPT_CONVERTED * threads,
    }  # fmt: skip


DIVIDED = heuristics(divided, "dout", ("ROWS", "BLOCK_N", "PARTS", "SLOTS", "VECTOR", "EDGES", "EVEN", "ANEW"))


@triton.jit
def _terms(dout, y, LOG: tl.constexpr):
    return dout.to(tl.float32) if LOG else dout.to(tl.float32) * y.to(tl.float32)


@triton.jit
def _result(dout, y, row_sum, LOG: tl.constexpr):
    dout, y = dout.to(tl.float32), y.to(tl.float32)
    return dout - tl.exp2(y * LOG2_E) * row_sum if LOG else y * (dout - row_sum)


@triton.jit
def _exchange(part_sum, words, part, turn, PARTS: tl.constexpr, SLOTS: tl.constexpr):
    # words: [2, PARTS], each with a part's sum in the upper half and the number of its turn, counted from 1, in the
    # lower; at first all are 0. Turns alternate between the two rows of words. No word is overwritten too early: a
    # program that publishes for turn + 2 has seen all words of turn + 1, so all programs have read those of turn.
    words += turn % 2 * PARTS
    word = part_sum.to(tl.uint32, bitcast=True).to(tl.int64) << 32 | (turn + 1)
    # Relaxed: readers need nothing but the word itself, so there is nothing to release or acquire.
    tl.atomic_xchg(words + part, word, sem="relaxed", scope="gpu")

    # Each part's word is polled by one thread.
    slot = tl.arange(0, SLOTS)
    address = tl.where(slot < PARTS, (words + slot).to(tl.int64), 0)
    word = tl.inline_asm_elementwise(AWAIT, "=&l,l,r", [address, turn + 1], tl.int64, is_pure=False, pack=1)
    return tl.sum((word >> 32).to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit
def _short_rows(
    dout, y, out, M, N, stride_dm, stride_ym, LOG: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, BLOCK_N)[None, :]
    mask = None if EVEN else col // VECTOR < N // VECTOR
    start = tl.program_id(0) * ROWS
    for first in tl.range(start, start + 1 if STAGES == 1 else M, tl.num_programs(0) * ROWS, num_stages=STAGES):
        # Places beyond the last row repeat it, and store the same values again. Offsets have 64 bits.
        row = tl.minimum(first + tl.arange(0, ROWS)[:, None], M - 1).to(tl.int64)
        # Written so that the compiler sees offsets that are multiples of VECTOR.
        dout_rows, y_rows = dout + row * stride_dm // VECTOR * VECTOR, y + row * stride_ym // VECTOR * VECTOR
        dout_tile = tl.load(dout_rows + col, mask=mask, other=None if EVEN else 0.0)
        y_tile = tl.load(y_rows + col, mask=mask, other=None if EVEN else 0.0)
        row_sum = tl.sum(_terms(dout_tile, y_tile, LOG), axis=1, keep_dims=True)
        result = _result(dout_tile, y_tile, row_sum, LOG)
        tl.store(out + row * N // VECTOR * VECTOR + col, result.to(out.dtype.element_ty), mask=mask)


@triton.autotune(CONFIGS, ["N"], prune_configs_by=fitting("dout", 2), cache_results=True, do_bench=tuning.bench)
@triton.heuristics(DIVIDED)
@triton.jit
def softmax_backward_v05_cooperative_kernel(
    dout, y, out, counters, M, N, stride_dm, stride_ym, LOG: tl.constexpr, WIDE: tl.constexpr,
    TILE_BYTES: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, EVEN: tl.constexpr, ANEW: tl.constexpr,
):  # fmt: skip
    # dout, y: [M, N], out: [M, N] contiguous; counters: words [groups, 2, PARTS], of 64 bits, then tickets [groups],
    # all 0.
    if ROWS > 1:
        _short_rows(dout, y, out, M, N, stride_dm, stride_ym, LOG, STAGES, ROWS, BLOCK_N, VECTOR, EVEN)
        return

    # PARTS programs form a group, which works on one row at a time.
    part, group, groups = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
    words = counters.to(tl.pointer_type(tl.int64)) + group * (2 * PARTS) if PARTS > 1 else None
    # Columns are counted from the row's first vector of 16 bytes. Each part has `share` vectors, the last one fewer.
    share = tl.cdiv(N // VECTOR, PARTS)
    place = tl.arange(0, BLOCK_N)
    col = part * (share * VECTOR) + place
    turn = 0
    ONE: tl.constexpr = PARTS == 1 and STAGES == 1
    for index in tl.range(group, group + 1 if ONE else M, 1 if ONE else groups, num_stages=STAGES):
        # 64-bit offsets, rounded up to whole vectors in a form that the compiler sees.
        row = tl.cast(index, tl.int64)
        dout_row = dout + tl.cdiv(row * stride_dm, VECTOR) * VECTOR
        y_row = y + tl.cdiv(row * stride_ym, VECTOR) * VECTOR
        out_start = tl.cdiv(row * N, VECTOR) * VECTOR
        head = (out_start - row * N).to(tl.int32) if EDGES else 0
        vectors = (N - head) // VECTOR
        if EDGES:
            # The elements before the first vector, in the first VECTOR places, and behind the last one. They are loaded
            # first: after the reduction, which waits for the rest of the row, they would take another memory latency.
            edge = tl.arange(0, 2 * VECTOR)
            edge_col = tl.where(edge < VECTOR, edge - head, vectors * VECTOR + edge - VECTOR)
            edge_mask = (edge_col < tl.where(edge < VECTOR, 0, N - head)) & (part == 0)
            dout_edges = tl.load(dout_row + edge_col, mask=edge_mask, other=0.0)
            y_edges = tl.load(y_row + edge_col, mask=edge_mask, other=0.0)
        # The mask is the same for a whole vector, so that it is loaded by one access.
        mask = None if EVEN else place // VECTOR < tl.minimum(share, vectors - part * share)
        dout_tile = tl.load(dout_row + col, mask=mask, other=None if EVEN else 0.0)
        y_tile = tl.load(y_row + col, mask=mask, other=None if EVEN else 0.0)
        row_sum = tl.sum(_terms(dout_tile, y_tile, LOG))
        if EDGES:
            row_sum += tl.sum(_terms(dout_edges, y_edges, LOG))
        if PARTS > 1:
            row_sum = _exchange(row_sum, words, part, turn, PARTS, SLOTS)
            turn += 1
        if ANEW:
            dout_tile, y_tile = as_it_came(dout_tile), as_it_came(y_tile)
        result = _result(dout_tile, y_tile, row_sum, LOG)
        tl.store(out + out_start + col, result.to(out.dtype.element_ty), mask=mask)
        if EDGES:
            result = _result(dout_edges, y_edges, row_sum, LOG)
            tl.store(out + out_start + edge_col, result.to(out.dtype.element_ty), mask=edge_mask)

    if PARTS > 1:
        leave(words, counters, group, PARTS, SLOTS)


STEP = Cooperative(
    softmax_backward_v05_cooperative_kernel,
    "softmax_backward/v05_cooperative",
    2,
    divided,
    softmax_backward_v01_two_passes,
)
_known: dict[tuple[Any, ...], Known] = {}


def softmax_backward_v05_cooperative(dout: Tensor, y: Tensor, *, out: Tensor, log: bool = False) -> None:
    """out = gradient of softmax's input, or of log_softmax's; fp32, bf16 or fp16.

    dout, its result's gradient, and y, its result: [M, N], contiguous rows; out: [M, N].
    """
    if not in_parts(softmax_backward_v05_cooperative, dout, y, out=out, log=log):
        launch(STEP, _known, (dout, y), out, log)

"""Rows by packs: of every run the packs that touch it, and what is not the run's is cut off.

A tile is K outputs of P packs each. Packs are numbered across an output's runs, so short runs fill lanes, too. Few
outputs are split into parts, of which there are several times as many as run at once: a slow SM then takes fewer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_twins._triton.reduction.reduction_nd.packs import (
    fold,
    fold_packs,
    key_of,
    load_packs,
    neutral,
    nothing,
    take,
    total_of,
    write,
)
from kernel_twins._triton.reduction.reduction_nd.totals import place_of, run_of


@triton.jit
def reduction_nd_packed_rows_kernel(
    x, out, parts, part_places, kept_sizes, kept_strides, kept_steps, sizes, strides, outputs, runs, packs,
    extent: tl.int64, divisor,
    KIND: tl.constexpr, K: tl.constexpr, P: tl.constexpr, VECTOR: tl.constexpr, SKEWED: tl.constexpr,
    SPLIT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    # x, out: addressed by the kept axes and the reduced axes; x's elements end at `extent`. parts, and for argmax
    # part_places: [parts, outputs]. A run takes `packs` numbers. Unless SKEWED, all runs are whole packs.
    LAST: tl.constexpr = len(sizes) - 1
    program, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    output = program * K + tl.arange(0, K)
    offset, step = place_of(output, kept_sizes, kept_strides, kept_steps)
    inside = (output < outputs)[None, :, None]
    # Packs are a tile's first axis: that is where the compiler lays a warp's lanes, which then read whole sectors.
    lane, place = tl.arange(0, P)[:, None, None], tl.arange(0, VECTOR)[None, None, :]
    run = tl.cast(sizes[LAST], tl.int32)
    whole = extent // VECTOR * VECTOR
    chunks = (runs * packs - 1) // P + 1
    each = (chunks - 1) // count + 1
    values, places = nothing((P, K, VECTOR), KIND)
    for chunk in tl.range(part * each, tl.minimum((part + 1) * each, chunks), loop_unroll_factor=UNROLL):
        pack = chunk * P + lane
        first, known = offset[None, :, None], inside
        if LAST > 0:
            number = pack // packs
            pack -= number * packs
            outer, _ = run_of(number, sizes, strides, strides)
            first, known = first + outer, known & (number < runs)
        aligned = first // VECTOR * VECTOR + pack.to(tl.int64) * VECTOR
        skew = (first - first // VECTOR * VECTOR).to(tl.int32)
        known = known & (pack * VECTOR < run + skew) & (aligned < whole)
        tile = load_packs(x, aligned, place, known, KIND)
        at = pack * VECTOR - skew + place
        if SKEWED:
            # As unsigned numbers, positions before the run are large: one comparison.
            tile = neutral(tile, at.to(tl.uint32, bitcast=True) < run.to(tl.uint32, bitcast=True), KIND)
        values, places = take(values, places, tile, at, KIND)
    if SKEWED:  # noqa: SIM102 - a choice of the compiler's, and one of the program
        # x's last elements, where it ends within a pack: the last output's last ones.
        if (program == tl.num_programs(0) - 1) & (part == count - 1):
            tail = tl.load(x + whole + place, mask=whole + place < extent, other=0.0).to(tl.float32)
            mine = (output == outputs - 1)[None, :, None] & (lane == 0) & (whole + place < extent)
            at = (whole - extent).to(tl.int32) + run + place
            values, places = take(values, places, neutral(tail, mine, KIND), at, KIND)
    values, places = fold_packs(values, places, KIND)
    value, at = total_of(fold(key_of(values, places, KIND), 0, KIND), KIND)
    if KIND == "argmax":  # if nothing is above -inf, the first element counts, which the first part has
        at = tl.where((value == -float("inf")) & (part == 0), 0, at)
    plane = part.to(tl.int64) * outputs
    write(out, parts, part_places, output, step, value, at, divisor, output < outputs, plane, KIND, SPLIT)

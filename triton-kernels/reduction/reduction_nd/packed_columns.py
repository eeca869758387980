"""Columns by packs, of a matrix whose rows start anywhere: a program takes rows of one skew.

Rows that are VECTOR, or a divisor of it, apart start at the same place of a pack. So a lane's packs hold the same
columns of all rows of such a class, and nothing is shifted. Each class and part has a plane of totals, and a second
launch merges the planes.

Fewer columns than a tile are FOLDED: that many rows, which continue in memory, are one row, whose columns repeat the
outputs. A program then adds up its columns' repetitions before it leaves its totals.

Argmax of WHOLE matrices reduces the columns, too. A lane meets a column's elements in the order of their indices,
whichever of the two axes has the smaller step. So it counts rows here as well, and only totals have indices of 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_twins._triton.reduction.reduction_nd.packs import (
    fold,
    key_of,
    load_packs,
    neutral,
    nothing,
    take,
    total_of,
    write,
)
from kernel_twins._triton.reduction.reduction_nd.totals import NOWHERE, reduce, run_of


@triton.jit
def reduction_nd_packed_columns_kernel(
    x, out, parts, part_places, kept_sizes, kept_strides, kept_steps, line, stride, rows, tiles, classes, outputs,
    extent: tl.int64, divisor, row_step,
    KIND: tl.constexpr, BLOCK_R: tl.constexpr, PACKS: tl.constexpr, VECTOR: tl.constexpr, SPLIT: tl.constexpr,
    FOLDED: tl.constexpr, LINE: tl.constexpr, WHOLE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    # x: matrices [rows, line] whose rows are `stride` apart; its elements end at `extent`. parts, and for argmax
    # part_places: [parts, classes, outputs], and behind it, if FOLDED, [parts, line]. LINE: outputs, at least, then. If
    # WHOLE, [parts, classes, tiles, outputs]; the last kept axis is then the columns, whose step is one of indices.
    LAST: tl.constexpr = len(kept_sizes) - 1
    program, part, count = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    outer, skew_class = (program // tiles // classes).to(tl.int64), program // tiles % classes
    offset, first_step = run_of(outer, kept_sizes, kept_strides, kept_steps)
    base = offset + skew_class.to(tl.int64) * stride
    skew = (base - base // VECTOR * VECTOR).to(tl.int32)
    whole = extent // VECTOR * VECTOR
    # Packs are a tile's first axis: that is where the compiler lays a warp's lanes, which then read whole sectors.
    pack = program % tiles * PACKS + tl.arange(0, PACKS)[:, None, None]
    place, lane = tl.arange(0, VECTOR)[None, None, :], tl.arange(0, BLOCK_R)[None, :, None]
    inside = pack * VECTOR < line + skew
    distance = tl.cast(stride, tl.int64) * classes // VECTOR * VECTOR  # whole packs, as the compiler sees then
    start = base // VECTOR * VECTOR + pack.to(tl.int64) * VECTOR + lane.to(tl.int64) * distance
    mine = (rows - 1 - skew_class) // classes + 1  # rows of the class
    each = ((mine - 1) // BLOCK_R // count + 1) * BLOCK_R
    values, places = nothing((PACKS, BLOCK_R, VECTOR), KIND)
    for first in tl.range(part * each, tl.minimum((part + 1) * each, mine), BLOCK_R, loop_unroll_factor=UNROLL):
        row, aligned = first + lane, start + tl.cast(first, tl.int64) * distance
        tile = load_packs(x, aligned, place, inside & (row < mine) & (aligned < whole), KIND)
        values, places = take(values, places, tile, row, KIND)
    # x's last elements, where it ends within a pack: the last row's, which the first lanes take last.
    is_last = program // tiles == tl.num_programs(0) // tiles - classes + (rows - 1) % classes
    if is_last & (part == count - 1):
        tail = tl.load(x + whole + place, mask=whole + place < extent, other=0.0).to(tl.float32)
        here = inside & (start + (mine - 1).to(tl.int64) * distance == whole) & (lane == 0)
        tail = neutral(tail, here & (whole + place < extent), KIND)
        values, places = take(values, places, tail, mine - 1, KIND)
    value, row = total_of(fold(key_of(values, places, KIND), 1, KIND), KIND)
    if KIND == "argmax":
        row = tl.where(row == NOWHERE, NOWHERE, row * classes + skew_class)
        # If nothing is above -inf, the first element counts.
        row = tl.where((value == -float("inf")) & (part == 0) & (skew_class == 0), 0, row)
    column = (program % tiles * PACKS + tl.arange(0, PACKS)[:, None]) * VECTOR - skew + tl.arange(0, VECTOR)[None, :]
    known = (column >= 0) & (column < line)
    plane = (part * classes + skew_class).to(tl.int64) * outputs
    if FOLDED:
        repeated = parts + count.to(tl.int64) * outputs + part.to(tl.int64) * line
        tl.store(repeated + column, value, mask=known)
        tl.debug_barrier()  # other threads' columns are there
        repetition, output = tl.arange(0, FOLDED)[:, None], tl.arange(0, LINE)
        column = repetition * outputs + output[None, :]
        known = (output[None, :] < outputs) & (column < line)
        value = tl.load(repeated + column, mask=known, other=0.0 if KIND == "sum" else -float("inf"))
        value, row = total_of(fold(key_of(value, value, KIND), 0, KIND), KIND)
        write(out, parts, None, output, output, value, row, divisor, output < outputs, plane, KIND, True)
    elif WHOLE:
        index = row * row_step + column.to(tl.int64) * kept_steps[LAST]
        index = tl.where(known & (row != NOWHERE), index, NOWHERE)
        value, index = reduce(neutral(value, known, KIND), index, 1, KIND)
        value, index = reduce(value, index, 0, KIND)
        plane = ((part * classes + skew_class) * tiles + program % tiles).to(tl.int64) * outputs
        write(out, parts, part_places, outer, outer, value, index, divisor, outer < outputs, plane, KIND, True)
    else:
        output, step = outer * line + column, first_step + column * tl.cast(kept_steps[LAST], tl.int64)
        write(out, parts, part_places, output, step, value, row, divisor, known, plane, KIND, SPLIT)

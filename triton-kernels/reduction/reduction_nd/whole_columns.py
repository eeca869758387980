"""Many outputs of few elements each: a lane has whole outputs, wherever they lie, and lanes exchange nothing.

Outputs are numbered across all kept axes, so short inner axes leave no lane idle. A lane asks for TURNS elements of
each of its outputs before it adds them. Its width is what all distances allow; neighbours that are read element by
element still share their sectors, since a lane's loads follow each other at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_twins._triton.reduction.reduction_nd.packs import nothing, take, write


@triton.jit
def column_of(column, sizes, strides, steps, VECTOR: tl.constexpr):
    # The offsets in x and out. Numbers have 32 bits, offsets 64. A vector's elements are neighbours in x.
    LAST: tl.constexpr = len(sizes) - 1
    index, place = column // VECTOR, column % VECTOR
    outer = tl.zeros_like(column).to(tl.int64)
    step = outer
    for axis in tl.static_range(LAST, -1, -1):
        at = index
        if axis > 0:
            size = sizes[axis] // VECTOR if axis == LAST else sizes[axis]
            index = index // size
            at = at - index * size
        if axis == LAST:
            inner = (at * VECTOR).to(tl.int64) if VECTOR > 1 else at.to(tl.int64) * strides[axis]
            step += (at * VECTOR + place).to(tl.int64) * steps[axis]
        else:
            outer += at.to(tl.int64) * strides[axis]
            step += at.to(tl.int64) * steps[axis]
    return outer // VECTOR * VECTOR + inner + place, step


@triton.jit
def next_of(at, element, sizes, strides):
    # The next element of one or two reduced axes, without a division: its index along the last axis, and its offset.
    LAST: tl.constexpr = len(sizes) - 1
    element += strides[LAST]
    if LAST > 0:
        at += 1
        is_over = at == sizes[LAST]
        element += tl.where(is_over, strides[0] - tl.cast(sizes[LAST], tl.int64) * strides[LAST], 0)
        at = tl.where(is_over, 0, at)
    return at, element


@triton.jit
def reduction_nd_whole_columns_kernel(
    x, out, parts, part_places, kept_sizes, kept_strides, kept_steps, sizes, strides, outputs, elements, divisor,
    KIND: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr, VECTOR: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    # x, out: addressed by the kept axes and one or two reduced axes. parts and part_places, as the other kernels have
    # them, are not used. ORDERED: out's elements lie in outputs' order.
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column // VECTOR < outputs // VECTOR
    offset, step = column_of(column, kept_sizes, kept_strides, kept_steps, VECTOR)
    if ORDERED:
        step = column
    values, places = nothing((BLOCK,), KIND)
    at, element = tl.program_id(0) * 0, tl.program_id(0).to(tl.int64) * 0
    for start in tl.range(0, elements, TURNS):
        for turn in tl.static_range(TURNS):
            where = x + offset + element // VECTOR * VECTOR
            known = inside & (start + turn < elements)
            tile = tl.load(where, mask=known, other=0.0 if KIND == "sum" else -float("inf")).to(tl.float32)
            values, places = take(values, places, tile, start + turn, KIND)
            at, element = next_of(at, element, sizes, strides)
    if KIND == "argmax":  # if nothing is above -inf, the first element counts
        places = tl.maximum(places, 0).to(tl.int64)
    write(out, parts, part_places, column, step, values, places, divisor, inside, 0, KIND, False)

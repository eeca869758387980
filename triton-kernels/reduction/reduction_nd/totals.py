"""Totals: what a program accumulates (a sum, a maximum, or the index of one), and the addresses of its elements.

A total is two tensors: values, and places, the indices of maxima, which only "argmax" uses. KIND is "sum" (also for a
mean, whose sum is divided), "max" or "argmax".
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(2**62)  # an index beyond all others


@triton.jit
def place_of(index, sizes, strides, steps):
    # The offsets in x and the places of the elements with these numbers; sizes, strides and steps are tuples with an
    # entry an axis. The outermost axis needs no division, as no index is beyond its end.
    offset, step = index * 0, index * 0
    for axis in tl.static_range(len(sizes) - 1, 0, -1):
        at = index % sizes[axis]
        offset += at * strides[axis]
        step += at * steps[axis]
        index = index // sizes[axis]
    return offset + index * strides[0], step + index * steps[0]


@triton.jit
def run_of(index, sizes, strides, steps):
    # The same for the first elements of runs: `index` numbers the runs of the innermost axis. Offsets have 64 bits;
    # numbers of 32 bits are divided as such, which takes a fraction of the instructions.
    offset = tl.cast(index * 0, tl.int64)
    step = offset
    for axis in tl.static_range(len(sizes) - 2, -1, -1):
        at = index
        if axis > 0:
            index = at // sizes[axis]
            at -= index * sizes[axis]
        offset += tl.cast(at, tl.int64) * strides[axis]
        step += tl.cast(at, tl.int64) * steps[axis]
    return offset, step


@triton.jit
def first_largest(a, a_place, b, b_place):
    # The larger element and its place. Of equal elements the first one counts, of NaNs the first NaN, in any order.
    first = b_place < a_place
    b_wins = (b > a) | ((b == a) & first) | ((b != b) & (first | (a == a)))
    return tl.where(b_wins, b, a), tl.where(b_wins, b_place, a_place)


@triton.jit
def none(SHAPE: tl.constexpr, KIND: tl.constexpr):
    # The total of no elements.
    values = tl.full(SHAPE, 0.0 if KIND == "sum" else -float("inf"), dtype=tl.float32)
    return values, tl.full(SHAPE, NOWHERE, dtype=tl.int64) if KIND == "argmax" else values


@triton.jit
def merge(values, places, others, other_places, KIND: tl.constexpr):
    if KIND == "sum":
        values += others
    elif KIND == "max":
        # NaN wins, as in PyTorch.
        values = tl.maximum(values, others, propagate_nan=tl.PropagateNan.ALL)
    else:
        values, places = first_largest(values, places, others, other_places)
    return values, places


@triton.jit
def add(values, places, pointers, at, mask, KIND: tl.constexpr):
    # Adds the elements at these pointers, whose places are `at`.
    loaded = tl.load(pointers, mask=mask, other=0.0 if KIND == "sum" else -float("inf")).to(tl.float32)
    if KIND == "argmax":
        at = tl.where(mask, at, tl.full((1,), NOWHERE, dtype=tl.int64))
    return merge(values, places, loaded, at, KIND)


@triton.jit
def later(values, times, pointers, now, mask):
    # argmax in the order of places: an element wins only if it is larger than all before it, or the first NaN.
    loaded = tl.load(pointers, mask=mask, other=-float("inf")).to(tl.float32)
    wins = ~(loaded <= values) & (values == values)
    return tl.where(wins, loaded, values), tl.where(wins, now, times)


@triton.jit
def reduce(values, places, AXIS: tl.constexpr, KIND: tl.constexpr):
    # tl.max ignores NaN, and returns an index within the tile. So a maximum takes two reductions, and its place a
    # third. tl.reduce with a function of two pairs would take one, but exchanges three registers a step, and the
    # interpreter calls that function for every element.
    if KIND == "sum":
        values = tl.sum(values, axis=AXIS)
        places = values
    else:
        is_nan = values != values
        has_nan = tl.max(is_nan.to(tl.int32), axis=AXIS) > 0
        largest = tl.max(values, axis=AXIS)
        if KIND == "argmax":
            if len(values.shape) > 1:
                wanted = tl.where(tl.expand_dims(has_nan, AXIS), is_nan, values == tl.expand_dims(largest, AXIS))
            else:
                wanted = tl.where(has_nan, is_nan, values == largest)
            places = tl.min(tl.where(wanted, places, tl.full((1,), NOWHERE, dtype=tl.int64)), axis=AXIS)
        values = tl.where(has_nan, float("nan"), largest)
        if KIND == "max":
            places = values
    return values, places


@triton.jit
def store(out, step, values, places, divisor, mask, KIND: tl.constexpr):
    if KIND == "argmax":
        tl.store(out + step, places, mask=mask)
    elif KIND == "max":
        tl.store(out + step, values.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + step, tl.div_rn(values, divisor).to(out.dtype.element_ty), mask=mask)

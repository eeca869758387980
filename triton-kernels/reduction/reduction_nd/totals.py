"""What is made of elements one after the other: a sum, a maximum, or its place; and where elements lie.

A total is two tensors, values and places; without "argmax" places are nothing but passed on. KIND is "sum" (a mean is a
sum that is divided), "max" or "argmax".
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(2**62)  # a place behind all others


@triton.jit
def place_of(index, sizes, strides, steps):
    # Where the elements of these numbers lie in x, and their places, from tuples with an entry for each axis. Of the
    # outermost axis no element is beyond the last one, so it needs no division.
    offset, step = index * 0, index * 0
    for axis in tl.static_range(len(sizes) - 1, 0, -1):
        at = index % sizes[axis]
        offset += at * strides[axis]
        step += at * steps[axis]
        index = index // sizes[axis]
    return offset + index * strides[0], step + index * steps[0]


@triton.jit
def run_of(index, sizes, strides, steps):
    # The same of the first elements of the innermost axis's runs of these numbers.
    offset, step = index * 0, index * 0
    for axis in tl.static_range(len(sizes) - 2, -1, -1):
        at = index % sizes[axis] if axis > 0 else index
        offset += at * strides[axis]
        step += at * steps[axis]
        index = index // sizes[axis] if axis > 0 else index
    return offset, step


@triton.jit
def first_largest(a, a_place, b, b_place):
    # Of equal elements the first place, of NaNs that of the first one: whatever order they come in.
    first = b_place < a_place
    b_wins = (b > a) | ((b == a) & first) | ((b != b) & (first | (a == a)))
    return tl.where(b_wins, b, a), tl.where(b_wins, b_place, a_place)


@triton.jit
def none(SHAPE: tl.constexpr, KIND: tl.constexpr):
    # Of no elements.
    values = tl.full(SHAPE, 0.0 if KIND == "sum" else -float("inf"), dtype=tl.float32)
    return values, tl.full(SHAPE, NOWHERE, dtype=tl.int64) if KIND == "argmax" else values


@triton.jit
def merge(values, places, others, other_places, KIND: tl.constexpr):
    if KIND == "sum":
        values += others
    elif KIND == "max":
        # PyTorch's maximum of a NaN and a number is NaN.
        values = tl.maximum(values, others, propagate_nan=tl.PropagateNan.ALL)
    else:
        values, places = first_largest(values, places, others, other_places)
    return values, places


@triton.jit
def add(values, places, pointers, at, mask, KIND: tl.constexpr):
    # The elements at these pointers, whose places are `at`.
    loaded = tl.load(pointers, mask=mask, other=0.0 if KIND == "sum" else -float("inf")).to(tl.float32)
    if KIND == "argmax":
        at = tl.where(mask, at, tl.full((1,), NOWHERE, dtype=tl.int64))
    return merge(values, places, loaded, at, KIND)


@triton.jit
def reduce(values, places, AXIS: tl.constexpr, KIND: tl.constexpr):
    # tl.max leaves NaN out, and its index is that of the tile: a maximum takes two reductions, and its place a third.
    # tl.reduce by a function of two pairs takes one, in which threads exchange three registers; the interpreter calls
    # that function for every element.
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

"""Packs of 16 bytes that lie where memory has their multiples: what a lane accumulates of them, and how lanes merge.

A row or a column tile starts anywhere in its first pack. That pack is loaded whole, and so is the last one: both lie
within x, since their other elements are neighbours in x. Only x's own last elements, where x ends within a pack, are
loaded one by one.

For argmax a lane keeps an int32 position of each largest element: it meets elements in their order. To merge lanes, a
value and its position are one int64, whose order is that of values first: one reduction takes the place of three.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_twins._triton.reduction.reduction_nd.totals import NOWHERE, merge, store

MOST_PLACES = tl.constexpr(2**31 - 1)  # beyond all positions; also NaN's number


@triton.jit
def nothing(SHAPE: tl.constexpr, KIND: tl.constexpr):
    # The total of no elements. Positions are only argmax's.
    values = tl.full(SHAPE, 0.0 if KIND == "sum" else -float("inf"), dtype=tl.float32)
    return values, tl.full(SHAPE, -1, dtype=tl.int32) if KIND == "argmax" else values


@triton.jit
def take(values, places, tile, at, KIND: tl.constexpr):
    # Adds a tile of elements whose positions `at` are beyond all before it.
    if KIND == "argmax":
        # Only a larger element wins, or the first NaN.
        wins = ~(tile <= values) & (values == values)
        places = tl.where(wins, at, places)
        values = tl.where(wins, tile, values)
    else:
        values, places = merge(values, places, tile, tile, KIND)
    return values, places


@triton.jit
def key_of(values, places, KIND: tl.constexpr):
    # What lanes merge by a plain sum or maximum.
    if KIND == "sum":
        keys = values
    else:
        # The bits of a negative number count downwards, and NaN is the largest.
        keys = values.to(tl.int32, bitcast=True)
        keys = tl.where(keys < 0, keys ^ MOST_PLACES, keys)
        keys = tl.where(values != values, MOST_PLACES, keys)
        if KIND == "argmax":
            # -0.0 equals 0.0, and of equal values the lowest position makes the largest number.
            keys = tl.where(values == 0.0, 0, keys)
            places = tl.where(places < 0, MOST_PLACES, places)
            keys = (keys.to(tl.int64) << 32) | (places ^ MOST_PLACES).to(tl.int64)
    return keys


@triton.jit
def fold_packs(values, places, KIND: tl.constexpr):
    # The total of each lane's pack, the last axis, which no other lane has: neighbours are merged until one is left.
    if KIND == "sum":
        values = tl.sum(values, axis=2)
        places = values
    else:
        P: tl.constexpr = values.shape[0]
        K: tl.constexpr = values.shape[1]
        HALVINGS: tl.constexpr = 3 if values.shape[2] == 8 else 2
        for _ in tl.static_range(HALVINGS):
            a, b = tl.split(values.reshape(P, K, values.shape[2] // 2, 2))
            a_place, b_place = a, b
            if KIND == "argmax":
                a_place, b_place = tl.split(places.reshape(P, K, places.shape[2] // 2, 2))
            values, places = merge(a, a_place, b, b_place, KIND)
        values, places = values.reshape(P, K), places.reshape(P, K)
    return values, places


@triton.jit
def fold(keys, AXIS: tl.constexpr, KIND: tl.constexpr):
    return tl.sum(keys, axis=AXIS) if KIND == "sum" else tl.max(keys, axis=AXIS)


@triton.jit
def total_of(keys, KIND: tl.constexpr):
    # The values and, for argmax, the positions in int64: NOWHERE if nothing was above -inf.
    if KIND == "sum":
        values = keys
        places = keys
    else:
        bits = (keys >> 32).to(tl.int32) if KIND == "argmax" else keys
        values = tl.where(bits < 0, bits ^ MOST_PLACES, bits).to(tl.float32, bitcast=True)
        places = values
        if KIND == "argmax":
            places = (keys & MOST_PLACES) ^ MOST_PLACES
            places = tl.where(places == MOST_PLACES, NOWHERE, places)
    return values, places


@triton.jit
def load_packs(x, aligned, place, known, KIND: tl.constexpr):
    # Packs at offsets that the compiler sees to be multiples of their size, under one mask each.
    return tl.load(x + (aligned + place), mask=known, other=0.0 if KIND == "sum" else -float("inf")).to(tl.float32)


@triton.jit
def neutral(tile, own, KIND: tl.constexpr):
    # The tile without the elements that are others'.
    return tl.where(own, tile, 0.0 if KIND == "sum" else -float("inf"))


@triton.jit
def write(out, parts, part_places, output, step, values, places, divisor, mask, plane, KIND: tl.constexpr,
          SPLIT: tl.constexpr):  # fmt: skip
    # The totals: of a part to its plane of the workspace, at output's number, or the result's, at its place in out.
    if SPLIT:
        tl.store(parts + plane + output, values, mask=mask)
        if KIND == "argmax":
            tl.store(part_places + plane + output, places, mask=mask)
    else:
        store(out, step, values, places, divisor, mask, KIND)

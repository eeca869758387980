"""The axes of a tensor in the form that kernels loop over: kept and reduced axes apart, each in the order of memory.

Its counterpart is cuda-kernels/reduction/reduction_nd/merged_axes.h.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import triton


class Axis(NamedTuple):
    size: int
    stride: int  # in elements of x
    step: int  # in elements of out; for a reduced axis, in argmax's index


Axes = tuple[Axis, ...]  # the outermost first, at least one


def axes_of(sizes: Sequence[int], strides: Sequence[int], ordered: bool = True) -> Axes:
    """The given axes, all kept or all reduced, merged to as few as possible; the last one has the smallest stride.

    Axes of size 1 are dropped. Two axes are merged if one continues in memory where the other ends; if ``ordered``,
    their steps must continue as well (otherwise steps mean nothing in the result). Axes of stride 0 come first.
    """
    step, axes = 1, []
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1:
            axes.append(Axis(size, stride, step))
        step *= size
    merged: list[Axis] = []
    # A stable sort, innermost first: of equal strides, the axis that was given last becomes the inner one.
    for outer in sorted(axes, key=lambda axis: axis.stride or math.inf):
        inner = merged[-1] if merged else None
        follows = inner is not None and outer.stride == inner.size * inner.stride
        if inner is not None and follows and (not ordered or outer.step == inner.size * inner.step):
            merged[-1] = Axis(outer.size * inner.size, inner.stride, inner.step)
        else:
            merged.append(outer)
    return tuple(merged[::-1]) or (Axis(1, 0, 0),)


def split(sizes: Sequence[int], strides: Sequence[int], reduced: Sequence[int], ordered: bool) -> tuple[Axes, Axes]:
    """The kept axes and the reduced ones; ``ordered``: the order of the reduced elements matters, as for argmax."""
    kept = [axis for axis in range(len(sizes)) if axis not in reduced]
    gone = [axis for axis in range(len(sizes)) if axis in reduced]

    def of(chosen: list[int], ordered: bool) -> Axes:
        return axes_of([sizes[axis] for axis in chosen], [strides[axis] for axis in chosen], ordered)

    return of(kept, True), of(gone, ordered)


def count(axes: Axes) -> int:
    return math.prod(axis.size for axis in axes)


def along_reduced(kept: Axes, reduced: Axes) -> bool:
    """True if the smallest stride belongs to a reduced axis, False if to a kept one."""
    return (reduced[-1].stride or math.inf) <= (kept[-1].stride or math.inf)


def least_padded(length: int, most: int, fewest: int = 1) -> int:
    """The largest power of 2 up to ``most`` whose blocks exceed the length by a quarter at most, or else ``fewest``."""
    size = min(triton.next_power_of_2(length), most)
    while size > fewest and 4 * triton.cdiv(length, size) * size > 5 * length:
        size //= 2
    return size

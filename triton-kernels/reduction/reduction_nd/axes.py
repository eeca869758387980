"""The axes of a tensor as kernels walk them: kept and reduced ones apart, each in the order of memory.

cuda-kernels/reduction/reduction_nd/axes.h does the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Axis(NamedTuple):
    size: int
    stride: int  # in elements of x
    step: int  # in elements of out, or, of a reduced axis, in places that argmax tells


Axes = tuple[Axis, ...]  # the outermost first, at least one


def axes_of(sizes: Sequence[int], strides: Sequence[int], ordered: bool = True) -> Axes:
    """As few axes as there can be of those given, which are all kept or all reduced; the last has the nearest elements.

    Axes of one element are dropped. Neighbours are merged where one goes on where the other ends, in memory and, where
    the result is ``ordered``, in what is stored or told, too; else steps mean nothing. Axes of stride 0 come first.
    """
    step, axes = 1, []
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1:
            axes.append(Axis(size, stride, step))
        step *= size
    merged: list[Axis] = []
    # The innermost first, and of equal strides the one that was given last, so that equal axes keep their order.
    for outer in sorted(axes, key=lambda axis: axis.stride or math.inf):
        inner = merged[-1] if merged else None
        follows = inner is not None and outer.stride == inner.size * inner.stride
        if inner is not None and follows and (not ordered or outer.step == inner.size * inner.step):
            merged[-1] = Axis(outer.size * inner.size, inner.stride, inner.step)
        else:
            merged.append(outer)
    return tuple(merged[::-1]) or (Axis(1, 0, 0),)


def split(sizes: Sequence[int], strides: Sequence[int], reduced: Sequence[int], ordered: bool) -> tuple[Axes, Axes]:
    """The kept axes and the reduced ones; ``ordered``: it matters which of the reduced elements is the first."""
    kept = [axis for axis in range(len(sizes)) if axis not in reduced]
    gone = [axis for axis in range(len(sizes)) if axis in reduced]

    def of(chosen: list[int], ordered: bool) -> Axes:
        return axes_of([sizes[axis] for axis in chosen], [strides[axis] for axis in chosen], ordered)

    return of(kept, True), of(gone, ordered)


def count(axes: Axes) -> int:
    return math.prod(axis.size for axis in axes)


def along_reduced(kept: Axes, reduced: Axes) -> bool:
    """Whether neighbours in memory lie along a reduced axis rather than along a kept one."""
    return (reduced[-1].stride or math.inf) <= (kept[-1].stride or math.inf)

"""Which backend ``backend="auto"`` takes for rows: the one that is expected to be the fastest, from measured times.

How much slower than the fastest one each backend is, is interpolated between the nearest measured cases, in logarithms.
``fastest.json`` has the times; ``python -m kernel_twins.report.calls.fastest`` derives it, and a test compares the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from kernel_twins.functional.choice import FILE
from kernel_twins.spec import ITEMSIZE, Case

BACKENDS = ("cuda", "torch", "triton")

NEIGHBOURS = 6
MARGIN = math.log(1.03)
"""PyTorch is taken where it is faster than ours by more than this: what times differ by between two recordings."""

# What two problems differ in, as distances in logarithms of sizes. Rows say less than their length, by which kernels
# are chosen; another layout counts as much as a length that is e^2 times as long.
_ROWS, _LAYOUT = 0.3, 2.0
_MERGED, _OPTION, _LEAST = 144.0, 0.25, 0.05  # squares

_OPTIONS = ("residual", "bias", "affine", "act")
_GAPS = {"": 0, "pitched": 3, "spaced": 8}
_WORD = 16  # bytes that a thread reads at once

Slowdowns = tuple[float, ...]  # logarithms, in the order of BACKENDS


@dataclass(frozen=True, slots=True)
class Problem:
    """What a call's time depends on. ``place`` is a point whose distance from another one tells how alike they are.

    ``axes`` tells of a reduction which of the merged axes are kept and which reduced, from the outermost inwards.
    """

    itemsize: int
    place: tuple[float, ...]
    axes: str = ""
    options: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, itemsize: int, sizes: Sequence[int], layout: Iterable[bool], axes: str = "", options: tuple[str, ...] = ()
    ) -> Problem:
        """``sizes`` are rows and their length, of reductions the innermost axis, too; ``layout`` is yes or no."""
        count, *lengths = map(math.log, sizes)
        return cls(itemsize, (_ROWS * count, *lengths, *(_LAYOUT * each for each in layout)), axes, options)


def rows(m: int, n: int, pitch: int, itemsize: int, options: Iterable[str] = ()) -> Problem:
    """m rows of n elements that begin ``pitch`` elements apart."""
    aligned, whole = pitch * itemsize % _WORD == 0, n * itemsize % _WORD == 0
    return Problem.of(itemsize, (m, n), (pitch != n, aligned, whole), "", tuple(sorted(options)))


def pitch_of(shape: Sequence[int], strides: Sequence[int], n: int, row: Iterable[int]) -> int:
    """How far apart neighbouring rows begin, where the axes in ``row`` are a row of n elements."""
    inside = set(row)
    apart = [
        stride
        for axis, (size, stride) in enumerate(zip(shape, strides, strict=True))
        if axis not in inside and size > 1
    ]
    return min(apart, default=n)


def reduced(shape: Sequence[int], strides: Sequence[int], axes: Iterable[int], itemsize: int) -> Problem:
    """A reduction, after axes that lie behind each other in memory and share a fate are merged."""
    dropped = set(axes)
    merged: list[tuple[int, int, bool]] = []
    by_stride = sorted(
        ((stride, size, axis in dropped) for axis, (size, stride) in enumerate(zip(shape, strides, strict=True))),
        reverse=True,
    )
    for stride, size, is_reduced in by_stride:
        if size == 1:
            continue
        if merged and merged[-1][2] == is_reduced and merged[-1][0] == stride * size:
            merged[-1] = (stride, merged[-1][1] * size, is_reduced)
        else:
            merged.append((stride, size, is_reduced))
    inner, length, _ = merged[-1] if merged else (1, 1, True)
    kept = math.prod(size for _, size, is_reduced in merged if not is_reduced)
    many = math.prod(size for _, size, is_reduced in merged if is_reduced)
    aligned = all(stride * itemsize % _WORD == 0 for stride, *_ in merged[:-1])
    layout = inner != 1, aligned, length * itemsize % _WORD == 0
    names = "".join(["r" if is_reduced else "k" for *_, is_reduced in merged])
    return Problem.of(itemsize, (kept, many, length), layout, names)


def measured(case: Case) -> Problem | None:
    """The problem that a measured case is; None if it has special values, or a layout that says nothing of others."""
    layout, itemsize = case.get("x") or case.get("logits"), ITEMSIZE[case.dtype]
    if case.get("values") or (layout != "permuted" and layout not in _GAPS) or not math.prod(case.shape):
        return None
    if case.get("axes") or case.get("kind"):
        axes = case.get("axes", str(len(case.shape) - 1))  # the last one, as the operation has it
        ordered = case.shape if layout == "permuted" else case.shape[::-1]
        strides, apart = [], 1
        for index, size in enumerate(ordered):
            strides.append(apart)
            apart *= size + (0 if index else _GAPS.get(layout, 0))
        return reduced(case.shape, strides if layout == "permuted" else strides[::-1], map(int, axes), itemsize)
    if layout == "permuted":
        return None
    m, n = case.shape
    options = [f"{name}.{case.get(name)}" for name in _OPTIONS if case.get(name)]
    return rows(m, n, n + _GAPS[layout], itemsize, options)


# ----------------------------------------------------------------------------------------------------------------------
# The expectation
# ----------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def table(gpu: str, function: str, differentiated: bool) -> dict[int, list[tuple[Problem, Slowdowns]]]:
    """The measured slowdowns by the elements' size, empty where there are none.

    Of calls whose gradients are wanted, forward and backward pass count together; if no backward pass of the function
    was measured, the forward pass counts alone.
    """
    passes = 2 if differentiated else 1
    found: dict[int, list[tuple[Problem, Slowdowns]]] = {}
    for slug, times in _content().get(gpu, {}).get(function, {}).items():
        problem = measured(Case.parse(slug))
        if problem is not None and min(len(each) for each in times.values()) >= passes:
            taken = [math.log(sum(times[backend][:passes])) for backend in BACKENDS]
            slowdowns = tuple(time - min(taken) for time in taken)
            found.setdefault(problem.itemsize, []).append((problem, slowdowns))
    return table(gpu, function, False) if differentiated and not found else found


@cache
def _content() -> dict[str, dict[str, dict[str, dict[str, list[float]]]]]:
    content: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = json.loads(FILE.read_text())
    return content


def slowdowns(known: Iterable[tuple[Problem, Slowdowns]], problem: Problem) -> dict[str, float]:
    """The logarithm of how much slower than the fastest each backend is expected to be; empty if nothing is known.

    The nearest cases count by the inverse of the fourth power of their distance.
    """
    place, axes, options = problem.place, problem.axes, problem.options
    # A loop over every case that was measured: it is what a call of new sizes waits for.
    distances = sorted(
        [
            (
                math.dist(place, other.place) ** 2
                + (_MERGED if axes != other.axes else 0.0)
                + (_OPTION if options != other.options else 0.0),
                told,
            )
            for other, told in known
        ]
    )[:NEIGHBOURS]
    if not distances:
        return {}
    weights = [(distance + _LEAST) ** -2 for distance, _ in distances]
    total = sum(weights)
    return {
        backend: sum(weight * told[index] for weight, (_, told) in zip(weights, distances, strict=True)) / total
        for index, backend in enumerate(BACKENDS)
    }


def ordered(gpu: str, function: str, problem: Problem, differentiated: bool) -> list[str]:
    """The backends, the one that is expected to be the fastest first; empty if nothing is known of such calls."""
    known = slowdowns(table(gpu, function, differentiated).get(problem.itemsize, ()), problem)
    if known:
        known["torch"] += MARGIN
    return sorted(known, key=lambda backend: known[backend])

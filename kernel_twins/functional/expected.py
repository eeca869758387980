"""Which backend ``backend="auto"`` takes: the one that is expected to be the fastest, from measured times.

How much slower than the fastest one each backend is on the GPU, is interpolated between the nearest measured cases, in
logarithms. A call that takes the host longer takes that long.
``fastest.json`` has the times; ``python -m kernel_twins.report.calls.fastest`` derives it, and a test compares the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeVar

from kernel_twins.ops.matmul.shared import copyable_with_out
from kernel_twins.spec import ITEMSIZE, Case

FILE = Path(__file__).parent / "fastest.json"
HOST = {2: "host of half precision", 4: "host of float32"}
"""The keys of a call's times on the host, by the elements' size, among those of the function's cases."""

BACKENDS = ("cuda", "torch", "triton")
COMPILED = "compile"
"""PyTorch's call, compiled by Inductor."""
_TRACED = ("cuda", "triton", COMPILED)  # the contestants inside torch.compile

NEIGHBOURS = 6
MARGIN = math.log(1.03)
"""PyTorch is taken where it is faster than ours by more than this: what times differ by between two recordings."""

_FUSED = math.log(2)
"""Inductor fuses rows with their neighbours, which saves a kernel of ours reading and writing a tensor once more."""

# What two problems differ in, as distances in logarithms of sizes. Rows say less than their length, by which kernels
# are chosen, and a product's sizes less than how full they leave its last wave of tiles; another layout counts as much
# as a length that is e^2 times as long.
_ROWS, _SIZES, _LAYOUT = 0.3, 0.3, 2.0
_MERGED, _OPTION, _LEAST = 144.0, 0.25, 0.05  # squares

_OPTIONS = ("residual", "bias", "affine", "act")
_GAPS = {"": 0, "pitched": 3, "spaced": 8}
_WORD = 16  # bytes that a thread reads at once
_TILE, _SMS = (128, 256), 132  # of the products' kernels; they take a wave of tiles at a time

# Microseconds: a launch, and an H100's datasheet. Only ratios of like problems' work count, so other GPUs can use it.
_LAUNCH, _BYTE, _FLOP = 4.0, 1 / 3.35e6, {2: 1 / 989e6, 4: 1 / 67e6}

Logarithms = tuple[float, ...]  # in the order of the contestants
_Told = TypeVar("_Told")


@dataclass(frozen=True, slots=True)
class Problem:
    """What a call's time depends on. ``place`` is a point whose distance from another one tells how alike they are.

    ``axes`` tells of a reduction which of the merged axes are kept and which reduced, from the outermost inwards.
    ``work`` is the least time in microseconds, by which times of unlike sizes are compared. ``is_product`` tells
    products, and attention, which is two, from what reads and writes rows.
    """

    itemsize: int
    place: tuple[float, ...]
    axes: str = ""
    options: tuple[str, ...] = ()
    work: float = field(default=_LAUNCH, kw_only=True)
    is_product: bool = field(default=False, kw_only=True)

    @classmethod
    def of(
        cls,
        itemsize: int,
        sizes: Sequence[int],
        layout: Iterable[bool],
        axes: str = "",
        options: tuple[str, ...] = (),
        tensors: int = 1,
    ) -> Problem:
        """``sizes`` are rows and their length, of reductions the innermost axis, too; ``layout`` is yes or no.

        ``tensors`` of that size are read or written.
        """
        count, *lengths = map(math.log, sizes)
        place = _ROWS * count, *lengths, *(_LAYOUT * each for each in layout)
        return cls(itemsize, place, axes, options, work=_LAUNCH + tensors * sizes[0] * sizes[1] * itemsize * _BYTE)


def rows(m: int, n: int, pitch: int, itemsize: int, options: Iterable[str] = ()) -> Problem:
    """m rows of n elements that begin ``pitch`` elements apart."""
    aligned, whole = pitch * itemsize % _WORD == 0, n * itemsize % _WORD == 0
    given = tuple(sorted(options))
    return Problem.of(itemsize, (m, n), (pitch != n, aligned, whole), "", given, tensors=2 + ("residual.yes" in given))


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


def product(
    m: int, n: int, k: int, itemsize: int, *, copied: bool, column_major: bool, options: Iterable[str] = ()
) -> Problem:
    """[M, K] by [K, N]: whether the copy engine takes operands and result, and how b, or a layer's weight, lies."""
    sizes = [_SIZES * math.log(size) for size in (m, n, k)]
    rows, columns = _TILE
    waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / _SMS)
    filled = math.log(m * n / (waves * _SMS * rows * columns))
    place = *sizes, filled, _LAYOUT * copied, _LAYOUT * column_major
    least = max(2 * m * n * k * _FLOP[itemsize], (m * k + k * n + m * n) * itemsize * _BYTE)
    return Problem(itemsize, place, options=tuple(options), work=_LAUNCH + least, is_product=True)


def attended(case: Case) -> Problem:
    """Attention, of which no time is committed so far."""
    b, heads, queries, d = case.shape
    keys, itemsize = int(case.get("keys", str(queries))), ITEMSIZE[case.dtype]
    place = _ROWS * math.log(b * heads), math.log(queries), math.log(keys), math.log(d)
    options = tuple(f"{name}.{case.get(name)}" for name in ("kv", "mask", "window") if case.get(name))
    work = _LAUNCH + 4 * b * heads * queries * keys * d * _FLOP[itemsize]
    return Problem(itemsize, place, options=options, work=work, is_product=True)


def measured(case: Case) -> Problem | None:
    """The problem that a measured case is; None if it has special values, or a layout that says nothing of others."""
    if case.get("values") or not math.prod(case.shape):
        return None
    is_reduction = case.get("axes") or case.get("kind")
    if len(case.shape) == 4 and not is_reduction:
        return None if case.get("packed") or case.get("layout") else attended(case)
    if len(case.shape) == 3 and not is_reduction:
        return _measured_product(case)
    layout, itemsize = case.get("x") or case.get("logits"), ITEMSIZE[case.dtype]
    if layout != "permuted" and layout not in _GAPS:
        return None
    if is_reduction:
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


def _measured_product(case: Case) -> Problem | None:
    if "expanded" in (case.get("a"), case.get("b")) or case.get("out"):
        return None
    m, n, k = case.shape
    return product(
        m,
        n,
        k,
        ITEMSIZE[case.dtype],
        copied=not copyable_with_out(case),
        column_major="col" in (case.get("b"), case.get("w")),
        options=("act",) if case.get("act", "none") != "none" else (),
    )


# ----------------------------------------------------------------------------------------------------------------------
# The expectation
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a call is expected to take, by backend in microseconds, and the measured cases that say so, nearest first.

    Of each case there are its slug and its distance, in logarithms of sizes. Both are empty where nothing is known.
    """

    us: Mapping[str, float]
    nearest: tuple[tuple[str, float], ...]


@lru_cache(maxsize=128)
def table(
    gpu: str, function: str, differentiated: bool, traced: bool = False
) -> dict[int, list[tuple[Problem, Logarithms]]]:
    """The measured slowdowns by the elements' size, and behind them the fastest one's time over the problem's work.

    It is empty where there are none. ``traced``: inside torch.compile.

    Of calls whose gradients are wanted, forward and backward pass count together; if no backward pass of the function
    was measured, the forward pass counts alone. So it does at a product of which the forward pass alone was measured:
    its gradients are products by the same kernels.
    """
    contestants = _TRACED if traced else BACKENDS
    found: dict[int, list[tuple[Problem, Logarithms]]] = {}
    for problem, _, times in _times(gpu, function, contestants):
        passes = min(len(each) for each in times)
        if passes > differentiated or problem.is_product:
            taken = [math.log(sum(each[: min(passes, 1 + differentiated)])) for each in times]
            told = *(time - min(taken) for time in taken), min(taken) - math.log(problem.work)
            found.setdefault(problem.itemsize, []).append((problem, told))
    return table(gpu, function, False, traced) if differentiated and not found else found


@lru_cache(maxsize=128)
def timed(gpu: str, function: str, differentiated: bool) -> dict[int, list[tuple[Problem, tuple[str, Logarithms]]]]:
    """The measured cases' slugs and times over their work, as ``table``, but of whole calls alone."""
    found: dict[int, list[tuple[Problem, tuple[str, Logarithms]]]] = {}
    for problem, slug, times in _times(gpu, function, BACKENDS):
        if min(len(each) for each in times) > differentiated:
            ratios = tuple(math.log(sum(each[: 1 + differentiated]) / problem.work) for each in times)
            found.setdefault(problem.itemsize, []).append((problem, (slug, ratios)))
    return timed(gpu, function, False) if differentiated and not found else found


def _times(gpu: str, function: str, contestants: Sequence[str]) -> Iterable[tuple[Problem, str, list[list[float]]]]:
    """Of each case at which all of them were timed its problem, its slug, and their times of each pass."""
    for slug, times in _content().get(gpu, {}).get(function, {}).items():
        problem = None if slug in HOST.values() else measured(Case.parse(slug))
        if problem is not None and times.keys() >= {*contestants}:
            yield problem, slug, [times[name] for name in contestants]


def host_times(gpu: str, function: str, itemsize: int) -> dict[str, float]:
    """The host's microseconds of one pass by backend; empty where they are unknown."""
    times = _content().get(gpu, {}).get(function, {}).get(HOST[itemsize], {})
    return {backend: us for backend, (us,) in times.items()}


def is_measured(gpu: str) -> bool:
    """Whether there are times of a GPU."""
    return gpu in _content()


@cache
def _content() -> dict[str, dict[str, dict[str, dict[str, list[float]]]]]:
    content: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = json.loads(FILE.read_text())
    return content


def _nearest(known: Iterable[tuple[Problem, _Told]], problem: Problem) -> list[tuple[float, _Told]]:
    """What is told of the nearest cases, and the squares of their distances."""
    place, axes, options = problem.place, problem.axes, problem.options
    # A loop over every case that was measured: it is what a call of new sizes waits for.
    return sorted(
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


def interpolated(near: Iterable[tuple[float, Logarithms]]) -> list[float]:
    """The mean of what is told, by the inverse of the fourth power of the distance, whose square is given."""
    weighed = [((square + _LEAST) ** -2, told) for square, told in near]
    total = sum(weight for weight, _ in weighed)
    return [
        sum(weight * each for (weight, _), each in zip(weighed, column, strict=True)) / total
        for column in zip(*(told for _, told in weighed), strict=True)
    ]


def ordered(
    gpu: str,
    function: str,
    problem: Problem | None,
    differentiated: bool,
    traced: bool = False,
    replayed: bool = False,
) -> list[str]:
    """The backends, the one that is expected to be the fastest first; empty if nothing is known of such calls.

    Inside torch.compile (``traced``) "torch" is Inductor's code. It comes first unless ours is expected to be faster,
    and, where rows are read and written, twice as fast. ``problem`` is None where its sizes are symbols, and then all
    measured cases count alike. The host's time does not count there, nor where a graph is ``replayed``.
    """
    by_width = table(gpu, function, differentiated, traced)
    if problem is None:
        known = [each for cases in by_width.values() for each in cases]
        near = [(0.0, told) for _, told in known]
    else:
        known = by_width.get(problem.itemsize, [])
        near = _nearest(known, problem)
    if not near:
        return []
    *slowdowns, least = interpolated(near)
    slower = dict(zip(_TRACED if traced else BACKENDS, slowdowns, strict=True))
    if traced:
        gained = 0.0 if known[0][0].is_product else _FUSED
        slower = {"torch": slower.pop(COMPILED) - gained, **slower}  # first where they are equal
    elif problem is not None:
        host = {} if replayed else host_times(gpu, function, problem.itemsize)
        unit = least + math.log(problem.work)
        for backend, us in host.items():
            slower[backend] = max(slower[backend], math.log(us * (1 + differentiated)) - unit)
        slower["torch"] += MARGIN
    return sorted(slower, key=lambda backend: slower[backend])


def estimate(gpu: str, function: str, problem: Problem, differentiated: bool) -> Estimate:
    """What a call is expected to take on the GPU.

    The logarithm of the time over the work is interpolated between the cases by which ``ordered`` decides, as far as
    they were measured with the passes that are asked for.
    """
    near = _nearest(timed(gpu, function, differentiated).get(problem.itemsize, ()), problem)
    ratios = interpolated((square, told) for square, (_, told) in near)
    us = {backend: problem.work * math.exp(ratio) for backend, ratio in zip(BACKENDS, ratios, strict=False)}
    return Estimate(us, tuple((slug, math.sqrt(square)) for square, (slug, _) in near))

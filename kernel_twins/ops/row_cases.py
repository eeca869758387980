"""Inputs and cases that the specs of operations along a matrix's rows share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kernel_twins.spec import ITEMSIZE, Case, SizeAxis

if TYPE_CHECKING:
    from torch import Generator, Tensor

NO_CLUSTERS = "Triton 3.6 gives a program no access to another one's shared memory"
"""Why Triton has no twin of a step that splits a row over a cluster."""

_BYTES = 2**29  # of a tensor in the bandwidth cases: ten times the L2 cache
_OUTLIER_EVERY, _OUTLIER = 1_000, 100.0
_SHIFT = 1_000.0
_BORDER = 16.0
_OVERFLOWING = 100.0  # exp() of it is infinite in fp32
_SHARED_BY = 128  # threads of the smallest block that has a long row to itself


def bandwidth_case(n: int, dtype: str = "bf16", **variant: str) -> Case:
    """A matrix of 512 MiB with rows of n elements."""
    return Case.of(_BYTES // ITEMSIZE[dtype] // n, n, dtype=dtype, **variant)


BANDWIDTH_CASES = (
    *(bandwidth_case(n) for n in (256, 1_024, 4_096, 5_003, 12_288, 16_384, 50_257, 65_536, 262_144)),
    *(bandwidth_case(n, "fp32") for n in (4_096, 65_536)),
)
# Throughput is drawn against the rows' length. Ragged rows start at every alignment.
PROFILE_CASE = bandwidth_case(4_096)
SHORTEST, SHORT, LONG, LONGEST = (bandwidth_case(n) for n in (256, 1_024, 65_536, 262_144))
RAGGED, LONG_RAGGED = (bandwidth_case(n) for n in (5_003, 50_257))
FEW_ROWS = Case.of(4_096, 1_024, dtype="bf16")
MANY_ROWS = Case.of(2**31 + 5, 2, dtype="bf16"), Case.of(2**32 + 5, 1, dtype="bf16")
"""More rows than a grid has blocks, and more elements than 32 bits count."""
SIZE_AXIS = SizeAxis(
    "N, row length",
    lambda case: case.shape[1],
    lambda case: f"M N = 2^{math.log2(math.prod(case.shape)):.0f}",  # rounded: M is a whole number
)
HEADLINE_CASES = tuple(bandwidth_case(n) for n in (1_024, 4_096, 16_384, 65_536, 262_144))


def matrix(case: Case, generator: Generator, layout: str = "") -> Tensor:
    """[M, N] standard normal values of the case's dtype.

    ``layout`` is empty for a contiguous matrix, ``pitched`` for rows that lie N + 3 elements apart (so that they start
    at every alignment), ``spaced`` for N + 8 (so that they start as those of a contiguous matrix do), or ``expanded``
    for one row seen M times. ``values`` in the variant: those of tensors.normal;
    ``outliers`` makes every thousandth value 100 times as wide; ``shifted`` adds 1000 to each; ``masked`` makes the
    first row and the second half of the others minus infinity; ``coarse`` takes multiples of 1/16 below 4: the sum of
    two is exact in every dtype.
    """
    from kernel_twins.ops.tensors import normal

    m, n = case.shape
    if layout in ("pitched", "spaced"):
        x = normal(case, (m, n + (3 if layout == "pitched" else 8)), generator)[:, :n]
    elif layout == "expanded":
        x = normal(case, (1, n), generator).expand(m, n)
    else:
        x = normal(case, (m, n), generator)
    if case.get("values") == "outliers":
        x.view(-1)[::_OUTLIER_EVERY] *= _OUTLIER
    if case.get("values") == "shifted":
        x += _SHIFT
    if case.get("values") == "coarse":
        x.mul_(16).round_().clamp_(-63, 63).div_(16)
    if case.get("values") == "masked":
        x[:1] = x[1:, n // 2 :] = -float("inf")
    return x


def lifted(x: Tensor, case: Case) -> Tensor:
    """x; in hostile cases, most of each row's exponentials are at its borders (tensors.borders).

    The exponentials of every other row overflow fp32, unless the row's maximum is subtracted first.
    """
    from kernel_twins.ops.tensors import borders

    if case.get("values") == "hostile" and x.shape[1]:
        places = borders(x.shape[1])
        x[:, places] += 1 + math.log(x.shape[1] / len(places))
        x[::2] += _OVERFLOWING
    return x


def weighted(x: Tensor, case: Case) -> Tensor:
    """x; in hostile cases, it has a mean other than 0, and most of each row's squares are at its borders."""
    from kernel_twins.ops.tensors import borders

    if case.get("values") == "hostile":
        x[:, borders(x.shape[1])] *= _BORDER
        x += 3
    return x


def shifted(x: Tensor, case: Case) -> Tensor:
    """x; in hostile cases, every other row is so far from zero that E[x^2] - E[x]^2 has no correct digit."""
    if case.get("values") == "hostile":
        x[::2] += _SHIFT
    return x


def row_chain(n: int) -> float:
    """tensors.chain of the additions that one thread makes for a row of n elements, in any step."""
    from kernel_twins.ops.tensors import chain

    return chain(n / _SHARED_BY)


Sized = tuple[int, int, Mapping[str, str]]  # rows, their length, and the case's variant


def test_cases(name: str, *more: Sized) -> tuple[Case, ...]:
    """Test cases in every dtype: each kind of length, each layout of the input ``name``, special values, and ``more``.

    The lengths are those at which some step takes another kernel, and their neighbours.
    """
    return tuple(
        Case.of(m, n, dtype=dtype, **variant)
        for dtype in ITEMSIZE
        for m, n, variant in (
            (0, 5, {}),
            (5, 0, {}),
            (1, 1, {}),
            (3, 2, {}),
            (300, 7, {}),
            *((67, n, {}) for n in (31, 256, 257, 1_000, 1_024)),
            (37, 4_099, {}),
            (5, 12_288, {}),
            (5, 16_387, {}),
            (3, 50_257, {}),
            (3, 65_536, {}),
            (2, 131_072, {}),
            (2, 262_147, {}),
            (1, 2**20, {}),
            *((19, n, {name: layout}) for n in (40, 1_027, 8_192) for layout in ("pitched", "expanded")),
            (9, 33, {"offset": "1"}),
            (9, 5_003, {"offset": "1"}),
            (9, 65_536, {"offset": "1"}),
            *((9, n, {"values": "outliers"}) for n in (1_000, 5_003, 70_000)),
            *((5, 1_003, {"values": values}) for values in ("inf", "infs", "nan")),
            *more,
        )
    )


def long_cases(name: str) -> tuple[Sized, ...]:
    """Test cases of register-resident rows that are split over a cluster.

    The lengths are on both sides of each limit in bf16: few packs a thread (for line-aligned rows, which those of 4,104
    elements are not), blocks of more warps, more packs a thread, and rows that no cluster's registers hold.
    """
    return (
        (131, 20_003, {}),
        (19, 40_000, {name: "expanded"}),
        (19, 40_003, {name: "spaced"}),
        *((67, n, {}) for n in (4_096, 4_104, 11_584, 12_288, 12_352)),
        *((2, n, {}) for n in (81_857, 81_858, 81_984, 163_777, 163_778, 262_081, 262_082)),
        (3, 262_144, {}),
        *((5, 50_257, {"values": values}) for values in ("outliers", "inf", "infs", "nan")),
    )


def short_cases(name: str) -> tuple[Sized, ...]:
    """Test cases of rows in the registers of one warp or a few, with every number of packs a lane.

    Rows start and end at every alignment. Some lengths are just too short or too long for these kernels, and some rows
    lie apart from each other.
    """
    lengths = (120, 121, 136, 137, 250, 383, 515, 777, 1_027, 1_280, 1_283, 1_539, 1_783, 1_792, 1_985, 2_051)
    longer = (2_499, 3_001, 3_072, 3_075, 5_003, 6_144, 8_120, 8_123, 8_184, 8_192)
    return (
        *((19, n, {}) for n in (*lengths, *longer)),
        *((19, n, {name: layout}) for n in (515, 1_536, 3_001) for layout in ("pitched", "spaced", "expanded")),
        *((9, n, {"values": values}) for n in (515, 3_072) for values in ("outliers", "inf", "infs", "nan", "masked")),
        (9, 515, {"offset": "1"}),
    )


def option_cases(option: Mapping[str, str]) -> tuple[Sized, ...]:
    """Test cases with another value of an option."""
    return *((9, n, option) for n in (200, 5_003, 70_000)), (9, 1_003, {**option, "values": "outliers"})


def masked_cases(option: Mapping[str, str]) -> tuple[Sized, ...]:
    """Test cases with values of minus infinity; the last one has that option, too."""
    masked = {"values": "masked"}
    return *((9, n, masked) for n in (64, 2_048, 70_000)), (9, 2_048, {**option, **masked})


def at_most(n: int, who: str) -> Callable[[Case], str]:
    """A step's ``accepts``: rows of up to n elements."""
    return lambda case: "" if case.shape[1] <= n else f"rows have {case.shape[1]} elements, {who} {n}"


def fits(size: int, who: str) -> Callable[[Case], str]:
    """A step's ``accepts``: rows of up to that many bytes."""

    def accepts(case: Case) -> str:
        row = case.shape[1] * ITEMSIZE[case.dtype]
        return "" if row <= size else f"rows have {row} bytes, {who} {size}"

    return accepts


def sum_of_exponentials_differs(baseline: str, case: Case) -> str:
    """Where a baseline loses a row's sum of exponentials (``Op.differs``)."""
    if baseline != "quack" or case.shape[-1] not in (70_000, 81_984):
        return ""
    if case.dtype != "fp32":
        return "quack makes NaN of rows that end so early in the last block's part that some warp has none of it"
    masked = case.get("values") == "masked"
    return "quack makes NaN of rows of which a warp's part is all minus infinity" if masked else ""

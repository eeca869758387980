"""The cases that reduction_nd is tested and timed on; reduction_nd.py says what their variants mean."""

from __future__ import annotations

from kernel_twins.spec import ITEMSIZE, Case

ROWS, COLUMNS = Case.of(65_536, 4_096, dtype="bf16"), Case.of(65_536, 4_096, dtype="bf16", axes="0")
MIDDLE = Case.of(64, 4_096, 1_024, dtype="bf16", axes="1")
OUTER_INNER = Case.of(64, 4_096, 1_024, dtype="bf16", axes="02")
STATISTICS = Case.of(64, 64, 16, 64, 64, dtype="bf16", axes="0234", kind="mean")
ALL = Case.of(65_536, 4_096, dtype="bf16", axes="01")
PERMUTED = Case.of(64, 4_096, 1_024, dtype="bf16", axes="1", x="permuted")
ODD_COLUMNS = Case.of(65_536, 4_099, dtype="bf16", axes="0")
VOCABULARY = Case.of(2_048, 131_072, dtype="bf16", kind="argmax")
FEW = Case.of(4_096, 1_024, dtype="bf16")

_LAYOUTS = ("permuted", "pitched", "sliced", "expanded")
_ODD_VALUES = ("inf", "infs", "nan", "ties", "masked", "nans")
_SMALL = (
    *(((5, n), "1") for n in (1, 2, 31, 32, 257, 1_027)),
    *(((n, 72), "0") for n in (1, 3, 256, 301)),
    ((300, 7), "0"),
    ((300, 7), "1"),
    ((1_003,), "0"),
    ((70_001,), "0"),
    ((7, 40, 24), "1"),
    ((7, 41, 25), "1"),
    ((7, 40, 24), "02"),
    ((7, 41, 25), "02"),
    ((7, 40, 24), "012"),
    ((3, 1, 17, 1, 9), "1"),
    ((4, 6, 3, 5, 8), "0234"),
    ((4, 6, 3, 5, 8), "13"),
    ((4, 6, 3, 5, 8), "024"),
)

TEST_CASES = (
    tuple(
        Case.of(*shape, dtype=dtype, **variant)
        for dtype in ITEMSIZE
        for shape, variant in (
            ((67, 1_024), {}),
            ((3, 70_003), {}),
            ((0, 5), {"axes": "0"}),
            ((0, 5), {"axes": "1"}),
            ((0, 5), {"axes": "1", "kind": "max"}),
            ((2, 0, 5), {"axes": "1", "kind": "mean"}),
            *((shape, {"axes": axes, "kind": kind}) for shape, axes in _SMALL for kind in ("mean", "max", "argmax")),
            *(
                (shape, {"axes": axes, "kind": kind, "x": layout})
                for layout in _LAYOUTS
                for shape, axes in (((33, 70), "0"), ((33, 70), "1"), ((6, 40, 24), "1"), ((6, 40, 24), "02"))
                for kind in ("sum", "argmax")
            ),
            ((4, 6, 3, 5, 8), {"axes": "13", "kind": "argmax", "x": "permuted"}),
            *(
                (shape, {"axes": axes, "kind": kind, "values": values})
                for values in _ODD_VALUES
                for shape, axes in (((33, 72), "0"), ((33, 71), "1"), ((6, 40, 24), "02"))
                for kind in ("sum", "max", "argmax")
                if not (kind == "sum" and values == "ties")
            ),
            ((9, 1_000), {"offset": "1"}),
            ((9, 200), {"offset": "1", "axes": "0", "kind": "argmax"}),
            ((70_001,), {"values": "tail"}),
        )
    )
    # So large that interleaved parts take several turns: one output, columns, misaligned rows, several runs.
    + (
        Case.of(40_000_011, dtype="bf16", values="tail"),
        Case.of(9_000_011, dtype="bf16", kind="argmax"),
        Case.of(203, 45_064, dtype="bf16", axes="0"),
        Case.of(3, 11_000_017, dtype="bf16", kind="max"),
        Case.of(90, 3, 120_000, dtype="bf16", axes="02"),
        Case.of(14_001, 2_051, dtype="bf16"),
    )
    # Columns that are no whole packs: many rows in one part, in several parts, and of two axes; few rows of several
    # matrices; a run of a pack and more, of fewer columns, and columns without neighbours.
    + tuple(
        Case.of(*shape, dtype=dtype, axes=axes, kind=kind, **variant)
        for shape, axes, variant in (
            ((1_301, 4_097), "0", {}),
            ((20_003, 72), "0", {"x": "pitched"}),
            ((300, 41, 71), "01", {"x": "pitched"}),
            ((40, 41, 73), "02", {"x": "permuted"}),
            ((41, 5, 1_326), "1", {}),
            ((700, 9), "0", {"x": "pitched", "offset": "1"}),
            ((70_001, 3), "0", {}),
            ((20_003, 9), "0", {"x": "sliced"}),
            ((40, 41, 3), "02", {}),  # short runs, which are columns, too
            ((3, 41, 2, 40), "023", {"x": "permuted"}),
            ((700, 3, 11), "02", {"offset": "1"}),
            ((39, 50, 61), "02", {"x": "permuted"}),  # runs of ragged packs, which are columns: few, and many
            ((39, 211, 37), "02", {"x": "permuted"}),
            ((9, 40, 24), "1", {}),
            ((9, 41, 28), "1", {}),
            ((7, 2_052), "1", {"x": "pitched"}),
            # Few rows of so many columns that a thread takes all rows of a pack, aligned and not.
            ((2, 9, 210_000), "1", {}),
            ((60, 3, 8_003), "1", {}),
            ((31, 5, 13_601), "1", {"x": "pitched"}),
            ((100_003, 7), "0", {}),  # few columns, whose rows are side by side in a block
            ((400_003, 5), "0", {}),
            ((100_001, 24), "0", {}),  # few packs of columns
            ((5, 6_011, 69), "1", {"x": "pitched"}),  # narrow rows of several matrices
            ((41, 1_303, 30), "1", {}),
            ((2_001, 61, 23), "1", {"x": "pitched"}),  # so many columns that a thread has all rows of one
            ((2_983, 1_327), "0", {"offset": "1"}),
            ((2_801, 699), "0", {"x": "sliced"}),
        )
        for dtype in ITEMSIZE
        for kind in ("sum", "max", "argmax")
    )
)

HUGE_CASES = (
    Case.of(2**31 + 5, dtype="bf16"),
    Case.of(2**31 - 5, dtype="bf16"),  # 32 bits count its elements, but not one block more
    Case.of(3, 2**30 + 8, dtype="bf16", axes="0"),
    Case.of(2**17, 2**14 + 8, dtype="bf16", kind="argmax"),
    Case.of(3, 12_701, 5_504, dtype="bf16", axes="02"),  # so many long rows that each has a warp
    Case.of(13_003, 16_424, dtype="bf16", kind="max"),
)

BENCH_CASES = (
    *(ROWS, COLUMNS, MIDDLE, OUTER_INNER, STATISTICS, ALL, PERMUTED, VOCABULARY),
    Case.of(32_768, 4_096, dtype="fp32"),
    Case.of(32_768, 4_096, dtype="fp32", axes="0", kind="max"),
    FEW,
    ODD_COLUMNS,
)
HEADLINE_CASES = (ROWS, COLUMNS, MIDDLE, STATISTICS, ALL, VOCABULARY)

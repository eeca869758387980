"""The cases that layer_norm and rms_norm are tested on, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping

from kernel_twins.ops import row_cases
from kernel_twins.ops.norm.shared import Norm
from kernel_twins.spec import Case

DRAWN_OPTIONS: tuple[Mapping[str, str], ...] = ({}, {}, {"residual": "yes"}, {"affine": "none"})

# So many rows that each block of a GPU adds several of them to its part of dweight and dbias.
_MANY_ROWS = ((2_000, 257), (1_500, 1_024), (400, 5_003), (300, 8_192), (100, 40_000))
_MORE_ROWS = ((3_000, 5_003), (600, 65_536))  # and reuses each stage of its ring
# Rows held by one warp: of whole packs; ragged, the longest and the shortest of two packs a lane and of more.
_WARP_ROWS = (
    *((67, n) for n in (72, 136, 384, 512, 640, 768, 1_280, 1_536, 2_048)),
    *((200, n) for n in (67, 131, 132)),
    *(
        (67, n)
        for n in (259, 263, 387, 515, 519, 521, 705, 771, 775, 961, 993, 1_031, 1_287, 1_473, 1_543, 1_799, 1_985)
    ),
    (1, 257),
    *((m, 2_055) for m in (1, 9)),
)
# So many ragged rows that a warp takes several in turn, on 132 SMs; the last blocks have fewer.
_RAGGED_TURNS = ((70_003, 515), (41_001, 1_027))
_WARP_LAYOUTS = (
    *((200, 131, {key: value}) for key, value in (("offset", "1"), ("x", "spaced"), ("values", "nan"))),
    (67, 136, {"offset": "1"}),
    (67, 1_003, {"offset": "1"}),
    (67, 136, {"x": "expanded"}),
    (67, 136, {"x": "expanded", "offset": "1"}),
    (67, 1_027, {"x": "spaced"}),
    *((67, n, {"affine": "none"}) for n in (257, 771)),
    *((67, 1_027, {"values": values}) for values in ("nan", "shifted")),
    (67, 519, {"offset": "1", "residual": "yes"}),
)
# So few rows that all their blocks run at once on 132 SMs, if threads have fewer registers.
_FEW_WARP_ROWS = ((4_000, 512), (4_000, 1_024))
# One row a cluster, in fp32 or 16 bits: the shortest and the longest, those just beyond, four and five packs a lane.
_CLUSTER_ROWS = (
    *((1, n) for n in (3_040, 6_080, 7_168, 18_432, 20_480, 20_736, 36_864, 41_472)),
    *((3, n) for n in (3_072, 5_120, 6_144, 10_240, 14_336, 16_384, 32_768, 40_960)),
)
# Rows of another skew than out's: in one lane to a warp with every number of packs, in a cluster; long rows, split.
_SKEWED_ROWS = (
    *((133, n) for n in (3, 13, 29, 61, 120, 250, 515, 765, 1_000, 1_279, 1_530, 2_040)),
    *((9, n) for n in (2_056, 5_003, 40_000, 150_001)),
)
_SPLIT_ROWS = ((3, 300_001), (2, 2_000_200))
# With a residual: whole packs in lanes, in a warp where rows are few or many, in a block; a tile; ragged rows.
_RESIDUAL_ROWS = ((67, 136), (67, 1_024), (5_000, 512), (67, 1_536), (133, 61))
_RAGGED_RESIDUAL_ROWS = (*((67, n) for n in (321, 517, 519, 1_027, 1_291, 1_555, 1_999, 2_047, 2_055)), (41_001, 1_027))
# Rows in tiles: from a lane a row to a warp a row, and more rows than a tile has groups of lanes.
_TILE_ROWS = ((131, 15), (9_001, 33), (131, 129), (131, 333), (3_001, 511), (131, 1_023))
_TILE_LAYOUTS = (
    *((1_001, n, {"x": "pitched"}) for n in (15, 33, 50, 241)),
    *((1_001, n, {"offset": "1"}) for n in (16, 61, 512)),
    *((1_001, n, {"values": values}) for n, values in ((33, "nan"), (61, "shifted"))),
)
# Whole packs of out, shifted together from rows of every skew: one lane to a warp a row, two to eight packs a lane.
_SHIFTED_ROWS = (
    *((1, n, {"x": "pitched"}) for n in (8, 64, 1_000)),
    *((133, n, {"x": "pitched"}) for n in (8, 24, 64, 88, 120, 184, 264, 640, 1_000, 1_024, 1_288, 2_048)),
    *((1_001, n, {"x": "pitched"}) for n in (16, 32, 48, 240)),
    *((133, n, {"x": "pitched", "values": values}) for n, values in ((64, "nan"), (264, "shifted"), (1_000, "nan"))),
)
# Just longer than a warp holds, misaligned alike; and so many long rows that the shared memory of clusters has them.
_ALIKE_ROWS = ((67, 2_501), (67, 3_999), (65, 262_152), (65, 270_001))
# Backward: a warp's rows of three packs a lane, and of more without column sums; rows of several skews, by tiles of
# few rows and by a ring whose stages are reused.
_BACKWARD_ROUTES = (
    (9_000, 640, {"residual": "yes"}),
    *((9_000, n, {"affine": "none"}) for n in (640, 1_216, 1_536, 2_040)),
    *((2_000, n, {"dout": "pitched", "affine": "none"}) for n in (358, 1_027, 2_056)),
    *((3_000, n, {"dout": "pitched", "residual": "yes"}) for n in (1, 358, 1_027, 5_003)),
    *((m, n, {"dout": "pitched"}) for m, n in ((3_000, 5_003), (600, 40_000), (300, 100_001))),
)
# Backward: tiles, by less than a warp to a block a row; from three rows a warp on, their stages are reused. Of the
# longest rows registers hold the column sums alone.
_TILED_ROWS = (
    *((8_001, n, {}) for n in (3, 61, 515)),
    (8_001, 515, {"residual": "yes"}),
    *((8_001, n, {"dout": "pitched", "affine": "none"}) for n in (250, 1_027)),
    *((3_001, n, {"dout": "pitched"}) for n in (1_531, 2_561)),
    *((401, n, {"dout": "pitched"}) for n in (10_243, 13_696)),
    *((401, n, {"dout": "pitched", "affine": "none"}) for n in (13_696, 20_477)),
    *((133, n, {"dout": "pitched", "values": "nan"}) for n in (61, 1_003)),
    (2_001, 515, {"dout": "expanded"}),
)
_LONG_RUNS = ((9_000, 5_003), (1_200, 65_536))  # forward, whose rings have more stages


def test_cases(norm: Norm) -> tuple[Case, ...]:
    """The forward pass's test cases."""
    more = (
        *row_cases.option_cases({"residual": "yes"}),
        (19, 1_027, {"residual": "yes", "x": "pitched"}),
        (9, 5_003, {"residual": "yes", "offset": "1"}),
        *row_cases.option_cases({"affine": "none"}),
        *(row_cases.option_cases({"affine": "weight"}) if norm.centered else ()),
        *((9, n, {"values": "shifted"}) for n in (1, 1_000, 5_003, 70_000)),
        *(
            (m, n, {})
            for m, n in (*_MANY_ROWS[:3], *_WARP_ROWS, *_FEW_WARP_ROWS, *_RAGGED_TURNS, *_CLUSTER_ROWS, *_LONG_RUNS)
        ),
        *_WARP_LAYOUTS,
        *((3, 10_240, {key: value}) for key, value in (("affine", "none"), ("values", "nan"), ("x", "expanded"))),
        *((m, n, {}) for m, n in _TILE_ROWS),
        *_TILE_LAYOUTS,
        *_SHIFTED_ROWS,
        *((133, n, {"x": "pitched", "affine": "none"}) for n in (64, 1_288)),
        *((m, n, {**variant, "residual": "yes"}) for m, n, variant in (*_TILE_LAYOUTS[::2], *_SHIFTED_ROWS)),
        *((m, n, {}) for m, n in _ALIKE_ROWS),
        *(
            (m, n, {"residual": "yes"})
            for m, n in (*_RESIDUAL_ROWS, *_RAGGED_RESIDUAL_ROWS, *_ALIKE_ROWS[-1:], *_LONG_RUNS)
        ),
        (9_000, 5_003, {"x": "pitched"}),
        *((m, n, {"x": "pitched"}) for m, n in (*_SKEWED_ROWS, *_SPLIT_ROWS)),
        *((m, n, {"x": "pitched", "residual": "yes"}) for m, n in (*_SKEWED_ROWS[::3], *_SPLIT_ROWS[:1])),
        *((m, n, {"residual": "yes"}) for m, n in _SPLIT_ROWS),
        *((3, 300_001, {key: value}) for key, value in (("x", "expanded"), ("affine", "none"), ("values", "shifted"))),
        *row_cases.long_cases("x"),
        *((67, n, {"residual": "yes"}) for n in (2_048, 4_104, 65_536)),
        *((2, n, {"residual": "yes"}) for n in (163_777, 163_778)),
        (9, 50_257, {"values": "shifted"}),
        *((9, n, {"affine": "none"}) for n in (50_257, 65_536)),
        *(((m, n, {"affine": "weight"}) for m, n in ((67, 257), (9, 50_257))) if norm.centered else ()),
    )
    cases = row_cases.test_cases("x", *more)
    # With one infinity in a row the mean is infinite by a sum and NaN by Welford's formula. y and rstd are NaN anyway.
    return tuple(case for case in cases if case.get("values") != "inf") if norm.centered else cases


def backward_test_cases() -> tuple[Case, ...]:
    more = (
        *row_cases.option_cases({"residual": "yes"}),
        (19, 1_027, {"residual": "yes", "dout": "pitched"}),
        *row_cases.option_cases({"affine": "none"}),
        *((19, n, {"x": "pitched"}) for n in (40, 1_027, 8_192, 70_000)),
        *((9, n, {"values": "shifted"}) for n in (1_000, 5_003, 70_000)),
        *((m, n, {}) for m, n in (*_MANY_ROWS, *_MORE_ROWS)),
        *((m, n, {"values": "outliers"}) for m, n in _MANY_ROWS[1:3]),
        (3_000, 5_003, {"residual": "yes"}),
        *((m, n, {"dout": "pitched"}) for m, n in (*_SKEWED_ROWS, *_SPLIT_ROWS)),
        *((m, n, {"dout": "pitched", "residual": "yes"}) for m, n in (*_SKEWED_ROWS[::3], *_SPLIT_ROWS[:1])),
        *((m, n, {"residual": "yes"}) for m, n in (*_SPLIT_ROWS, (40, 300_000))),
        *((3, 300_001, {key: value}) for key, value in (("dout", "expanded"), ("affine", "none"))),
        (40, 300_001, {}),
        (2_000, 515, {"dout": "pitched"}),
        *_BACKWARD_ROUTES,
        *_TILED_ROWS,
    )
    return row_cases.test_cases("dout", *more)

"""The grid of compilations: all its cells are there, and which instruction a product gets follows a rule."""

from __future__ import annotations

import pytest

from kernel_twins.report.sweeps import grid

TABLE = grid.read().to_dict("records")
DOTS = [row for row in TABLE if row["kernel"] == grid.DOT]


def test_every_cell_is_recorded() -> None:
    assert [tuple(row[key] for key in grid.KEY) for row in TABLE] == [cell.key for cell in grid.cells()]


def test_a_cell_has_sizes_or_says_why_not() -> None:
    for row in TABLE:
        sizes = [row[name] for name in ("registers", "stack_bytes", "shared_bytes")]
        assert all(sizes) or (row["refused"] and not any(sizes)), row


def test_what_a_block_cannot_hold_is_refused() -> None:
    for row in TABLE:
        if row["shared_bytes"]:
            assert (int(row["shared_bytes"]) > grid.LIMIT) == bool(row["refused"]), row


def test_wgmma_wants_a_large_tile_and_whole_warp_groups() -> None:
    bf16 = [row for row in TABLE if row["dtype"] == "bf16" and row["instruction"]]
    assert sum(row["kernel"] == grid.DOT for row in bf16) == 48
    assert len(bf16) > 150
    for row in bf16:
        large = int(row["block_m"]) >= 64 and int(row["block_n"]) >= 16 and int(row["warps"]) % 4 == 0
        assert row["instruction"] == ("wgmma" if large else "mma.sync"), row


def test_fp32_runs_on_tensor_cores_as_tf32_alone() -> None:
    found = {row["dtype"]: row["instruction"] for row in DOTS if row["block_k"] == "32"}
    assert found == {"fp32 as ieee": "FMA", "fp32 as tf32": "wgmma"}


def test_a_cell_compiled_anew_is_what_is_recorded() -> None:
    pytest.importorskip("torch")
    triton = pytest.importorskip("triton")
    (cell,) = (each for each in grid.cells() if each.key == (grid.DOT, "64", "64", "64", "bf16", "4", "1"))
    (row,) = (each for each in DOTS if tuple(each[key] for key in grid.KEY) == cell.key)
    if row["compiler"] != f"triton {triton.__version__}":
        pytest.skip("another version of Triton recorded it")
    assert grid.compile_cell(cell) == [row[name] for name in grid.FACTS]

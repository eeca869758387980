"""Which kernels the last Triton steps of the norms take for rows of which number, length and alignment."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernel_twins.spec import ITEMSIZE  # noqa: E402

routing = importlib.import_module("kernel_twins._triton.norm.routing")

SMS = 132
NORMS = ["layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def route(
    op: str, m: int, n: int, dtype: str = "bf16", *, vector: int | None = None, written: int | None = None,
    given: bool = True, wide: bool = True, shifted: int = 0,
) -> Any:  # fmt: skip
    """Of contiguous rows, or of rows that accesses of ``vector`` elements take, and results such of ``written``.

    ``given``: a weight; ``shifted``: in a gradient, the matrices whose rows have other skews than dx's.
    """
    x = torch.empty(m, n, dtype=DTYPES[dtype], device="meta")
    if vector is None:
        vector = routing.vector_of(n, [n], x.element_size(), [])
    if op.endswith("_backward"):
        return routing.backward(op, x, given, False, vector, wide, shifted)
    return routing.forward(op, x, False, vector, vector if written is None else written, wide)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_short_pitched_rows_are_written_by_vectors_of_a_lane_each(op: str) -> None:
    assert route(op, 1_000_000, 20, vector=1, written=4)[:2] == (8, 16)
    assert route(op, 1_000_000, 20, vector=1, written=4).width == 4
    assert route(op, 1_000_000, 120, "fp32", vector=1, written=4).width == 1  # too long for half of a warp
    assert route(op, 1_000_000, 20, vector=4, written=4).width == 4


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_longer_pitched_rows_are_held_by_several_warps(op: str) -> None:
    assert route(op, 529, 8_640, "fp32", vector=1, written=4)[:2] == (256, 1)
    assert route(op, 529, 2_000, "fp32", vector=1, written=4).width == 1  # one warp holds it
    assert not isinstance(route(op, 529, 8_641, "fp32", vector=1, written=1), routing.Held)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_length_has_a_configuration_whose_programs_fit_an_sm(op: str, itemsize: int) -> None:
    for n in (1, *(2**i + more for i in range(2, 31) for more in (0, 1))):
        config = routing.cooperative(op, n, itemsize)
        assert config["PER_SM"] * config["num_warps"] * 32 * config["maxnreg"] <= 65_536
        assert config["maxnreg"] % 8 == 0 and 24 <= config["maxnreg"] <= 255


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_no_launch_holds_are_split(op: str, dtype: str) -> None:
    for m, n in ((1, 2**24), (3, 2**24 + 1), (39, 2**22 + 8), (3_000, 2**22 + 3), (2, 2**32 + 5)):
        assert isinstance(route(op, m, n, dtype), routing.Split)


def test_many_long_rows_share_one_launch() -> None:
    for op, (m, n) in itertools.product(NORMS, ((4_096, 65_536), (1_024, 262_144), (5_341, 50_257))):
        assert isinstance(route(op, m, n), dict)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_short_rows_are_held_at_any_alignment_that_wide_accesses_do_not_take(op: str) -> None:
    for n in (1, 40, 61, 75, 358, 453, 1_027, 2_047):
        assert isinstance(route(op, 100_000, n, vector=1, wide=False), routing.Held)
        in_packs = isinstance(route(op, 100_000, n, vector=1), routing.Skewed)
        assert in_packs == (2 * n >= routing.LEAST_SKEWED[op])
    assert isinstance(route(op, 100_000, 1_024), dict)
    assert isinstance(route(op, 100_000, 5_003), dict)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_rows_without_weights_are_not_shared_by_partial_tiles(op: str) -> None:
    for m, n, held in ((8_706, 17_848, True), (8_706, 24_576, True), (8_706, 24_584, False), (200, 17_848, False)):
        x = torch.empty(m, n, dtype=torch.bfloat16, device="meta")
        assert isinstance(routing.forward(op, x, False, 8, 8, True, False), routing.Held) == held
        assert not isinstance(routing.forward(op, x, False, 8, 8, True), routing.Held)
        assert not isinstance(routing.forward(op, x, True, 8, 8, True, False), routing.Held)


@pytest.mark.parametrize("op", ["layer_norm_backward", "rms_norm_backward"])
def test_short_rows_are_held_where_there_are_no_columns_to_add_up(op: str) -> None:
    for n in (1, 61, 832, 1_216, 3_294, 8_192):
        assert isinstance(route(op, 100_000, n, given=False), routing.Held)
        assert not isinstance(route(op, 100_000, n), routing.Held)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", NORMS)
def test_rows_are_held_where_chunks_leave_fewer_lanes_idle_than_a_tile(op: str, dtype: str) -> None:
    held = routing.Summed if op.endswith("_backward") else routing.Held
    for n in (288, 640, 768, 1_280, 1_536, 2_560) if dtype == "fp32" else (640, 768, 1_280, 1_536, 2_560, 5_120):
        assert isinstance(route(op, 100_000, n, dtype), held), n
    for n in (64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 65_536):
        assert isinstance(route(op, 100_000, n, dtype), dict), n


@pytest.mark.parametrize("op", ["layer_norm_backward", "rms_norm_backward"])
def test_short_misaligned_rows_are_held_by_programs_that_sum_columns(op: str) -> None:
    for n in (387, 515, 1_027, 1_030):
        assert isinstance(route(op, 100_000, n), routing.Summed)
        x = torch.empty(100_000, n, dtype=torch.bfloat16, device="meta")
        assert isinstance(routing.backward(op, x, True, False, 1, wide=False, shifted=2), dict)  # skews differ


@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_summed_rows_fit_their_lanes_and_keep_their_skew(itemsize: int, sums: int) -> None:
    vector = 16 // itemsize
    for n, m in itertools.product((*range(32 * vector, 40 * vector), 768, 1_027, 1_280, 1_536, 5_120), (1, 397, 10**6)):
        found = routing.summed(n, itemsize, sums, torch.device("meta"))
        if found is None:
            assert n > 2_048 and itemsize == 4
            continue
        tiles, programs = found.constants(n), found.programs(m, n, SMS)
        heads = range(vector) if n % vector else (0,)
        vectors = [(n - head) // vector for head in heads]
        places = tiles["CHUNKS"] * tiles["BLOCK_N"]
        assert places - tiles["BLOCK_N"] < max(vectors) * vector <= places
        assert tiles["FULL"] == min(vectors) * vector // tiles["BLOCK_N"]
        rounds = -(-m // (programs * found.rows))
        assert rounds == -(-m // (found.rows * found.per_sm * SMS))
        assert rounds == 1 or programs * found.rows * n % vector == 0
        if tiles["EDGES"]:
            assert found.lanes >= 2 * vector


@pytest.mark.parametrize("op", ["layer_norm_backward", "rms_norm_backward"])
def test_misaligned_rows_share_a_launch_only_where_they_travel_ahead(op: str) -> None:
    assert isinstance(route(op, 12_349, 71_757, given=False), routing.Split)
    assert isinstance(route(op, 12_349, 71_760, given=False), dict)
    assert isinstance(route(op, 5_341, 50_257), dict)


@pytest.mark.parametrize("op", ["layer_norm_backward", "rms_norm_backward"])
def test_longer_rows_whose_skews_differ_are_taken_by_packs(op: str) -> None:
    itemsize, vector, tiles, device = 2, 8, routing.backward_tiles, torch.device("meta")
    assert isinstance(route(op, 20_000, 8_640, vector=1, wide=False, shifted=2), dict)
    for m, n, shifted in itertools.product((1, 20_000), (4_096, 4_288, 5_003, 5_378, 8_640), range(1, 8)):
        config = routing.cooperative(op, n, itemsize, True)
        divided = tiles.divided(n, itemsize, False, shifted, config, device)
        assert divided["EDGES"] and divided["VECTOR"] == vector and not divided["EVEN"]
        assert divided["PARTS"] * divided["BLOCK_N"] >= n // vector * vector
        groups = tiles.grid_of(m, n, shifted, config | divided, device)[0] // divided["PARTS"]
        assert groups >= m or groups * n % vector == 0
        assert groups * divided["PARTS"] <= tiles.sharing(config, shifted, device)
    # Few groups share the longest rows: a whole period of them would leave many programs out.
    config = routing.cooperative(op, 106_821, itemsize, True)
    assert not tiles.divided(106_821, itemsize, False, 2, config, device)["EDGES"]


def test_shifted_matrices_have_rows_of_other_skews_than_the_result() -> None:
    shifted = routing.backward_tiles.shifted_matrices
    assert shifted(1_027, (1_027, 1_027), 2) == 0
    assert shifted(1_027, (1_035, 1_030), 2) == 2
    assert shifted(1_024, (0, 1_024, 1_027), 2) == 4
    assert shifted(1_027, (0, 1_031, 1_028), 4) == 5


@pytest.mark.parametrize(("matrices", "most_warps"), [(1, 1), (2, 8)])
@pytest.mark.parametrize("vector", [1, 2, 4, 8])
def test_held_rows_fit_their_lanes(matrices: int, most_warps: int, vector: int) -> None:
    for n, m in itertools.product(range(vector, 2_049, vector), (1, 10**6)):
        held = routing.held(m, n, vector, matrices, most_warps, SMS)
        tiles = held.constants(n, vector)
        columns = tiles["BLOCK_N"] * tiles["CHUNKS"]
        assert columns - tiles["BLOCK_N"] < n <= columns
        assert tiles["FULL"] == n // tiles["BLOCK_N"]
        assert tiles["CHUNKS"] * vector * matrices <= routing.HELD
        assert held.programs(m) * held.rows * held.turns >= m
        if most_warps == 1 and n >= 32 * vector:
            assert n > 0.7 * columns  # a tile as long as the next power of 2 may be half empty


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_the_parts_of_a_split_row_are_the_row(dtype: str) -> None:
    for m, n, vector in itertools.product((1, 2, 39, 3_000, 10**6), (1, 4_097, 2_002_200, 2**32 + 5), (1, 2)):
        split = routing.split(m, n, ITEMSIZE[dtype], vector, routing.MOST_PARTS, SMS)
        share = split.share_tiles * split.block
        assert (split.parts - 1) * share < n <= split.parts * share
        assert split.parts <= split.slots <= routing.MOST_PARTS
        for has_sums in (False, True):
            slices, rows = split.sliced(m, n, has_sums, SMS)
            assert (slices - 1) * rows < m <= slices * rows


def test_accesses_are_as_wide_as_all_rows_allow() -> None:
    rows = torch.empty(4, 64, dtype=torch.bfloat16)
    assert routing.vector_of(1_024, [1_024, 1_032], 2, [rows, None]) == 8
    assert routing.vector_of(1_024, [1_026, 0], 2, [rows]) == 2
    assert routing.vector_of(6, [6], 4, [rows]) == 2
    assert routing.vector_of(1_027, [1_027], 2, [rows]) == 1
    assert routing.vector_of(1_024, [1_024], 2, [rows, rows.view(-1)[1:]]) == 1


@pytest.mark.parametrize("itemsize", [2, 4])
def test_skewed_rows_fit_their_lanes_and_every_row_is_taken_once(itemsize: int) -> None:
    vector = 16 // itemsize
    for n, m in itertools.product(range(32 * vector, 2_050, 7), (1, 5, 10**6)):
        found = routing.skewed(m, n, itemsize, SMS)
        if found is None:
            assert n > 1_024
            continue
        tiles = found.constants(n)
        heads = range(vector) if n % vector else (0,)
        vectors = [(n - head) // vector for head in heads]
        places = tiles["CHUNKS"] * tiles["BLOCK_N"]
        assert places - tiles["BLOCK_N"] < max(vectors) * vector <= places
        assert tiles["FULL"] <= min(vectors) * vector // tiles["BLOCK_N"]
        assert found.lanes >= 2 * vector and vector % found.rows == 0
        programs, together = found.programs(m), vector // found.rows
        assert programs * found.rows * found.turns >= m
        if m < 100:
            rows = sorted(
                program // together * vector * found.turns + program % together * found.rows + line + turn * vector
                for program, line, turn in itertools.product(range(programs), range(found.rows), range(found.turns))
            )
            assert rows == list(range(len(rows)))

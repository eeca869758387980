"""The figures: what they say, what they leave apart, and that they are the same file whenever they are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("matplotlib")

from kernel_twins import OPS
from kernel_twins.harness.ceilings import Ceilings
from kernel_twins.report.figures import render, sampled, style
from kernel_twins.report.figures.groups import groups
from kernel_twins.report.figures.placing import Box, Room
from kernel_twins.report.meaning import moved
from kernel_twins.report.meaning.analysis import Results, load
from kernel_twins.report.rows import store
from kernel_twins.spec import BACKENDS, Op
from tests.logs import timing

FOLDER = store.DATA / store.REFERENCE_GPU
CEILINGS = Ceilings("h100-sxm", 3_000, 3_000, 3_000, 3_000, 3_000, 1, 1, 132)


def results(folder: Path, op: Op, times: Mapping[tuple[str, str], float], ceilings: Ceilings | None) -> Results:
    """An operation whose cells took these times at every timed case, by backend and step."""
    rows = [
        timing(*cell, [time] * 20, case=case.slug)
        for case in op.timed_cases
        for cell, time in times.items()
        if not cell[1] or op.times(op.step(cell[1]), case)
    ]
    store.write(folder / f"{op.name}.timings.csv", pd.DataFrame(rows, columns=store.TABLES["timings"]))
    return Results(op, folder, ceilings)


def lasts(op: Op, time: float) -> dict[tuple[str, str], float]:
    """A time for both languages' last steps and all baselines."""
    steps = [(backend, op.steps_of(backend)[-1].name) for backend in BACKENDS]
    return dict.fromkeys([*((baseline, "") for baseline in op.baselines), *steps], time)


def texts(path: Path) -> list[str]:
    """What a figure says, line by line."""
    found = (each for each in ElementTree.parse(path).iter() if each.tag.endswith("}text"))
    return ["".join(each.itertext()).replace("\N{NO-BREAK SPACE}", " ").strip() for each in found]


@pytest.mark.parametrize("name", ["softmax", "softmax_backward"])
def test_operations_over_rows_are_drawn_against_their_length(tmp_path: Path, name: str) -> None:
    op = OPS[name]
    its = results(tmp_path, op, lasts(op, 100.0), CEILINGS)
    render.draw(tmp_path, tmp_path, [its])
    assert render.outdated(tmp_path, tmp_path, [its]) == []
    said = texts(tmp_path / f"{name}-sizes.svg")
    assert f"{op.title}: CUDA reaches 1.00 × the best baseline, Triton 1.00 ×" in said
    assert {"CUDA", "Triton", "PyTorch", "torch.compile", "Liger", "quack"} <= {*said}
    assert {"bf16, M N = 2^28", "fp32", "unaligned", "256", "64k", "50257"} <= {*said}


def test_operations_without_a_series_of_sizes_are_drawn_case_by_case(tmp_path: Path) -> None:
    op = OPS["reduction_nd"]
    its = results(tmp_path, op, {**lasts(op, 100.0), ("compile", ""): 80.0}, None)
    render.draw(tmp_path, tmp_path, [its])
    assert render.outdated(tmp_path, tmp_path, [its]) == []
    (tmp_path / "reduction_nd-sizes.svg").write_text("of an operation that had an axis of sizes")
    assert render.strays(tmp_path, tmp_path, [its]) == ["reduction_nd-sizes"]
    said = texts(tmp_path / "reduction_nd-cases.svg")
    assert "Reduction over axes: CUDA reaches 0.80 × the best baseline, Triton 0.80 ×" in said
    assert "64 x 4,096 x 1,024 bf16, axes 1, x permuted" in said
    assert said.count("torch.compile") == len(op.timed_cases)


def test_sizes_that_are_not_aligned_are_apart_and_never_joined() -> None:
    op = OPS["layer_norm"]
    assert op.size_axis
    found = groups(op, op.size_axis)
    odd = [op.size_axis.size(case) for group in found if group.is_odd for case in group.cases]
    assert {1027, 5003, 50257} <= {*odd} and all(size % 2 for size in odd)
    assert not any(group.is_joined for group in found if group.is_odd)
    assert not any(group.is_joined for group in found if len(group.cases) < 3)
    assert [op.size_axis.size(case) for case in found[0].cases] == [256, 1024, 4096, 12288, 16384, 65536, 262144]


def test_a_ladder_says_how_far_it_comes_and_which_step_loses(tmp_path: Path) -> None:
    op = OPS["vector_add"]
    ladder = {("cuda", step.name): 400.0 - 40 * index for index, step in enumerate(op.steps)}
    times = {
        ("torch", ""): 250.0,
        ("compile", ""): 300.0,
        ("cub", ""): 260.0,
        **ladder,
        ("cuda", op.steps[4].name): 480.0,
    }
    render.draw(tmp_path, tmp_path, [results(tmp_path, op, times, CEILINGS)])
    said = texts(tmp_path / "vector_add-ladder.svg")
    assert "Vector add: CUDA's v06 reaches 1.25 × PyTorch" in said
    assert "In CUDA v06_bulk_tile brings most, 2.40 × the step before; v05_bulk_ring loses 42 %." in said
    assert {step.name for step in op.steps} <= {*said}
    assert "PyTorch 250.0 µs" in said and "DRAM copy 268.4 µs" in said
    assert said.count("unmeasured") == len(op.steps_of("triton"))


def test_a_language_without_a_step_has_a_dash(tmp_path: Path) -> None:
    op = OPS["reduction"]
    times: dict[tuple[str, str], float] = {
        (backend, step.name): 100.0 for backend in BACKENDS for step in op.steps_of(backend)
    }
    render.draw(tmp_path, tmp_path, [results(tmp_path, op, {**lasts(op, 90.0), **times}, None)])
    gaps = sum(len(BACKENDS) - len(step.backends) for step in op.steps)
    assert gaps and texts(tmp_path / "reduction-ladder.svg").count("–") == gaps


def test_a_last_step_that_is_not_measured_yet_leaves_the_figures_to_the_one_before(tmp_path: Path) -> None:
    op = OPS["vector_add"]
    *_, before, _ = op.steps_of("cuda")
    times = {("torch", ""): 100.0, ("cuda", before.name): 80.0}
    its = results(tmp_path, op, times, CEILINGS)
    render.draw(tmp_path, tmp_path, [its])
    assert render.outdated(tmp_path, tmp_path, [its]) == []
    assert "Vector add: CUDA reaches 1.25 × the best baseline" in texts(tmp_path / "vector_add-sizes.svg")
    assert "unmeasured" in texts(tmp_path / "vector_add-ladder.svg")


def test_a_last_step_that_is_wrong_has_no_ratio_in_a_figure(tmp_path: Path) -> None:
    op = OPS["reduction_nd"]
    *_, before, last = op.steps_of("cuda")
    cells = [("torch", "", "ok"), ("cuda", before.name, "ok"), ("cuda", last.name, "wrong: element 3 is nan")]
    rows = [
        timing(backend, step, [100.0] * 20 if status == "ok" else [], status, case.slug)
        for case in op.timed_cases
        for backend, step, status in cells
    ]
    store.write(tmp_path / f"{op.name}.timings.csv", pd.DataFrame(rows, columns=store.TABLES["timings"]))
    render.draw(tmp_path, tmp_path, [Results(op, tmp_path, None)])
    assert op.title in texts(tmp_path / "reduction_nd-cases.svg")


def test_a_figure_is_the_same_file_whenever_it_is_drawn(tmp_path: Path) -> None:
    loaded = [each for each in load(store.REFERENCE_GPU, FOLDER) if each.op.name in ("vector_add", "reduction_nd")]
    for place in ("once", "again"):
        render.draw(FOLDER, tmp_path / place, loaded)
    names = {path.name for path in (tmp_path / "once").iterdir()}
    assert {
        "vector_add-ladder.svg",
        "vector_add-sizes.svg",
        "reduction_nd-cases.svg",
        "roofline.svg",
        "sampled.svg",
    } <= names
    for name in names:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_figures_are_drawn_again_where_their_rows_changed(tmp_path: Path) -> None:
    op = OPS["vector_add"]
    its = results(tmp_path, op, lasts(op, 100.0), None)
    render.draw(tmp_path, tmp_path, [its])
    before = render.drawn_from(tmp_path / "vector_add-ladder.svg")
    changed = results(tmp_path, op, lasts(op, 90.0), None)
    assert render.outdated(tmp_path, tmp_path, [changed]) == ["vector_add-sizes", "vector_add-ladder"]
    render.draw(tmp_path, tmp_path, [changed])
    assert before and render.drawn_from(tmp_path / "vector_add-ladder.svg") not in ("", before)


def test_committed_figures_are_small_and_as_wide_as_a_readme() -> None:
    paths = list((store.ROOT / "profiling" / "plots").glob("*.svg"))
    assert paths
    for path in paths:
        assert path.stat().st_size < 200_000, path.name
        assert ElementTree.parse(path).getroot().get("width") == f"{style.WIDTH * style.PX:g}pt", path.name


def test_a_step_tells_the_counter_that_it_moved_most() -> None:
    matmul = next(each for each in load(store.REFERENCE_GPU, FOLDER) if each.op.name == "matmul_bf16")
    first, swizzled = (matmul.op.step(name) for name in ("v01_naive", "v03_swizzled"))
    assert moved.of_step(matmul, swizzled, "cuda", matmul.op.profile_case)[0].startswith("bank conflicts ")
    assert moved.of_step(matmul, first, "cuda", matmul.op.profile_case) == []


def test_products_by_tf32_have_their_own_roof() -> None:
    plots = store.ROOT / "profiling" / "plots"
    said = texts(plots / "matmul_tf32x3-ladder.svg")
    assert any(text.startswith("fp32 FMA ") for text in said) and any(text.startswith("3 × TF32 ") for text in said)
    assert any(text.startswith("3 × TF32 ") for text in texts(plots / "roofline.svg"))
    assert not any(text.startswith("3 × TF32 ") for text in texts(plots / "matmul_fp32-ladder.svg"))


def test_every_sampled_case_is_a_dot() -> None:
    cells = sampled.read(FOLDER)
    with style.in_force():
        axes = sampled.draw(cells).axes[0]
    # A dot is a stroke without length: two points and a gap.
    dots = sum(len(np.asarray(line.get_xdata())) // 3 for line in axes.lines if line.get_solid_capstyle() == "round")
    assert dots == len(cells) and dots > 0


def test_sampled_cases_without_a_time_stand_at_the_end_and_count_for_no_mean() -> None:
    cells = sampled.read(FOLDER)
    function, direction = cells[["function", "pass"]].iloc[0]
    own = (cells["function"] == function) & (cells["pass"] == direction) & (cells["backend"] == "auto")
    cells.loc[own, "ratio"] = 0.0
    with style.in_force():
        said = [text.get_text() for text in sampled.draw(cells).texts]
        nothing = sampled.draw(cells.assign(ratio=0.0)).get_label()
    assert f"{own.sum()} of {own.sum()}" in said and said.count("–") == 1
    assert nothing == 'Sampled cases: "auto" gave no time'


def test_labels_are_spread_as_little_as_needed() -> None:
    assert style.spread([10.0, 50.0, 52.0], 15, 0, 100) == [10.0, 43.5, 58.5]
    assert style.spread([98.0, 1.0, 99.0], 15, 0, 100) == [85.0, 1.0, 100.0]
    with pytest.raises(ValueError, match="8 places 15 apart do not fit between 0 and 100"):
        style.spread([50.0] * 8, 15, 0, 100)


def test_a_label_takes_the_first_free_place_and_crosses_lines_only_where_it_must() -> None:
    room = Room(Box(0, 0, 100, 100))
    room.take(Box(0, 0, 30, 30))
    room.cross((0, 50), (100, 50))
    wanted = [Box(20, 20, 40, 40), Box(40, 45, 60, 55), Box(40, 60, 60, 70), Box(90, 90, 110, 100)]
    assert room.first_free(wanted) == wanted[2]
    assert room.first_free(wanted) == wanted[1]
    assert room.first_free(wanted) is None


def test_colours_of_text_are_dark_enough_to_read() -> None:
    assert style.ink(style.COLOURS["triton"]) == style.COLOURS["triton"]
    assert style.ink(style.COLOURS["liger"]) != style.COLOURS["liger"]
    baselines = {baseline for op in OPS.values() for baseline in op.baselines}
    assert {*baselines, *BACKENDS} <= style.COLOURS.keys()
    for op in OPS.values():
        colours = [style.COLOURS[name] for name in (*op.baselines, *BACKENDS)]
        assert len({*colours}) == len(colours), op.name

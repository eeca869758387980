"""The example of docs/how-to-read-a-counter.md: its prose says what its tables, which are rendered, show."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_twins import OPS
from kernel_twins.report.meaning.analysis import Results, load
from kernel_twins.report.pages import worked_example
from kernel_twins.report.rows import store

PAGE = store.ROOT / "docs/how-to-read-a-counter.md"
FOLDER = store.DATA / store.REFERENCE_GPU


@pytest.fixture(scope="module")
def parts() -> dict[str, list[str]]:
    results = next(each for each in load(store.REFERENCE_GPU, FOLDER) if each.op.name == worked_example.OP)
    return worked_example.parts(FOLDER, results)


def test_the_prose_has_the_counters_of_its_table(parts: dict[str, list[str]]) -> None:
    cells = {line.split(" | ")[0]: line.split(" | ")[1:3] for line in parts["example"]}
    told = PAGE.read_text()
    for metric, of_both in (
        ("| wavefronts of shared memory", ("282.6 M",)),
        ("| wavefronts lost to banks", ("219.6 M", "1.4 M")),
    ):
        for cell, words in zip(cells[metric], of_both, strict=False):
            assert f"{int(cell.replace(',', '')) / 1e6:.1f} M" == words and words in told


def test_the_prediction_of_the_trial_came_true_as_the_page_says(parts: dict[str, list[str]]) -> None:
    rows = {line.split(" | ")[0].lstrip("| "): line.rstrip(" |").split(" | ")[1:] for line in parts["trial"][2:]}
    share = {title: float(cells[1]) for title, cells in rows.items()}
    instructions = {title: float(cells[2]) for title, cells in rows.items()}
    assert share["ldmatrix alone"] > 0.9 and share["the XOR alone"] < 0.6
    assert instructions["ldmatrix alone"] / instructions["neither: v02"] == pytest.approx(1 - 0.36, abs=0.005)
    assert instructions["the XOR alone"] > instructions["neither: v02"]


def test_what_nobody_has_measured_yet_is_said_to_lack(tmp_path: Path) -> None:
    results = Results(OPS[worked_example.OP], tmp_path, None)
    assert worked_example.parts(tmp_path, results) == {name: ["Not measured yet."] for name in ("example", "trial")}

"""What the documents owe their reader about the recorded numbers."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest

from kernel_twins import OPS
from kernel_twins.report.rows import store

ROOT = Path(__file__).resolve().parents[2]
FOLDER = store.DATA / store.REFERENCE_GPU


def test_readme_says_what_ambiguous_is() -> None:
    """The words of the table, which has moved to docs/results.md, are explained before it begins."""
    text = (ROOT / "docs" / "results.md").read_text()
    legend, _, table = text.partition("<!-- results:begin -->")
    for word in ("FAST", "SLOW", "SAME", "AMBIGUOUS"):
        assert word in table
        assert word in legend


def test_probe_how_much_of_the_lead_over_cublas_is_early_launch() -> None:
    """Of products launched back to back the next one is set up early, which cuBLAS does not ask for: it is said where
    the step that does so is explained. Its time with another kernel in between is the recordings' matter."""
    text = (ROOT / "docs" / "matmul_bf16.md").read_text()
    _, _, section = text.partition(f"\n## {OPS['matmul_bf16'].step('v15_dispatch').name}: ")
    section, _, _ = section.partition("\n## ")
    assert "*programmatic dependent launch* the kernel may be set up while the one before it\nin the stream" in section


@pytest.mark.parametrize("case", ["4096x4096x4096-bf16", "8192x8192x8192-bf16"])
def test_probe_matmul_against_cublas_at_full_clock(case: str) -> None:
    """Large products are timed rested as well, where no power cap holds the clock down."""
    rows = store.read_table(FOLDER, "matmul_bf16", "timings")
    clocks = pandas.to_numeric(rows["sm_clock_mhz"])
    assert clocks[(rows["case"] == case) & (rows["step"] == "v15_dispatch")].max() == clocks.max()

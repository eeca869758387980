"""The example of docs/how-to-read-a-counter.md shows what is recorded."""

from __future__ import annotations

import re

import pytest

from kernel_twins.report.rows import store

PAGE = store.ROOT / "docs/how-to-read-a-counter.md"


def test_the_example_shows_the_recorded_counters() -> None:
    rows = store.read_table(store.DATA / store.REFERENCE_GPU, "matmul_bf16", "counters")
    rows = rows[(rows["case"] == "4096x4096x4096-bf16") & (rows["backend"] == "cuda")]
    recorded = rows.set_index(["step", "metric"])["value"].astype(float)
    told = re.findall(r"^\| `([\w.]+)` \| ([\d.,]+) \| ([\d.,]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(told) >= 10
    for metric, *values in told:
        for step, value in zip(("v02_tensor_cores", "v03_swizzled"), values, strict=True):
            assert float(value.replace(",", "")) == pytest.approx(recorded[step, metric], abs=0.005, rel=1e-6), metric

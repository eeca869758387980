"""The log's pages for tests: rows of a small ladder, and what a folder of rows is told as."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from kernel_twins import OPS
from kernel_twins.report.meaning import static
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.ncu.extract import counter_rows
from kernel_twins.report.ncu.reader import Launch
from kernel_twins.report.pages import documents, places
from kernel_twins.report.rows import store
from kernel_twins.report.rows.metrics import DURATION, METRICS

OP = OPS["vector_add"]
CASE = OP.profile_case
LABEL = "kl.vector_add.cuda.v01_scalar"
NO_STATIC = pd.DataFrame(columns=static.STATIC)


def pages(folder: Path, results: Sequence[Results]) -> dict[str, str]:
    """Every page by its path from the folder, in which they lie beside the data."""
    made = documents.logs(folder, list(results), NO_STATIC, places.beside(folder))
    return {path.relative_to(folder).as_posix(): text for path, text in made.items()}


def told(folder: Path, results: Sequence[Results]) -> str:
    """All pages as one text."""
    return "\n".join(pages(folder, results).values())


def launch(label: str = LABEL, kernel: str = "vector_add_v01_scalar_kernel", /, **changes: float) -> Launch:
    metrics = dict.fromkeys(METRICS, 1.0) | {DURATION: 1_000.0, "gpc__cycles_elapsed.avg.per_second": 1.5e9}
    for name, value in changes.items():
        (full,) = [metric for metric in METRICS if name in metric]
        metrics[full] = value
    return Launch(label, kernel, metrics, {name: metric.unit for name, metric in METRICS.items()})


def timing(backend: str, step: str, times: list[float], status: str = "ok", case: str = CASE.slug) -> dict[str, str]:
    row = dict.fromkeys(store.TABLES["timings"], "")
    return row | {
        "case": case,
        "backend": backend,
        "step": step,
        "status": status,
        "contest": "fast" if status == "ok" else "",
        "times_us": " ".join(map(str, times)),
        "extra_bytes": "4096",
        "error": "3e-07" if step else "2e-07",
        "run": "r1",
    }


def measured(folder: Path) -> Path:
    """Vector add in part: three CUDA steps with times, two of them with counters, and a Triton step that is wrong."""
    timings = [
        timing("torch", "", [300.0, 302.0, 298.0] * 8),
        timing("cub", "", [310.0] * 24),
        timing("cuda", "v01_scalar", [330.0] * 24),
        timing("cuda", "v02_grid_stride", [300.0, 302.0, 298.0] * 8),
        timing("cuda", "v06_bulk_tile", [250.0] * 24),
        timing("triton", "v06_bulk_tile", [], status="wrong: element 3 is nan"),
    ]
    launches = [
        launch(gpu__dram_throughput=85.0),
        launch("kl.vector_add.cuda.v02_grid_stride", "vector_add_v02_grid_stride_kernel", gpu__dram_throughput=91.0),
    ]
    expected = {each.label: 1 for each in launches}
    store.write(folder / "vector_add.timings.csv", pd.DataFrame(timings, columns=store.TABLES["timings"]))
    counters, _ = counter_rows(launches, expected, OP, "r1", {}, "T3")
    store.write(folder / "vector_add.counters.csv", counters)
    return folder

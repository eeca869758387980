"""The committed measurements: plain CSV tables, one folder a GPU, the latest run of every operation.

``<op>.timings.csv`` has a row a cell (case, backend, step) with the time of every round; ``<op>.counters.csv`` a row
for every metric of every profiled launch; ``runs.csv`` says on what and with what each run was made. Nothing that
can be derived is stored: rates, shares and ratios are computed when the documents are rendered.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "profiling" / "data"
RUNS = ROOT / "runs"  # ignored by git: unfinished runs, and the results of GPUs that are not published
REFERENCE_GPU = "h100-sxm"

KEY = ["case", "backend", "step"]
TIMINGS = [
    *KEY, "status", "contest", "times_us", "extra_bytes", "error", "margin",
    "sm_clock_mhz", "power_w", "temperature_c", "throttle", "code", "run",
]  # fmt: skip
COUNTERS = [*KEY, "launch", "kernel", "metric", "value", "unit", "code", "run"]
PROVENANCE = [
    "run", "date", "gpu", "driver", "power_limit_w", "cuda", "torch", "triton", "nvcc", "ncu", "python",
]  # fmt: skip


def read(path: Path, columns: list[str]) -> pd.DataFrame:
    """A table as text (no guessing of types), empty where there is no file; ValueError if a column is missing."""
    if not path.exists():
        return pd.DataFrame(columns=columns)
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    if missing := [column for column in columns if column not in table.columns]:
        raise ValueError(f"{path.name}: column {', '.join(missing)} is missing; the file was not written by this tool")
    return table[columns]


def write(path: Path, table: pd.DataFrame) -> None:
    """Replace a table in one move, so that an interruption leaves the old one or the new one, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", newline="") as file:
        table.to_csv(file, index=False, lineterminator="\n")
    os.chmod(name, 0o644)  # mkstemp lets nobody else read
    os.replace(name, path)


def read_timings(folder: Path, op: str) -> pd.DataFrame:
    return read(folder / f"{op}.timings.csv", TIMINGS)


def read_counters(folder: Path, op: str) -> pd.DataFrame:
    return read(folder / f"{op}.counters.csv", COUNTERS)


def read_runs(folder: Path) -> pd.DataFrame:
    return read(folder / "runs.csv", PROVENANCE)

"""What ``backend="auto"`` reads, from the committed timings: ``python -m kernel_twins._profiling.report.fastest``.

Run it after a measurement is published; a test compares the file with the data.
"""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from kernel_twins._profiling.report import functions_table, store
from kernel_twins._profiling.report.places import DATA
from kernel_twins._profiling.report.recorded import times_us
from kernel_twins.functional.choice import FILE
from kernel_twins.spec import Backend, Case

FUNCTIONS: dict[str, dict[str, dict[Backend, str]]] = {
    "matmul": {
        "matmul_bf16": {"cuda": "v15_dispatch", "triton": "v17_prologue"},
        "matmul_fp32": {"cuda": "v12_short_loop", "triton": "v10_autotuned"},
    },
    "linear": {"linear": {"cuda": "v01_fused", "triton": "v01_fused"}},
}
"""The operations behind a public function, and the step of each that a backend takes on the GPU that was measured."""

NOISE = 1.01
"""Within this factor of the fastest, the first of cuda, torch and triton is taken: in the order of a call's cost."""


def derive() -> dict[str, dict[str, dict[str, str]]]:
    """The fastest backend by GPU, function and case, of what was timed in the same contest."""
    derived = {}
    for folder in sorted(path for path in DATA.iterdir() if path.is_dir()):
        calls = functions_table.read(folder)
        derived[folder.name] = {
            function: {
                slug: backend
                for op, steps in by_op.items()
                for slug, backend in sorted(
                    fastest(store.read_table(folder, op, "timings"), steps, _host_times(calls, function)).items()
                )
            }
            for function, by_op in FUNCTIONS.items()
        }
    return derived


def _host_times(calls: pd.DataFrame, function: str) -> dict[str, float]:
    """The host's time of a call by backend, in microseconds, without gradients."""
    rows = calls[(calls.kind == "host") & (calls.function == function) & (calls.status == "ok")]
    return {
        row.backend: float(np.median(times_us(row)))
        for row in rows.itertuples()
        if not Case.parse(row.case).get("grad")
    }


def fastest(timings: pd.DataFrame, steps: dict[Backend, str], host: dict[str, float]) -> dict[str, str]:
    """The fastest backend by case. A call takes as long as the GPU does or, where that is longer, as its host."""
    times: dict[str, dict[str, float]] = {}
    for row in timings[(timings.status == "ok") & (timings.contest == "fast")].itertuples():
        if row.step == steps.get(row.backend, "" if row.backend == "torch" else None):
            on_gpu = float(np.median(times_us(row)))
            times.setdefault(row.case, {})[row.backend] = max(on_gpu, host.get(row.backend, 0.0))
    return {
        slug: next(
            name for name in ("cuda", "torch", "triton") if of.get(name, float("inf")) <= NOISE * min(of.values())
        )
        for slug, of in times.items()
        if "torch" in of
    }


def render() -> str:
    return json.dumps(derive(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(render())

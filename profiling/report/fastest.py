"""What ``backend="auto"`` reads, from the committed timings: ``python -m kernel_twins._profiling.report.fastest``.

Run it after a measurement is published; a test compares the file with the data.
"""

from __future__ import annotations

import json
import statistics

from kernel_twins._profiling.report import store
from kernel_twins._profiling.report.places import DATA
from kernel_twins.functional.choice import FILE
from kernel_twins.spec import Backend

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
    return {
        folder.name: {
            function: {
                slug: backend
                for op, steps in by_op.items()
                for slug, backend in sorted(_of_op(folder.name, op, steps).items())
            }
            for function, by_op in FUNCTIONS.items()
        }
        for folder in sorted(DATA.iterdir())
        if folder.is_dir()
    }


def _of_op(gpu: str, op: str, steps: dict[Backend, str]) -> dict[str, str]:
    rows = store.read_table(DATA / gpu, op, "timings")
    times: dict[str, dict[str, float]] = {}
    for row in rows[(rows.status == "ok") & (rows.contest == "fast")].itertuples():
        if row.step == steps.get(row.backend, "" if row.backend == "torch" else None):
            times.setdefault(row.case, {})[row.backend] = statistics.median(map(float, row.times_us.split()))
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

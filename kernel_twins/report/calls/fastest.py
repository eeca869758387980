"""What ``backend="auto"`` reads, from the committed timings: ``python -m kernel_twins.report.calls.fastest``.

Run it after a measurement is published; a test compares the file with the data.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from kernel_twins import OPS
from kernel_twins.functional.choice import FILE
from kernel_twins.functional.function import Function
from kernel_twins.report.calls import functions_table
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import DATA
from kernel_twins.report.rows.recorded import median_us
from kernel_twins.spec import ITEMSIZE, Backend, Case

NOISE = 1.01
"""Within this factor of the fastest, the first of cuda, torch and triton is taken: in the order of a call's cost."""


def derive() -> dict[str, dict[str, dict[str, str]]]:
    """The fastest backend by GPU, function and case; of functions that choose by it, and were timed on the host too."""
    derived = {}
    choosing = [function for function in FUNCTIONS.values() if function.chooses]
    for folder in sorted(path for path in DATA.iterdir() if path.is_dir()):
        calls = functions_table.read(folder)
        hosts = [(function, host_times(calls, function.name)) for function in choosing]
        by_function = {function.name: _by_case(folder, host, function) for function, host in hosts if host}
        derived[folder.name] = {name: cases for name, cases in by_function.items() if cases}
    return derived


def _by_case(folder: Path, host: dict[int, dict[str, float]], function: Function) -> dict[str, str]:
    best: dict[str, str] = {}
    for op in dict.fromkeys(function.drawn):
        timings = store.read_table(folder, op, "timings")
        best |= sorted(fastest(timings, measured_steps(op, timings), host).items())
    return best


def measured_steps(op: str, timings: pd.DataFrame) -> dict[Backend, str]:
    """The step that stands behind a backend on the GPU that was measured; while it was not, the last one that was."""
    timed = {(row.step, row.backend) for row in timings.itertuples()}
    found: dict[Backend, str] = {}
    for backend, (behind, *_) in OPS[op].behind.items():
        names = [step.name for step in OPS[op].steps_of(backend)]
        before = reversed(names[: names.index(behind) + 1])
        found[backend] = next((name for name in before if (name, backend) in timed), behind)
    return found


def host_times(calls: pd.DataFrame, function: str) -> dict[int, dict[str, float]]:
    """The host's time of a call, in microseconds and without gradients, by the elements' size and the backend."""
    times: dict[int, dict[str, float]] = {}
    for row in calls[(calls.kind == "host") & (calls.function == function) & (calls.status == "ok")].itertuples():
        case = Case.parse(row.case)
        if not case.get("grad"):
            times.setdefault(ITEMSIZE[case.dtype], {})[row.backend] = median_us(row)
    return times


def fastest(timings: pd.DataFrame, steps: dict[Backend, str], host: dict[int, dict[str, float]]) -> dict[str, str]:
    """The fastest backend by case, of what was timed in the same contest.

    A call takes as long as the GPU does or, where that is longer and known of all backends, as its host.
    """
    on_gpu: dict[str, dict[str, float]] = {}
    for row in timings[(timings.status == "ok") & (timings.contest == "fast")].itertuples():
        if row.step == steps.get(row.backend, "" if row.backend == "torch" else None):
            on_gpu.setdefault(row.case, {})[row.backend] = median_us(row)
    best = {}
    for slug, times in on_gpu.items():
        asked = host.get(ITEMSIZE[Case.parse(slug).dtype], {})
        if times.keys() <= asked.keys():
            times = {backend: max(time, asked[backend]) for backend, time in times.items()}
        if "torch" in times:
            least = min(times.values())
            best[slug] = next(
                name for name in ("cuda", "torch", "triton") if times.get(name, float("inf")) <= NOISE * least
            )
    return best


def render() -> str:
    return json.dumps(derive(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(render())

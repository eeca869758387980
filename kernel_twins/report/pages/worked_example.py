"""The tables of docs/how-to-read-a-counter.md: what v03 of matmul_bf16 moved, and what each of its two ideas did."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pandas as pd

from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.rows.metrics import METRICS
from kernel_twins.spec import Name

OP = "matmul_bf16"
_STEPS = ("v02_tensor_cores", "v03_swizzled")
_COUNTERS = (
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.max",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "smsp__inst_executed.sum",
    "smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
)
_VARIANTS = {
    "v02_tensor_cores": "neither: v02",
    "ldmatrix_alone": "ldmatrix alone",
    "xor_alone": "the XOR alone",
    "v03_swizzled": "both: v03",
}


def parts(folder: Path, results: Results) -> dict[str, list[str]]:
    """The lines between the page's markers, by their names."""
    return {"example": counters(results), "trial": trial(folder)}


def counters(results: Results) -> list[str]:
    case = results.op.profile_case
    before, after = (results.counters(Name("cuda", step), case) for step in _STEPS)
    rows = [
        [_title(name), *map(_told, values), write.change(*values)]
        for name in _COUNTERS
        if (values := (before.get(name), after.get(name))) != (None, None)
    ]
    if not rows:
        return [write.NOT_MEASURED]
    return write.table(["counter", *_STEPS, "change"], rows)


def trial(folder: Path) -> list[str]:
    """Of ``profiling/trials/ldmatrix_or_xor.py``."""
    file = folder / "trials" / "ldmatrix_or_xor.csv"
    if not file.exists():
        return [write.NOT_MEASURED]
    table = pd.read_csv(file).set_index("variant")
    times = {name: statistics.median(map(float, str(table.loc[name, "times_us"]).split())) for name in _VARIANTS}
    rows = [
        [
            title,
            write.number(times[name], 4),
            f"{times[name] / times['v02_tensor_cores']:.2f}",
            *(write.number(float(table.loc[name, column]) / 1e6) for column in ("instructions", "wavefronts")),
            f"{100 * float(table.loc[name, 'lost_to_banks']) / float(table.loc[name, 'wavefronts']):.0f}",
        ]
        for name, title in _VARIANTS.items()
    ]
    header = ["", "µs", "of v02's time", "instructions, million", "wavefronts, million", "lost to banks, %"]
    return write.table(header, rows)


def _title(name: str) -> str:
    """A counter's meaning and unit; of a stall, its name, by which the text speaks of it."""
    if stall := re.search(r"_stalled_(\w+)_per_", name):
        return f"`{stall[1]}`: {METRICS[name].meaning}"
    return METRICS[name].meaning + (f", {METRICS[name].unit}" if METRICS[name].unit in ("ns", "%") else "")


def _told(value: float | None) -> str:
    return write.number(value, 4)

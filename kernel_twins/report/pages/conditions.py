"""What arithmetic bounds, under three conditions: sustained, rested and in a chain. A table of what was recorded."""

from __future__ import annotations

from collections.abc import Iterable

from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.rows.recorded import CONDITIONS
from kernel_twins.spec import BACKENDS, Backend, Case, Name

MEANING = (
    "*sustained*, samples follow each other, so that products run at the power limit and below the full clock; "
    "*rested*, each sample begins when the SM clock is back at its maximum, with an untimed one just before it; *in a "
    "chain*, a small kernel stands between two calls, so that none begins while the one before it ends, and its time "
    "is in theirs. Clock and watts are medians over readings while samples ran; the sensor of watts is slower than a "
    "rested sample, and has the rest in it. A verdict is of paired rounds under one condition; ncu's cycles are asked "
    "about sustained ones alone."
)

_TITLES = {"sustained": "sustained", "rested": "rested", "chain": "in a chain"}


def table(results: Iterable[Results]) -> list[str]:
    """Three rows for each case that was timed under all conditions; no lines where none was."""
    rows = [row for each in results for case in each.op.condition_cases for row in _rows(each, case)]
    header = ["product", "", "chip", "best baseline, µs"]
    header += ["CUDA, last step, µs", "× baseline", "Triton, last step, µs", "× baseline"]
    marked = any(write.STALE in cell for row in rows for cell in row)
    return [*write.table(header, rows, right=3), *(["", write.STALE_NOTE] if marked else [])] if rows else []


def _rows(results: Results, case: Case) -> list[list[str]]:
    """Against the baseline that was timed under all conditions, the fastest of the sustained ones."""
    baseline = results.best_baseline(case, "rested")
    if baseline is None:
        return []
    rows: list[list[str]] = []
    for condition in CONDITIONS:
        title = "" if rows else f"{results.op.name} {case.slug}"
        theirs = write.number(results.time_us(case, baseline, condition), 4)
        row = [title, _TITLES[condition], results.sensors(case, condition), f"{theirs} {baseline.backend}"]
        rows.append(row + [cell for backend in BACKENDS for cell in _ours(results, case, backend, baseline, condition)])
    return rows


def _ours(results: Results, case: Case, backend: Backend, baseline: Name, condition: str) -> list[str]:
    step = results.op.last_step(backend, case)
    name = Name(backend, step.name if step else "")
    ratio = results.ratio(case, name, baseline, condition)
    if ratio is None:
        return ["–", "–"]
    mark = f" {write.STALE}" if results.stale(name) else ""
    verdict = results.standing(case, name, baseline, condition)
    return [write.number(results.time_us(case, name, condition), 4) + mark, f"{write.ratio(ratio)} {verdict}"]

"""A step's quantities before and after, a column for each language: what the log's entries and the pages share."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_twins._profiling.report import write
from kernel_twins._profiling.report.analysis import Results
from kernel_twins._profiling.report.quantities import QUANTITIES
from kernel_twins.spec import Backend, Name, Step

TITLES = {"cuda": "CUDA", "triton": "Triton"}


def before_and_after(
    results: Results, step: Step, backends: Sequence[Backend], quantities: Sequence[tuple[str, ...]]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table; each of ``quantities`` names those that share a row, left out if none is known."""
    header, columns = [f"at {results.op.profile_case.slug}"], []
    for backend in backends:
        previous = results.previous(step, backend)
        before = results.quantities(Name(backend, previous.name)) if previous else None
        columns.append((before, results.quantities(Name(backend, step.name))))
        header.append(f"{TITLES[backend]} {previous.name[:3] + ' → ' if previous else ''}{step.name[:3]}")
    rows = []
    for keys in quantities:
        cells = [_cell(keys, before, after) for before, after in columns]
        if any(cell.strip("– ·→") for cell in cells):
            rows.append([" · ".join(_heading(results, key) for key in keys), *cells])
    return header, rows


def at_other_cases(results: Results, step: Step, backends: Sequence[Backend]) -> list[list[str]]:
    """Rows for the same header: the times at each other case that the step's predictions name."""
    rows = []
    for case in dict.fromkeys(each.case for each in step.predictions if each.case):
        cells = []
        for backend in backends:
            previous = results.previous(step, backend)
            before = {"time": results.time_us(case, Name(backend, previous.name))} if previous else None
            cells.append(_cell(("time",), before, {"time": results.time_us(case, Name(backend, step.name))}))
        rows.append([f"time at {case.slug}, µs", *cells])
    return rows


def _heading(results: Results, key: str) -> str:
    return f"rate, {results.rate_unit}" if key == "rate" else QUANTITIES[key].heading


def _cell(keys: tuple[str, ...], before: dict[str, float | None] | None, after: dict[str, float | None]) -> str:
    now = " · ".join(write.number(after[key]) for key in keys)
    if before is None:
        return now
    was = " · ".join(write.number(before[key]) for key in keys)
    changes = [write.change(before[key], after[key]) for key in keys]
    told = f" ({' · '.join(changes)})" if any(each not in ("", "=") for each in changes) else ""
    return f"{was} → {now}{told}"

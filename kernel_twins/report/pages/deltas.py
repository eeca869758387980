"""A step's quantities before and after, a column for each language: what the log's entries and the pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.spec import Backend, Case, Name, Step

TITLES = {"cuda": "CUDA", "triton": "Triton"}


def before_and_after(
    results: Results, step: Step, backends: Sequence[Backend], quantities: Sequence[tuple[str, ...]]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table; each of ``quantities`` names those that share a row, left out if none is known.

    A language's column is of the case at which the step is profiled, and without quantities where it is not.
    """
    cases = {backend: results.op.profile_case_of(step, backend) for backend in backends}
    header, columns = [_place(cases.values())], []
    for backend, case in cases.items():
        previous = results.op.before(step, backend)
        before = results.quantities(Name(backend, previous.name), case) if previous and case else None
        after = results.quantities(Name(backend, step.name), case) if case else dict.fromkeys(QUANTITIES)
        columns.append((before, after))
        place = "" if header[0] else f" {_place([case])}".rstrip()
        header.append(f"{TITLES[backend]} {previous.name[:3] + ' → ' if previous else ''}{step.name[:3]}{place}")
    rows = []
    for keys in quantities:
        cells = [_cell(keys, before, after) for before, after in columns]
        if any(cell.strip("– ·→") for cell in cells):
            rows.append([" · ".join(_heading(results, key) for key in keys), *cells])
    return header, rows


def at_other_cases(results: Results, step: Step, backends: Sequence[Backend]) -> list[list[str]]:
    """Rows for the same header: the times at each other case that the step's predictions name.

    A time before that is of another step than the header's has its number.
    """
    rows = []
    for case in dict.fromkeys(each.case for each in step.predictions if each.case):
        if all(case == results.op.profile_case_of(step, backend) for backend in backends):
            continue
        cells = []
        for backend in backends:
            previous = results.previous(step, backend, case)
            before = {"time": results.time_us(case, Name(backend, previous.name))} if previous else None
            who = f"{previous.name[:3]}: " if previous and previous != results.op.before(step, backend) else ""
            cells.append(who + _cell(("time",), before, {"time": results.time_us(case, Name(backend, step.name))}))
        rows.append([f"time at {case.slug}, µs", *cells])
    return rows


def _place(cases: Iterable[Case | None]) -> str:
    """The one case of all columns, empty where there is none or there are several."""
    (case, *others) = set(cases)
    return f"at {case.slug}" if case and not others else ""


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

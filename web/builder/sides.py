"""What the page that compares any two knows of a call: its payloads, an operation each.

Lists of quantities, counters and instruction classes are in the orders that ``words`` gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from builder import numbers
from builder.rungs import TITLES
from kernel_twins.compiler.disassembly import CLASSES
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.rows.metrics import METRICS, STALLS, stall_metric
from kernel_twins.report.rows.recorded import CONDITIONS, times_us
from kernel_twins.spec import Backend, Case, Name

SASS = ("instructions", *CLASSES)


def words() -> dict[str, Any]:
    """The quantities with their formulas, the counters, the stalls, and the classes of instructions."""
    return {
        "quantities": [
            {"key": key, "heading": each.heading, "formula": dataclasses.asdict(each.compute)}
            for key, each in QUANTITIES.items()
        ],
        "metrics": [{"key": each.name, "meaning": each.meaning, "unit": each.unit} for each in METRICS.values()],
        "stalls": [{"key": stall_metric(stall), "name": stall, "meaning": told} for stall, told in STALLS.items()],
        "sass": list(SASS),
    }


def payload(results: Results, rows: pd.DataFrame) -> dict[str, Any]:
    """An operation's calls, and what was measured of them at each case; ``rows`` are the static ones."""
    runs: dict[str, int] = {}
    cases: dict[str, dict[str, Any]] = {}
    for slug, name in results.recorded.rows:
        case = Case.parse(slug)
        if case in results.op.timed_cases:
            cases.setdefault(slug, {})[numbers.call(name)] = _cell(results, case, name, runs)
    return {
        "title": results.op.title,
        "unit": results.rate_unit,
        "case": results.op.profile_case.slug,
        "calls": {numbers.call(name): _call(results, name, rows) for name in _names(results)},
        "cases": cases,
    }


def _names(results: Results) -> Iterator[Name]:
    """The ladders in their order, then the others as they were timed."""
    tried = dict.fromkeys(name for _, name in results.recorded.rows)
    for step in results.op.steps:
        yield from (name for backend in step.backends if (name := Name(backend, step.name)) in tried)
    yield from (name for name in tried if not name.step)


def _call(results: Results, name: Name, rows: pd.DataFrame) -> dict[str, Any]:
    if not name.step:
        return {"title": name.backend}
    backend: Backend = "cuda" if name.backend == "cuda" else "triton"
    title = f"{TITLES[backend]} {name.step}"
    file = results.op.file(name.step, backend)
    return {"title": title, "file": file, "stale": results.stale(name), "sass": _sass(results, name, backend, rows)}


def _sass(results: Results, name: Name, backend: Backend, rows: pd.DataFrame) -> dict[str, Any] | None:
    """Of the kernel with most instructions, of those that were launched where the step is profiled."""
    own = rows[(rows["op"] == results.op.name) & (rows["step"] == name.step) & (rows["backend"] == backend)]
    case = results.case_of(results.op.step(name.step), backend)
    launched: Mapping[str, int] = results.recorded.kernels.get((case.slug, name), {}) if case else {}
    here = own[[kernel.partition("<")[0] in launched for kernel in own["kernel"]]]
    found = own if here.empty else here
    if found.empty:
        return None
    largest = found.loc[found["instructions"].astype(int).idxmax()]
    counts = [int(largest[column]) for column in SASS]
    return {"kernel": largest["kernel"], "kernels": len(own), "counts": counts}


def _cell(results: Results, case: Case, name: Name, runs: dict[str, int]) -> dict[str, Any]:
    """``status`` where there is no time; ``rounds`` by contest, as ratios pair those of one run; ncu's ``cycles``."""
    found: dict[str, Any] = {}
    if (status := results.status(case, name)) != "ok":
        found["status"] = status
    values = [_short(value) for value in results.quantities(name, case).values()]
    while values and values[-1] is None:
        values.pop()
    found["quantities"] = values
    contests = results.recorded.rows[case.slug, name]
    found["rounds"] = {
        contest: [
            runs.setdefault(contests[contest].run, len(runs)),
            [float(each) for each in times_us(contests[contest])],
        ]
        for contest in CONDITIONS["sustained"]
        if contest in contests and contests[contest].status == "ok"
    }
    if counters := results.counters(name, case):
        found["counters"] = [_short(counters.get(metric)) for metric in METRICS]
    if (cycles := results.recorded.cycles.get((case.slug, name))) is not None:
        found["cycles"] = [int(each) for each in cycles]
    if limit := results.limiter(name, case):
        found["limit"] = limit.told()
    return found


def _short(value: float | None) -> float | int | None:
    """A value to nine digits, whole where it is."""
    if value is None:
        return None
    rounded = float(f"{value:.9g}")
    return int(rounded) if rounded == int(rounded) else rounded

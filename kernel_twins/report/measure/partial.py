"""Part of a ladder, measured on its own: it is printed and replaces nothing that is recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TypedDict, cast

from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import load
from kernel_twins.report.measure import publish
from kernel_twins.report.measure.selection import Selection
from kernel_twins.spec import Backend


class _Cell(TypedDict):
    op: str
    step: str
    backend: str
    case: str
    status: str
    time_us: float | None
    ratio: float | None
    baseline: str | None
    limit: str | None


def show(selection: Selection, stage: Path, as_json: bool) -> list[str]:
    """Extract the stage and print its cells to stdout; returns what could not be used, a line each."""
    folder = stage.with_name(f"{stage.name}-results")
    shutil.rmtree(folder, ignore_errors=True)  # or an earlier part's numbers would pass for this one's
    problems = publish.publish(stage, folder)
    rows: list[_Cell] = []
    for results in load(stage.parent.name, folder):
        op = results.op
        if op not in selection.ops or not results.measured:
            continue
        for case in selection.cases(op):
            baseline = results.best_baseline(case)
            for name in (each for each in selection.names(op) if op.times(op.step(each.step), case)):
                ratio = results.ratio(case, name, baseline) if baseline else None
                profiled = case == op.profile_case_of(op.step(name.step), cast(Backend, name.backend))
                limit = results.limiter(name, case) if profiled else None
                rows.append(
                    {
                        "op": op.name,
                        "step": name.step,
                        "backend": name.backend,
                        "case": case.slug,
                        "status": results.status(case, name),
                        "time_us": results.time_us(case, name),
                        "ratio": ratio.value if ratio else None,
                        "baseline": baseline.backend if baseline else None,
                        "limit": limit.told() if limit else None,
                    }
                )
    if as_json:
        print(json.dumps(rows, indent=2))
        return problems
    for row in rows:
        time, faster = write.number(row["time_us"]), write.number(row["ratio"])
        told = f"{time} µs, {faster} × {row['baseline']}" if row["status"] == "ok" else row["status"] or "not served"
        print(f"{row['op']} {row['step']} {row['backend']} {row['case']}: {told}")
        if row["limit"]:
            print(f"  limited by {row['limit']}")
    return problems

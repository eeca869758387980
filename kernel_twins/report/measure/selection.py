"""Which cells a command is about: all of them, or those of some operations, one step, one language, one shape.

Part of a ladder, measured on its own, is printed and replaces nothing that is recorded.
"""

from __future__ import annotations

import difflib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernel_twins import OPS, named, ops
from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results, load
from kernel_twins.report.measure import publish
from kernel_twins.spec import BACKENDS, Backend, Case, Name, Op


@dataclass(frozen=True, slots=True)
class Selection:
    """Operations and, where not empty, the one step, language and case that are meant of them."""

    ops: tuple[Op, ...]
    step: str = ""
    backend: str = ""
    case: str = ""

    @classmethod
    def of(cls, names: list[str] | None, step: str | None, backend: str | None, shape: str | None) -> Selection:
        """From the command line; ValueError names the argument that fits nothing."""
        chosen = tuple(ops.get(name) for name in names or OPS)
        case = Case.parse(shape).slug if shape else ""
        known_steps = {each.name for op in chosen for each in op.steps}
        if step and not any(each.startswith(step) for each in known_steps):
            raise ValueError(f"--step is {step!r}; {_like(step, known_steps)}, see `python -m kernel_twins list`")
        if step:
            step = named.whole(step, sorted(known_steps), "--step", " and ".join(names or ["all operations"]))
        if case and not any(case == each.slug for op in chosen for each in op.timed_cases):
            known = {each.slug for op in chosen for each in op.timed_cases}
            raise ValueError(f"--shape is {shape!r}, which is not timed; {_like(case, known)}")
        selection = cls(chosen, step or "", backend or "", case)
        meant = tuple(op for op in chosen if selection.cases(op))
        if not meant:
            given = {"--step": step, "--backend": backend, "--shape": shape}
            told = ", ".join(f"{option} {value}" for option, value in given.items() if value)
            raise ValueError(f"{told} have no cell in common{_why_none(chosen, step, case)}")
        return replace(selection, ops=meant)

    @property
    def whole(self) -> bool:
        """Whether operations are meant with all that they have, so that the results can replace recorded ones."""
        return not (self.step or self.backend or self.case)

    def cases(self, op: Op) -> tuple[Case, ...]:
        """The cases that are meant and that any of the steps meant is timed on."""
        steps = [op.step(name.step) for name in self.names(op)]
        meant = (case for case in op.timed_cases if self.case in ("", case.slug))
        return tuple(case for case in meant if any(op.times(step, case) for step in steps))

    def names(self, op: Op) -> list[Name]:
        """The steps that are meant, by language; baselines are not among them."""
        languages: list[Backend] = [backend for backend in BACKENDS if self.backend in ("", backend)]
        return [
            Name(backend, step.name)
            for backend in languages
            for step in op.steps_of(backend)
            if self.step in ("", step.name)
        ]

    def profiled(self, op: Op) -> list[tuple[Case, Name]]:
        """Those of ``Op.profiled_cells`` that are meant, and the baselines where any of these steps is profiled."""
        names, cases = self.names(op), self.cases(op)
        steps = [(case, name) for case, name in op.profiled_cells if case in cases and name in names]
        places = {case for case, _ in steps}
        return [cell for cell in op.profiled_cells if cell in steps or (not cell[1].step and cell[0] in places)]


def show(selection: Selection, stage: Path, as_json: bool) -> list[str]:
    """Extract a part's stage and print its cells to stdout; returns what could not be used, a line each."""
    folder = stage.with_name(f"{stage.name}-results")
    shutil.rmtree(folder, ignore_errors=True)  # or an earlier part's numbers would pass for this one's
    problems = publish.publish(stage, folder)
    rows = [
        _row(results, case, name)
        for results in load(stage.parent.name, folder)
        if results.op in selection.ops and results.measured
        for case in selection.cases(results.op)
        for name in selection.names(results.op)
        if results.op.times(results.op.step(name.step), case)
    ]
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


def _row(results: Results, case: Case, name: Name) -> dict[str, Any]:
    baseline = results.best_baseline(case)
    ratio = results.ratio(case, name, baseline) if baseline else None
    limit = results.limiter(name, case) if (case, name) in results.op.profiled_cells else None
    return {
        "op": results.op.name,
        "step": name.step,
        "backend": name.backend,
        "case": case.slug,
        "status": results.status(case, name),
        "time_us": results.time_us(case, name),
        "ratio": ratio.value if ratio else None,
        "baseline": baseline.backend if baseline else None,
        "limit": limit.told() if limit else None,
    }


def _why_none(chosen: tuple[Op, ...], step: str | None, case: str) -> str:
    """What keeps a step from being timed on a case, to be appended to a message."""
    for op in chosen:
        if case and any(each.name == step for each in op.steps):
            reason = op.refusal(op.step(step or ""), Case.parse(case))
            wide = " and ".join(each.name for each in op.steps if each.wide)
            return f": {reason}" if reason else f": of the steps of {op.name} only {wide} are timed on wide cases"
    return ""


def _like(text: str, known: set[str]) -> str:
    near = difflib.get_close_matches(text, sorted(known), n=3, cutoff=0.3)
    return f"the nearest are {', '.join(near)}" if near else f"there is, for example, {min(known)}"

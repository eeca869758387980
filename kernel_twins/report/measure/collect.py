"""Measures: the gate and the bench for every case, then every step under the profiler. Nothing is published here.

All that is measured lies in a stage (see stage.py), written after every case; extraction makes tables of it.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch
from rich.progress import Progress
from torch._inductor import config

from kernel_twins.harness.bench import Timing, bench
from kernel_twins.report.meaning import predictions
from kernel_twins.report.measure.collect_compile import Work, compile_all
from kernel_twins.report.measure.profilers import Profilers, worker_command
from kernel_twins.report.measure.selection import Selection
from kernel_twins.report.measure.stage import Profiled, Stage
from kernel_twins.report.ncu import ncu
from kernel_twins.report.rows import base, store
from kernel_twins.report.rows.base import InvalidDataError
from kernel_twins.report.rows.metrics import Tier
from kernel_twins.spec import BACKENDS, NOT_JUDGED, UNPROVEN, Backend, Case, Name, Op


@dataclass(frozen=True, slots=True)
class Settings:
    """How to profile: ncu up to a tier, or Triton's Proton, with at most so many seconds for a process."""

    tool: str = "ncu"
    tier: Tier = "T3"
    timeout_s: float = 300.0


@dataclass(slots=True)
class Problems:
    """What went wrong, a line each: calls that are wrong or not judged, and operations that could not be profiled."""

    unproven: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def collect(selection: Selection, stage: Stage, ledger: Path, settings: Settings, progress: Progress) -> Problems:
    """Time and profile what is selected.

    ``ledger`` is the folder in which the first measurement of every cell is noted. CannotRunError where no operation
    could be profiled here; what was measured until then stays in the stage.
    """
    problems = Problems()
    task = progress.add_task("measuring", total=sum(len(selection.cases(op)) + 1 for op in selection.ops))
    progress.update(task, description="compiling")
    work = [Work.of(op, *each) for op in selection.ops for each in _untimed(selection, op, stage)]
    for line in compile_all(work):
        progress.console.print(f"{line}: what it has not compiled, the bench does", style="yellow", markup=False)
    for op in selection.ops:
        if stage.published(op):
            progress.advance(task, len(selection.cases(op)) + 1)
            continue
        with Profilers(op, stage, settings.tier) as profilers:
            chosen = _runnable(selection, op)
            backends = tuple(backend for backend in BACKENDS if any(name.backend == backend for name in chosen))
            timings = store.read_table(stage.folder, op.name, "timings")
            predictions.note_measured(ledger, op.name, chosen, datetime.datetime.now(datetime.UTC), "collect")
            meant = [cell for cell in selection.profiled(op) if not cell[1].step or cell[1] in chosen]
            if settings.tool == "ncu" and stage.profiled(op) is None and any(name.step for _, name in meant):
                profilers.start()
            untimed = dict(_untimed(selection, op, stage))
            for case in selection.cases(op):
                progress.update(task, description=f"{op.name} {case.slug}")
                if timed := untimed.get(case):
                    stage.forget_profile(op)
                    rows = [_timing_row(stage, op, case, each) for each in _bench(op, case, timed, backends)]
                    timings = timings[timings["case"] != case.slug]
                    timings = pd.concat([timings, pd.DataFrame(rows, columns=store.TABLES["timings"])])
                    store.write(store.path(stage.folder, op.name, "timings"), timings)
                    torch.cuda.empty_cache()
                progress.advance(task)
            problems.unproven += [
                f"{op.name} {row.step or 'baseline'} ({row.backend}) at {row.case}: {_told(op, row.status)}"
                for row in timings.itertuples()
                if row.status.startswith(UNPROVEN)
            ]
            progress.update(task, description=f"{op.name} under {settings.tool}")
            if stage.profiled(op) is None:
                try:
                    _profile(op, meant, timings, stage, settings, profilers)
                except InvalidDataError as error:  # of this operation alone
                    problems.broken.append(f"{op.name}: {error}")
            progress.advance(task)
    return problems


def _runnable(selection: Selection, op: Op) -> list[Name]:
    """The steps that are meant and that this GPU can run."""
    capability = torch.cuda.get_device_capability()
    return [name for name in selection.names(op) if op.step(name.step).runs_on(capability)]


def _untimed(selection: Selection, op: Op, stage: Stage) -> Iterator[tuple[Case, list[Name]]]:
    """The cases that the stage does not hold as the code is now, with the steps that are timed on them."""
    timings, runnable = store.read_table(stage.folder, op.name, "timings"), _runnable(selection, op)
    for case in () if stage.published(op) else selection.cases(op):
        timed = [name for name in runnable if op.times(op.step(name.step), case)]
        if not _recorded(timings, case, {name: stage.code(op, name) for name in timed}):
            yield case, timed


def _bench(op: Op, case: Case, timed: list[Name], backends: tuple[Backend, ...]) -> list[Timing]:
    """The bench's. Processes that compile are left to a search: all else is compiled, or one kernel at a time."""
    steps = tuple(step for step in op.steps if any(name.step == step.name for name in timed))
    searches = "max_autotune" in op.baselines_at(case)
    with config.patch(compile_threads=config.decide_compile_threads() if searches else 1):
        return bench(op, case, steps, backends)


def _recorded(timings: pd.DataFrame, case: Case, codes: dict[Name, str]) -> bool:
    """Whether the stage holds this case, measured with the code as it is now, and judged."""
    rows = timings[timings["case"] == case.slug]
    if rows["status"].str.startswith(NOT_JUDGED).any():
        return False
    rows = rows[rows["step"] != ""]
    return dict(zip(map(Name, rows["backend"], rows["step"]), rows["code"], strict=True)) == codes


def _told(op: Op, status: str) -> str:
    again = f"; end what else uses this GPU, and measure it again: `python profiling/ncu_report.py --op {op.name}`"
    return status + again if status.startswith(NOT_JUDGED) else status


def _timing_row(stage: Stage, op: Op, case: Case, timing: Timing) -> dict[str, str]:
    return {
        "case": case.slug,
        "backend": timing.name.backend,
        "step": timing.name.step,
        "status": timing.status,
        "contest": timing.contest,
        "times_us": " ".join(f"{time:.5g}" for time in timing.times_us),
        "extra_bytes": "" if timing.extra_bytes is None else str(timing.extra_bytes),
        "error": "" if timing.error is None else f"{timing.error:.4g}",
        "margin": "" if timing.margin is None else f"{timing.margin:.4g}",
        **store.sensor_fields(timing.sensors),
        "code": stage.code(op, timing.name),
        "run": stage.run["run"],
    }


def _profile(
    op: Op,
    meant: list[tuple[Case, Name]],
    timings: pd.DataFrame,
    stage: Stage,
    settings: Settings,
    profilers: Profilers,
) -> None:
    """Of the cells that are meant, every step that is right and the baselines that were timed, under the profiler."""
    status = {(row.case, Name(row.backend, row.step)): row.status for row in timings.itertuples()}
    told = {(case, name): status.get((case.slug, name), "") for case, name in meant}
    fit = [cell for cell in meant if (not told[cell].startswith(UNPROVEN) if cell[1].step else told[cell] == "ok")]
    labelled = {base.label(op, case, name): name for case, name in fit}
    if not any(name.step for name in labelled.values()):  # a part of a ladder, at other cases than the profiled ones
        stage.note_profiled(op, Profiled("none", settings.tier, {}, {}))
        return
    if settings.tool == "proton":
        compiled = _proton(op, list(labelled), stage, settings.timeout_s)
    else:
        compiled = profilers.profile(labelled, settings.timeout_s)
    codes = {label: stage.code(op, name) for label, name in labelled.items()}
    for label, name in labelled.items():
        if name.backend == "triton":
            codes[label] += compiled.get(name.step, "-")
    launches = {label: op.step(name.step).launches if name.step else 0 for label, name in labelled.items()}
    stage.note_profiled(op, Profiled(settings.tool, settings.tier, launches, codes))


def _proton(op: Op, called: list[str], stage: Stage, timeout_s: float) -> dict[str, str]:
    """Leave Proton's report; the digests of the Triton code that the calls launch are another process's."""
    module = "kernel_twins.report.measure.proton"
    ncu.run([sys.executable, "-m", module, op.name, str(stage.report(op, "proton")), *called], timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        digests, awaited = Path(folder) / "digests.json", Path(folder) / "labels"
        awaited.write_text(" ".join(called))
        ncu.run(worker_command(op, 1, digests, awaited), timeout_s)
        return dict(json.loads(digests.read_text()))

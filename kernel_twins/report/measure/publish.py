"""Extraction of a stage: reports become rows, are checked, and take the place of the recorded ones.

An operation is published when all of it is there; its old tables stay until then, each is replaced in one move, and
rows of another run than the timings' are never used beside them. What cannot be extracted stays in
the stage, so that a reader that was missing can be installed and the extraction be made up for.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kernel_twins import OPS
from kernel_twins.report.calls import functions_table, sampled_table
from kernel_twins.report.meaning import regressions, retired
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.measure import proton
from kernel_twins.report.measure.profilers import CYCLE_CALLS
from kernel_twins.report.measure.stage import Profiled, Stage, enter_run
from kernel_twins.report.ncu import extract
from kernel_twins.report.ncu.faults import suspicious
from kernel_twins.report.rows import base, kernels, store
from kernel_twins.report.rows.base import CannotRunError, InvalidDataError
from kernel_twins.report.rows.metrics import names
from kernel_twins.spec import BACKENDS, Name, Op


def publish(folder: Path, target: Path) -> list[str]:
    """Publish every profiled operation of the stage in a folder in ``target``; returns what is not fit, a line each.

    A report that cannot be used keeps its operation in the stage; a cell with an impossible counter is published
    without counters. CannotRunError where there is nothing to publish, and, after all others, where reports cannot be
    read here or are full of values that are none.
    """
    stage = Stage.lying_in(folder)
    problems: list[str] = []
    unreadable: CannotRunError | None = None
    for op in OPS.values():
        try:
            profiled = stage.profiled(op)
            if profiled is None:
                continue
            tables = _tables(stage, op, profiled)
        except InvalidDataError as error:
            stage.forget_profile(op)  # its timings stay, and are what a run goes on from
            problems.append(f"{op.name}: {error}; profile it again by `collect --resume`")
            continue
        except CannotRunError as error:
            unreadable = error
            continue
        try:
            tables["cycles"] = _cycles(stage, op, profiled)
        except InvalidDataError as error:  # verdicts stand without, by the bench alone
            problems.append(f"{op.name} has no cycles: {error}")
        _replace(op, tables, stage, target)
        for row in tables["quarantine"].itertuples():
            problems.append(f"{op.name} {row.step or 'baseline'} ({row.backend}) is quarantined: {row.reason}")
        stage.clear(op)
    if unreadable:
        raise unreadable
    return problems


def _replace(op: Op, tables: dict[str, pd.DataFrame], stage: Stage, target: Path) -> None:
    # The ratios before come first: interrupted between the two, they are computed from the old timings again.
    tables = {"previous": _ratios(op, target), **tables}
    enter_run(target, stage.run)
    for table in sorted(store.TABLES, key=lambda table: table != "previous"):
        if table in tables and len(tables[table]):
            store.write(store.path(target, op.name, table), tables[table])
        else:
            store.path(target, op.name, table).unlink(missing_ok=True)
    forget_unnamed_runs(target)


def forget_unnamed_runs(folder: Path) -> None:
    """Drop the runs that no recorded time is of any more, and no verdict of a retired prediction."""
    named = {run for each in OPS for run in store.read_table(folder, each, "timings")["run"]}
    named |= functions_table.runs(folder) | sampled_table.runs(folder) | retired.runs(folder)
    runs = store.read_runs(folder)
    store.write(folder / "runs.csv", runs[runs["run"].isin(named)])


def _tables(stage: Stage, op: Op, profiled: Profiled) -> dict[str, pd.DataFrame]:
    run, codes = stage.run["run"], profiled.codes
    timings = store.read_table(stage.folder, op.name, "timings")
    by_name = {base.labelled(op, label)[1]: code for label, code in codes.items()}
    whole = [by_name.get(Name(row.backend, row.step), row.code) for row in timings.itertuples()]
    if changed := {
        row.step for row, code in zip(timings.itertuples(), whole, strict=True) if _source(row.code) != _source(code)
    }:
        raise InvalidDataError(f"{', '.join(sorted(changed))} changed while the run was under way")
    timings["code"] = whole
    tables = {"timings": timings, "quarantine": pd.DataFrame(columns=store.TABLES["quarantine"])}
    if profiled.tool == "none":
        return tables
    if profiled.tool == "proton":
        seen = proton.rows(stage.report(op, "proton"), op, run, codes)
        tables["proton"], tables["quarantine"] = _without_foreign(op, seen)
        return tables
    launches = extract.launches_of(stage.report(op, "counters"))
    counted = [launch.metrics for launch in launches]
    if fault := suspicious(counted, names(profiled.tier), stage.run["ncu"], stage.run["driver"]):
        raise fault
    tables["counters"], tables["quarantine"] = extract.counter_rows(
        launches, profiled.launches, op, run, codes, profiled.tier
    )
    return tables


def _cycles(stage: Stage, op: Op, profiled: Profiled) -> pd.DataFrame:
    if profiled.tool != "ncu":
        return pd.DataFrame(columns=store.TABLES["cycles"])
    launches = extract.launches_of(stage.report(op, "cycles"))
    return extract.cycle_rows(launches, profiled.launches, CYCLE_CALLS, op, stage.run["run"], profiled.codes)


def _without_foreign(op: Op, seen: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Proton's rows but for those of cells of another step's kernel, and the quarantine's."""
    reasons = kernels.refused(op, seen)
    refused = [(row.case, Name(row.backend, row.step)) in reasons for row in seen.itertuples()]
    cells = seen[refused].drop_duplicates(store.KEY)
    told = cells.assign(reason=[reasons[row.case, Name(row.backend, row.step)] for row in cells.itertuples()])
    return seen[[not each for each in refused]], told[store.TABLES["quarantine"]]


def _source(code: str) -> str:
    return code.partition(":")[0]


def _ratios(op: Op, folder: Path) -> pd.DataFrame:
    """What every step's ratio to the best baseline is in the tables that are about to be replaced.

    Of a step that lost, and whose loss nobody has accepted, it stays the ratio from before the loss: to measure again
    mends nothing.
    """
    results = Results(op, folder, None)
    recorded = store.read_table(folder, op.name, "previous")
    lost = {(loss.case, loss.name) for loss in regressions.losses(results) if not loss.reason}
    keys = [(row.case, Name(row.backend, row.step)) for row in recorded.itertuples()]
    run = results.recorded.runs[-1] if results.recorded.runs else ""
    rows = [tuple(row) for row, key in zip(recorded.itertuples(index=False), keys, strict=True) if key in lost]
    for case in op.timed_cases:
        baseline = results.best_baseline(case)
        for backend in BACKENDS:
            for step in op.steps_of(backend):
                name = Name(backend, step.name)
                ratio = results.ratio(case, name, baseline) if baseline else None
                if ratio and baseline and (case.slug, name) not in lost:
                    cell = (case.slug, backend, step.name)
                    rows.append((*cell, baseline.backend, f"{ratio.value:.4f}", run, ""))
    return pd.DataFrame(rows, columns=store.TABLES["previous"])

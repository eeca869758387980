"""Extraction of a stage: reports become rows, are checked, and take the place of the recorded ones.

An operation is published when all of it is there; its old tables stay until then, each is replaced in one move, and
rows of another run than the timings' are never used beside them. What cannot be extracted stays in
the stage, so that a reader that was missing can be installed and the extraction be made up for.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from kernel_twins import OPS
from kernel_twins._profiling.report import extract, proton, store
from kernel_twins._profiling.report.analysis import Results
from kernel_twins._profiling.report.collect import CYCLE_CALLS
from kernel_twins._profiling.report.errors import InvalidDataError
from kernel_twins._profiling.report.faults import suspicious
from kernel_twins._profiling.report.metrics import names
from kernel_twins._profiling.report.stage import Profiled, Stage
from kernel_twins.spec import BACKENDS, Name, Op


def publish(folder: Path, target: Path) -> list[str]:
    """Publish every profiled operation of the stage in a folder in ``target``; returns what is not fit, a line each.

    A report that cannot be used keeps its operation in the stage; a cell with an impossible counter is published
    without counters. CannotRunError where nothing here can read reports.
    """
    stage = Stage.lying_in(folder)
    problems: list[str] = []
    for op in OPS.values():
        profiled = stage.profiled(op)
        if profiled is None:
            continue
        try:
            tables = _tables(stage, op, profiled)
        except InvalidDataError as error:
            problems.append(f"{op.name}: {error}")
            continue
        try:
            tables["cycles"] = _cycles(stage, op, profiled)
        except InvalidDataError as error:  # verdicts stand without, by the bench alone
            problems.append(f"{op.name} has no cycles: {error}")
        tables["previous"] = _ratios(op, target)
        runs = pd.concat([store.read_runs(target), store.read_runs(stage.folder)]).drop_duplicates("run")
        store.write(target / "runs.csv", runs)  # with the new one before any table names it
        for table in store.TABLES:
            if table in tables and len(tables[table]):
                store.write(store.path(target, op.name, table), tables[table])
            else:
                store.path(target, op.name, table).unlink(missing_ok=True)
        named = {run for each in OPS for run in store.read_table(target, each, "timings")["run"]}
        store.write(target / "runs.csv", runs[runs["run"].isin(named)])
        for row in tables["quarantine"].itertuples():
            problems.append(f"{op.name} {row.step or 'baseline'} ({row.backend}) is quarantined: {row.reason}")
        stage.clear(op)
    return problems


def _tables(stage: Stage, op: Op, profiled: Profiled) -> dict[str, pd.DataFrame]:
    run, case, codes = stage.run["run"], op.profile_case.slug, profiled.codes
    timings = store.read_table(stage.folder, op.name, "timings")
    by_name = {tuple(each.split(".")[2:]): code for each, code in codes.items()}
    timings["code"] = [
        by_name.get((row.backend, row.step), row.code) if row.step else "" for row in timings.itertuples()
    ]
    tables = {"timings": timings, "quarantine": pd.DataFrame(columns=store.TABLES["quarantine"])}
    if profiled.tool == "proton":
        tables["proton"] = proton.rows(stage.report(op, "proton"), op, case, run, codes)
        return tables
    launches = extract.launches_of(stage.report(op, "counters"))
    if fault := suspicious(launches, names(profiled.tier), stage.run["ncu"], stage.run["driver"]):
        raise fault
    tables["counters"], tables["quarantine"] = extract.counter_rows(
        launches, profiled.launches, case, run, codes, profiled.tier
    )
    return tables


def _cycles(stage: Stage, op: Op, profiled: Profiled) -> pd.DataFrame:
    if profiled.tool != "ncu":
        return pd.DataFrame(columns=store.TABLES["cycles"])
    launches = extract.launches_of(stage.report(op, "cycles"))
    case, run = op.profile_case.slug, stage.run["run"]
    return extract.cycle_rows(launches, profiled.launches, CYCLE_CALLS, case, run, profiled.codes)


def _ratios(op: Op, folder: Path) -> pd.DataFrame:
    """What every step's ratio to the best baseline is in the tables that are about to be replaced."""
    results = Results(op, folder, None)
    rows = []
    for case in op.bench_cases:
        baseline = results.best_baseline(case)
        if baseline is None:
            continue
        for backend in BACKENDS:
            for step in op.steps_of(backend):
                ratio = results.ratio(case, Name(backend, step.name), baseline)
                if ratio is not None:
                    cell = (case.slug, backend, step.name)
                    rows.append((*cell, baseline.backend, f"{ratio.value:.4f}", results.runs[-1], ""))
    return pd.DataFrame(rows, columns=store.TABLES["previous"])

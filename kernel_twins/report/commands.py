"""What each verb of ncu_report.py does. Data goes to stdout, progress and messages to the console on stderr."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd
from rich.console import Console

from kernel_twins import OPS, named
from kernel_twins.errors import UnavailableError
from kernel_twins.harness.ceilings import gpu_slug
from kernel_twins.harness.load import why_no_gpu
from kernel_twins.report.measure.selection import Selection, show
from kernel_twins.report.pages import checks, documents
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import FAILED, INVALID_DATA, OK, CannotRunError, shown


def all(arguments: argparse.Namespace, console: Console) -> int:  # noqa: A001
    """Without a verb: everything that this machine can do."""
    reason = why_no_gpu()
    if reason:
        console.print(f"{reason}: rendering from the committed measurements of {store.REFERENCE_GPU}")
        documents.render(store.REFERENCE_GPU, store.DATA / store.REFERENCE_GPU, console)
        return OK
    code = collect(arguments, console)
    if not _selection(arguments).whole:
        return code
    gpu, target = _target(arguments.publish)
    try:
        code = max(code, _extract(gpu, target, console))
    except CannotRunError:
        if code == OK:  # else it has been said why nothing waits for extraction
            raise
    if not arguments.op:
        try:
            code = max(code, functions(arguments, console))
        except UnavailableError as error:  # what was collected is rendered all the same
            console.print(str(error), style="red", markup=False)
            code = FAILED
    documents.render(gpu, target, console)
    if gpu == store.REFERENCE_GPU:
        code = max(code, _failures(checks.regressions(), console))
    return code


def plan(arguments: argparse.Namespace, console: Console) -> int:
    from kernel_twins.report.measure.plan import run

    return run(_selection(arguments), arguments.tier, arguments.tool, arguments.json)


def predict(arguments: argparse.Namespace, console: Console) -> int:
    from kernel_twins.report.meaning import predictions

    folder = store.ledger(arguments.gpu)
    frozen = predictions.freeze(folder, OPS.values(), datetime.datetime.now(datetime.UTC))
    for line in frozen:
        print(line)
    if frozen:
        told = f"; commit {shown(folder)}/predictions.csv before you measure" if folder.parent == store.DATA else ""
        console.print(f"{len(frozen)} predictions of {arguments.gpu} frozen{told}")
    else:
        console.print("every prediction is frozen already")
    return OK


def retire(arguments: argparse.Namespace, console: Console) -> int:
    """Fold a rung, before it is taken out of the spec: its predictions keep their verdicts, its rows are forgotten."""
    from kernel_twins.report.meaning import analysis
    from kernel_twins.report.measure.retire import retire as fold

    folder, op = store.ledger(arguments.gpu), OPS[arguments.op]
    step = named.step(op, arguments.step)
    backends = [arguments.backend] if arguments.backend else step.backends
    (results,) = (each for each in analysis.load(arguments.gpu, folder) if each.op is op)
    lines = fold(results, step, backends, arguments.why, datetime.datetime.now(datetime.UTC))
    for line in lines:
        print(line)
    told = f"take {step.name} out of {op.name}'s spec, with what was compared with it, and delete its files; then `log`"
    console.print(f"{len(lines)} predictions retired, rows of {step.name} forgotten; {told}", markup=False)
    return OK


def collect(arguments: argparse.Namespace, console: Console) -> int:
    """Measure; a selection of less than whole operations goes to a folder of its own and is printed."""
    gpu, target = _target(arguments.publish)
    from kernel_twins.report.measure import measuring

    selection = _selection(arguments)
    stage = store.RUNS / gpu / ("unfinished" if selection.whole else "partial")
    problems = measuring.measure(selection, stage, target, arguments, console)
    if not (selection.whole or problems.broken):
        problems.broken += show(selection, stage, arguments.json)
    code = _failures(problems.unproven + problems.broken, console)
    return INVALID_DATA if problems.broken else code


def extract(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.file:
        return _show_reports(arguments)
    if reason := why_no_gpu():
        raise CannotRunError(f"nothing was collected here: {reason}; give the FILE.ncu-rep that you want to read")
    return _extract(*_target(arguments.publish), console)


def _show_reports(arguments: argparse.Namespace) -> int:
    """Anybody's reports: a column for each launch, or all that they hold as CSV or JSON."""
    files = [Path(file) for file in arguments.file]
    if not (arguments.all or arguments.json):
        from kernel_twins.report.compare import launches

        for file in files:
            launches.show(file)
        return OK
    from kernel_twins.report.ncu.extract import foreign_table

    table = pd.concat([foreign_table(path).assign(file=str(path)) for path in files])
    if arguments.json:
        print(table.to_json(orient="records", indent=2))
    else:
        table.to_csv(sys.stdout, index=False, lineterminator="\n")
    return OK


def _extract(gpu: str, target: Path, console: Console) -> int:
    from kernel_twins.report.measure import publish

    return INVALID_DATA if _failures(publish.publish(store.RUNS / gpu / "unfinished", target), console) else OK


def functions(arguments: argparse.Namespace, console: Console) -> int:
    """Time the public functions as a user calls them; `log` renders what is recorded."""
    gpu, target = _target(arguments.publish)
    from kernel_twins.report.measure.functions import record

    code = _failures(record(gpu, target, _progress(arguments, console)), console)
    console.print(f"wrote {shown(target)}/functions.csv", markup=False)
    return code


def sampled(arguments: argparse.Namespace, console: Console) -> int:
    """Time the public functions at cases that nobody chose; `log` renders what is recorded."""
    gpu, target = _target(arguments.publish)
    from kernel_twins.report.measure import sampled as recorder
    from kernel_twins.report.measure.plan import missed

    if told := missed(OPS.values(), target):
        console.print(told, style="yellow", markup=False)
    recording = recorder.opened(store.RUNS / gpu / "sampled", target, gpu, arguments.compile)
    work = recorder.compile_all if arguments.compile else recorder.record
    code = _failures(work(recording, _progress(arguments, console)), console)
    if not arguments.compile:
        recording.publish(target)
        console.print(f"wrote {shown(target)}/sampled/{recording.run['run']}.csv", markup=False)
    return code


def sweeps(arguments: argparse.Namespace, console: Console) -> int:
    from kernel_twins.report.sweeps import grid, inductor, passes, stages

    def progress(line: str) -> None:
        console.print(line, markup=False)

    if arguments.sweep != "stages" and arguments.kernel:
        raise ValueError(f"KERNEL is {' '.join(arguments.kernel)}; only `sweeps stages` takes kernels")
    match arguments.sweep:
        case "stages":
            changed = stages.record(arguments.kernel, progress)
            passes.record()
            console.print(f"{changed} files of {shown(stages.FOLDER)} changed")
        case "compile":
            console.print(f"{grid.record(progress)} cells in {shown(grid.FILE)}")
        case "inductor":
            console.print(f"{inductor.record(progress)} files in {shown(inductor.FOLDER)}")
    return OK


def static(arguments: argparse.Namespace, console: Console) -> int:
    from kernel_twins.report.meaning.static import record

    changed = record(arguments.reason, lambda line: console.print(line, markup=False))
    console.print(f"{changed} rows changed")
    return OK


def diff(arguments: argparse.Namespace, console: Console) -> int:
    from kernel_twins.report.compare.diff import run

    return run(arguments.a, arguments.b, arguments.json, arguments.all)


def log(arguments: argparse.Namespace, console: Console) -> int:
    folder = store.ledger(arguments.gpu)
    if not folder.is_dir():
        known = ", ".join(sorted(each.name for each in store.DATA.iterdir() if each.is_dir()))
        raise ValueError(
            f"--gpu is {arguments.gpu!r}, of which nothing was recorded; {known} is committed, others come by `collect`"
        )
    documents.render(arguments.gpu, folder, console)
    return OK


def check(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.accept:
        checks.accept(arguments.accept)
    found = checks.run(arguments.release, arguments.audit)
    if arguments.json:
        print(json.dumps({"failures": found.failures, "warnings": found.warnings}, indent=2))
    for line in found.warnings:
        console.print(line, style="yellow", markup=False)
    if not (code := _failures(found.failures, console)):
        console.print("documents, data and code agree")
    return code


def _selection(arguments: argparse.Namespace) -> Selection:
    return Selection.of(arguments.op, arguments.step, arguments.backend, arguments.shape)


def _target(publish: bool) -> tuple[str, Path]:
    """This machine's GPU and the folder that its data belongs in; CannotRunError where there is none."""
    if reason := why_no_gpu():
        raise CannotRunError(f"cannot measure here: {reason}; `doctor` says what is missing, `log` renders without")
    import torch

    gpu = gpu_slug(torch.cuda.get_device_name())
    published = publish or gpu == store.REFERENCE_GPU
    return gpu, (store.DATA if published else store.RUNS) / gpu


def _failures(lines: Iterable[str], console: Console) -> int:
    """Tell them; returns the exit code that they make."""
    code = OK
    for line in lines:
        console.print(line, style="red", markup=False)
        code = FAILED
    return code


def _progress(arguments: argparse.Namespace, console: Console) -> Callable[[str], None]:
    return lambda line: None if arguments.quiet else console.print(line, markup=False)

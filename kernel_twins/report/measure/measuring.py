"""A run from its opening to its last report: on one GPU here, on several in a process for each (shards.py)."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from kernel_twins.report.meaning import predictions
from kernel_twins.report.measure import shards
from kernel_twins.report.measure.collect import Problems, Settings, collect
from kernel_twins.report.measure.plan import missed
from kernel_twins.report.measure.selection import Selection
from kernel_twins.report.measure.stage import Stage
from kernel_twins.report.ncu import ncu
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import CANNOT_RUN, FAILED, OK, CannotRunError
from kernel_twins.spec import Name


def measure(
    selection: Selection, folder: Path, target: Path, arguments: argparse.Namespace, console: Console
) -> Problems:
    """Collect into a stage. First measurements are noted beside the target's data."""
    settings = Settings(arguments.tool, arguments.tier, arguments.timeout)
    if settings.tool == "ncu":
        ncu.find()  # before a run is opened and an hour of timing begins
    if not (selection.whole or arguments.resume):
        shutil.rmtree(folder, ignore_errors=True)  # a part of a ladder is printed at once: nothing to keep of it
    about = f"{settings.tool} {settings.tier} {selection.step} {selection.backend} {selection.case}".strip()
    stage = Stage.open(folder, arguments.resume, about)
    if target.parent == store.DATA and not arguments.quiet:
        _warn_of_unfrozen(selection, target, console)
    if selection.whole and (told := missed(selection.ops, target)):
        console.print(told, style="yellow", markup=False)
    gpus = torch.cuda.device_count()
    if gpus > 1 and len(selection.ops) > 1 and selection.whole:
        codes = shards.run([op.name for op in selection.ops], shards.visible(gpus), _arguments(arguments))
        if lost := sorted(op for op, code in codes.items() if code == CANNOT_RUN):
            raise CannotRunError(f"{', '.join(lost)} could not be measured here (see above)")
        return Problems(
            unproven=[
                f"{op} failed or has a step that is not known to be right (see above)"
                for op, code in codes.items()
                if code == FAILED
            ],
            broken=[f"{op} was not measured (see above)" for op, code in codes.items() if code not in (OK, FAILED)],
        )
    silent = arguments.quiet or not console.is_terminal or "NO_COLOR" in os.environ
    with Progress(console=console, disable=silent) as progress:
        return collect(selection, stage, target, settings, progress)


def _warn_of_unfrozen(selection: Selection, folder: Path, console: Console) -> None:
    frozen = set(predictions.read_frozen(folder)["digest"])
    late = (
        "/".join(cell)
        for op in selection.ops
        for cell, text in predictions.standing(op)
        if Name(cell.backend, cell.step) in selection.names(op) and predictions.digest(cell, text) not in frozen
    )
    if cells := list(dict.fromkeys(late)):
        more = f" and {len(cells) - 3} more" if len(cells) > 3 else ""
        console.print(
            f"{', '.join(cells[:3])}{more}: predictions are not frozen and will count as post hoc; interrupt this, run "
            "`python profiling/ncu_report.py predict`, commit, and collect again",
            style="yellow",
        )


def _arguments(arguments: argparse.Namespace) -> list[str]:
    told = ["--tool", arguments.tool, "--tier", arguments.tier, "--timeout", str(arguments.timeout)]
    return [*told, "--publish"] if arguments.publish else told

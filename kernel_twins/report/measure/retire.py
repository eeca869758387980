"""Folding a rung: its frozen predictions keep their verdicts in retired.csv, and its rows are forgotten."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator
from pathlib import Path

import pandas as pd

from kernel_twins.report.meaning import judged, predictions, retired, static
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.judged import Judged
from kernel_twins.report.meaning.predictions import Cell
from kernel_twins.report.measure.publish import forget_unnamed_runs
from kernel_twins.report.rows import store
from kernel_twins.spec import Backend, Name, Op, Step

Row = dict[str, str]


def retire(results: Results, step: Step, backends: Collection[Backend], why: str, now: datetime.datetime) -> list[str]:
    """Retire a step's predictions in some languages and forget its rows; returns a line for each prediction.

    With it go relative predictions of later steps that were compared with it. After an interruption the same call goes
    on. ValueError where a prediction is not frozen, or where there is no reason.
    """
    folder, told = results.recorded.folder, " ".join(why.split())
    if not told:
        raise ValueError("why is empty, must be one sentence that says why the rung is folded")
    with store.locked(folder):
        rows = [row | {"rung": step.name, "why": told} for backend in backends for row in _rows(results, step, backend)]
        added = retired.add(folder, rows, now)
        _forget(folder, results.op, step, backends)
    return [f"{row['op']} {row['step']} {row['backend']}: {row['prediction']} ({row['verdict']})" for row in added]


def _rows(results: Results, step: Step, backend: Backend) -> Iterator[Row]:
    """What is retired with a step in one language: of the step all that was frozen, of later ones what names it."""
    made = set()
    for each in judged.of_step(results, step, backend):
        row = _row(results, each)
        made.add(row["digest"])
        yield row
    for row in predictions.read_frozen(results.recorded.folder).to_dict("records"):
        cell = (row["op"], row["step"], row["backend"])
        if cell == (results.op.name, step.name, backend) and row["digest"] not in made:
            yield _withdrawn(row)
    for each in _compared(results, step, backend):
        yield _row(results, each)


def _compared(results: Results, step: Step, backend: Backend) -> Iterator[Judged]:
    """The relative predictions of later steps that are multiples of what the step measured."""
    ladder = results.op.steps_of(backend)
    for later in ladder[ladder.index(step) + 1 :]:
        for each in judged.of_step(results, later, backend):
            prediction = each.judgement.prediction
            if prediction.relative and each.judgement.verdict != "void":
                before = results.previous(later, backend, prediction.case or results.op.profile_case)
                if before == step:
                    yield each


def _row(results: Results, each: Judged) -> Row:
    prediction, actual = each.judgement.prediction, each.judgement.actual
    cell, text = Cell(each.op.name, each.step, each.backend), predictions.canonical(prediction)
    if each.mark == "not frozen":
        raise ValueError(f"{'/'.join(cell)} `{text}` is not frozen: run `ncu_report.py predict` first")
    case = prediction.case or each.op.profile_case
    recorded = results.recorded.row(case, Name(each.backend, each.step))
    return {
        **cell._asdict(),
        "prediction": text,
        "digest": predictions.digest(cell, text),
        "mark": each.mark,
        "verdict": each.judgement.verdict,
        "came": "" if actual is None else f"{actual:.10g}",
        "case": case.slug,
        "run": recorded.run if recorded else "",
        "beside": each.beside,
    }


def _withdrawn(frozen: Row) -> Row:
    """Of a prediction that the spec does not make any more."""
    kept = {name: frozen[name] for name in ("op", "step", "backend", "prediction", "digest", "mark")}
    case = predictions.parsed(frozen["prediction"]).case
    empty = dict.fromkeys(("came", "run", "beside"), "")
    return kept | empty | {"verdict": retired.WITHDRAWN, "case": case.slug if case else ""}


def _forget(folder: Path, op: Op, step: Step, backends: Collection[Backend]) -> None:
    """Drop the step's rows from the operation's tables, and from the static ones."""
    for table in store.TABLES:
        file, rows = store.path(folder, op.name, table), store.read_table(folder, op.name, table)
        kept = rows[~_of(rows, step, backends)]
        if kept.empty:
            file.unlink(missing_ok=True)
        elif len(kept) < len(rows):
            store.write(file, kept)
    forget_unnamed_runs(folder)
    if folder == store.DATA / store.REFERENCE_GPU:
        rows = store.read(static.FILE, static.STATIC)
        store.write(static.FILE, rows[~((rows["op"] == op.name) & _of(rows, step, backends))])


def _of(rows: pd.DataFrame, step: Step, backends: Collection[Backend]) -> pd.Series:
    return (rows["step"] == step.name) & rows["backend"].isin(backends)

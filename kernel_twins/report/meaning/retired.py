"""Predictions of rungs that were folded into a later step: they leave the spec, and stay in the score.

``retired.csv`` lies beside ``predictions.csv`` and is only ever added to, too. A row is a frozen prediction with the
verdict that it had when its rung was folded, since what it was judged by goes with the rung. Relative predictions of
later steps that were compared with the rung lose what they are multiples of: they are retired with it.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kernel_twins.report.meaning import predictions
from kernel_twins.report.meaning.judgement import Judgement
from kernel_twins.report.meaning.predictions import Cell, Mark
from kernel_twins.report.rows import store
from kernel_twins.spec import Backend, Op

COLUMNS = [
    "op", "step", "backend", "prediction", "digest", "mark", "verdict", "came", "case", "run", "beside", "rung", "why",
    "retired",
]  # fmt: skip
"""``came`` is empty where nothing was measured; ``run`` measured it; ``rung`` is the step that was folded."""

WITHDRAWN = "withdrawn"
"""The verdict of what had left the spec before its rung did; it counts as withdrawn still."""


@dataclass(frozen=True, slots=True)
class Retired:
    """A prediction with the verdict that it keeps."""

    step: str
    backend: Backend
    judgement: Judgement
    mark: Mark
    beside: str
    rung: str
    why: str


def read(folder: Path) -> pd.DataFrame:
    return store.read(folder / "retired.csv", COLUMNS)


def add(folder: Path, rows: Iterable[dict[str, str]], now: datetime.datetime) -> list[dict[str, str]]:
    """Enter rows, which come without their date; returns those that were not there. The others stay as they are."""
    table = read(folder)
    known = set(table["digest"])
    new = [row | {"retired": predictions.stamp(now)} for row in rows if row["digest"] not in known]
    predictions.add(folder / "retired.csv", table, [[row[column] for column in COLUMNS] for row in new])
    return new


def of(folder: Path, op: Op) -> list[Retired]:
    """An operation's retired predictions that are judged, in the order in which they were retired."""
    found = []
    for row in _rows(read(folder)):
        if row.op == op.name and row.verdict != WITHDRAWN:
            actual = float(row.came) if row.came else None
            judgement = Judgement(predictions.parsed(row.prediction), row.verdict, actual, f"run {row.run}")
            found.append(Retired(row.step, row.backend, judgement, row.mark, row.beside, row.rung, row.why))
    return found


def runs(folder: Path) -> set[str]:
    """The runs that verdicts of retired predictions rest on."""
    return set(read(folder)["run"]) - {""}


def withdrawn(folder: Path, op: Op) -> list[Mark]:
    """The marks of an operation's frozen predictions that its spec does not make any more, and that are not judged."""
    table = read(folder)
    counted = set(table[table["verdict"] != WITHDRAWN]["digest"]) | _standing([op])
    frozen = predictions.read_frozen(folder)
    return [row.mark for row in _rows(frozen[frozen["op"] == op.name]) if row.digest not in counted]


def violations(folder: Path, ops: Collection[Op]) -> list[str]:
    """Where the specs, the frozen predictions and the retired ones do not agree, a line each."""
    table, frozen = read(folder), predictions.read_frozen(folder)
    marks = dict(zip(frozen["digest"], frozen["mark"], strict=True))
    cells = {Cell(op.name, step.name, backend) for op in ops for step in op.steps for backend in step.backends}
    standing, lines = _standing(ops), []
    folded = {Cell(row.op, row.rung, row.backend) for row in _rows(table)}
    for cell in sorted(folded & cells):
        lines.append(f"{'/'.join(cell)} is retired and stands in the spec: take it out, and delete its file")
    for row in _rows(table):
        cell = Cell(row.op, row.step, row.backend)
        told = f"{'/'.join(cell)} `{row.prediction}`"
        if row.digest != predictions.digest(cell, row.prediction) or marks.get(row.digest) != row.mark:
            lines.append(f"{told} is retired as {row.mark}, and was not frozen so: retired.csv was changed by hand")
        elif row.digest in standing and Cell(row.op, row.rung, row.backend) not in cells:
            lines.append(f"{told} was compared with {row.rung}, which is retired: take it out of the spec")
    lost = Counter(
        Cell(row.op, row.step, row.backend) for row in _rows(frozen) if row.digest not in set(table["digest"])
    )
    for cell in sorted(lost.keys() - cells):
        command = f"`ncu_report.py retire {cell.op} {cell.step} --backend {cell.backend} --why REASON`"
        lines.append(
            f"{'/'.join(cell)} left the spec with {lost[cell]} frozen predictions that are not retired: put it back, "
            f"and run {command} before it goes"
        )
    return lines


def _standing(ops: Iterable[Op]) -> set[str]:
    return {predictions.digest(cell, text) for op in ops for cell, text in predictions.standing(op)}


def _rows(table: pd.DataFrame) -> Iterator[Any]:
    yield from table.itertuples(index=False)

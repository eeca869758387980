"""What a step is expected to do, frozen before it is measured; judgement.py holds it against what came.

Two tables lie beside a GPU's data, so that a tarball or a shallow clone renders the same log. ``predictions.csv`` has a
row for every prediction that was ever frozen (with its commit where it is older than the table), ``measured.csv`` the
first measurement of every cell, tuning runs and trials included. Neither is ever changed, only added to. A prediction
is *pre-registered* if it was frozen before its cell was first measured, and *post hoc* otherwise; to measure again
changes nothing, and a prediction that is worded anew is a new one. Git's history bears the tables out (history.py).
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd

from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.rows import store
from kernel_twins.spec import BACKENDS, Backend, Case, Name, Op, Prediction

Mark = Literal["pre-registered", "post hoc", "not frozen"]
FROZEN_COLUMNS = ["op", "step", "backend", "prediction", "digest", "frozen", "commit", "mark"]
MEASURED_COLUMNS = ["op", "step", "backend", "first", "by"]

_COMPARES: dict[str, Literal["<=", ">=", "=="]] = {"<=": "<=", ">=": ">=", "=": "=="}
_DATE = "%Y-%m-%dT%H:%M:%SZ"


class Cell(NamedTuple):
    """One step in one language."""

    op: str
    step: str
    backend: str


def canonical(prediction: Prediction) -> str:
    """A prediction's one spelling, such as ``sectors_per_load = 16 ± 1 %`` or ``time <= 0.9 x at 1024x256-bf16``."""
    unit = "x" if prediction.relative else QUANTITIES[prediction.quantity].unit
    compare = "=" if prediction.compare == "==" else prediction.compare
    tolerance = f"± {100 * prediction.tolerance:.10g} %" if prediction.compare == "==" else ""
    place = f"at {prediction.case.slug}" if prediction.case else ""
    return " ".join(filter(None, (prediction.quantity, compare, f"{prediction.value:.10g}", unit, tolerance, place)))


def parsed(text: str) -> Prediction:
    """The prediction of which ``canonical`` made a text; of both languages."""
    text, _, place = text.partition(" at ")
    text, _, tolerance = text.partition(" ± ")
    quantity, compare, value, *unit = text.split(" ")
    case = Case.parse(place) if place else None
    found = Prediction(quantity, _COMPARES[compare], float(value), relative=unit == ["x"], case=case)
    return dataclasses.replace(found, tolerance=float(tolerance.removesuffix(" %")) / 100) if tolerance else found


def digest(cell: Cell, prediction: str) -> str:
    """What tells a frozen prediction from every other: who is meant, and what is claimed."""
    return hashlib.sha256(f"{'/'.join(cell)} {prediction}".encode()).hexdigest()[:12]


def standing(op: Op) -> Iterator[tuple[Cell, str]]:
    """Every prediction that an operation's spec makes now, by cell."""
    for step in op.steps:
        for backend in BACKENDS:
            if backend in step.backends:
                for prediction in step.predictions:
                    if backend in prediction.backends:
                        yield Cell(op.name, step.name, backend), canonical(prediction)


def read_frozen(folder: Path) -> pd.DataFrame:
    return store.read(folder / "predictions.csv", FROZEN_COLUMNS)


def read_measured(folder: Path) -> pd.DataFrame:
    return store.read(folder / "measured.csv", MEASURED_COLUMNS)


def freeze(folder: Path, ops: Iterable[Op], now: datetime.datetime) -> list[str]:
    """Add what the specs predict and what is not frozen yet; return a line for each prediction that was added.

    ``now`` must know its time zone.
    """
    with store.locked(folder):
        frozen, first = read_frozen(folder), _first(folder)
        known = set(frozen["digest"])
        new = [(cell, text) for op in ops for cell, text in standing(op) if digest(cell, text) not in known]
        rows = []
        for cell, text in dict.fromkeys(new):
            mark: Mark = "post hoc" if cell in first else "pre-registered"
            rows.append([*cell, text, digest(cell, text), stamp(now), "", mark])
        add(folder / "predictions.csv", frozen, rows)
    return [f"{op} {step} {backend}: {text} ({mark})" for op, step, backend, text, _, _, _, mark in rows]


def note_measured(folder: Path, op: str, names: Iterable[Name], now: datetime.datetime, by: str) -> None:
    """Enter the first measurement of each of an operation's steps; one that is there already stays as it is.

    ``by`` says what measured: a run, a search for configurations, trials. Baselines are not noted.
    """
    cells = dict.fromkeys(Cell(op, name.step, name.backend) for name in names if name.step)
    with store.locked(folder):  # every GPU of a run enters its own
        measured = read_measured(folder)
        known = set(map(Cell, measured["op"], measured["step"], measured["backend"]))
        add(folder / "measured.csv", measured, [[*cell, stamp(now), by] for cell in cells if cell not in known])


def violations(folder: Path) -> list[str]:
    """Rows whose mark the dates in the two tables do not bear out, a line each."""
    first = _first(folder)
    lines = []
    for row in read_frozen(folder).itertuples():
        cell = Cell(row.op, row.step, row.backend)
        told = f"{'/'.join(cell)} `{row.prediction}` is marked {row.mark}"
        if row.digest != digest(cell, row.prediction):
            lines.append(f"{told}, but its digest is not {row.digest}: the row was changed by another hand")
        elif row.mark == "pre-registered" and row.frozen >= first.get(cell, "9"):
            lines.append(f"{told}, but was frozen {row.frozen} and measured {first[cell]}")
    return lines


def _first(folder: Path) -> dict[Cell, str]:
    """When each cell was first measured, on whichever GPU."""
    first: dict[Cell, str] = {}
    everywhere = [file.parent for root in (store.DATA, store.RUNS) for file in root.glob("*/measured.csv")]
    for each in everywhere if folder in everywhere else [folder]:
        for row in read_measured(each).itertuples():
            cell = Cell(row.op, row.step, row.backend)
            first[cell] = min(row.first, first.get(cell, row.first))
    return first


class Marks:
    """The marks of a GPU's frozen predictions."""

    def __init__(self, folder: Path) -> None:
        table = read_frozen(folder)
        self._marks: dict[str, Mark] = dict(zip(table["digest"], table["mark"], strict=True))

    def mark(self, op: str, step: str, backend: Backend, prediction: Prediction) -> Mark:
        return self._marks.get(digest(Cell(op, step, backend), canonical(prediction)), "not frozen")


def add(file: Path, table: pd.DataFrame, rows: list[list[str]]) -> None:
    """Write a table with further rows; none leave the file alone."""
    if rows:
        added = pd.DataFrame(rows, columns=table.columns, dtype=str)
        store.write(file, pd.concat([table, added], ignore_index=True))


def stamp(now: datetime.datetime) -> str:
    """A date as the tables spell it."""
    return now.astimezone(datetime.UTC).strftime(_DATE)

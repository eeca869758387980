"""What ``diff`` is asked to compare: names of cells and commits, and the measurements that they stand for."""

from __future__ import annotations

import dataclasses
import io
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from kernel_twins.report.compare.history import NoHistoryError, git
from kernel_twins.report.meaning.verdict import Floats
from kernel_twins.report.rows import store
from kernel_twins.report.rows.errors import InvalidDataError
from kernel_twins.report.rows.metrics import CYCLES, fold
from kernel_twins.spec import BACKENDS, Name

FORMS = """accepted are
  OP/STEP/BACKEND  a step in a language, such as vector_add/v03_vectorized/cuda, or a baseline, as OP/torch; what one
                   side leaves out of STEP and BACKEND is taken from the other
  …@COMMIT         the same, as a commit has it
  @COMMIT          all cells of it, against those of the other side
  FILE.ncu-rep     a report of Nsight Compute's"""

_COLUMNS = {
    "timings": ["case", "backend", "step", "status", "contest", "times_us", "run"],
    "counters": ["case", "backend", "step", "launch", "metric", "value"],
    "cycles": ["case", "backend", "step", "cycles"],
}
_STEP = re.compile(r"v\d\d_\w+")


class OperandError(ValueError):
    """An operand that names nothing; the message says what there is."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A cell, or with no ``op`` all cells, as the commit ``ref`` has them (empty: the working tree)."""

    text: str
    op: str = ""
    step: str | None = None
    backend: str | None = None
    ref: str = ""

    @classmethod
    def parse(cls, text: str) -> Operand:
        cell, at, ref = text.rpartition("@")
        if not at:
            cell, ref = (text, "") if "/" in text else ("", text)
        op, *parts = cell.split("/")
        steps = [part for part in parts if _STEP.fullmatch(part)]
        backends = [part for part in parts if not _STEP.fullmatch(part)]
        if (at and not ref) or len(steps) > 1 or len(backends) > 1 or (cell and not parts):
            raise OperandError(f"{text!r} is not the name of a cell or a commit; {FORMS}")
        backend = backends[0] if backends else None
        baseline = "" if backend and backend not in BACKENDS else None
        return cls(text, op, steps[0] if steps else baseline, backend, ref)

    def filled_from(self, other: Operand) -> Operand:
        """With what this one leaves out taken from the other one; OperandError where neither tells it."""
        step = other.step if self.step is None else self.step
        backend = other.backend if self.backend is None and other.step else self.backend
        for lacking, what in ((not step and backend in (None, *BACKENDS), "step"), (backend is None, "backend")):
            if lacking:
                raise OperandError(f"{self.text!r} leaves the {what} out, and {other.text!r} does not tell it; {FORMS}")
        return dataclasses.replace(self, step=step, backend=backend)


@dataclass(slots=True)
class Measured:
    """What is known of one cell: times by case and contest with their run; by case, one call's counters and the
    cycles of ten."""

    times: dict[tuple[str, str], tuple[str, Floats]] = field(default_factory=dict)
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    cycles: dict[str, Floats] = field(default_factory=dict)


class Source:
    """The reference GPU's data, as a commit has them or (with an empty ``ref``) the working tree."""

    def __init__(self, ref: str) -> None:
        folder = store.DATA / store.REFERENCE_GPU
        self._place = f"{ref}:{folder.relative_to(store.ROOT).as_posix()}" if ref else ""
        self._folder = folder
        try:
            listed = git(store.ROOT, "ls-tree", "--name-only", "--end-of-options", self._place).decode() if ref else ""
        except NoHistoryError as error:
            raise OperandError(f"{ref!r} is no commit with measurements ({error}); {FORMS}") from None
        self._files = listed.split() if ref else [each.name for each in folder.glob("*.csv")]

    @property
    def ops(self) -> list[str]:
        return sorted(name.removesuffix(".timings.csv") for name in self._files if name.endswith(".timings.csv"))

    def content(self, file: str) -> bytes | None:
        """A table as it stands there; None where there is none."""
        if file not in self._files:
            return None
        return git(store.ROOT, "show", f"{self._place}/{file}") if self._place else (self._folder / file).read_bytes()

    def cell(self, operand: Operand) -> Measured:
        """One cell; OperandError, which tells what there is instead, where it was not measured."""
        op, name = operand.op, Name(operand.backend or "", operand.step or "")
        if op not in self.ops:
            known = ", ".join(self.ops) or "none"
            raise OperandError(f"{operand.text!r} was not measured; operations that were are {known}")
        cells = self.cells(op)
        if name not in cells:
            names = sorted("/".join(filter(None, (each.step, each.backend))) for each in cells)
            raise OperandError(f"{operand.text!r} was not measured; {op} has {', '.join(names) or 'nothing'}")
        return cells[name]

    def cells(self, op: str) -> dict[Name, Measured]:
        """Everything measured of an operation; InvalidDataError where a table is not what it should be."""
        found: dict[Name, Measured] = {}
        for row in self._rows(op, "timings"):
            if row.status == "ok":
                cell = found.setdefault(Name(row.backend, row.step), Measured())
                cell.times[row.case, row.contest] = row.run, _numbers(op, "timings", row.times_us, above=0.0)
        calls: dict[tuple[Name, str], dict[str, dict[str, float]]] = {}
        for row in self._rows(op, "counters"):
            launch = calls.setdefault((Name(row.backend, row.step), row.case), {}).setdefault(row.launch, {})
            (launch[row.metric],) = _numbers(op, "counters", row.value)
        for (name, case), call in calls.items():
            if any(CYCLES not in launch for launch in call.values()):
                raise InvalidDataError(f"{op}.counters.csv: a launch of {name.step or name.backend} has no {CYCLES}")
            found.setdefault(name, Measured()).counters[case] = fold(list(call.values()))
        for row in self._rows(op, "cycles"):
            cell = found.setdefault(Name(row.backend, row.step), Measured())
            cell.cycles[row.case] = _numbers(op, "cycles", row.cycles)
        return found

    def _rows(self, op: str, table: str) -> list[Any]:
        file, columns = f"{op}.{table}.csv", _COLUMNS[table]
        content = self.content(file)
        if content is None:
            return []
        if content.rstrip().rpartition(b"\n")[2].startswith(b"# "):
            return list(store.parse(content, columns, file).itertuples())
        # The first committed tables have no footer; git has digests of its own, so none of them is cut short.
        try:
            old = pd.read_csv(io.BytesIO(content), dtype=str, keep_default_na=False)[columns]
        except (ValueError, KeyError) as error:
            raise InvalidDataError(f"{file} is no table of this version's: {error}") from None
        return list(old.itertuples())


def _numbers(op: str, table: str, text: str, above: float = -np.inf) -> Floats:
    try:
        values = np.array(text.split(), dtype=float)
    except ValueError:
        values = np.array([])
    if not (len(values) and np.isfinite(values).all() and values.min() > above):
        raise InvalidDataError(f"{op}.{table}.csv: {text!r} must be finite numbers, of time more than 0")
    return values

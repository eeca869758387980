"""What ``diff`` is asked to compare: names of cells and commits, and the measurements that they stand for."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from kernel_twins import OPS, named
from kernel_twins.harness import ceilings
from kernel_twins.report.compare.history import NoHistoryError, git
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import InvalidDataError
from kernel_twins.spec import BACKENDS, Name

FORMS = """accepted are
  OP/STEP/BACKEND  a step in a language, such as vector_add/v03_vectorized/cuda or vector_add/v03/cuda, or a baseline,
                   as OP/torch; what one side leaves out of STEP and BACKEND is taken from the other
  …@COMMIT         the same, as a commit has it
  @COMMIT          all cells of it, against those of the other side
  FILE.ncu-rep     a report of Nsight Compute's, or FILE.csv, what `ncu --import REPORT --csv --page raw
                   --print-units base` prints of it; against another report"""

_STEP = re.compile(r"v\d\w*")


class OperandError(ValueError):
    """An operand that names nothing; the message says what there is."""


def is_report(text: str) -> bool:
    """Whether an operand is the name of a file."""
    return text.endswith((".ncu-rep", ".csv"))


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


@dataclass(frozen=True, slots=True)
class Cell:
    """Who was measured, and in which data."""

    results: Results
    name: Name

    @property
    def told(self) -> str:
        return "/".join(filter(None, (self.results.op.name, self.name.step, self.name.backend)))


def cells(folder: Path, op: str) -> dict[Name, Cell]:
    """All cells of an operation that were timed."""
    results = Results(OPS[op], folder, ceilings.load(store.REFERENCE_GPU))
    return {name: Cell(results, name) for _, name in results.recorded.rows}


def cell(folder: Path, operand: Operand) -> Cell:
    """The one that is named; OperandError, which tells what there is instead, where it was not measured."""
    measured = [op for op in OPS if store.path(folder, op, "timings").exists()]
    if operand.op not in measured:
        known = ", ".join(measured) or "none"
        raise OperandError(f"{operand.text!r} was not measured; operations that were are {known}")
    found = cells(folder, operand.op)
    name = Name(operand.backend or "", _step(operand, found))
    if name not in found:
        names = sorted("/".join(filter(None, (each.step, each.backend))) for each in found)
        raise OperandError(f"{operand.text!r} was not measured; {operand.op} has {', '.join(names)}")
    return found[name]


def _step(operand: Operand, found: Iterable[Name]) -> str:
    """A measured step's whole name; what was typed where no step begins so, which is then not found."""
    known = [name.step for name in found if name.step and operand.backend in (None, name.backend)]
    if not operand.step or not any(step.startswith(operand.step) for step in known):
        return operand.step or ""
    try:
        return named.whole(operand.step, known, "step", operand.op)
    except ValueError as error:
        raise OperandError(f"{operand.text!r}: {error}") from None


@contextlib.contextmanager
def data(ref: str) -> Iterator[Path]:
    """The folder of the reference GPU's data, or a copy as a commit has them; OperandError where it has none."""
    folder = store.DATA / store.REFERENCE_GPU
    if not ref:
        yield folder
        return
    place = f"{ref}:{folder.relative_to(store.ROOT).as_posix()}"
    with tempfile.TemporaryDirectory() as copy:
        try:
            for file in git(store.ROOT, "ls-tree", "--name-only", "--end-of-options", place).decode().split():
                op, _, table = file.removesuffix(".csv").partition(".")
                if op in OPS and table in ("timings", "counters", "cycles"):
                    old = _read(git(store.ROOT, "show", f"{place}/{file}"), file)
                    store.write(Path(copy) / file, old.reindex(columns=store.TABLES[table], fill_value=""))
        except NoHistoryError as error:
            raise OperandError(f"{ref!r} is no commit with measurements ({error}); {FORMS}") from None
        yield Path(copy)


def _read(content: bytes, file: str) -> pd.DataFrame:
    """A committed table of whatever version, which git has digests of. The code of its rows is one commit's."""
    body, _, last = content.rstrip().rpartition(b"\n")
    try:
        whole = io.BytesIO(body if last.startswith(b"# ") else content)
        return pd.read_csv(whole, dtype=str, keep_default_na=False).assign(code="")
    except ValueError as error:
        raise InvalidDataError(f"{file} is no table: {error}") from None

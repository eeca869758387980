"""What ``diff`` is asked to compare: names of cells, commits and runs, and the tables that they stand for."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
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
  OP/STEP/BACKEND    a step in a language, such as vector_add/v03_vectorized/cuda, or a baseline, as OP/torch; what one
                     side leaves out of STEP and BACKEND is taken from the other
  …@COMMIT, …@RUN    the same, as a commit or a run of runs.csv has it
  @COMMIT, @RUN      all cells of it, against those of the other side
  FILE.ncu-rep       a report of Nsight Compute's"""

_TIMINGS = ["case", "backend", "step", "status", "contest", "times_us", "run"]
_CYCLES = ["case", "backend", "step", "cycles", "run"]
_COUNTERS = ["case", "backend", "step", "launch", "metric", "value", "run"]
_STEP = re.compile(r"v\d\d_\w+")
_RUN = re.compile(r"\d{4}-\d\d-\d\d-[0-9a-f]+")


class OperandError(ValueError):
    """An operand that names nothing; the message says what there is."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A cell, or with no ``op`` all cells, of the data set that ``ref`` names (empty: the working tree's)."""

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
            raise OperandError(f"{text!r} is not the name of a cell, a commit or a run; {FORMS}")
        step = steps[0] if steps else None
        backend = backends[0] if backends else None
        if backend and backend not in BACKENDS and step is None:
            step = ""  # a baseline
        return cls(text, op, step, backend, ref)

    def filled_from(self, other: Operand) -> Operand:
        """With what this one leaves out taken from the other one; OperandError where neither tells it."""
        if not self.op:
            return self
        step = other.step if self.step is None else self.step
        backend = other.backend if self.backend is None and other.step else self.backend
        if not step and (backend is None or backend in BACKENDS):
            raise OperandError(f"{self.text!r} leaves the step out, and {other.text!r} does not tell it; {FORMS}")
        if backend is None:
            raise OperandError(f"{self.text!r} leaves the backend out, and {other.text!r} does not tell it; {FORMS}")
        return dataclasses.replace(self, step=step, backend=backend)

    @property
    def name(self) -> Name:
        return Name(self.backend or "", self.step or "")


@dataclass(slots=True)
class Measured:
    """What a data set holds of one cell: times by case and contest with their run; by case, one call's counters and
    the cycles of ten."""

    times: dict[tuple[str, str], tuple[str, Floats]] = field(default_factory=dict)
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    cycles: dict[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """A data set: the content of its files by name (None where there is no such file), and the run that is meant."""

    content: Callable[[str], bytes | None]
    files: tuple[str, ...]
    run: str = ""

    @property
    def ops(self) -> list[str]:
        return [name.removesuffix(".timings.csv") for name in self.files if name.endswith(".timings.csv")]

    def cell(self, op: str, name: Name, text: str) -> Measured:
        """One cell; OperandError, which tells what there is instead, where it was not measured."""
        if op not in self.ops:
            raise OperandError(f"{text!r} was not measured; operations that were are {', '.join(self.ops) or 'none'}")
        known = self.cells(op)
        if name not in known:
            names = sorted("/".join(filter(None, (each.step, each.backend))) for each in known)
            raise OperandError(f"{text!r} was not measured; {op} has {', '.join(names) or 'nothing'}")
        return known[name]

    def cells(self, op: str) -> dict[Name, Measured]:
        """Everything measured of an operation; InvalidDataError where a table is not what it should be."""
        found: dict[Name, Measured] = {}
        for row in self._rows(f"{op}.timings.csv", _TIMINGS):
            if row.status == "ok":
                times = np.array(_numbers(f"{op}.timings.csv", row.times_us.split()))
                if not len(times) or times.min() <= 0:
                    raise InvalidDataError(f"{op}.timings.csv: times_us of {row.case} is {row.times_us!r}")
                cell = found.setdefault(Name(row.backend, row.step), Measured())
                cell.times[row.case, row.contest] = row.run, times
        launches: dict[tuple[Name, str], dict[str, dict[str, float]]] = {}
        for row in self._rows(f"{op}.counters.csv", _COUNTERS):
            launch = launches.setdefault((Name(row.backend, row.step), row.case), {}).setdefault(row.launch, {})
            launch[row.metric] = _numbers(f"{op}.counters.csv", [row.value])[0]
        for (name, case), call in launches.items():
            if any(CYCLES not in launch for launch in call.values()):
                raise InvalidDataError(f"{op}.counters.csv: a launch of {name.step or name.backend} has no {CYCLES}")
            found.setdefault(name, Measured()).counters[case] = fold(list(call.values()))
        for row in self._rows(f"{op}.cycles.csv", _CYCLES):
            cycles = np.array(_numbers(f"{op}.cycles.csv", row.cycles.split()))
            found.setdefault(Name(row.backend, row.step), Measured()).cycles[row.case] = cycles
        return found

    def _rows(self, file: str, columns: list[str]) -> list[Any]:
        content = self.content(file)
        if content is None:
            return []
        if content.rstrip().rpartition(b"\n")[2].startswith(b"# "):
            table = store.parse(content, columns, file)
        else:
            table = _without_footer(content, columns, file)
        return [row for row in table.itertuples() if self.run in ("", row.run)]


def source(ref: str) -> Source:
    """The data set of that name: the working tree's, a run's or a commit's; OperandError where there is none."""
    reference = store.DATA / store.REFERENCE_GPU
    if not ref:
        return _folder(reference)
    for runs in sorted([*store.DATA.glob("*/runs.csv"), *store.RUNS.glob("*/runs.csv")]):
        if ref in set(store.read_runs(runs.parent)["run"]):
            return _folder(runs.parent, ref)
    data = store.DATA.relative_to(store.ROOT).as_posix()
    try:
        if _RUN.fullmatch(ref):
            holding = git(store.ROOT, "log", "--reverse", "--format=%H", f"-S{ref}", "--", f"{data}/*/runs.csv").split()
            if holding:
                commit = holding[0].decode()
                file = git(store.ROOT, "grep", "-l", ref, commit, "--", f"{data}/*/runs.csv").decode().split()[0]
                return _commit(commit, file.partition(":")[2].removesuffix("/runs.csv"), ref)
        commit = git(store.ROOT, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}").decode().strip()
        return _commit(commit, f"{data}/{store.REFERENCE_GPU}")
    except NoHistoryError as error:
        raise OperandError(f"{ref!r} is neither a recorded run nor a commit ({error}); {FORMS}") from None


def _folder(folder: Path, run: str = "") -> Source:
    def content(file: str) -> bytes | None:
        return (folder / file).read_bytes() if (folder / file).exists() else None

    return Source(content, tuple(sorted(each.name for each in folder.glob("*.csv"))), run)


def _commit(commit: str, folder: str, run: str = "") -> Source:
    listed = git(store.ROOT, "ls-tree", "--name-only", f"{commit}:{folder}").decode().splitlines()

    def content(file: str) -> bytes | None:
        return git(store.ROOT, "show", f"{commit}:{folder}/{file}") if file in listed else None

    return Source(content, tuple(listed), run)


def _without_footer(content: bytes, columns: list[str], file: str) -> pd.DataFrame:
    """The first committed tables have no footer; git has digests of its own, so none of them is cut short."""
    try:
        table = pd.read_csv(io.BytesIO(content), dtype=str, keep_default_na=False)
    except ValueError as error:
        raise InvalidDataError(f"{file} is no table: {error}") from None
    if missing := [column for column in columns if column not in table.columns]:
        raise InvalidDataError(f"{file}: column {', '.join(missing)} is missing: it is from another version")
    return table[columns]


def _numbers(file: str, texts: list[str]) -> list[float]:
    try:
        values = [float(text) for text in texts]
    except ValueError as error:
        raise InvalidDataError(f"{file}: {error}") from None
    if not all(map(math.isfinite, values)):
        raise InvalidDataError(f"{file}: {' '.join(texts)} must be finite numbers")
    return values

"""The committed measurements: plain CSV tables, one folder a GPU, the latest run of every operation.

``<op>.timings.csv`` has a row a cell (case, backend, step) and contest (see harness/bench.py) with the time of
every round; ``<op>.counters.csv`` a row for every metric of every profiled launch; ``<op>.cycles.csv`` the cycles of
ten more calls of each profiled cell; ``<op>.quarantine.csv`` the cells whose counters were refused, and why;
``<op>.proton.csv`` what Triton's Proton saw where counters are forbidden; ``<op>.previous.csv`` the ratios to the best
baseline that the run before had, so that a step that lost is noticed, with the reason for which a loss was accepted.
``functions.csv`` has the times of the public functions (see functions_table.py), ``sampled/<run>.csv`` those at cases
that nobody chose, and ``sampled.csv`` all such runs that were ever begun (see sampled_table.py). ``predictions.csv``,
``measured.csv`` and ``retired.csv`` hold predictions (see meaning/predictions.py and retired.py). ``runs.csv`` says on
what and with what each run was made. Nothing that can be derived is stored: rates, shares and ratios are computed when
the documents are rendered.

Every file ends in a footer with the number of its rows and their digest, so that one cut short is noticed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from kernel_twins.report.rows.base import DATA as DATA
from kernel_twins.report.rows.base import REFERENCE_GPU as REFERENCE_GPU
from kernel_twins.report.rows.base import ROOT as ROOT
from kernel_twins.report.rows.base import RUNS as RUNS
from kernel_twins.report.rows.base import InvalidDataError
from kernel_twins.report.rows.libraries import LIBRARIES

KEY = ["case", "backend", "step"]
SENSORS = ["sm_clock_mhz", "power_w", "temperature_c", "throttle"]
TABLES: dict[str, list[str]] = {
    "timings": [
        *KEY, "status", "contest", "times_us", "extra_bytes", "error", "margin", *SENSORS, "code", "run",
    ],
    "counters": [*KEY, "launch", "kernel", "metric", "value", "unit", "code", "run"],
    "cycles": [*KEY, "cycles", "code", "run"],
    "quarantine": [*KEY, "reason", "code", "run"],
    "proton": [*KEY, "kernel", "count", "time_ns", "bytes", "flops", "code", "run"],
    "previous": [*KEY, "baseline", "ratio", "run", "reason"],
}  # fmt: skip
"""Columns of an operation's tables. ``cycles`` and ``times_us`` hold several numbers, blanks between them."""
_LATER = list(LIBRARIES)  # facts that the first runs did not tell
FACTS = ["gpu", "driver", "power_limit_w", "cuda", "torch", "triton", "nvcc", "ncu", "python", *_LATER]
"""Machine and versions; empty where something is not installed, or where a run did not tell yet."""
PROVENANCE = ["run", "date", *FACTS]

_FOOTER = re.compile(r"# (\d+) rows,sha256 ([0-9a-f]{16}),*")


def sensor_fields(read: Mapping[str, float | str | None]) -> dict[str, str]:
    """A row's columns of what the sensors read, empty where they read nothing."""
    told = {name: read.get(name) for name in SENSORS}
    return {
        name: "" if value is None else value if isinstance(value, str) else f"{value:.4g}"
        for name, value in told.items()
    }


def ledger(gpu: str) -> Path:
    """Where a GPU's data and the first measurements of its cells are kept: beside the published, else in runs/."""
    return (DATA if (DATA / gpu).is_dir() else RUNS) / gpu


def path(folder: Path, op: str, table: str) -> Path:
    return folder / f"{op}.{table}.csv"


def read_table(folder: Path, op: str, table: str) -> pd.DataFrame:
    """One of an operation's tables as text, empty where there is none."""
    return read(path(folder, op, table), TABLES[table])


def read_runs(folder: Path) -> pd.DataFrame:
    return read(folder / "runs.csv", PROVENANCE, later=_LATER)


def read(file: Path, columns: list[str], later: Sequence[str] = ()) -> pd.DataFrame:
    """A table as text (no guessing of types), empty where there is no file.

    Of the columns, those that came ``later`` are empty in tables that were written before.
    InvalidDataError if it is cut short, was changed by another hand or lacks a column.
    """
    if not file.exists():
        return pd.DataFrame(columns=columns)
    return parse(file.read_bytes(), columns, file.name, later)


def parse(content: bytes, columns: list[str], name: str, later: Sequence[str] = ()) -> pd.DataFrame:
    """What ``read`` does, for content that comes from elsewhere, such as from git's history."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidDataError(f"{name} is not text in UTF-8 ({error.reason}): take it from git again") from None
    body, _, last = text.removesuffix("\n").rpartition("\n")
    footer = _FOOTER.fullmatch(last)
    if footer is None or not text.endswith("\n"):
        raise InvalidDataError(f"{name} has no footer: it is cut short or was not written by this tool")
    body += "\n"
    if _digest(body) != footer[2]:
        raise InvalidDataError(f"{name} does not have the digest in its footer: take it from git, or measure again")
    table = pd.read_csv(io.StringIO(body), dtype=str, keep_default_na=False)
    for column in later:
        if column not in table.columns:
            table[column] = ""
    if missing := [column for column in columns if column not in table.columns]:
        raise InvalidDataError(f"{name}: column {', '.join(missing)} is missing: it is from another version")
    if len(table) != int(footer[1]):
        raise InvalidDataError(f"{name} has {len(table)} rows, its footer says {footer[1]}")
    return table[columns]


def render(table: pd.DataFrame) -> str:
    """A table as it stands in its file; the footer has as many fields as a row, as viewers expect."""
    body = table.to_csv(index=False, lineterminator="\n")
    padding = "," * max(0, len(table.columns) - 2)
    return f"{body}# {len(table)} rows,sha256 {_digest(body)}{padding}\n"


def write(file: Path, table: pd.DataFrame) -> None:
    """Replace a table in one move, so that an interruption leaves the old one or the new one, never half."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", newline="") as stream:
            stream.write(render(table))
        os.chmod(name, 0o644)  # mkstemp lets nobody else read
        os.replace(name, file)
    except BaseException:  # a full disk, Ctrl-C: the old table stays, and no half one beside it
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else who asks for the same folder is inside at the same time; for tables that several processes add to."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # which ends the lock


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]

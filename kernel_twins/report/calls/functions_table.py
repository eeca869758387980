"""The rows of ``functions.csv``, the recorded times of the public functions, and the log's section made from them.

A row is a call (function and case), timed in a backend: ``host`` is the host's time of one call, ``forward`` the GPU's
of a forward pass, ``gpu`` that from the start of its forward pass to the end of its backward pass, and ``backward`` the
wall time of the backward pass alone. ``times_us`` has a value a round, each the mean over ``calls`` calls. All rows are
of one run, and rounds of the same call are paired.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kernel_twins.harness.ceilings import gpu_slug
from kernel_twins.report.calls import functions_code
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.verdict import Ratio, paired_ratio
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import InvalidDataError
from kernel_twins.report.rows.recorded import median_us, times_us
from kernel_twins.spec import Case

KEY = ["kind", "function", "case", "backend"]
COLUMNS = [
    *KEY, "status", "calls", "times_us", "error", *store.SENSORS, "cpu", "code", "run",
]  # fmt: skip
"""``error``: the largest of result and gradients against fp32, as a share of the norm. ``cpu``: the host's."""

LEAST_ROUNDS = 20
TITLES = {"torch": "PyTorch", "compiled": "torch.compile", "cuda": "CUDA", "triton": "Triton", "auto": "auto"}

_ON_GPU = {"torch": (), "compiled": ("torch",), "cuda": ("torch", "compiled"), "triton": ("torch", "compiled")}
BESIDE: dict[str, dict[str, tuple[str, ...]]] = {
    "host": {"torch": (), "cuda": ("torch",), "triton": ("torch",), "auto": ("torch",)},
    "forward": _ON_GPU,
    "gpu": _ON_GPU,
    "backward": _ON_GPU,
}
"""Each kind's backends in the order of the columns, and what each is compared with."""

MEASURED = {
    "host": "The host's time of one call, by its clock around batches that the GPU keeps up with; where the case has "
    "`grad.yes` the operands require gradients, and the forward pass alone is timed, elsewhere gradients are off.",
    "forward": "The GPU's time of one forward pass with a bias; where the case has `grad.yes` the operands require "
    "gradients, and what the backward pass needs is stored on the way.",
    "gpu": "The GPU's time of one forward and backward pass, `linear` with a bias and all three gradients, by events "
    "around batches of a few milliseconds, gradients set to None in between; where operands are small, it waits for "
    "the host. The case is M x N x K of `linear`'s forward pass, and M rows of N elements of the others.",
    "backward": "The wall time of one backward pass alone: by the host's clock, from the start of a batch, whose "
    "forward passes were made before, to the end of the GPU's work for it.",
}


def file(folder: Path) -> Path:
    return folder / "functions.csv"


def read(folder: Path) -> pd.DataFrame:
    """The rows, empty where there are none; InvalidDataError says which of them is not what it should be."""
    table = store.read(file(folder), COLUMNS)
    known = set(store.read_runs(folder)["run"])
    for number, row in enumerate(table.itertuples(), 1):
        if problem := _problem(row, known):
            raise _refused(f"row {number}, {' '.join(getattr(row, key) for key in KEY)}: {problem}")
    if table.duplicated(KEY).any():
        raise _refused(f"{' '.join(table[table.duplicated(KEY)].iloc[0][KEY])} stands there twice")
    if table["run"].nunique() > 1:
        raise _refused(f"its rows are of several runs: {', '.join(sorted(set(table['run'])))}")
    for kind, rows in table[table["status"] == "ok"].groupby("kind"):
        if rows["times_us"].str.split().str.len().nunique() > 1:
            raise _refused(f"{kind} has rows of different numbers of rounds, which are no pairs")
    return table


def runs(folder: Path) -> set[str]:
    """The run that the rows are of, if there are any."""
    return set(store.read(file(folder), COLUMNS)["run"])


def _refused(what: str) -> InvalidDataError:
    return InvalidDataError(f"functions.csv: {what}; measure again by `ncu_report.py functions`")


def _problem(row: Any, known: set[str]) -> str:
    """What is wrong with a row, empty if nothing is."""
    if row.backend not in BESIDE.get(row.kind, {}) or row.function not in FUNCTIONS:
        return "there is no such kind, function or backend"
    if row.run not in known:
        return f"its run, {row.run!r}, is not in runs.csv"
    try:
        if Case.parse(row.case).slug != row.case:
            return "the case is not in its one spelling"
        times, wrong = times_us(row), float(row.error or "nan")
        calls = int(row.calls or "0")
    except ValueError as error:
        return str(error)
    if row.status != "ok":
        told = row.status.startswith("wrong: ") and not len(times)
        return "" if told else f"status is {row.status!r}, with {len(times)} times"
    if len(times) < LEAST_ROUNDS or not np.all(np.isfinite(times) & (times > 0)):
        return f"times_us must be {LEAST_ROUNDS} or more times, is {row.times_us!r}"
    return "" if calls > 0 and wrong >= 0 else "calls or error is missing"


def stale(gpu: str, folder: Path) -> list[str]:
    """A line where functions changed since they were measured."""
    changed = _changed(gpu, read(folder))
    return [f"{', '.join(changed)} changed since measured: run `ncu_report.py functions`"] if changed else []


def unrecorded(folder: Path) -> list[str]:
    """The contests that are declared and have no row, or lack one of a backend, a line each; or why nobody can tell."""
    recorded = set(read(folder)[KEY].itertuples(index=False, name=None))
    try:
        from kernel_twins.report.calls.declared import declared

        lacking = dict.fromkeys(call[:3] for call in declared() if call not in recorded)
    except ImportError as error:
        return [f"the rows of functions.csv were not compared with the calls that are declared: {error}"]
    return [
        f"{function} was never timed at {case} ({kind}): run `ncu_report.py functions`"
        for kind, function, case in lacking
    ]


def _changed(gpu: str, table: pd.DataFrame) -> list[str]:
    """The functions that have rows of other code than today's."""
    measured = table[table["code"] != ""].groupby("function", sort=False)["code"].agg(set)
    return [str(function) for function, codes in measured.items() if codes != {functions_code.code(gpu, str(function))}]


def section(folder: Path) -> list[str]:
    """The log's section; nothing where there are no rows."""
    table = read(folder)
    if table.empty:
        return []
    run = table["run"].iloc[0]
    runs = store.read_runs(folder).set_index("run")
    changed = _changed(gpu_slug(runs.loc[run, "gpu"]), table)
    since = f" Changed since: {', '.join(changed)}." if changed else ""
    lines = [
        "## The public functions",
        "",
        f"{_called(table)} as a user calls them, beside PyTorch and PyTorch under `torch.compile` (run `{run}`)."
        f"{since} No call was timed before its result, and its gradients where they are timed, agreed with those in "
        "fp32. A time is the median over rounds, in which the calls took turns in random order: the "
        "eighth of the rounds in which a loop apart from the calls ran fastest, since hosts are shared. × is how many "
        "times faster, the median over paired rounds with its 99 % interval.",
    ]
    for kind, measured in MEASURED.items():
        rows = table[table["kind"] == kind]
        if len(rows):
            lines += ["", f"{measured} {_rounds(rows)}.", "", *_table(kind, rows)]
    wrong = table[table["status"] != "ok"]
    if len(wrong):
        told = (f"- {row.function} {row.case}, {TITLES[row.backend]}: {row.status}." for row in wrong.itertuples())
        lines += ["", *told]
    return lines


def _called(table: pd.DataFrame) -> str:
    """The functions, in the order of their rows."""
    *most, last = (f"`kernel_twins.{function}`" for function in table["function"].unique())
    return f"{', '.join(most)} and {last}" if most else str(last)


def _rounds(rows: pd.DataFrame) -> str:
    timed = rows[rows["status"] == "ok"]
    if timed.empty:
        return "Nothing was timed"
    counts = {len(times_us(row)) for row in timed.itertuples()}
    calls = sorted({int(calls) for calls in timed["calls"]})
    batch = f"{calls[0]}" if len(calls) == 1 else f"{calls[0]} to {calls[-1]}"
    cpu = timed["cpu"].iloc[0] if timed["kind"].iloc[0] in ("host", "backward") else ""
    return f"{max(counts)} rounds of {batch} calls" + (f", on {cpu}" if cpu else "")


def _table(kind: str, rows: pd.DataFrame) -> list[str]:
    columns = BESIDE[kind]
    header = ["call"]
    for backend, others in columns.items():
        header += [f"{TITLES[backend]}, µs", *(f"× {TITLES[other]}" for other in others)]
    lines = []
    for (function, case), call in rows.groupby(["function", "case"], sort=False):
        of = {row.backend: row for row in call.itertuples()}
        cells = [f"{function} {case}"]
        for backend, others in columns.items():
            cells += [_time(of.get(backend)), *(write.ratio(ratio(of.get(backend), of.get(other))) for other in others)]
        lines.append(cells)
    return write.table(header, lines)


def _time(row: Any) -> str:
    if row is None:
        return "–"
    return write.number(median_us(row)) if row.status == "ok" else "wrong"


def ratio(row: Any, other: Any) -> Ratio | None:
    """How many times faster a row is than another one; None where one of them is missing or has no time."""
    if row is None or other is None or not row.status == other.status == "ok":
        return None
    return paired_ratio(times_us(other), times_us(row))

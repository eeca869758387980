"""What git's history says of predictions and measurements: which commit first held each of them, and in which order.

A prediction is read from the specs of every commit that touched them, by a process that imports the specs as they were.
A cell was measured in a commit that holds a time of it, for any GPU, or a configuration that a search found for it. A
step that git sees renamed stays the same cell: a new number does not make an old kernel unmeasured.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from kernel_twins._profiling.report import sampled_table, store
from kernel_twins._profiling.report.predictions import Cell, canonical, read_frozen, read_measured
from kernel_twins.spec import Case, Prediction

_SPECS = ("kernel_twins/spec.py", "kernel_twins/ops")
_TIMINGS = re.compile(r"profiling/data/[^/]+/([^/]+)\.timings\.csv")
_TUNED = re.compile(r"triton-kernels/tuned/[^/]+\.json")
_STEP_FILE = re.compile(r"(cuda|triton)-kernels/(\w+)/(v\d\d_\w+)\.(?:cu|py)")
_DATE = "%Y-%m-%dT%H:%M:%SZ"

# Runs in the folder of an old tree, without site-packages: an installed kernel_twins must not answer in its place. What
# that tree's Prediction does not have yet takes today's default.
_DUMP = """
import json, sys
sys.path.insert(0, ".")
from kernel_twins.ops import OPS
fields = ("quantity", "compare", "value", "relative", "tolerance", "backends")
print(json.dumps([
    [op.name, step.name, list(getattr(step, "backends", ("cuda", "triton"))),
     {field: getattr(prediction, field) for field in fields if hasattr(prediction, field)},
     prediction.case.slug if getattr(prediction, "case", None) else None]
    for op in OPS.values() for step in op.steps for prediction in step.predictions
]))
"""


class NoHistoryError(RuntimeError):
    """Git cannot answer here; the message says why."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit by its full hash, with the date at which it was made, in UTC."""

    hash: str
    date: str

    @property
    def short(self) -> str:
        return self.hash[:7]


@dataclass(frozen=True)
class Evidence:
    """The commits that first held each prediction and a measurement of each cell."""

    repo: Path
    predicted: dict[tuple[Cell, str], Commit]
    measured: dict[Cell, Commit]

    def precedes(self, commit: Commit | None, other: Commit) -> bool:
        """Whether ``commit`` is a strict ancestor of ``other``; one that there is not never is."""
        return commit is not None and commit != other and _is_ancestor(self.repo, commit.hash, other.hash)


def git(repo: Path, *arguments: str) -> bytes:
    """What git prints; NoHistoryError where there is no git, no repository, or no such thing in it."""
    environment = os.environ | {"TZ": "UTC", "LC_ALL": "C"}  # dates in UTC, messages in English
    command = ["git", "-C", str(repo), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True, env=environment).stdout
    except FileNotFoundError:
        raise NoHistoryError("git is not installed") from None
    except subprocess.CalledProcessError as error:
        raise NoHistoryError(error.stderr.decode(errors="replace").strip().partition("\n")[0]) from None


def whole(folder: Path) -> Path:
    """The root of the repository that holds ``folder``; NoHistoryError where its history does not reach back."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    root = Path(git(there, "rev-parse", "--show-toplevel").decode().strip())
    if git(root, "rev-parse", "--is-shallow-repository").decode().strip() == "true":
        raise NoHistoryError("this clone is shallow: `git fetch --unshallow` brings the whole history")
    if not (root / _SPECS[0]).is_file():  # an installed wheel may lie in anybody's repository
        raise NoHistoryError(f"the history around it, of {root.name}, is not that of kernel-twins")
    return root


def evidence(folder: Path) -> Evidence:
    """What the history of the repository that holds ``folder`` says; NoHistoryError where it cannot say."""
    repo = whole(folder)
    return Evidence(repo, first_predicted(repo), first_measured(repo))


def known(folder: Path) -> Evidence | None:
    """``evidence``, or None where there is none to be had: in a tarball, in a shallow clone."""
    try:
        return evidence(folder)
    except NoHistoryError:
        return None


def first_predicted(repo: Path) -> dict[tuple[Cell, str], Commit]:
    """By cell and canonical text, the first commit whose specs held a prediction; unimportable specs hold none."""
    found: dict[tuple[Cell, str], Commit] = {}
    for commit in _commits(repo, *_SPECS):
        for op, step, backends, fields, slug in _predictions_of(repo, commit):
            limited = fields.pop("backends", backends)
            text = canonical(Prediction(**fields, case=Case.parse(slug) if slug else None))
            for backend in backends:
                if backend in limited:
                    found.setdefault((Cell(op, step, backend), text), commit)
    return found


def first_measured(repo: Path) -> dict[Cell, Commit]:
    """By cell, the first commit that holds a measurement of it or of the step that it was renamed from."""
    found: dict[Cell, Commit] = {}
    for commit in _commits(repo, "profiling/data", "triton-kernels", "cuda-kernels"):
        changed = git(
            repo, "show", "--diff-merges=first-parent", "--format=", "--name-status", "-M", commit.hash
        ).decode()
        for status, *paths in (line.split("\t") for line in changed.splitlines() if line):
            if status.startswith("D"):
                continue
            if _TIMINGS.fullmatch(paths[-1]) or _TUNED.fullmatch(paths[-1]):
                for cell in _measured_in(git(repo, "show", f"{commit.hash}:{paths[-1]}"), paths[-1]):
                    found.setdefault(cell, commit)
            elif status.startswith("R"):
                old, new = (_STEP_FILE.fullmatch(path) for path in paths)
                if old and new and (before := found.get(Cell(old[2], old[3], old[1]))):
                    found.setdefault(Cell(new[2], new[3], new[1]), before)
    return found


def audit(folder: Path) -> tuple[list[str], list[str]]:
    """The frozen predictions whose mark git does not bear out, a line each; and notes on what could not be audited."""
    frozen = read_frozen(folder)
    try:
        found = evidence(folder)
    except NoHistoryError as reason:
        return [], [f"{folder.name}: predictions not audited: {reason}"]
    violations = [*_lost(folder, "predictions.csv", frozen), *_lost(folder, "measured.csv", read_measured(folder))]
    violations += _lost(folder, "sampled.csv", sampled_table.ledger(folder)[sampled_table.BEGUN])
    recorded = read_measured(folder)
    measured = {Cell(*row) for row in recorded[["op", "step", "backend"]].itertuples(index=False)}
    for row in frozen.itertuples():
        cell = Cell(row.op, row.step, row.backend)
        told = f"{'/'.join(cell)} `{row.prediction}` is marked {row.mark}"
        commit, first = found.predicted.get((cell, row.prediction)), found.measured.get(cell)
        if row.mark != "pre-registered":
            continue
        if first is not None and not found.precedes(commit, first):
            since = f"was first committed in {commit.short}" if commit else "is in no commit"
            violations.append(f"{told}, but {since}; the cell was measured in {first.short}")
        elif commit is None and cell in measured:
            violations.append(f"{told}, but was measured before it was committed")
    return violations, []


def _lost(folder: Path, name: str, table: pd.DataFrame) -> list[str]:
    """Rows of a table's committed versions that it does not hold any more, or not as they were; a line each."""
    repo = whole(folder)
    path = (folder.absolute() / name).relative_to(repo)
    rows = {tuple(row) for row in table.itertuples(index=False)}
    lost: dict[tuple[str, ...], Commit] = {}
    for commit in _commits(repo, str(path)):
        try:
            content = git(repo, "show", f"{commit.hash}:{path}")
        except NoHistoryError:  # the commit that removed it
            continue
        for row in store.parse(content, list(table.columns), name).itertuples(index=False):
            if tuple(row) not in rows:
                lost.setdefault(tuple(row), commit)
    return [
        f"{name} lacks the row {', '.join(row)} of {commit.short}: put it back, rows are only ever added"
        for row, commit in lost.items()
    ]


def _commits(repo: Path, *paths: str) -> list[Commit]:
    """The commits up to HEAD that touched the paths, parents before children."""
    arguments = ("--reverse", "--topo-order", "--format=%H %cd", f"--date=format-local:{_DATE}")
    lines = git(repo, "log", *arguments, "HEAD", "--", *paths).decode().splitlines()
    return [Commit(*line.split(" ", 1)) for line in lines]


def _predictions_of(repo: Path, commit: Commit) -> list[tuple[str, str, list[str], dict[str, Any], str | None]]:
    """Operation, step, its languages, the prediction's fields and the slug of the case that it names, if any.

    Nothing where the specs cannot be imported.
    """
    try:
        tree = git(repo, "archive", "--format=zip", commit.hash, "kernel_twins")
    except NoHistoryError:
        return []  # this commit removed the folder
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(io.BytesIO(tree)) as archive:
            archive.extractall(folder)
        dump = subprocess.run([sys.executable, "-I", "-S", "-c", _DUMP], cwd=folder, capture_output=True, text=True)
    return list(json.loads(dump.stdout)) if dump.returncode == 0 else []


def _measured_in(content: bytes, path: str) -> list[Cell]:
    """The cells that a committed file holds measurements of; none where it cannot be read, as history stays as it is.

    Not by store.parse: the first tables have no footer yet.
    """
    try:
        if timings := _TIMINGS.fullmatch(path):
            table = pd.read_csv(io.BytesIO(content), dtype=str, keep_default_na=False)
            timed = table[(table["status"] == "ok") & (table["step"] != "")]
            return [Cell(timings[1], row.step, row.backend) for row in timed.itertuples()]
        return [Cell(*name.split("/"), "triton") for name in json.loads(content)]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


@cache
def _is_ancestor(repo: Path, commit: str, other: str) -> bool:
    try:
        git(repo, "merge-base", "--is-ancestor", commit, other)
    except NoHistoryError:
        return False
    return True

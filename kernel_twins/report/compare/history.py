"""What git's history says of frozen predictions: each came before the first measurement of its cell.

Rows of ``predictions.csv`` and ``measured.csv`` are only ever added, so that the first commit that holds a row dates
it. Rows that are older than these tables name the commit themselves.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from kernel_twins.report.calls import sampled_table
from kernel_twins.report.meaning import retired
from kernel_twins.report.meaning.predictions import Cell, read_frozen, read_measured
from kernel_twins.report.rows import store

_BY_COMMIT = "commit "  # how the `by` of a measurement begins that is older than its table

Rows = dict[tuple[str, ...], str]  # the first commit that holds each row


class NoHistoryError(RuntimeError):
    """Git cannot answer here; the message says why."""


def audit(folder: Path) -> tuple[list[str], list[str]]:
    """The frozen predictions whose mark git does not bear out, and rows that are gone, a line each; then notes on what
    could not be audited.
    """
    frozen, measured = read_frozen(folder), read_measured(folder)
    begun, folded = sampled_table.ledger(folder)[sampled_table.BEGUN], retired.read(folder)
    try:
        repo = _whole(folder)
        predicted_by = _first_commits(repo, folder / "predictions.csv", frozen)
        measured_by = _first_commits(repo, folder / "measured.csv", measured)
        folded_by = _first_commits(repo, folder / "retired.csv", folded)
        begun_by = _rekeyed(folder, _first_commits(repo, folder / "sampled.csv", begun))
    except NoHistoryError as reason:
        return [], [f"{folder.name}: predictions not audited: {reason}"]
    violations = [*_lost("predictions.csv", frozen, predicted_by), *_lost("measured.csv", measured, measured_by)]
    violations += _lost("retired.csv", folded, folded_by) + _lost("sampled.csv", begun, begun_by)
    since: dict[Cell, list[str]] = {}
    for row in _rows(measured):
        named = row.by.removeprefix(_BY_COMMIT) if row.by.startswith(_BY_COMMIT) else measured_by.get(tuple(row))
        since.setdefault(Cell(*row[:3]), []).extend([named] if named else [])
    for row in _rows(frozen[frozen["mark"] == "pre-registered"]):
        cell = Cell(*row[:3])
        told = f"{'/'.join(cell)} `{row.prediction}` is marked {row.mark}, but was"
        commits = [each for each in (predicted_by.get(tuple(row)), row.commit) if each]
        if cell in since and not commits:
            violations.append(f"{told} measured before it was committed")
            continue
        early = (each for each in since.get(cell, []) if not any(_precedes(repo, commit, each) for commit in commits))
        if measured_in := next(early, ""):
            violations.append(f"{told} first committed in {commits[0][:7]}; the cell was measured in {measured_in[:7]}")
    return violations, []


def _rekeyed(folder: Path, rows: Rows) -> Rows:
    """Rows of the ledger of sampled cases with the digests that their codes are now, see identity.py."""
    pairs = store.read(folder.parent / "rekeyed.csv", ["name", "before", "after"])
    after = {row.before: row.after for row in _rows(pairs) if row.name == "sampled"}

    def now(code: str) -> str:
        while code in after:
            code = after[code]
        return code

    return {(*row[:2], now(row[2])): commit for row, commit in rows.items()}


def _whole(folder: Path) -> Path:
    """The root of the repository that holds ``folder``; NoHistoryError where its history does not reach back."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    root = Path(git(there, "rev-parse", "--show-toplevel").decode().strip())
    if git(root, "rev-parse", "--is-shallow-repository").decode().strip() == "true":
        raise NoHistoryError("this clone is shallow: `git fetch --unshallow` brings the whole history")
    if not (root / "kernel_twins" / "spec" / "__init__.py").is_file():  # a wheel may lie in anybody's repository
        raise NoHistoryError(f"the history around it, of {root.name}, is not that of kernel-twins")
    return root


def _first_commits(repo: Path, file: Path, table: pd.DataFrame) -> Rows:
    """By row, the first commit whose version of the file holds it, of the table's columns."""
    path = str(file.absolute().relative_to(repo))
    found: Rows = {}
    for commit in git(repo, "log", "--reverse", "--topo-order", "--format=%H", "HEAD", "--", path).decode().split():
        try:
            content = git(repo, "show", f"{commit}:{path}")
        except NoHistoryError:  # the commit that removed it
            continue
        for row in _rows(store.parse(content, list(table.columns), file.name)):
            found.setdefault(tuple(row), commit)
    return found


def _lost(name: str, table: pd.DataFrame, first: Rows) -> list[str]:
    """Rows of a table's committed versions that it does not hold any more, or not as they were; a line each."""
    held = set(map(tuple, _rows(table)))
    return [
        f"{name} lacks the row {', '.join(row)} of {commit[:7]}: put it back, rows are only ever added"
        for row, commit in first.items()
        if row not in held
    ]


def _rows(table: pd.DataFrame) -> Iterator[Any]:
    yield from table.itertuples(index=False)


@cache
def _precedes(repo: Path, commit: str, other: str) -> bool:
    """Whether ``commit`` is a strict ancestor of ``other``; one that there is not never is."""
    try:
        one, two = (git(repo, "rev-parse", "--verify", f"{each}^{{commit}}") for each in (commit, other))
        git(repo, "merge-base", "--is-ancestor", commit, other)
    except NoHistoryError:
        return False
    return one != two


def git(repo: Path, *arguments: str) -> bytes:
    """What git prints; NoHistoryError where there is no git, no repository, or no such thing in it."""
    command = ["git", "-C", str(repo), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=True, env=os.environ | {"LC_ALL": "C"}).stdout
    except FileNotFoundError:
        raise NoHistoryError("git is not installed") from None
    except subprocess.CalledProcessError as error:
        raise NoHistoryError(error.stderr.decode(errors="replace").strip().partition("\n")[0]) from None

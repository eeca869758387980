"""One operation's rows on one GPU, by cell: what was timed, and the counters that belong to the code that was timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kernel_twins.report.rows import kernels, store
from kernel_twins.report.rows.metrics import fold
from kernel_twins.spec import Case, Name, Op

Cell = tuple[str, Name]  # a case's slug, and who was measured

CONDITIONS: Mapping[str, tuple[str, ...]] = {"sustained": ("fast", "slow"), "rested": ("rested",), "chain": ("chain",)}
"""The contests under each condition, of which none is compared with another.

Sustained times are those that are meant where no condition is named.
"""


class Recorded:
    """The tables of an operation in a folder. What was counted of another step's kernel is as if it were not there."""

    def __init__(self, op: Op, folder: Path) -> None:
        self.op = op
        self.folder = folder
        # By contest: baselines are timed beside the slow steps too, and some calls under other conditions.
        self.rows: dict[Cell, dict[str, Any]] = {}
        for row in self.table("timings").itertuples():
            self.rows.setdefault((row.case, Name(row.backend, row.step)), {})[row.contest] = row

    def table(self, table: str) -> pd.DataFrame:
        return store.read_table(self.folder, self.op.name, table)

    def row(self, case: Case, name: Name, condition: str = "sustained") -> Any:
        """The cell's row, of the fast contest where it was in both; None where it was never tried."""
        rows = self.rows.get((case.slug, name), {})
        return next((rows[contest] for contest in (*CONDITIONS[condition], "") if contest in rows), None)

    @property
    def runs(self) -> list[str]:
        return sorted({row.run for rows in self.rows.values() for row in rows.values()} | set(self.counters["run"]))

    @cached_property
    def counters(self) -> pd.DataFrame:
        return self.table("counters")

    @cached_property
    def foreign(self) -> dict[Cell, str]:
        """The cells whose counters are not those of the step's kernel, and why."""
        return kernels.refused(self.op, self.counters)

    @cached_property
    def calls(self) -> dict[Cell, dict[str, float]]:
        """Counters by call."""
        return {cell: fold(launches) for cell, launches in self.launches.items()}

    @cached_property
    def launches(self) -> dict[Cell, list[dict[str, float]]]:
        """Counters by call and launch."""
        launches: dict[Cell, dict[str, dict[str, float]]] = {}
        for row in self._own(self.counters):
            launches.setdefault(_cell(row), {}).setdefault(row.launch, {})[row.metric] = float(row.value)
        return {cell: list(found.values()) for cell, found in launches.items()}

    @cached_property
    def kernels(self) -> dict[Cell, Counter[str]]:
        """The kernels of a call, by name, and how often each was launched."""
        launched: dict[Cell, Counter[str]] = {}
        for row in self._own(self.counters.drop_duplicates([*store.KEY, "launch"])):
            launched.setdefault(_cell(row), Counter())[row.kernel] += 1
        return launched

    @cached_property
    def cycles(self) -> dict[Cell, np.ndarray]:
        """Cycles of ten calls."""
        return {_cell(row): np.array(row.cycles.split(), dtype=float) for row in self._own(self.table("cycles"))}

    @cached_property
    def quarantined(self) -> dict[Cell, str]:
        """Why a call's counters were refused."""
        return {_cell(row): row.reason for row in self._current(self.table("quarantine"))}

    @cached_property
    def proton(self) -> pd.DataFrame:
        """What Triton's Proton saw, where ncu's counters were not to be had."""
        table = self.table("proton")
        return table.loc[[row.Index for row in self._current(table)]]

    def _own(self, table: pd.DataFrame) -> list[Any]:
        return [row for row in self._current(table) if _cell(row) not in self.foreign]

    def _current(self, table: pd.DataFrame) -> list[Any]:
        """The rows that belong to the code that was timed, and to its run."""
        timed = {name: (row.code, row.run) for (_, name), rows in self.rows.items() for row in rows.values()}
        return [row for row in table.itertuples() if timed.get(Name(row.backend, row.step)) == (row.code, row.run)]


def _cell(row: Any) -> Cell:
    return row.case, Name(row.backend, row.step)


def times_us(row: Any) -> np.ndarray:
    """A row's times, one a round."""
    return np.array(row.times_us.split(), dtype=float)


def median_us(row: Any) -> float:
    """What a row counts for: the median over its rounds."""
    return float(np.median(times_us(row)))

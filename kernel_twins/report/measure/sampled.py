"""Records the public functions at cases that nobody chose: the verb ``sampled``.

``--compile`` begins a recording: its run's id gives the seed, the seed the cases, and what these need compiled is
compiled in many processes at once. Without it, a recording that was begun is gone on with, case after case, until it
is whole. The ledger names every seed from its beginning on, and a new recording cannot be begun while one that the
same code can finish lies unfinished: nobody can draw until the cases please.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from kernel_twins.functional.function import Pass
from kernel_twins.report.calls import sampled_table
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.calls.sampled_cases import CASES, cases, is_compiled, seed_of
from kernel_twins.report.measure import ahead, publish, stage
from kernel_twins.report.rows import libraries, store
from kernel_twins.report.rows.base import CannotRunError
from kernel_twins.spec import Case

_COMPILED = ("triton", *libraries.COMPILED)  # into caches that outlive the process
_PROCESSES = 12  # that compile: as many as one GPU's memory has room for the operands of

Progress = Callable[[str], None]
Work = tuple[str, int]  # a function, and the number of one of its cases


class Recording:
    """A folder in runs/ with one recording's cases and what is measured of them; written after every contest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: dict[str, str] = dict(store.read_runs(folder).iloc[0])
        told = json.loads((folder / "sampled.json").read_text())
        self.code: str = told["code"]
        self.cases: dict[str, list[Case]] = {
            function: [Case.parse(slug) for slug in slugs] for function, slugs in told["cases"].items()
        }
        self._rows: dict[str, pd.DataFrame] = {}

    @classmethod
    def lying_in(cls, folder: Path) -> Recording | None:
        return cls(folder) if (folder / "sampled.json").exists() else None

    @classmethod
    def begin(cls, folder: Path, run: dict[str, str], code: str) -> Recording:
        """Instead of one that lies there, which other code began: that is set aside."""
        if earlier := cls.lying_in(folder):
            folder.rename(folder.with_name(f"{folder.name}-{earlier.run['run']}"))
        (folder / "runs.csv").unlink(missing_ok=True)  # of one that ended before it had drawn its cases
        stage.enter_run(folder, run)
        seed = seed_of(run["run"])
        drawn = {function: [case.slug for case in cases(function, seed)] for function in FUNCTIONS}
        stage.write_json(folder / "sampled.json", {"code": code, "cases": drawn})
        return cls(folder)

    def changed(self, run: Mapping[str, str], code: str) -> list[str]:
        """In what a run that began now would be another one, a line each."""
        differ = [name for name in store.FACTS if self.run[name] != run[name]]
        lines = [f"{name} was {self.run[name]!r}, is {run[name]!r}" for name in differ]
        return lines + ([] if code == self.code else [f"code was {self.code}, is {code}"])

    def rows(self, function: str) -> pd.DataFrame:
        if function not in self._rows:
            self._rows[function] = store.read(self.folder / f"{function}.csv", sampled_table.COLUMNS)
        return self._rows[function]

    def add(self, function: str, rows: list[dict[str, str]]) -> None:
        named = {"seed": str(seed_of(self.run["run"])), "run": self.run["run"]}
        added = pd.DataFrame([row | named for row in rows], columns=sampled_table.COLUMNS)
        self._rows[function] = pd.concat([self.rows(function), added], ignore_index=True)
        store.write(self.folder / f"{function}.csv", self._rows[function])

    def waiting(self) -> list[tuple[str, int, list[Pass]]]:
        """The cases that are not whole yet, and the passes that they lack."""
        found = []
        for function, drawn in self.cases.items():
            rows = self.rows(function)
            done = set(zip(rows["case"], rows["pass"], strict=True))
            for index, case in enumerate(drawn):
                if lacking := [each for each in FUNCTIONS[function].passes if (case.slug, each) not in done]:
                    found.append((function, index, lacking))
        return found

    def lost(self) -> dict[str, str]:
        """Statuses of calls after which the GPU was lost, by cell."""
        file = self.folder / "lost.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def note_lost(self, cell: str, status: str) -> None:
        stage.write_json(self.folder / "lost.json", {**self.lost(), cell: status})

    def compiled(self) -> set[Work]:
        """What was compiled, so that an interrupted command does not do it again."""
        lines = [line.split() for file in self.folder.glob("compiled-*.txt") for line in file.read_text().splitlines()]
        return {(function, int(index)) for function, index in lines}

    def publish(self, target: Path) -> None:
        """Put the rows beside the recorded ones, of which the last ones stay; the folder goes."""
        rows = pd.concat([self.rows(function) for function in FUNCTIONS], ignore_index=True)
        stage.enter_run(target, self.run)
        sampled_table.enter(target, self.run["run"], self.code)  # where the folder is another than that it began with
        store.write(sampled_table.file(target, self.run["run"]), rows)
        sampled_table.forget_older(target)
        publish.forget_unnamed_runs(target)
        shutil.rmtree(self.folder)


def opened(folder: Path, target: Path, gpu: str, begins: bool) -> Recording:
    """The recording to go on with; with ``begins`` a new one, where none lies there that this code can go on with.

    CannotRunError where there is none, or where it was begun with something else.
    """
    run, code = stage.new_run(), sampled_table.code(gpu)
    lying = Recording.lying_in(folder)
    changed = lying.changed(run, code) if lying else []
    if lying and not changed:
        return lying
    if not begins:
        told = f"run {lying.run['run']} was begun with something else: {'; '.join(changed)}" if lying else "none waits"
        raise CannotRunError(f"no recording to go on with: {told}; begin one by `ncu_report.py sampled --compile`")
    recording = Recording.begin(folder, run, code)
    sampled_table.enter(target, recording.run["run"], code)
    return recording


def compile_all(recording: Recording, progress: Progress) -> list[str]:
    """Compile what the cases need; returns what went wrong, a line each. What stays undone is done when it is timed."""
    every = [(function, index) for function in FUNCTIONS for index in range(CASES)]
    done = recording.compiled()
    waiting = sorted((each for each in every if each not in done), key=lambda each: not is_compiled(each[1]))
    stage.write_json(recording.folder / "compile.json", waiting)
    count = min(_PROCESSES, len(os.sched_getaffinity(0)))
    progress(f"{len(waiting)} of {len(every)} cases to compile for, in {count} processes")
    return ahead.run("kernel_twins.report.measure.sampled", recording.folder, count)


def record(recording: Recording, progress: Progress) -> list[str]:
    """Measure what the recording lacks; returns what was wrong with our functions, a line each.

    CannotRunError where a call took the GPU away from this process: the same command goes on after it.
    """
    import torch

    from kernel_twins.report.calls.sampled_contests import Problem, compiling, contest
    from kernel_twins.report.calls.sampled_timing import LostGpuError

    lost = recording.lost()
    wrong = []
    with torch.cuda.stream(torch.cuda.Stream()), compiling(), contextlib.ExitStack() as after:
        after.callback(gc.unfreeze)
        for function, index, passes in recording.waiting():
            case = recording.cases[function][index]
            progress(f"{function} {index + 1}/{CASES} {case.slug}")
            problem = Problem(function, case, index)
            for direction in passes:
                cell = f"{function} {direction} {case.slug}"
                known = {name: lost[f"{cell} {name}"] for name in problem.names(direction) if f"{cell} {name}" in lost}
                try:
                    rows = contest(problem, direction, known)
                except LostGpuError as error:
                    recording.note_lost(f"{cell} {error.backend}", error.status)
                    raise CannotRunError(
                        f"{cell}: {error}; the GPU is lost to this process: the same command goes on without that call"
                    ) from None
                recording.add(function, rows)
                wrong += [f"{cell} ({row['backend']}): {row['status']}" for row in rows if sampled_table.is_wrong(row)]
            del problem  # before the next one's operands are made
            gc.collect()
            gc.freeze()  # modules and compiled code, which poison() would look through before every call
    return wrong


def main(folder: str, number: str, count: str) -> None:
    """Compile a share of what waits, as one of many processes, see ahead.py."""
    from kernel_twins.report.calls.sampled_contests import compiling

    recording = Recording(Path(folder))
    waiting = json.loads((recording.folder / "compile.json").read_text())
    with (
        (recording.folder / f"compiled-{number}.txt").open("a") as done,
        compiling(),
        ahead.searches_forgotten(),
    ):
        for function, index in waiting[int(number) :: int(count)]:
            _compile(function, recording.cases[function][index], index)
            print(function, index, file=done, flush=True)


def _compile(function: str, case: Case, index: int) -> None:
    import torch

    from kernel_twins.report.calls.sampled_contests import Problem, prepare

    try:
        problem = Problem(function, case, index, sets=1)
    except torch.OutOfMemoryError:  # the others have it
        return
    for direction in FUNCTIONS[function].passes:
        for name in problem.names(direction):
            if name in _COMPILED:
                try:
                    prepare(problem, direction, name)
                except Exception as error:  # the recording meets it again, alone, and tells it
                    print(f"{function} {direction} {case.slug} {name}: {error}"[:300], file=sys.stderr)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])

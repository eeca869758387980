"""A process that compiles for sampled cases, one of many, see ahead.py.

Run by sampled.py as ``python -m kernel_twins.report.measure.sampled_compile FOLDER NUMBER COUNT``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.calls.sampled_contests import Problem, compiling, prepare
from kernel_twins.report.measure import ahead
from kernel_twins.report.measure.sampled import Recording

_READY_MADE = ("torch", "cuda", "auto")


def main(folder: str, number: str, count: str) -> None:
    recording = Recording(Path(folder))
    waiting = json.loads((recording.folder / "compile.json").read_text())
    with (
        (recording.folder / f"compiled-{number}.txt").open("a") as done,
        compiling(),
        ahead.searches_forgotten(),
    ):
        for function, index in waiting[int(number) :: int(count)]:
            _compile(function, index, recording)
            print(function, index, file=done, flush=True)


def _compile(function: str, index: int, recording: Recording) -> None:
    try:
        problem = Problem(function, recording.cases[function][index], index, sets=1)
    except torch.OutOfMemoryError:  # the others have it
        return
    for direction in FUNCTIONS[function].passes:
        for name in problem.names():
            if name not in _READY_MADE:
                try:
                    prepare(problem, direction, name)
                except Exception as error:  # the recording meets it again, alone, and tells it
                    print(f"{function} {direction} {problem.case.slug} {name}: {error}"[:300], file=sys.stderr)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A process that compiles for sampled cases, one of many: what it leaves in the caches, the recording finds there.

Run by sampled.py as ``python -m kernel_twins._profiling.report.sampled_compile FOLDER NUMBER COUNT``. It calls what is
compiled at its first call: Triton's kernels, ours and others', quack's, and what torch.compile makes. Which of several
configurations is fastest is found out when the GPU has nothing else to do: here, no such result is kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from triton.runtime import Autotuner

from kernel_twins._profiling.report.sampled import Recording
from kernel_twins._profiling.report.sampled_cases import FUNCTIONS
from kernel_twins._profiling.report.sampled_contests import Problem, compiling, prepare

_READY_MADE = ("torch", "cuda", "auto")


def main(folder: str, number: str, count: str) -> None:
    Autotuner.check_disk_cache = _search_and_forget
    recording = Recording(Path(folder))
    waiting = json.loads((recording.folder / "compile.json").read_text())
    with (
        (recording.folder / f"compiled-{number}.txt").open("a") as done,
        compiling(),
        config.patch(autotune_local_cache=False),
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


def _search_and_forget(tuner: Autotuner, key: Any, configs: Any, search: Callable[[], None]) -> bool:
    """In the place of what keeps a search's result on disk."""
    search()
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])

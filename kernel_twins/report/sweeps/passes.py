"""The passes that Triton's compiler runs on matmul_bf16 v04, in their order, and which of them do the five named jobs.

``python -m kernel_twins.report.sweeps.passes`` compiles it while MLIR prints the code before each pass, in a process of
its own: MLIR reads its settings once.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from typing import Any

import pandas as pd

from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import ROOT
from kernel_twins.report.sweeps.cells import KERNELS
from kernel_twins.report.sweeps.evidence import PASSES
from kernel_twins.report.sweeps.stages import FOLDER

FILE = FOLDER / "passes.csv"
COLUMNS = ["stage", "pass", "argument", "named"]
_STEP = ("matmul_bf16", "v04")
_STAGE = "stage of compilation: "
_DUMP = re.compile(rf"^(?:// -----// IR Dump Before (\w+) \(([\w-]+)\) \('([\w.]+)'.*|{_STAGE}(\w+))$", re.MULTILINE)


def record() -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MLIR_ENABLE_DUMP": "1", "PYTHONPATH": str(ROOT)},
    )
    store.write(FILE, pd.DataFrame(parsed(done.stderr), columns=COLUMNS))


def read() -> pd.DataFrame:
    return store.read(FILE, COLUMNS)


def parsed(text: str) -> list[tuple[str, str, str, str]]:
    """Stage, name, argument of every pass over a module, and the named job that is done behind it and not before."""
    marks = list(_DUMP.finditer(text))
    bodies = [text[mark.end() : after.start()] for mark, after in zip(marks, [*marks[1:], None], strict=True) if after]
    bodies.append(text[marks[-1].end() :])
    rows: list[tuple[str, str, str, str]] = []
    stage, done = "", set[str]()
    for mark, body in zip(marks, bodies, strict=True):
        new = [each.name for each in PASSES if each.name not in done and re.search(each.dump, body)]
        if new and rows:
            *kept, (of, name, argument, _) = rows
            rows = [*kept, (of, name, argument, "; ".join(new))]
        done |= {*new}
        if mark[4]:
            stage = mark[4]
        elif mark[3] == "builtin.module":
            rows.append((stage, mark[1], mark[2], ""))
    return rows


def _compile() -> None:
    from triton import knobs

    from kernel_twins.report.sweeps import compiling

    def announce(_: Any, stages: dict[str, Any], *__: Any) -> None:
        for name, make in list(stages.items()):
            stages[name] = functools.partial(_announced, name, make)

    knobs.runtime.add_stages_inspection_hook = announce
    (kernel,) = (each for each in KERNELS if (each.op.name, each.number) == _STEP)
    with compiling.anew():
        compiling.of_kernel(kernel)


def _announced(stage: str, make: Any, *given: Any) -> Any:
    os.write(2, f"{_STAGE}{stage}\n".encode())
    return make(*given)


if __name__ == "__main__":
    _compile()

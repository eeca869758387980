"""The two profiled processes of an operation: one counts what a call does, one takes the cycles of several calls.

Most of their time goes by in imports, of compilers above all. So both are started before the operation is timed, get
ready beside it without touching the GPU, and wait (see worker.py) to be told what to call: what turned out to be right.
They wait for a lock, since the system lets go of it for us, however we end, and nobody is left waiting.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from kernel_twins.report.measure.stage import Stage
from kernel_twins.report.ncu import ncu
from kernel_twins.report.rows.metrics import CYCLES, DURATION, Tier, names
from kernel_twins.spec import Op

CYCLE_CALLS = 10
"""Calls whose cycles confirm or question the bench's verdict; a single pass each, so that nothing is replayed."""


class Profilers(contextlib.ExitStack):
    """At its end no process is left, whether it had something to call or not.

    A full disk, whoever met it, becomes a faults.Fault there.
    """

    def __init__(self, op: Op, stage: Stage, tier: Tier) -> None:
        super().__init__()
        self._op, self._stage, self._tier = op, stage, tier
        self._waiting: list[tuple[Path, IO[str], ncu.Started]] = []

    def start(self) -> None:
        """Start both, unless they have been."""
        if self._waiting:
            return
        folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        self._digests = folder / "digests.json"
        both = (("counters", 1, names(self._tier)), ("cycles", CYCLE_CALLS, [DURATION, CYCLES]))
        for report, calls, metrics in both:
            awaited = folder / report
            locked = self.enter_context(awaited.open("w"))
            fcntl.flock(locked, fcntl.LOCK_EX)
            command = worker_command(self._op, calls, self._digests, awaited)
            started = ncu.started(command, self._stage.report(self._op, report), metrics)
            self._waiting.append((awaited, locked, self.enter_context(started)))

    def profile(self, labels: Iterable[str], timeout_s: float) -> dict[str, str]:
        """Leave both reports, of calls with these labels; returns the digests of the Triton code that they launched.

        On any failure a faults.Fault says what happened.
        """
        self.start()
        text = " ".join(labels)
        for awaited, locked, run in self._waiting:  # one after the other, since each must have the GPU to itself
            awaited.write_text(text)
            fcntl.flock(locked, fcntl.LOCK_UN)
            run.reaches(left(awaited), timeout_s)  # what ncu does after that, it does without the GPU
        for _, _, run in self._waiting:
            run.finish(timeout_s)
        return dict(json.loads(self._digests.read_text()))


def left(awaited: Path) -> Path:
    """What a process makes when it has called everything and waited for the GPU."""
    return awaited.with_suffix(".left")


def worker_command(op: Op, calls: int, digests: Path, awaited: Path) -> list[str]:
    """Of the process that is profiled, see worker.py."""
    module = "kernel_twins.report.measure.worker"
    return [sys.executable, "-m", module, op.name, str(calls), str(digests), str(awaited)]

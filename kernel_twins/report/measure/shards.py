"""A run over several GPUs of one kind: every GPU takes the next operation, in a process that sees no other GPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from kernel_twins.report.rows import store


def visible(count: int) -> list[str]:
    """The names under which a child can be given one of this process's GPUs."""
    named = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return named or [str(index) for index in range(count)]


def run(ops: Sequence[str], gpus: Sequence[str], arguments: Sequence[str]) -> dict[str, int]:
    """Collect each operation on the first GPU that is free; returns the exit codes. The stage is open already."""
    waiting: SimpleQueue[str] = SimpleQueue()
    for op in ops:
        waiting.put(op)
    codes: dict[str, int] = {}
    script = str(store.ROOT / "profiling" / "ncu_report.py")

    def work(gpu: str) -> None:
        while True:
            try:
                op = waiting.get_nowait()
            except Empty:
                return
            command = [sys.executable, script, "collect", "--op", op, "--resume", "--quiet", *arguments]
            with tempfile.TemporaryDirectory() as folder:  # ncu's lock lies in TMPDIR, and one waits for the other
                environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "TMPDIR": folder}
                codes[op] = subprocess.run(command, env=environment, check=False).returncode

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C, which the children have got too: nobody takes another operation
        while not waiting.empty():
            with contextlib.suppress(Empty):
                waiting.get_nowait()
        raise
    return codes

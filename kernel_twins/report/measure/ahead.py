"""Compilation ahead of a measurement, in many processes at once: what they leave in the caches, the measurement finds.

That is what is compiled at its first call: Triton's kernels, ours and others', quack's, and what torch.compile makes.
Which of several configurations is fastest is found out when the GPU has nothing else to do: here, no such result is
kept.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kernel_twins.report.rows import store


def run(module: str, folder: Path, count: int, meanwhile: Callable[[], object] = lambda: None) -> list[str]:
    """Run ``python -m MODULE FOLDER NUMBER COUNT`` for every number below the count; returns who failed, a line each.

    None of them is left when this returns or raises. ``meanwhile`` is called while they run.
    """
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # or each starts processes of its own
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            command = [sys.executable, "-m", module, str(folder), str(number), str(count)]
            worker = subprocess.Popen(command, env=environment, cwd=store.ROOT, stdout=subprocess.DEVNULL)
            workers.append(worker)
        meanwhile()
        codes = [worker.wait() for worker in workers]
    except BaseException:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()
        raise
    return [f"process {number} of those that compile ended with {code}" for number, code in enumerate(codes) if code]


@contextlib.contextmanager
def searches_forgotten() -> Iterator[None]:
    """No search among configurations, Triton's or torch.compile's, leaves its result on disk."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache
    from triton.runtime import Autotuner

    # Not by torch.compile's own setting: it is written into the code that is compiled, whose callers would search, too.
    instead = ((AutotuneCache, "save"), (Autotuner, "check_disk_cache"))
    kept = [getattr(owner, method) for owner, method in instead]
    for owner, method in instead:
        setattr(owner, method, getattr(_Forgetful, method))
    try:
        yield
    finally:
        for (owner, method), own in zip(instead, kept, strict=True):
            setattr(owner, method, own)


class _Forgetful:
    """Methods in the place of those that keep a search's result on disk.

    Named alike, because the code that torch.compile keeps is pickled with the method's name.
    """

    def save(self, *_: object, **__: object) -> None:
        """torch.compile's."""

    def check_disk_cache(self, key: Any, configs: Any, search: Callable[[], None]) -> bool:
        """Triton's."""
        search()
        return False

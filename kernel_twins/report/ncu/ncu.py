"""Running ncu, and other processes that may hang, crash or be interrupted, so that none outlives us.

A report appears under its name only when ncu ended well and wrote one; until then it lies in a folder beside that is
removed whatever happens, and a report that was there before stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kernel_twins.report.ncu import faults
from kernel_twins.report.rows.base import ROOT

_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_PARAMS = Path("/proc/driver/nvidia/params")
_DRIVER = Path("/proc/driver/nvidia/version")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_POLL_S = 0.05
_NICE = 10  # so much lower a priority than ours, for a process that gets ready while something is timed
VERSION = r"Version ([\d.]+)"
"""What ``ncu --version`` says, for ``version``."""


def find() -> Path:
    """The ncu to use: NCU's, else that on PATH, else a toolkit's, else the newest of its own installations.

    An EnvironmentFault (exit code 3) lists where it was looked for.
    """
    if named := os.environ.get("NCU"):
        if found := shutil.which(named):
            return Path(found)
        raise _missing(f"NCU is {named!r}, which is no program", "point NCU at Nsight Compute's ncu, or unset it")
    home = os.environ.get("CUDA_HOME")
    places = [*([f"{home}/bin/ncu"] if home else []), *_PLACES]
    if found := shutil.which("ncu"):
        return Path(found)
    for place in places:
        for candidate in sorted(Path("/").glob(place.lstrip("/")), reverse=True):
            if os.access(candidate, os.X_OK):
                return candidate
    raise _missing(
        f"there is no ncu on PATH, nor as {', '.join(places)}",
        "install Nsight Compute (part of the CUDA toolkit; with NVIDIA's package repository `sudo apt-get install "
        "cuda-nsight-compute-13-0`), or set NCU to where it is",
    )


def _missing(message: str, remedy: str) -> faults.EnvironmentFault:
    remedy += "; the log still rebuilds from committed data: `python profiling/ncu_report.py log`"
    return faults.EnvironmentFault("no_ncu", message, remedy)


def version(program: str, pattern: str) -> str:
    """What ``program --version`` says by ``pattern``'s first group; empty without such a program or answer."""
    if shutil.which(program) is None:
        return ""
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(pattern, answer)
    return match.group(1) if match else ""


def driver_version() -> str:
    """The kernel driver's version, empty where there is none."""
    match = re.search(r"Kernel Module\D*?\s([\d.]+)\s", _read(_DRIVER))
    return match.group(1) if match else ""


def admin_only() -> str:
    """The driver's RmProfilingAdminOnly: ``1`` if only root may read counters, ``0`` if all may, empty if unknown."""
    match = re.search(r"^RmProfilingAdminOnly: (\d+)", _read(_PARAMS), re.MULTILINE)
    return match.group(1) if match else ""


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def profile(command: list[str], report: Path, metrics: Sequence[str], timeout_s: float) -> None:
    """Run a command under ncu and leave its report: launches inside cudaProfilerStart and a matching NVTX range.

    Clocks are free and caches flushed before every replay. On any failure a faults.Fault says what happened; then, as
    on KeyboardInterrupt, no process of it is left and ``report`` is as it was before.
    """
    with started(command, report, metrics) as run:
        run.finish(timeout_s)


@contextlib.contextmanager
def started(command: list[str], report: Path, metrics: Sequence[str]) -> Iterator[Started]:
    """As ``profile``, of a command that waits to be told what to do: who enters tells it, and then calls ``finish``.

    It runs at a lower priority than this process, whose work it must not disturb meanwhile.
    """
    ncu = find()
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=report.parent, prefix=".ncu-", ignore_cleanup_errors=True) as folder:
            half, log = Path(folder) / "half.ncu-rep", Path(folder) / "log"
            options = [
                "--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off",
                "--nvtx", "--nvtx-include", faults.NVTX_INCLUDE, "--metrics", ",".join(metrics),
                "--log-file", str(log), "-f", "-o", str(half), "--",
            ]  # fmt: skip
            with _running([str(ncu), *options, *command]) as running:
                ours = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PGRP, running.process.pid, min(ours + _NICE, 19))
                yield Started(running, report, half, log, ncu)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        around = _circumstances(report, 0, ncu)
        raise faults.diagnose(str(error), 1, around) from error


@dataclass(frozen=True, slots=True)
class Started:
    """ncu, and the command under it."""

    running: _Running
    report: Path
    half: Path
    log: Path
    ncu: Path

    def reaches(self, file: Path, timeout_s: float) -> None:
        """Wait until the command has made the file; it fails as at the end, if it ends or so long passes before."""
        deadline = time.monotonic() + timeout_s
        while not file.exists():
            if _has_ended(self.running.process) or time.monotonic() >= deadline:
                raise self._fault(self.running.end(0), timeout_s)
            time.sleep(_POLL_S)

    def finish(self, timeout_s: float) -> None:
        """Wait for the end, at most so long from now on, and give the report its name."""
        ended = self.running.end(timeout_s)
        if ended.returncode != 0 or not self.half.exists() or not self.half.stat().st_size:
            raise self._fault(ended, timeout_s)
        os.replace(self.half, self.report)

    def _fault(self, ended: _Ended, timeout_s: float) -> faults.Fault:
        around = _circumstances(self.report, timeout_s, self.ncu)
        return faults.diagnose(f"{_read(self.log)}\n{ended.printed}", ended.returncode, around, ended.stderr)


def run(command: list[str], timeout_s: float) -> str:
    """Run a command without ncu, with the same care; return what it wrote to stdout, or raise a faults.Fault."""
    around = faults.Circumstances(report=tempfile.gettempdir(), timeout_s=timeout_s)
    try:
        with _running(command) as running:
            ended = running.end(timeout_s)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise faults.diagnose(str(error), 1, around) from error
    if ended.returncode != 0:
        raise faults.diagnose(ended.printed, ended.returncode, around, ended.stderr)
    return ended.stdout


@dataclass(frozen=True, slots=True)
class _Ended:
    returncode: int | None
    """None: it was killed at the timeout."""
    stdout: str
    stderr: str

    @property
    def printed(self) -> str:
        return f"{self.stdout}\n{self.stderr}"


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]

    def end(self, timeout_s: float) -> _Ended:
        """Wait for the end, which comes after so long at the latest, of all that the command has started, too."""
        deadline = time.monotonic() + timeout_s
        while not (by_itself := _has_ended(self.process)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        _end_group(self.process)
        self.out.seek(0)
        self.err.seek(0)
        out, err = (stream.read().decode(errors="replace") for stream in (self.out, self.err))
        return _Ended(self.process.returncode if by_itself else None, out, err)


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[_Running]:
    """Start a command in a process group of its own, all of which is gone at the end of the context.

    The session stays ours, since Linux may share a processor among sessions first, whatever the priority of a process.
    Output goes to files: a pipe would stay open for as long as a grandchild lives. LC_ALL=C, because ncu writes
    numbers as the locale does. One thread of torch.compile, since it starts processes for more, which takes longer
    than the one kernel that there is to compile.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
    environment = os.environ | {"LC_ALL": "C", "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, process_group=0
        )
        try:
            yield _Running(process, out, err)
        finally:
            _end_group(process)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without collecting it: until then no other process, nor another's group, is given its number."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # it has not been collected, so that the number is its own group's
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _circumstances(report: Path, timeout_s: float, ncu: Path) -> faults.Circumstances:
    lock = Path(tempfile.gettempdir()) / "nsight-compute-lock"
    return faults.Circumstances(
        report=str(report),
        timeout_s=timeout_s,
        ncu=version(str(ncu), VERSION),
        driver=driver_version(),
        admin_only=admin_only(),
        lock=str(lock),
        lock_owner=_owner(lock),
        free_bytes=_free_bytes(report.parent),
    )


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _owner(file: Path) -> str:
    try:
        return file.owner()
    except (OSError, KeyError):
        return ""

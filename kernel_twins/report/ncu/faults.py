"""From what ncu printed to what went wrong: a named fault, what it means here, and the command that mends it.

One table of patterns; the first that matches wins, because ncu tells the cause first and then that it failed. An
EnvironmentFault would meet every further cell of this machine too; a DataFault costs its own report only. Messages
are ncu 2025.3's and those of earlier versions; the lines of ncu itself begin with ``==``, all others are the
application's.
"""

from __future__ import annotations

import difflib
import math
import re
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar, Protocol

from kernel_twins.report.rows.errors import CANNOT_RUN, INVALID_DATA, CannotRunError, InvalidDataError
from kernel_twins.report.rows.metrics import METRICS

_NAN_SHARE = 0.05  # of a report's values: more than that is no single counter that fails, but a tool that cannot read
_FULL = 2**20  # bytes: a disk with less has no room for any report
_TAIL = 15  # lines of the application's own that are shown after it crashed


class Fault(Exception):
    """Something that ncu or its surroundings did: ``name`` for tests and tables, ``message``, ``remedy``.

    ``tail`` holds the application's last lines where they say more.
    """

    exit_code: ClassVar[int]

    def __init__(self, name: str, message: str, remedy: str, tail: str = "") -> None:
        self.name, self.message, self.remedy, self.tail = name, message, remedy, tail
        lines = [f"{message}: {remedy}", *(f"    {line}" for line in tail.splitlines())]
        super().__init__("\n".join(lines))


class EnvironmentFault(Fault, CannotRunError):
    """This machine cannot profile as it is."""

    exit_code = CANNOT_RUN


class DataFault(Fault, InvalidDataError):
    """This one report cannot be had; others may."""

    exit_code = INVALID_DATA


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What messages quote of a run and its machine; empty where it is not known."""

    report: str = "the report"
    timeout_s: float = 0
    nvtx_include: str = ""
    ncu: str = ""
    driver: str = ""
    admin_only: str = ""
    """Value of RmProfilingAdminOnly: 1 if only root may read counters."""
    lock: str = ""
    lock_owner: str = ""
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    pattern: re.Pattern[str]
    message: str
    remedy: str


def _rule(name: str, pattern: str, message: str, remedy: str) -> _Rule:
    return _Rule(name, re.compile(pattern), message, remedy)


FORBIDDEN_REMEDY = (
    "run as root, or set the module option with `echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo "
    "tee /etc/modprobe.d/profiling.conf` and reboot; in a container start it with --cap-add=SYS_ADMIN; where neither "
    "is allowed, as on many clouds, use `python profiling/ncu_report.py collect --tool proton`"
)
_TABLE = (
    _rule(
        "no_gpu",
        r"failed to connect to the CUDA driver|libcuda\.so\S* (?:was not found|not found)|libcuda\.so\S*: cannot open"
        r"|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device",
        "no GPU or no driver is visible",
        "see what `nvidia-smi` says, and start a container with --gpus all; `log`, `diff` and `check` work without",
    ),
    _rule(
        "counters_forbidden",
        r"ERR_NVGPUCTRPERM",
        "this user may not read the GPU's counters (ERR_NVGPUCTRPERM; RmProfilingAdminOnly is {admin_only})",
        FORBIDDEN_REMEDY,
    ),
    _rule(
        "counters_held",
        r"driver resource was unavailable|CUPTI_ERROR_HARDWARE_BUSY",
        "another tool holds the GPU's counters (a driver resource was unavailable)",
        "pause DCGM with `dcgmi profile --pause` and afterwards `dcgmi profile --resume`; end other ncu and nsys "
        "--gpu-metrics runs, in other containers of this machine too",
    ),
    _rule(
        "mismatch",
        r"[Dd]river is not compatible with Nsight Compute",
        "driver {driver} and ncu {ncu} do not match",
        "take the ncu of the CUDA version that `nvidia-smi` names, and point NCU at it",
    ),
    _rule(
        "sandbox",
        r"LibraryNotLoaded",
        "ncu could not load the driver's profiling library (LibraryNotLoaded), which a sandbox such as gVisor or WSL "
        "hides, and which a driver (here {driver}) of another CUDA than ncu's (here {ncu}) lacks",
        "run outside the sandbox, or point NCU at the ncu that the driver asks for, or use "
        "`python profiling/ncu_report.py collect --tool proton`",
    ),
    _rule(
        "unknown_metric",
        r"Failed to find metric (?P<metric>\S+)",
        "ncu {ncu} does not know {metric} on this GPU",
        "the registry's nearest names are {nearest}; see `ncu --query-metrics`, and correct "
        "kernel_twins/report/rows/metrics.py or choose a lower --tier",
    ),
    _rule(
        "locked",
        r"lock file (?P<path>\S*nsight-compute-lock)|InterprocessLockFailed|nsight-compute-lock",
        "ncu may not open its lock file {lock} (its owner is {lock_owner})",
        'give ncu a folder of your own: `export TMPDIR="$HOME/.cache/ncu" && mkdir -p "$TMPDIR"`',
    ),
)
_DISK = re.compile(r".*(?:No space left on device|ENOSPC|Disk quota exceeded).*")
_LAST_KERNEL = re.compile(r'^==PROF== Profiling "([^"]*)"', re.MULTILINE)
_APPLICATION_FAILED = re.compile(r"The application returned an error code \((\d+)\)")


def diagnose(output: str, returncode: int | None, around: Circumstances, stderr: str = "") -> Fault:
    """Why a run of ncu left no report, or a run without ncu failed.

    ``output`` is all that was printed (ncu's log and both streams); ``stderr`` the application's own; ``returncode``
    is None where the run was killed at the timeout.
    """
    tool = "\n".join(line for line in output.splitlines() if line.startswith("=="))
    if returncode is None:
        return _hang(tool, around)
    full = _DISK.search(output)
    if full or (around.free_bytes is not None and around.free_bytes < _FULL):
        return _disk_full(full[0].strip() if full else "ncu did not say so", around)
    for rule in _TABLE:
        # Only no_gpu is also told by the application, which then dies before ncu has anything to say.
        if match := rule.pattern.search(output if rule.name == "no_gpu" else tool):
            return EnvironmentFault(rule.name, _fill(rule.message, around, match), _fill(rule.remedy, around, match))
    return _other(tool, output, returncode, around, stderr)


def _hang(tool: str, around: Circumstances) -> Fault:
    kernels = _LAST_KERNEL.findall(tool)
    where = f" while {kernels[-1]} was profiled" if kernels else ""
    return DataFault(
        "hang",
        f"no end after {around.timeout_s:g} s{where}; the process and its children were ended",
        "raise --timeout if the cell is only slow; kernels that wait for each other never end under ncu, which runs "
        "them one at a time (they need `ncu --replay-mode app-range`); another ncu may hold "
        f"{around.lock or 'TMPDIR/nsight-compute-lock'}",
    )


def _disk_full(told: str, around: Circumstances) -> Fault:
    free = "an unknown number of" if around.free_bytes is None else f"{around.free_bytes:,}"
    return EnvironmentFault(
        "disk_full",
        f"a disk is full ({told}); {free} bytes are free beside {around.report}",
        "free some, or write elsewhere (TMPDIR, TRITON_CACHE_DIR); what was recorded before is kept, and collect goes "
        "on by --resume",
    )


def _other(tool: str, output: str, returncode: int, around: Circumstances, stderr: str) -> Fault:
    """What the table does not name: nothing profiled, a crash, a signal, or an error of ncu's that is new to us."""
    errors = [line.removeprefix("==ERROR==").strip() for line in tool.splitlines() if line.startswith("==ERROR==")]
    told = [line for line in (stderr.strip() or output).splitlines() if line.strip() and not line.startswith("==")]
    tail = "\n".join(told[-_TAIL:])
    own = [line for line in errors if not _APPLICATION_FAILED.search(line)]
    if own:
        return DataFault(
            "ncu_failed",
            f"ncu failed: {' '.join(own)}",
            "measure the cell again, or without counters: `python profiling/ncu_report.py collect --tool proton`",
            tail,
        )
    if returncode == 0:
        if "No kernels were profiled" in tool:
            return DataFault(
                "nothing_profiled",
                f"no kernel was launched inside a range that matches --nvtx-include {around.nvtx_include} between "
                "cudaProfilerStart and cudaProfilerStop",
                "check that the labels begin with kl. and that the call launches on this process's GPU: "
                "`python -m kernel_twins run OP STEP BACKEND`",
            )
        return DataFault("no_report", f"ncu ended well but wrote nothing to {around.report}", "measure the cell again")
    if returncode < 0:
        return DataFault(
            "ended",
            f"the run was ended from outside by signal {-returncode} ({signal.strsignal(-returncode)})",
            "SIGKILL is most often the kernel's answer to memory that ran out: see `dmesg | tail`; then measure again",
        )
    failed = _APPLICATION_FAILED.search(tool)
    code = failed[1] if failed else returncode
    return DataFault(
        "crash",
        f"the process failed with exit code {code}: {told[-1].strip() if told else 'it printed nothing'}",
        "try its steps one by one, without ncu: `python -m kernel_twins run OP STEP BACKEND`",
        tail,
    )


def _fill(text: str, around: Circumstances, match: re.Match[str]) -> str:
    facts = {key: value or "unknown" for key, value in asdict(around).items()}
    found = match.groupdict()
    if (lock := found.get("path")) and lock != around.lock:
        facts |= {"lock": lock, "lock_owner": "unknown"}
    metric = _plain_metric(found.get("metric") or "")
    near = difflib.get_close_matches(metric, METRICS, n=3, cutoff=0.4)
    return text.format(**facts, metric=metric, nearest=", ".join(near) or "too far from it to name")


def _plain_metric(name: str) -> str:
    """ncu quotes a name without its suffix as the regular expression that it became."""
    return re.sub(r"\\?\.\(.*$", "", name.removeprefix("regex:^")).replace("\\", "").rstrip("$.")


class _HasMetrics(Protocol):
    @property
    def metrics(self) -> Mapping[str, float]: ...


def suspicious(
    launches: Iterable[_HasMetrics], expected: Collection[str] = (), ncu: str = "", driver: str = ""
) -> EnvironmentFault | None:
    """The fault of a report in which more than 5 % of the values are no numbers; None if it can be trusted.

    That is how a driver shows itself that is newer than ncu, or a GPU that ncu does not know: it exits 0. An
    ``expected`` metric that a launch lacks counts as one that is no number.
    """
    values = [launch.metrics.get(name, math.nan) for launch in launches for name in {*launch.metrics, *expected}]
    lost = sum(math.isnan(value) for value in values)
    if not values or lost <= _NAN_SHARE * len(values):
        return None
    return EnvironmentFault(
        "mismatch",
        f"{lost} of {len(values)} counters are n/a or NaN: ncu {ncu or 'of unknown version'} does not know driver "
        f"{driver or 'of unknown version'} or this GPU",
        "take the ncu of the CUDA version that `nvidia-smi` names, and point NCU at it",
    )

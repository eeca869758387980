"""From what ncu printed to what went wrong: a named fault, what it means here, and the command that mends it.

The first rule that matches wins, because ncu tells the cause first and then that it failed. An EnvironmentFault would
meet every further cell of this machine too; a DataFault costs its own report only. Messages are ncu 2025.3's and those
of earlier versions; the lines of ncu itself begin with ``==``, all others are the application's.
"""

from __future__ import annotations

import difflib
import math
import re
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass

from kernel_twins.report.rows.base import CannotRunError, InvalidDataError
from kernel_twins.report.rows.metrics import METRICS

NVTX_INCLUDE = r"regex:kl\..*"
"""The labels of what is profiled, as ncu's option takes it."""

_NAN_SHARE = 0.05  # of a report's values: more than that is no single counter that fails, but a tool that cannot read
_FULL = 2**20  # bytes: a disk with less has no room for any report
_TAIL = 15  # lines of the application's own that are shown after it crashed


class Fault(Exception):
    """Something that ncu or its surroundings did: ``name`` for tests and tables, ``message``, ``remedy``.

    ``tail`` holds the application's last lines where they say more.
    """

    def __init__(self, name: str, message: str, remedy: str, tail: str = "") -> None:
        self.name, self.message, self.remedy = name, message, remedy
        super().__init__("\n".join([f"{message}: {remedy}", *(f"    {line}" for line in tail.splitlines())]))


class EnvironmentFault(Fault, CannotRunError):
    """This machine cannot profile as it is."""


class DataFault(Fault, InvalidDataError):
    """This one report cannot be had; others may."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What messages quote of a run and its machine; empty where it is not known."""

    report: str = "the report"
    timeout_s: float = 0
    ncu: str = ""
    driver: str = ""
    admin_only: str = ""
    """Value of RmProfilingAdminOnly: 1 if only root may read counters."""
    lock: str = ""
    lock_owner: str = ""
    free_bytes: int | None = None


_PROTON = "`python profiling/ncu_report.py collect --tool proton`"
_ALONE = "`python -m kernel_twins run OP STEP BACKEND`"
_MATCHING = "take the ncu of the CUDA version that `nvidia-smi` names, and point NCU at it"
RULES = {
    "no_gpu": (
        r"failed to connect to the CUDA driver|libcuda\.so\S* (?:was not found|not found)|libcuda\.so\S*: cannot open"
        r"|Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device",
        "no GPU or no driver is visible",
        "see what `nvidia-smi` says, and start a container with --gpus all; `log`, `diff` and `check` work without",
    ),
    "counters_forbidden": (
        r"ERR_NVGPUCTRPERM",
        "this user may not read the GPU's counters (ERR_NVGPUCTRPERM; RmProfilingAdminOnly is {admin_only})",
        "run as root, or set the module option with `echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | "
        "sudo tee /etc/modprobe.d/profiling.conf` and reboot; in a container start it with --cap-add=SYS_ADMIN; where "
        f"neither is allowed, as on many clouds, use {_PROTON}",
    ),
    "counters_held": (
        r"driver resource was unavailable|CUPTI_ERROR_HARDWARE_BUSY",
        "another tool holds the GPU's counters (a driver resource was unavailable)",
        "pause DCGM with `dcgmi profile --pause` and afterwards `dcgmi profile --resume`; end other ncu and nsys "
        "--gpu-metrics runs, in other containers of this machine too",
    ),
    "mismatch": (
        r"[Dd]river is not compatible with Nsight Compute",
        "driver {driver} and ncu {ncu} do not match",
        _MATCHING,
    ),
    "sandbox": (
        r"LibraryNotLoaded",
        "ncu could not load the driver's profiling library (LibraryNotLoaded), which a sandbox such as gVisor or WSL "
        "hides, and which a driver (here {driver}) of another CUDA than ncu's (here {ncu}) lacks",
        f"run outside the sandbox, or point NCU at the ncu that the driver asks for, or use {_PROTON}",
    ),
    "unknown_metric": (
        r"Failed to find metric (?P<metric>\S+)",
        "ncu {ncu} does not know {metric} on this GPU",
        "the registry's nearest names are {nearest}; see `ncu --query-metrics`, and correct "
        "kernel_twins/report/rows/metrics.py or choose a lower --tier",
    ),
    "locked": (
        r"lock file (?P<path>\S*nsight-compute-lock)|InterprocessLockFailed|nsight-compute-lock",
        "ncu may not open its lock file {lock} (its owner is {lock_owner})",
        'give ncu a folder of your own: `export TMPDIR="$HOME/.cache/ncu" && mkdir -p "$TMPDIR"`',
    ),
}
"""By name: what ncu says, what that means, and what mends it."""

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
        kernels = _LAST_KERNEL.findall(tool)
        where = f" while {kernels[-1]} was profiled" if kernels else ""
        return DataFault(
            "hang",
            f"no end after {around.timeout_s:g} s{where}; the process and its children were ended",
            "raise --timeout if the cell is only slow; kernels that wait for each other never end under ncu, which "
            "runs them one at a time (they need `ncu --replay-mode app-range`); another ncu may hold "
            f"{around.lock or 'TMPDIR/nsight-compute-lock'}",
        )
    full = _DISK.search(output)
    if full or (around.free_bytes is not None and around.free_bytes < _FULL):
        told = full[0].strip() if full else "ncu did not say so"
        free = "an unknown number of" if around.free_bytes is None else f"{around.free_bytes:,}"
        return EnvironmentFault(
            "disk_full",
            f"a disk is full ({told}); {free} bytes are free beside {around.report}",
            "free some, or write elsewhere (TMPDIR, TRITON_CACHE_DIR); what was recorded before is kept, and collect "
            "goes on by --resume",
        )
    for name, (pattern, message, remedy) in RULES.items():
        # Only no_gpu is also told by the application, which then dies before ncu has anything to say.
        if match := re.search(pattern, output if name == "no_gpu" else tool):
            facts = _facts(around, match)
            return EnvironmentFault(name, message.format(**facts), remedy.format(**facts))
    return _other(tool, output, returncode, around, stderr)


def _other(tool: str, output: str, returncode: int, around: Circumstances, stderr: str) -> Fault:
    """What no rule names: nothing profiled, a crash, a signal, or an error of ncu's that is new to us."""
    errors = [line.removeprefix("==ERROR==").strip() for line in tool.splitlines() if line.startswith("==ERROR==")]
    told = [line for line in (stderr.strip() or output).splitlines() if line.strip() and not line.startswith("==")]
    tail = "\n".join(told[-_TAIL:])
    failed = _APPLICATION_FAILED.search(tool)
    if own := [line for line in errors if not _APPLICATION_FAILED.search(line)]:
        remedy = f"measure the cell again, or without counters: {_PROTON}"
        return DataFault("ncu_failed", f"ncu failed: {' '.join(own)}", remedy, tail)
    if returncode == 0 and "No kernels were profiled" in tool:
        return DataFault(
            "nothing_profiled",
            f"no kernel was launched inside a range that matches --nvtx-include {NVTX_INCLUDE} between "
            "cudaProfilerStart and cudaProfilerStop",
            f"check that the labels begin with kl. and that the call launches on this process's GPU: {_ALONE}",
        )
    if returncode == 0:
        return DataFault("no_report", f"ncu ended well but wrote nothing to {around.report}", "measure the cell again")
    if returncode < 0:
        return DataFault(
            "ended",
            f"the run was ended from outside by signal {-returncode} ({signal.strsignal(-returncode)})",
            "SIGKILL is most often the kernel's answer to memory that ran out: see `dmesg | tail`; then measure again",
        )
    code, last = failed[1] if failed else returncode, told[-1].strip() if told else "it printed nothing"
    remedy = f"try its steps one by one, without ncu: {_ALONE}"
    return DataFault("crash", f"the process failed with exit code {code}: {last}", remedy, tail)


def _facts(around: Circumstances, match: re.Match[str]) -> dict[str, object]:
    """What messages are filled with. ncu quotes a metric without its suffix as the regular expression it became."""
    facts = {key: value or "unknown" for key, value in asdict(around).items()}
    found = match.groupdict()
    if (lock := found.get("path")) and lock != around.lock:
        facts |= {"lock": lock, "lock_owner": "unknown"}
    metric = re.sub(r"\\?\.\(.*$", "", (found.get("metric") or "").removeprefix("regex:^"))
    metric = metric.replace("\\", "").rstrip("$.")
    nearest = ", ".join(difflib.get_close_matches(metric, METRICS, n=3, cutoff=0.4)) or "too far from it to name"
    return facts | {"metric": metric, "nearest": nearest}


def suspicious(
    launches: Iterable[Mapping[str, float]], expected: Collection[str] = (), ncu: str = "", driver: str = ""
) -> EnvironmentFault | None:
    """The fault of a report in which more than 5 % of the values are no numbers; None if it can be trusted.

    That is how a driver shows itself that is newer than ncu, or a GPU that ncu does not know: it exits 0. An
    ``expected`` metric that a launch lacks counts as one that is no number.
    """
    values = [metrics.get(name, math.nan) for metrics in launches for name in {*metrics, *expected}]
    lost = sum(map(math.isnan, values))
    if not values or lost <= _NAN_SHARE * len(values):
        return None
    unknown = "of unknown version"
    told = f"ncu {ncu or unknown} does not know driver {driver or unknown} or this GPU"
    return EnvironmentFault("mismatch", f"{lost} of {len(values)} counters are n/a or NaN: {told}", _MATCHING)

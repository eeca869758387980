"""What this machine has for measuring and for rendering, what it lacks, and the command that mends each.

Only a real profile proves that counters may be read, so one kernel is profiled where there is a GPU and an ncu.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from kernel_twins import OPS, remedies
from kernel_twins.compiler.disassembly import find_extensions, newer_sources
from kernel_twins.errors import UnavailableError
from kernel_twins.harness import ceilings
from kernel_twins.harness.load import extension, why_no_gpu
from kernel_twins.harness.sensors import identity
from kernel_twins.report.ncu import faults, ncu, reader
from kernel_twins.report.rows import libraries, metrics
from kernel_twins.report.rows.base import CANNOT_RUN, OK, ROOT, InvalidDataError

State = Literal["ok", "missing", "warning"]
Answer = tuple[State, str, str]
Check = Callable[[], Answer]

_PYTHONS = ((3, 11), (3, 14))
_ROOM = 2**30  # bytes: a report embeds the modules that were loaded, 8 MB for three kernels
_TRY_TIMEOUT_S = 60
_TRY = """
import torch
x = torch.zeros(2**20, device="cuda")
torch.cuda.synchronize()
torch.cuda.cudart().cudaProfilerStart()
mark = torch.cuda.nvtx.range_start("kl.doctor")
x.add_(1)
torch.cuda.synchronize()
torch.cuda.nvtx.range_end(mark)
torch.cuda.cudart().cudaProfilerStop()
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """``missing`` is what measuring cannot do without; with a ``warning`` it goes on, with less."""

    name: str
    state: State
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Every check, in the order in which to mend things."""
    checks = _CHECKS | (_DATA_CHECKS if importlib.util.find_spec("pandas") else {})
    return [_examine(name, check) for name, check in checks.items()]


def _examine(name: str, check: Check) -> Finding:
    try:
        return Finding(name, *check())
    except Exception as error:  # a library that is broken in a new way must not hide what else there is to say
        return Finding(name, "missing", f"could not be examined: {error!r}", "install it anew")


def run(as_json: bool) -> int:
    """Print the findings to stdout, as a table or as JSON; 0 if all is there that measuring needs, else 3."""
    findings = examine()
    able = all(finding.state != "missing" for finding in findings)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return OK if able else CANNOT_RUN
    for each in findings:
        print(f"{each.state:8}{each.name:20}{each.found}")
        if each.remedy:
            print(f"{'':28}-> {each.remedy}")
    if able:
        print("\neverything for measuring is here; `python profiling/ncu_report.py plan` tells how long it takes")
    elif all(finding.state == "ok" for finding in findings if finding.name in _RENDERING):
        print("\nnothing can be measured here yet; the log can be rendered here: `python profiling/ncu_report.py log`")
    return OK if able else CANNOT_RUN


def _python() -> Answer:
    lowest, highest = _PYTHONS
    version = ".".join(map(str, sys.version_info[:3]))
    if lowest <= sys.version_info[:2] <= highest:
        return "ok", version, ""
    return "missing", f"{version}; 3.11 to 3.14 are supported", "make PYTHON=python3.12"


def _torch() -> Answer:
    try:
        import torch
    except ImportError as error:
        return "missing", f"it does not import: {error}", remedies.torch()
    if torch.version.cuda is None:
        return "missing", f"{torch.__version__}, built without CUDA", remedies.torch()
    return "ok", f"{torch.__version__}, CUDA {torch.version.cuda}", ""


def _gpu() -> Answer:
    needed = "8.0 or later is needed, 9.0 for every step"
    if reason := why_no_gpu():
        remedy = f"see what `nvidia-smi` says; start a container with --gpus all; compute capability {needed}"
        return "missing", reason, remedy
    import torch

    driver, capability = ncu.driver_version() or identity()["driver"], torch.cuda.get_device_capability()
    steps = [step for op in OPS.values() for step in op.steps]
    able = sum(step.runs_on(capability) for step in steps)
    found = f"{torch.cuda.get_device_name()}, driver {driver or 'unknown'}, compute capability "
    found += f"{'.'.join(map(str, capability))}: {able} of {len(steps)} steps run"
    if able == len(steps):
        return "ok", found, ""
    return "warning" if able else "missing", found, f"{needed}; the others are left out"


def _extension() -> Answer:
    try:
        extension()
    except UnavailableError as error:
        return "missing", str(error), remedies.build()
    libraries = find_extensions()
    if newer := newer_sources(libraries, ROOT):
        return "warning", f"older than {', '.join(newer[:3])}{' and others' if newer[3:] else ''}", remedies.build()
    names = " and ".join(library.name for library in libraries)
    if len(libraries) < 2:
        return "warning", f"{names} alone, without the steps that no public function runs", remedies.build()
    return "ok", names, ""


def _toolkit() -> Answer:
    """Only building needs it, so that an extension that is there does without."""
    remedy = f"{remedies.INSTALL}, or set CUDA_HOME to a toolkit's folder"
    try:
        import torch

        from build_support import toolkit
    except ImportError as error:
        return "warning", f"not looked for: {error}", remedy
    if torch.version.cuda is None:
        return "warning", f"not looked for: torch {torch.__version__} was built without CUDA", remedies.torch()
    try:
        found = toolkit.find(os.environ, torch.version.cuda)
    except toolkit.BuildError as error:
        return "warning", f"none to build with: {str(error).splitlines()[0]}", remedy
    return "ok", f"nvcc {ncu.version(str(found.nvcc), 'V([0-9.]+)')} in {found.home}", ""


def _package(module: str, distribution: str, state: State, without: str) -> Answer:
    if found := libraries.version(module, distribution):
        return "ok", found, ""
    return state, f"not installed: {without}", f"pip install {distribution}"


def _ncu() -> Answer:
    try:
        found = ncu.find()
    except faults.Fault as fault:
        return "missing", fault.message, fault.remedy
    return "ok", f"{ncu.version(str(found), ncu.VERSION) or 'version unknown'}, {found}", ""


def _reader() -> Answer:
    spec = reader.find_nvidia_reader()
    if spec is None or spec.origin is None:
        return "warning", "none: reports are read as CSV", "pip install ncu-report"
    return "ok", str(Path(spec.origin).parent), ""


def _counters() -> Answer:
    user = "root" if os.geteuid() == 0 else "not root"
    known = f"RmProfilingAdminOnly is {ncu.admin_only() or 'unknown'}, this user is {user}"
    if why_no_gpu():
        return "missing", f"not tried without a GPU; {known}", "run on a machine with a GPU"
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", _TRY]
            ncu.profile(command, Path(folder) / "try.ncu-rep", metrics.names("T0"), _TRY_TIMEOUT_S)
    except faults.Fault as fault:
        return "missing", f"{fault.message}; {known}", fault.remedy
    return "ok", f"a kernel was profiled; {known}", ""


def _disk() -> Answer:
    room = {folder: shutil.disk_usage(folder).free for folder in (str(ROOT), tempfile.gettempdir())}
    found = ", ".join(f"{free / 1e9:.1f} GB in {folder}" for folder, free in room.items())
    if min(room.values()) >= _ROOM:
        return "ok", found, ""
    return "warning", found, "free 1 GB, or set TMPDIR to a folder on another disk"


def _survey() -> Answer:
    from kernel_twins.report.rows import store

    gpu = store.REFERENCE_GPU
    if not why_no_gpu():
        import torch

        gpu = ceilings.gpu_slug(torch.cuda.get_device_name())
    try:
        ceilings.load(gpu)
    except FileNotFoundError as error:
        return "warning", str(error).partition(":")[0], "python hardware-survey/survey.py"
    return "ok", f"ceilings of {gpu} are known", ""


def _data() -> Answer:
    from kernel_twins.report.calls import functions_table, sampled_table
    from kernel_twins.report.rows import store

    folders = sorted(folder for folder in store.DATA.glob("*") if folder.is_dir())
    remedy = "git checkout -- profiling/data"
    try:
        for folder in folders:
            store.read_runs(folder)
            functions_table.read(folder)
            sampled_table.read(folder)
            for op in OPS:
                for table in store.TABLES:
                    store.read_table(folder, op, table)
    except (InvalidDataError, OSError) as error:
        return "missing", str(error), remedy
    if not folders:
        return "warning", f"none in {store.DATA}", remedy
    return "ok", f"{', '.join(folder.name for folder in folders)}: every table is whole", ""


def _unfinished() -> Answer:
    from kernel_twins.report.rows import store

    lying = [str(folder) for folder in sorted(store.RUNS.glob("*/unfinished*"))]
    if not lying:
        return "ok", "none", ""
    remedy = f"go on with `python profiling/ncu_report.py collect --resume`, or drop it with `rm -r {' '.join(lying)}`"
    return "warning", f"in {', '.join(lying)}", remedy


_PACKAGES: tuple[tuple[str, str, State, str], ...] = (
    ("pandas", "pandas", "missing", "tables can be neither written nor read"),
    ("rich", "rich", "missing", "nothing can be measured or rendered"),
    ("matplotlib", "matplotlib", "warning", "the figures are not drawn"),
    ("pynvml", "nvidia-ml-py", "warning", "clocks and power are not recorded"),
    *((each.module, each.package, "warning", "its baselines are skipped") for each in libraries.LIBRARIES.values()),
)
_CHECKS: dict[str, Check] = {
    "Python": _python,
    "torch": _torch,
    "GPU": _gpu,
    "triton": lambda: _package("triton", "triton", "missing", "half of every ladder cannot run"),
    "CUDA toolkit": _toolkit,
    "extension": _extension,
    "ncu": _ncu,
    "NVIDIA's reader": _reader,
    "counters": _counters,
    **{each[1]: partial(_package, *each) for each in _PACKAGES},
    "free disk space": _disk,
}
# These read tables, and so need pandas, which everything above does without.
_DATA_CHECKS: dict[str, Check] = {"survey": _survey, "committed data": _data, "unfinished run": _unfinished}
_RENDERING = ("Python", "pandas", "rich", "committed data")

"""Measures: the gate and the bench for every case, then one launch of every step under ncu.

An operation is published in one move when all of it has been measured; until then its rows lie in the unfinished
folder, written after every case, and the next run goes on from there as long as code and machine are the same.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import torch
import triton
from rich.console import Console
from rich.progress import Progress

from kernel_twins._load import extension
from kernel_twins._profiling.report import identity, store
from kernel_twins._profiling.report.extract import counter_rows
from kernel_twins._profiling.report.metrics import METRICS
from kernel_twins._profiling.report.reader import InvalidReportError, Launch
from kernel_twins._profiling.report.worker import cells, label
from kernel_twins.bench import Timing, bench
from kernel_twins.sensors import identity as gpu_identity
from kernel_twins.spec import Case, Name, Op

_NCU_TIMEOUT_S = 300


def collect(ops: list[Op], gpu: str, target: Path, console: Console) -> list[str]:
    """Measure the operations and publish each one's tables in ``target``; return what went wrong, a line each."""
    unfinished = store.RUNS / gpu / "unfinished"
    run = _run_row(unfinished)
    problems: list[str] = []
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=sum(len(op.bench_cases) + 1 for op in ops))
        for op in ops:
            sources = _source_digests(op)
            if _published(target, op, run["run"], sources):
                progress.advance(task, len(op.bench_cases) + 1)
                continue
            timings = store.read_table(unfinished, op.name, "timings")
            for case in op.bench_cases:
                progress.update(task, description=f"{op.name} {case.slug}")
                if not _recorded(timings, case, sources):
                    rows = [_timing_row(case, timing, sources, run["run"]) for timing in bench(op, case, op.steps)]
                    timings = timings[timings["case"] != case.slug]
                    timings = pd.concat([timings, pd.DataFrame(rows, columns=store.TABLES["timings"])])
                    store.write(unfinished / f"{op.name}.timings.csv", timings)
                    torch.cuda.empty_cache()
                progress.advance(task)
            problems += _wrong(op, timings)
            progress.update(task, description=f"{op.name} under ncu")
            counters, codes, trouble = _profile(op, timings, sources, run["run"])
            problems += trouble
            progress.advance(task)
            _publish(target, op, timings, counters, codes, run)
            (unfinished / f"{op.name}.timings.csv").unlink()
    if not list(unfinished.glob("*.timings.csv")):
        shutil.rmtree(unfinished)  # the run is whole: the next one is a new one
    return problems


def _run_row(unfinished: Path) -> dict[str, str]:
    """Provenance: that of the run to go on with, if nothing but the time has changed since, else a new one."""
    gpu = gpu_identity()
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "driver": str(gpu.get("driver") or ""),
        "power_limit_w": str(gpu.get("power_limit_w") or ""),
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "nvcc": _version("nvcc", r"release [\d.]+, V([\d.]+)"),
        "ncu": _version("ncu", r"Version ([\d.]+)"),
        "python": platform.python_version(),
    }
    earlier = store.read_runs(unfinished)
    if len(earlier) and all(earlier.iloc[0][key] == value for key, value in facts.items()):
        return dict(earlier.iloc[0])
    shutil.rmtree(unfinished, ignore_errors=True)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    name = f"{date[:10]}-{hashlib.sha256((date + json.dumps(facts)).encode()).hexdigest()[:6]}"
    row = {"run": name, "date": date, **facts}
    store.write(unfinished / "runs.csv", pd.DataFrame([row], columns=store.PROVENANCE))
    return row


def _version(program: str, pattern: str) -> str:
    if shutil.which(program) is None:
        return ""
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(pattern, answer)
    return match.group(1) if match else ""


def _source_digests(op: Op) -> dict[Name, str]:
    return {
        Name(backend, step.name): identity.source_digest(op.name, step.name, backend)
        for step in op.steps
        for backend in step.backends
    }


def _recorded(timings: pd.DataFrame, case: Case, sources: dict[Name, str]) -> bool:
    """Whether the unfinished run holds this case, measured with the code as it is now."""
    return _codes(timings[timings["case"] == case.slug]) == sources


def _published(target: Path, op: Op, run: str, sources: dict[Name, str]) -> bool:
    """Whether this run, before it was interrupted, has published the operation with the code as it is now."""
    timings = store.read_table(target, op.name, "timings")
    return bool((timings["run"] == run).any()) and _codes(timings) == sources


def _codes(timings: pd.DataFrame) -> dict[Name, str]:
    """The source digest that each step was measured with."""
    steps = timings[timings["step"] != ""]
    digests = (code.partition(":")[0] for code in steps["code"])
    return dict(zip(map(Name, steps["backend"], steps["step"]), digests, strict=True))


def _timing_row(case: Case, timing: Timing, sources: dict[Name, str], run: str) -> dict[str, str]:
    sensors = timing.sensors
    return {
        "case": case.slug,
        "backend": timing.name.backend,
        "step": timing.name.step,
        "status": timing.status,
        "contest": timing.contest,
        "times_us": " ".join(f"{time:.5g}" for time in timing.times_us),
        "extra_bytes": str(timing.extra_bytes),
        "error": f"{timing.error:.4g}",
        "margin": f"{timing.margin:.4g}",
        "sm_clock_mhz": _text(sensors.get("sm_clock_mhz")),
        "power_w": _text(sensors.get("power_w")),
        "temperature_c": _text(sensors.get("temperature_c")),
        "throttle": _text(sensors.get("throttle")),
        "code": sources.get(timing.name, ""),
        "run": run,
    }


def _text(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _wrong(op: Op, timings: pd.DataFrame) -> list[str]:
    wrong = timings[timings["status"].str.startswith("wrong")]
    return [
        f"{op.name} {row.step or 'baseline'} ({row.backend}) at {row.case}: {row.status}" for row in wrong.itertuples()
    ]


def _profile(
    op: Op, timings: pd.DataFrame, sources: dict[Name, str], run: str
) -> tuple[pd.DataFrame, dict[Name, str], list[str]]:
    """One launch of every right step under ncu: counters, code identities, and what went wrong."""
    at_profile = timings[timings["case"] == op.profile_case.slug]
    wrong = {Name(r.backend, r.step) for r in at_profile.itertuples() if r.status.startswith("wrong")}
    names = [name for name in cells(op.name) if name not in wrong]
    problems: list[str] = []
    launches: list[Launch] = []
    with tempfile.TemporaryDirectory() as folder:
        report, digests = Path(folder) / "report.ncu-rep", Path(folder) / "digests.json"
        arguments = [op.name, str(digests), *(label(op.name, name) for name in names)]
        command = [sys.executable, "-m", "kernel_twins._profiling.report.worker", *arguments]
        ncu = shutil.which("ncu")
        if ncu is None:
            problems.append("ncu is not on PATH, so no counters were collected: install Nsight Compute")
            output = _run(command)
        else:
            output = _run([ncu, *_ncu_options(report), *command])
        if not digests.exists():
            problems.append(f"{op.name}: the profiled process failed: {_explain(output)}")
        if ncu is not None and digests.exists():
            read = Path(folder) / "launches.json"
            if report.exists():
                output = _run([sys.executable, "-m", "kernel_twins._profiling.report.reader", str(report), str(read)])
            if read.exists():
                launches = [Launch(**launch) for launch in json.loads(read.read_text())]
            else:
                problems.append(f"{op.name}: {_explain(output)}")
        compiled = json.loads(digests.read_text()) if digests.exists() else {}

    kernels = identity.sass_digests(Path(extension().__file__ or ""))
    codes = {
        name: f"{source}:{compiled.get(name.step, '-')}"
        if name.backend == "triton"
        else f"{source}:{identity.cuda_digest(op.name, name.step, kernels) if kernels else '-'}"
        for name, source in sources.items()
    }
    if not launches:
        return pd.DataFrame(columns=store.TABLES["counters"]), codes, problems
    expected = {label(op.name, name): op.step(name.step).launches if name.step else 0 for name in names}
    labelled = {label(op.name, name): code for name, code in codes.items()}
    try:
        counters = counter_rows(launches, expected, op.profile_case.slug, run, labelled)
    except InvalidReportError as error:
        return pd.DataFrame(columns=store.TABLES["counters"]), codes, [*problems, f"{op.name}: {error}"]
    return counters, codes, problems


def _ncu_options(report: Path) -> list[str]:
    return [
        "--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off",
        "--nvtx", "--nvtx-include", r"regex:kl\..*", "--metrics", ",".join(METRICS), "-f", "-o", str(report),
    ]  # fmt: skip


def _run(command: list[str]) -> str:
    """Run a command with its children in a group of their own, so that a hang can be ended whole."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(store.ROOT), os.getenv("PYTHONPATH")]))}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        return process.communicate(timeout=_NCU_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        return f"no end after {_NCU_TIMEOUT_S} s"
    finally:
        if process.poll() is None:  # timed out or interrupted: nothing of it may stay on the GPU
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _explain(output: str) -> str:
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "counters are forbidden to this user: run as root, or set NVreg_RestrictProfilingToAdminUsers=0 for the "
            "nvidia module (in a container: --cap-add=SYS_ADMIN); many clouds allow neither"
        )
    lines = [line for line in output.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _publish(
    target: Path, op: Op, timings: pd.DataFrame, counters: pd.DataFrame, codes: dict[Name, str], run: dict[str, str]
) -> None:
    """Put an operation's new tables in place of its old ones, and keep the runs that some table still names."""
    names = [Name(backend, step) for backend, step in zip(timings["backend"], timings["step"], strict=True)]
    timings = timings.assign(code=[codes.get(name, "") for name in names])
    runs = pd.concat([store.read_runs(target), pd.DataFrame([run], columns=store.PROVENANCE)]).drop_duplicates("run")
    store.write(target / "runs.csv", runs)
    store.write(target / f"{op.name}.timings.csv", timings)
    if len(counters):
        store.write(target / f"{op.name}.counters.csv", counters)
    named: set[str] = set()
    for table in target.glob("*.*.csv"):
        named |= set(pd.read_csv(table, usecols=["run"], dtype=str)["run"])
    store.write(target / "runs.csv", runs[runs["run"].isin(named)])

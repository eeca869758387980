"""Faults as a user meets them: the command line, with a script called ncu on PATH that acts each of them out.

Only the GPU is stood in for: its facts, the binaries' digests, the bench. All from argparse to the tables is real.
"""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from kernel_twins import OPS
from kernel_twins.harness.bench import Timing
from kernel_twins.report import cli, commands
from kernel_twins.report.measure import collect, stage
from kernel_twins.report.ncu import extract, ncu
from kernel_twins.report.ncu.faults import RULES
from kernel_twins.report.ncu.reader import Launch
from kernel_twins.report.rows import identity, store
from kernel_twins.report.rows.metrics import CYCLES, DURATION, METRICS
from kernel_twins.spec import BACKENDS, Name

OP = OPS["matmul_fp32"]
CASES = [case.slug for case in OP.bench_cases]
NAMES = [Name(each) for each in OP.baselines] + [Name(b, step.name) for b in BACKENDS for step in OP.steps_of(b)]
COLLECT = ["collect", "--op", OP.name]
_EARLIER: dict[str, bytes] = {}
"""Content of the tables of an earlier run, by file; see ``recorded``."""

_HEAD = f"""\
#!{sys.executable} -IS
import fcntl, json, os, signal, sys, time
from pathlib import Path
arguments = sys.argv[1:]
if arguments == ["--version"]:
    sys.exit(print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1)"))
if arguments[0] == "--import":  # where NVIDIA's module is not installed
    sys.exit("==ERROR== The file could not be opened")
_, _, _, op, calls, digests, awaited = arguments[arguments.index("--") + 1:]
with open(awaited) as stream:
    fcntl.flock(stream, fcntl.LOCK_SH)
    labels = stream.read().split()
metrics = arguments[arguments.index("--metrics") + 1].split(",")
report = Path(arguments[arguments.index("-o") + 1])
log = Path(arguments[arguments.index("--log-file") + 1])
"""
HEALTHY = f"""
Path(digests).write_text(json.dumps({dict.fromkeys((step.name for step in OP.steps), "ptx")}))
report.write_text(json.dumps([[label, metrics] for label in labels for _ in range(int(calls))]))
Path(awaited).with_suffix(".left").touch()
"""
FORBIDDEN = """
log.write_text("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance "
               "Counters on the target device 0.\\n==WARNING== No kernels were profiled.")
"""
HELD = """
log.write_text("==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool "
               "(like DCGM) is concurrently collecting profiling data.")
sys.exit(9)
"""
NOT_LAUNCHED = """
log.write_text("==PROF== Disconnected from process 7\\n==WARNING== No kernels were profiled.")
"""
CRASHING = """
report.write_text("of the launches before the crash")
log.write_text("==PROF== Disconnected from process 7\\n==ERROR== The application returned an error code (1).")
sys.exit("Traceback (most recent call last):\\nRuntimeError: CUDA error: an illegal memory access was encountered")
"""
HANGING = """
os.fork()
report.write_text("half")
time.sleep(600)
"""
INTERRUPTING = """
parent = os.getppid()
report.write_text("half")
if os.fork():
    os.kill(parent, signal.SIGINT)
time.sleep(600)
"""
GARBAGE = HEALTHY + "report.write_bytes(bytes(range(256)) * 40)"
FULL = (3, ("No space left", "resume"))


class Machine:
    """A machine whose GPU takes 100 µs for everything, and whose ncu is what ``install`` makes it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self.timed: list[str] = []

    def install(self, body: str | None) -> None:
        script = self.folder / "bin" / "ncu"
        script.unlink(missing_ok=True)
        if body is not None:
            script.write_text(_HEAD + textwrap.dedent(body))
            script.chmod(0o755)

    def bench(self, op: Any, case: Any, steps: Any, backends: Any) -> list[Timing]:
        self.timed.append(case.slug)
        return [Timing(name, "ok", "fast", [100.0] * 20) for name in NAMES]

    def recorded(self) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in self.data.iterdir()}

    def half_done(self) -> list[Path]:
        return [*self.folder.rglob("*.tmp"), *self.folder.rglob(".ncu-*"), *self.folder.rglob("half*")]

    def processes(self) -> list[str]:
        """Those of our ncu that still run after up to 5 s; one that is only not collected yet has no command line."""
        deadline = time.monotonic() + 5
        while (found := [pid for pid in os.listdir("/proc") if self._is_ncu(pid)]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def _is_ncu(self, pid: str) -> bool:
        try:
            return os.fsencode(self.folder / "bin" / "ncu") in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # no process, or gone by now
            return False


_read_report = extract.launches_of
_source_digest = functools.cache(identity.source_digest)


def launches_of(report: Path, everything: bool = False) -> list[Launch]:
    """What the healthy ncu wrote; all else is for the real reader."""
    if not report.read_bytes().startswith(b"[["):
        return _read_report(report, everything)
    real = {DURATION: 1e5, CYCLES: 2e5, "gpc__cycles_elapsed.avg.per_second": 1.9e9}
    steps = {label: label.split(".")[3] for label, _ in json.loads(report.read_text())}
    kernels = {label: f"{OP.name}_{step}_kernel" for label, step in steps.items()}
    return [
        Launch(
            label,
            kernels[label],
            {name: real.get(name, 1.0) for name in names},
            {name: METRICS[name].unit for name in names},
        )
        for label, names in json.loads(report.read_text())
    ]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for variable in ("NCU", "CUDA_HOME", "CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(ncu, "_PLACES", ())
    monkeypatch.setattr(stage, "_facts", lambda: dict.fromkeys(store.PROVENANCE[2:], "1"))
    monkeypatch.setattr(stage, "_binaries", lambda: {f"{OP.name}/{step.name}": "sass" for step in OP.steps})
    monkeypatch.setattr(collect, "compile_all", lambda work: [])
    monkeypatch.setattr(collect, "bench", machine.bench)
    monkeypatch.setattr(extract, "launches_of", launches_of)
    monkeypatch.setattr(identity, "source_digest", _source_digest)  # half of the time that this file takes
    monkeypatch.setattr(commands, "why_no_gpu", lambda: "")
    monkeypatch.setattr(commands, "_target", lambda publish: ("gpu", machine.data))
    monkeypatch.setattr(store, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return machine


@pytest.fixture
def recorded(machine: Machine, capsys: pytest.CaptureFixture[str]) -> Machine:
    """With the data of an earlier run, which one test makes for all."""
    machine.install(HEALTHY)
    if not _EARLIER:
        assert (cli.main(COLLECT, ""), cli.main(["extract"], "")) == (0, 0)
        assert capsys.readouterr() == ("", "")
        _EARLIER.update(machine.recorded())
        machine.timed.clear()
    machine.data.mkdir(exist_ok=True)
    for file, content in _EARLIER.items():
        (machine.data / file).write_bytes(content)
    return machine


def fill_disk(monkeypatch: pytest.MonkeyPatch, file: str, after: int = 0) -> None:
    """A disk on which there is no room when ``file`` is to be put in place, but for so many times."""
    replace, room = os.replace, [after]

    def full(source: Any, target: Any) -> None:
        if str(target).endswith(file):
            room[0] -= 1
            if room[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)


@dataclass(frozen=True)
class Scenario:
    """What ncu does (None: there is none), or which write meets the full disk; what a user is told."""

    name: str
    ncu: str | None
    code: int
    words: tuple[str, ...]
    timed: int = len(CASES)
    """Cases that were timed before the fault."""
    options: tuple[str, ...] = ()
    full: tuple[str, int] | None = None
    """The file whose write fails, after how many that went well."""
    lost: int = 0
    """Cases that were timed in vain."""


SCENARIOS = [
    Scenario("forbidden", FORBIDDEN, 3, ("ERR_NVGPUCTRPERM", RULES["counters_forbidden"][2], "collect --tool proton")),
    Scenario("held", HELD, 3, ("driver resource was unavailable", "dcgmi profile --pause")),
    Scenario("no_ncu", None, 3, ("no ncu on PATH", "install Nsight Compute", "ncu_report.py log"), timed=0),
    Scenario("not_launched", NOT_LAUNCHED, 4, (OP.name, "no kernel was launched", "python -m kernel_twins run")),
    Scenario("crash", CRASHING, 4, (OP.name, "exit code 1: RuntimeError: CUDA error: an illegal memory access")),
    Scenario("hang", HANGING, 4, (OP.name, "no end after 0.5 s", "raise --timeout"), options=("--timeout", "0.5")),
    Scenario("ctrl_c", INTERRUPTING, 130, ("interrupted", "--resume")),
    Scenario("disk_full_of_timings", HEALTHY, *FULL, timed=3, full=(f"{OP.name}.timings.csv", 2), lost=1),
    Scenario("disk_full_of_reports", HEALTHY, *FULL, full=("cycles.ncu-rep", 0)),
    Scenario("disk_full_of_notes", HEALTHY, *FULL, full=("profiled.json", 0)),
    Scenario("disk_full_at_the_start", HEALTHY, *FULL, timed=0, full=("stage.json", 0)),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_fault_costs_nothing_that_was_recorded_and_the_run_goes_on(
    recorded: Machine, scenario: Scenario, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recorded.recorded()
    assert len(before) == 5  # runs.csv and measured.csv, timings, counters and cycles
    recorded.install(scenario.ncu)
    with monkeypatch.context() as patches:
        if scenario.full:
            fill_disk(patches, *scenario.full)
        code = cli.main([*COLLECT, *scenario.options], "")
    captured = capsys.readouterr()
    assert (code, captured.out) == (scenario.code, "")
    assert [word for word in scenario.words if word not in captured.err] == []
    assert recorded.recorded() == before
    assert recorded.half_done() == []
    assert recorded.processes() == []
    assert recorded.timed == CASES[: scenario.timed]

    recorded.install(HEALTHY)
    assert cli.main([*COLLECT, "--resume"], "") == 0
    assert recorded.timed == CASES[: scenario.timed] + CASES[scenario.timed - scenario.lost :]
    assert cli.main(["extract"], "") == 0
    assert capsys.readouterr() == ("", "")
    assert recorded.recorded().keys() == before.keys() | {f"{OP.name}.previous.csv"}
    assert not (recorded.folder / "runs" / "gpu" / "unfinished").exists()


def test_a_garbage_report_is_refused_by_name_and_profiled_again(
    recorded: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """ncu ended well and wrote something; only reading it shows that it is no report."""
    before = recorded.recorded()
    recorded.install(GARBAGE)
    assert cli.main(COLLECT, "") == 0
    assert cli.main(["extract"], "") == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{OP.name}: {OP.name}.counters.ncu-rep: " in captured.err
    assert recorded.recorded() == before
    assert recorded.half_done() == []

    recorded.install(HEALTHY)
    assert cli.main([*COLLECT, "--resume"], "") == 0
    assert recorded.timed == CASES
    assert cli.main(["extract"], "") == 0
    assert recorded.recorded().keys() > before.keys()


@pytest.mark.parametrize("table", ["data/runs", "timings", "counters", "cycles", "previous"])
def test_a_disk_that_fills_up_during_extraction_costs_another_extraction(
    recorded: Machine, table: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are replaced one by one; each is the old one or the new one, and none is read beside another run's."""
    assert cli.main(COLLECT, "") == 0
    with monkeypatch.context() as patches:
        fill_disk(patches, f"{table}.csv")
        assert cli.main(["extract"], "") == 3
    captured = capsys.readouterr()
    assert captured.out == "" and "No space left" in captured.err
    assert recorded.half_done() == []
    for each in store.TABLES:
        store.read_table(recorded.data, OP.name, each)  # or raises

    assert cli.main(["extract"], "") == 0
    (run,) = store.read_runs(recorded.data)["run"]
    assert {run} == {
        each
        for name in ("timings", "counters", "cycles")
        for each in store.read_table(recorded.data, OP.name, name)["run"]
    }
    assert recorded.timed == CASES


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("options", "variable", "stderr", "silent"),
    [
        ([], "", Terminal, False),
        (["--quiet"], "", Terminal, True),
        ([], "CI=true", Terminal, True),
        ([], "NO_COLOR=1", Terminal, True),
        ([], "", io.StringIO, True),
    ],
    ids=["terminal", "quiet", "ci", "no_color", "no_terminal"],
)
def test_progress_is_for_terminals_only_and_errors_for_all(
    machine: Machine,
    options: list[str],
    variable: str,
    stderr: type[io.StringIO],
    silent: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, _, value = variable.partition("=")
    if name:
        monkeypatch.setenv(name, value)
    for body, code, error in ((FORBIDDEN, 3, "ERR_NVGPUCTRPERM"), (CRASHING, 4, "illegal memory"), (HEALTHY, 0, "")):
        machine.install(body)
        stream = stderr()
        monkeypatch.setattr(sys, "stderr", stream)
        assert cli.main([*COLLECT, *options], "") == code
        told = stream.getvalue()
        assert error in told
        assert (f"{OP.name} under ncu" in told) != silent
        assert not (silent and "\r" in told)
        assert error or not silent or told == ""
    assert capsys.readouterr().out == ""

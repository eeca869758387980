"""Everything that can go wrong under ncu, acted out by a script called ncu that stands on PATH."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kernel_twins import OPS
from kernel_twins.report.measure import profilers
from kernel_twins.report.ncu import faults, ncu
from kernel_twins.report.ncu.faults import Circumstances, DataFault, EnvironmentFault, Fault, diagnose
from kernel_twins.report.rows.base import CANNOT_RUN, INVALID_DATA, CannotRunError, InvalidDataError

EARLIER = b"the report of an earlier run"
METRICS = ["gpu__time_duration.sum", "dram__bytes_read.sum"]

_HEAD = f"""\
#!{sys.executable}
import os, subprocess, sys, time
from pathlib import Path
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 1)")
    sys.exit()
command = arguments[arguments.index("--") + 1:]
report = Path(arguments[arguments.index("-o") + 1])
log = Path(arguments[arguments.index("--log-file") + 1])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with an earlier report, on a machine that has no ncu of its own."""
    monkeypatch.setattr(ncu, "_PLACES", (str(tmp_path / "toolkit" / "*" / "ncu"),))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for variable in ("NCU", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "cell.ncu-rep").write_bytes(EARLIER)
    return tmp_path


def install(file: Path, body: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_HEAD + textwrap.dedent(body))
    file.chmod(0o755)
    return file


def profile(folder: Path, command: list[str] | None = None, timeout_s: float = 30) -> None:
    ncu.profile(command or ["application"], folder / "cell.ncu-rep", METRICS, timeout_s)


def assert_intact(folder: Path) -> None:
    """What was recorded before is there, and nothing half done beside it."""
    assert (folder / "cell.ncu-rep").read_bytes() == EARLIER
    assert {entry.name for entry in folder.iterdir()} <= {"bin", "cell.ncu-rep", "pids", "toolkit"}


@dataclass(frozen=True)
class Scenario:
    """What ncu prints and how it ends; the fault that it must be taken for, and words that the message must hold."""

    fault: str
    kind: type[Fault]
    log: str = ""
    stderr: str = ""
    returncode: int = 1
    report: str | None = None
    words: tuple[str, ...] = field(default=())


_CLOSING = "==PROF== Trying to shutdown target application\n==ERROR== The application returned an error code (9)."
SCENARIOS = [
    Scenario(
        "no_gpu", EnvironmentFault,
        stderr="==ERROR== Nsight Compute failed to connect to the CUDA driver (stub libcuda.so[.1] on path?).",
        words=("driver", "nvidia-smi", "--gpus all", "log"),
    ),
    Scenario(
        "no_gpu", EnvironmentFault,
        log="==ERROR== The application returned an error code (1).\n==WARNING== No kernels were profiled.",
        stderr="RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        words=("nvidia-smi",),
    ),
    Scenario(
        "counters_forbidden", EnvironmentFault, returncode=0,
        log="==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters "
        "on the target device 0.\n==WARNING== No kernels were profiled.",
        words=("RmProfilingAdminOnly", "NVreg_RestrictProfilingToAdminUsers=0", "--cap-add=SYS_ADMIN", "--tool proton"),
    ),
    Scenario(
        "counters_held", EnvironmentFault, returncode=9,
        log="==ERROR== An error was reported by the driver:\n==ERROR== Profiling failed because a driver resource was "
        f"unavailable. Ensure that no other tool (like DCGM) is concurrently collecting profiling data.\n{_CLOSING}",
        words=("DCGM", "dcgmi profile --pause", "nsys"),
    ),
    Scenario(
        "sandbox", EnvironmentFault, returncode=9,
        log="==ERROR== An error was reported by the counter measurement library:\n==ERROR== Failed to initialize the "
        f"profiler: LibraryNotLoaded. Check that a compatible driver library is loaded.\n{_CLOSING}",
        words=("gVisor", "2025.3.1.0", "--tool proton"),
    ),
    Scenario(
        "mismatch", EnvironmentFault,
        log="==ERROR== Cuda driver is not compatible with Nsight Compute.\n" + _CLOSING,
        words=("2025.3.1.0", "NCU"),
    ),
    Scenario(
        "unknown_metric", EnvironmentFault,
        log="==ERROR== Failed to find metric dram__bytes_raed.sum\n" + _CLOSING,
        words=("dram__bytes_raed.sum", "dram__bytes_read.sum", "--query-metrics"),
    ),
    Scenario(
        "locked", EnvironmentFault, returncode=9,
        log="==ERROR== Failed to open/create lock file /scratch/nsight-compute-lock. Please check that this process "
        f"has write permissions on this file.\n{_CLOSING}",
        words=("/scratch/nsight-compute-lock", "owner", "TMPDIR"),
    ),
    Scenario(
        "disk_full", EnvironmentFault, report="half of a report",
        log="==ERROR== Failed to write report: No space left on device",
        words=("cell.ncu-rep", "bytes are free", "is kept"),
    ),
    Scenario(
        "nothing_profiled", DataFault, returncode=0, log="==WARNING== No kernels were profiled.",
        words=(r"regex:kl\..*", "cudaProfilerStart", "kernel_twins run"),
    ),
    Scenario("no_report", DataFault, returncode=0, log="==PROF== Disconnected from process 7", words=("cell.ncu-rep",)),
    Scenario("no_report", DataFault, returncode=0, report="", words=("measure the cell again",)),
    Scenario(
        "crash", DataFault, returncode=1, report="of the launches before the crash",
        log="==PROF== Disconnected from process 7\n==ERROR== The application returned an error code (3).\n"
        "==WARNING== No kernels were profiled.",
        stderr="Traceback (most recent call last):\n  File \"worker.py\", line 1\nRuntimeError: an illegal access",
        words=("exit code 3", "RuntimeError: an illegal access", "Traceback", "without ncu"),
    ),
    Scenario("ncu_failed", DataFault, log="==ERROR== Something of next year's\n" + _CLOSING, words=("of next year's",)),
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.fault)
def test_a_failure_of_ncu_is_named_with_its_remedy(folder: Path, scenario: Scenario) -> None:
    install(
        folder / "bin" / "ncu",
        f"""
        log.write_text({scenario.log!r})
        sys.stderr.write({scenario.stderr!r})
        if {scenario.report!r} is not None:
            report.write_text({scenario.report!r})
        sys.exit({scenario.returncode})
        """,
    )
    with pytest.raises(Fault) as caught:
        profile(folder)
    fault = caught.value
    assert (fault.name, type(fault)) == (scenario.fault, scenario.kind)
    assert [word for word in scenario.words if word not in str(fault)] == []
    assert_intact(folder)


def test_exit_codes_follow_from_whose_fault_it_was() -> None:
    environment, data = EnvironmentFault("a", "b", "c"), DataFault("a", "b", "c")
    assert isinstance(environment, CannotRunError) and CANNOT_RUN == 3
    assert isinstance(data, InvalidDataError) and INVALID_DATA == 4


def test_a_report_appears_whole_and_under_its_name(folder: Path) -> None:
    """A finished run replaces an earlier report; it was asked for what was wanted, in the C locale."""
    install(
        folder / "bin" / "ncu",
        """
        log.write_text("==PROF== Disconnected")
        report.write_text("\\n".join([os.environ["LC_ALL"], os.environ["PYTHONPATH"], *sys.argv]))
        """,
    )
    profile(folder, ["application", "--flag"])
    locale, path, *arguments = (folder / "cell.ncu-rep").read_text().splitlines()
    assert locale == "C"
    assert str(Path(ncu.__file__).parents[3]) in path.split(os.pathsep)
    options = " ".join(arguments)
    assert f"--metrics {','.join(METRICS)}" in options
    assert r"--nvtx-include regex:kl\..*" in options
    assert "--clock-control none --cache-control all --profile-from-start off" in options
    assert options.endswith("-- application --flag")
    assert sorted(entry.name for entry in folder.iterdir()) == ["bin", "cell.ncu-rep"]


def test_no_ncu_lists_the_places_and_what_works_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/opt/my-cuda")
    with pytest.raises(EnvironmentFault) as caught:
        profile(folder)
    told = str(caught.value)
    assert caught.value.name == "no_ncu"
    for words in ("PATH", "/opt/my-cuda/bin/ncu", str(folder / "toolkit"), "NCU", "log still rebuilds"):
        assert words in told
    assert_intact(folder)


def test_ncu_is_taken_from_the_most_explicit_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (install(folder / "toolkit" / version / "ncu") for version in ("2024.1.1", "2025.3.1"))
    assert old != ncu.find() == new
    monkeypatch.setenv("CUDA_HOME", str(folder / "cuda"))
    in_home = install(folder / "cuda" / "bin" / "ncu")
    assert ncu.find() == in_home
    on_path = install(folder / "bin" / "ncu")
    assert ncu.find() == on_path
    monkeypatch.setenv("NCU", str(old))
    assert ncu.find() == old
    monkeypatch.setenv("NCU", str(folder / "nowhere"))
    with pytest.raises(EnvironmentFault, match="nowhere"):
        ncu.find()


def test_versions_are_read_where_there_are_any(folder: Path) -> None:
    assert ncu.version("ncu", ncu.VERSION) == ""
    install(folder / "bin" / "ncu")
    assert ncu.version("ncu", ncu.VERSION) == "2025.3.1.0"
    assert ncu.version("ncu", "release (.*)") == ""


_HANGING = """
log.write_text('==PROF== Profiling "first" - 0: 0%....100% - 8 passes\\n==PROF== Profiling "waits_for_ever" - 1: 0%')
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
report.write_text("half")
pids = Path(PIDS)
pids.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
pids.with_suffix(".new").rename(pids)
time.sleep(600)
"""


def hanging(folder: Path) -> Path:
    install(folder / "bin" / "ncu", _HANGING.replace("PIDS", repr(str(folder / "pids"))))
    return folder / "pids"


def assert_ended(pids: Path) -> None:
    """That no process still runs; one that its new parent has not collected yet is a zombie."""
    for pid in pids.read_text().split():
        deadline = time.monotonic() + 5
        while (state := _state(pid)) not in ("gone", "Z"):
            assert time.monotonic() < deadline, f"process {pid} is left, in state {state}"
            time.sleep(0.01)


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def test_a_hang_is_ended_with_all_its_children(folder: Path) -> None:
    pids = hanging(folder)
    with pytest.raises(DataFault) as caught:
        profile(folder, timeout_s=1)
    assert caught.value.name == "hang"
    for words in ("no end after 1 s", "waits_for_ever", "--timeout", "app-range"):
        assert words in str(caught.value)
    assert_ended(pids)
    assert_intact(folder)


def test_ctrl_c_ends_all_children_and_leaves_no_half_report(folder: Path) -> None:
    pids = hanging(folder)

    def interrupt() -> None:
        while not pids.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt, daemon=True)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        profile(folder)
    presser.join()
    assert_ended(pids)
    assert_intact(folder)


def test_a_run_that_is_not_finished_leaves_nothing(folder: Path) -> None:
    pids = hanging(folder)
    with ncu.started(["application"], folder / "cell.ncu-rep", METRICS):
        while not pids.exists():
            time.sleep(0.01)
    assert_ended(pids)
    assert_intact(folder)


def test_who_is_done_with_the_gpu_is_not_waited_for_any_longer(folder: Path) -> None:
    left = folder / "bin" / "left"
    install(folder / "bin" / "ncu", f"Path({str(left)!r}).touch(); time.sleep(60)")
    with ncu.started(["application"], folder / "cell.ncu-rep", METRICS) as run:
        run.reaches(left, 30)
        assert run.running.process.poll() is None
    assert_intact(folder)


@pytest.mark.parametrize(("does", "name"), [("time.sleep(60)", "hang"), ("sys.exit('no device')", "crash")])
def test_who_is_never_done_with_the_gpu_fails_before_another_begins(folder: Path, does: str, name: str) -> None:
    install(folder / "bin" / "ncu", does)
    with ncu.started(["application"], folder / "cell.ncu-rep", METRICS) as run:
        with pytest.raises(Fault) as caught:
            run.reaches(folder / "never", 1)
        assert caught.value.name == name
    assert_intact(folder)


def test_what_gets_ready_beside_our_work_goes_behind_it(folder: Path) -> None:
    pids = hanging(folder)
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    with ncu.started(["application"], folder / "cell.ncu-rep", METRICS):
        while not pids.exists():
            time.sleep(0.01)
        for pid in pids.read_text().split():
            assert os.getpriority(os.PRIO_PROCESS, int(pid)) == min(ours + 10, 19)
            assert os.getsid(int(pid)) == os.getsid(0)


@pytest.mark.parametrize("seconds", [0, 600])
def test_no_group_is_ended_whose_number_may_be_anothers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """A process keeps its number until it is waited for, and that is its group's, too."""
    install(folder / "bin" / "ncu", f"report.write_text('whole')\ntime.sleep({seconds})")
    killed = []

    def killpg(number: int, signal: int) -> None:
        os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT | os.WNOHANG)  # ChildProcessError once it is collected
        killed.append(number)
        os.kill(-number, signal)

    monkeypatch.setattr(os, "killpg", killpg)
    with contextlib.suppress(DataFault):
        profile(folder, timeout_s=5 if not seconds else 0)
    assert len(killed) == 1


def waiting(folder: Path) -> profilers.Profilers:
    """Of an operation, under an ncu that never ends and leaves its number in a folder."""
    (folder / "pids").mkdir()
    script = f"Path({str(folder / 'pids')!r}, str(os.getpid())).touch()\ntime.sleep(600)"
    install(folder / "bin" / "ncu", script)
    stage = SimpleNamespace(report=lambda _, kind: folder / f"{kind}.ncu-rep")
    return profilers.Profilers(OPS["vector_add"], cast("Any", stage), "T0")


def test_ctrl_c_while_the_second_process_is_started_leaves_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = profilers.worker_command

    def interrupted(*arguments: Any) -> list[str]:
        if arguments[1] == profilers.CYCLE_CALLS:
            while not list((folder / "pids").iterdir()):
                time.sleep(0.01)
            raise KeyboardInterrupt
        return command(*arguments)

    monkeypatch.setattr(profilers, "worker_command", interrupted)
    with pytest.raises(KeyboardInterrupt), waiting(folder) as started:
        started.start()
    (pid,) = (folder / "pids").iterdir()
    assert _state(pid.name) == "gone"
    assert_intact(folder)


def test_a_full_disk_where_processes_wait_is_named_and_ends_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def tell(started: profilers.Profilers) -> None:
        with started:
            started.start()
            while len(list((folder / "pids").iterdir())) < 2:
                time.sleep(0.01)
            monkeypatch.setattr(Path, "write_text", full)
            started.profile(["kl.vector_add.cuda.v01_scalar"], 30)

    started = waiting(folder)
    with pytest.raises(EnvironmentFault, match="disk is full") as caught:
        tell(started)
    assert caught.value.name == "disk_full"
    assert [_state(pid.name) for pid in (folder / "pids").iterdir()] == ["gone", "gone"]
    assert_intact(folder)


def test_a_process_left_behind_by_a_run_that_ended_well_is_ended(folder: Path) -> None:
    pids = hanging(folder)
    script = folder / "bin" / "ncu"
    script.write_text(script.read_text().removesuffix("time.sleep(600)\n"))
    profile(folder)
    assert (folder / "cell.ncu-rep").read_text() == "half"
    assert_ended(pids)


def test_a_run_that_is_killed_says_by_what(folder: Path) -> None:
    install(folder / "bin" / "ncu", "report.write_text('half')\nos.kill(os.getpid(), 9)")
    with pytest.raises(DataFault, match="by signal 9") as caught:
        profile(folder)
    assert caught.value.name == "ended"
    assert_intact(folder)


def test_a_disk_that_is_full_for_us_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own files beside the report meet the full disk before ncu does."""
    install(folder / "bin" / "ncu")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(EnvironmentFault, match="disk is full") as caught:
        profile(folder)
    assert caught.value.name == "disk_full"
    assert_intact(folder)


def test_a_full_disk_is_told_even_where_ncu_does_not() -> None:
    fault = diagnose("==ERROR== Internal error", 1, Circumstances(report="/data/cell.ncu-rep", free_bytes=12))
    assert fault.name == "disk_full"
    assert "12 bytes are free beside /data/cell.ncu-rep" in str(fault)


def test_the_applications_own_words_are_not_taken_for_ncus() -> None:
    """A test's name, or a comment in a traceback, may speak of what ncu speaks of."""
    stderr = "ValueError: ERR_NVGPUCTRPERM is only quoted here"
    assert diagnose(stderr, 1, Circumstances(), stderr).name == "crash"


@pytest.mark.parametrize("quoted", [r"regex:^sm__cycles_elapsd(\.(sum|max|pct))?$", "sm__cycles_elapsd.max"])
def test_an_unknown_metric_brings_the_nearest_known_ones(quoted: str) -> None:
    fault = diagnose(f"==ERROR== Failed to find metric {quoted}", 1, Circumstances(ncu="2025.3"))
    assert "2025.3 does not know sm__cycles_elapsd" in fault.message
    assert "sm__cycles_elapsed.max" in fault.remedy


def test_the_value_that_forbids_counters_is_quoted() -> None:
    fault = diagnose("==ERROR== ERR_NVGPUCTRPERM", 1, Circumstances(admin_only="1"))
    assert "RmProfilingAdminOnly is 1" in str(fault)


def test_counters_that_are_no_numbers_in_bulk_are_refused_with_the_versions() -> None:
    whole = {str(index): float(index) for index in range(100)}
    few = whole | {str(index): math.nan for index in range(5)}
    many = whole | {str(index): math.nan for index in range(6)}
    assert faults.suspicious([whole]) is None
    assert faults.suspicious([]) is None
    assert faults.suspicious([few]) is None
    assert faults.suspicious([few], ["absent"]) is not None
    fault = faults.suspicious([many], ncu="2025.3.1", driver="999.1")
    assert fault is not None
    assert fault.name == "mismatch"
    assert "6 of 100" in str(fault) and "2025.3.1" in str(fault) and "999.1" in str(fault)


def test_a_command_without_ncu_gets_the_same_care(folder: Path) -> None:
    def script(text: str, timeout_s: float = 30) -> str:
        return ncu.run([sys.executable, "-c", text], timeout_s)

    assert script("import sys; print('rows'); print('progress', file=sys.stderr)") == "rows\n"
    with pytest.raises(DataFault, match="exit code 4: the report is cut short"):
        script("import sys; print('the report is cut short'); sys.exit(4)")
    with pytest.raises(DataFault, match=r"no end after 0\.2 s"):
        script("import time; time.sleep(600)", 0.2)
    with pytest.raises(EnvironmentFault, match="nvidia-smi"):
        script("raise RuntimeError('No CUDA GPUs are available')")


RECORDED = Path(__file__).parents[1] / "fixtures" / "ncu"


@pytest.mark.parametrize(
    ("log", "name", "told"),
    [
        ("no_kernels", "nothing_profiled", "cudaProfilerStart"),
        ("crash", "crash", "about to exit"),
    ],
)
def test_what_ncu_printed_on_an_h100_is_diagnosed(log: str, name: str, told: str) -> None:
    printed, _, returned = (RECORDED / f"{log}.log").read_text().strip().rpartition("exit code ")
    fault = diagnose(printed, int(returned), Circumstances())
    assert (fault.name, type(fault)) == (name, DataFault)
    assert told in str(fault)


def test_a_metric_that_ncu_does_not_know_is_no_error_of_ncus() -> None:
    """ncu 2025.3 exits 0 and writes n/a in its place: that is for extraction to notice."""
    printed = (RECORDED / "unknown_metric.log").read_text()
    assert "no__such_metric.sum                     (!) n/a" in printed
    assert printed.rstrip().endswith("exit code 0")

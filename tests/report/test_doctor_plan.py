"""What the machine has, and what a run would do: both are asked before anything is measured."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from kernel_twins import OPS
from kernel_twins.report import cli, doctor
from kernel_twins.report.doctor import Finding
from kernel_twins.report.measure import plan
from kernel_twins.report.measure.selection import Selection
from kernel_twins.report.ncu import faults, ncu
from kernel_twins.report.rows import store
from kernel_twins.spec import Case, Name

EVERYTHING = Selection.of(None, None, None, None)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without GPU and without ncu, whatever this one has."""
    monkeypatch.setattr(doctor, "why_no_gpu", lambda: "no NVIDIA GPU is visible")
    monkeypatch.setattr(ncu, "_PLACES", (str(tmp_path / "ncu"),))
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("NCU", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def examined() -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor.examine()}


@pytest.mark.usefixtures("bare")
def test_what_is_missing_comes_with_what_mends_it() -> None:
    findings = examined()
    assert {name for name in ("GPU", "ncu", "counters") if findings[name].state == "missing"} == {
        "GPU", "ncu", "counters",
    }  # fmt: skip
    assert "nvidia-smi" in findings["GPU"].remedy
    assert "install Nsight Compute" in findings["ncu"].remedy
    assert findings["Python"].state == "ok"
    assert all(finding.remedy for finding in findings.values() if finding.state != "ok")
    assert not any(finding.remedy for finding in findings.values() if finding.state == "ok")


@pytest.mark.usefixtures("bare")
def test_a_machine_without_gpu_is_told_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(as_json=False) == 3
    printed = capsys.readouterr().out
    assert "the log can be rendered here: `python profiling/ncu_report.py log`" in printed
    assert "-> see what `nvidia-smi` says" in printed


@pytest.mark.usefixtures("bare")
def test_findings_as_json_hold_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(as_json=True) == 3
    told = json.loads(capsys.readouterr().out)
    assert {each["name"]: each["state"] for each in told} == {each.name: each.state for each in doctor.examine()}
    assert set(told[0]) == {"name", "state", "found", "remedy"}


def test_a_warning_does_not_keep_from_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("rich", "warning", "not installed", "pip install rich")])
    assert doctor.run(as_json=False) == 0
    assert "everything for measuring is here" in capsys.readouterr().out


def test_data_that_is_cut_short_is_named(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "DATA", bare / "data")
    (bare / "data" / "gpu").mkdir(parents=True)
    assert examined()["committed data"].state == "ok"
    whole = (store.ROOT / "profiling" / "data" / store.REFERENCE_GPU / "vector_add.timings.csv").read_bytes()
    (bare / "data" / "gpu" / "vector_add.timings.csv").write_bytes(whole[:-40])
    finding = examined()["committed data"]
    assert finding.state == "missing"
    assert "vector_add.timings.csv" in finding.found
    assert "git checkout" in finding.remedy
    assert "can be rendered" not in _printed(bare, monkeypatch)


def _printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    file = folder / "printed"
    with file.open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        doctor.run(as_json=False)
        monkeypatch.undo()
    return file.read_text()


def test_an_unfinished_run_is_found(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RUNS", bare / "runs")
    assert examined()["unfinished run"].state == "ok"
    (bare / "runs" / "h100-sxm" / "unfinished").mkdir(parents=True)
    finding = examined()["unfinished run"]
    assert finding.state == "warning"
    assert "--resume" in finding.remedy and str(bare / "runs" / "h100-sxm" / "unfinished") in finding.remedy


@pytest.mark.usefixtures("bare")
def test_a_full_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 10**6))
    assert examined()["free disk space"].state == "warning"


@pytest.mark.usefixtures("bare")
def test_an_extension_older_than_its_sources_is_stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, library = tmp_path / "cuda-kernels" / "op" / "v01_first.cu", tmp_path / "_C.so"
    source.parent.mkdir(parents=True)
    for file, when in ((source, 2000), (library, 1000)):
        file.touch()
        os.utime(file, (when, when))
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(doctor, "extension", lambda: None)
    monkeypatch.setattr(doctor, "find_extensions", lambda: [library, library])
    finding = examined()["extension"]
    assert (finding.state, finding.remedy) == ("warning", "python setup.py build_ext")
    assert "v01_first.cu" in finding.found
    os.utime(library, (3000, 3000))
    assert examined()["extension"].state == "ok"


@pytest.mark.usefixtures("bare")
def test_an_extension_without_the_ladders_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "_C.so"
    library.touch()
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    monkeypatch.setattr(doctor, "extension", lambda: None)
    monkeypatch.setattr(doctor, "find_extensions", lambda: [library])
    finding = examined()["extension"]
    assert (finding.state, finding.remedy) == ("warning", "python setup.py build_ext")
    assert "_C.so alone" in finding.found


def test_only_a_real_profile_proves_that_counters_may_be_read(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "why_no_gpu", lambda: "")
    tried = []

    def profile(command: list[str], report: Path, metrics: list[str], timeout_s: float) -> None:
        tried.append((command, metrics, timeout_s))
        if len(tried) > 1:
            raise faults.EnvironmentFault("counters_held", "another tool holds them", "dcgmi profile --pause")

    monkeypatch.setattr(ncu, "profile", profile)
    assert doctor._examine("counters", doctor._counters).state == "ok"
    finding = doctor._examine("counters", doctor._counters)
    assert (finding.state, finding.remedy) == ("missing", "dcgmi profile --pause")
    assert "RmProfilingAdminOnly" in finding.found
    ((_, code), metrics, timeout_s) = (tried[0][0][1:], tried[0][1], tried[0][2])
    assert "kl.doctor" in code
    compile(code, "try", "exec")
    assert "gpu__time_duration.sum" in metrics
    assert timeout_s == 60


@pytest.mark.usefixtures("bare")
def test_a_check_that_breaks_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(doctor, "why_no_gpu", broken)
    findings = examined()
    assert findings["GPU"].state == "missing" and "libcudart" in findings["GPU"].found
    assert findings["Python"].state == "ok"


def test_doctor_needs_neither_pandas_nor_rich() -> None:
    """The very packages whose absence it must report; torch is left out too, as it takes seconds to import."""
    code = (
        "import sys, importlib.util as util\n"
        "gone = ('pandas', 'rich', 'torch')\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name in gone else real(name, *rest)\n"
        "sys.modules.update(dict.fromkeys(gone))\n"
        "from kernel_twins.report import doctor\n"
        "sys.exit(doctor.run(False))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=store.ROOT, check=False)
    assert done.returncode == 3, done.stderr
    for line in ("missing pandas", "missing rich", "missing torch"):
        assert line in done.stdout
    assert "can be rendered" not in done.stdout


@pytest.mark.parametrize(
    ("torch", "first"),
    [
        ("raise ImportError('libcudart')", "pip uninstall -y torch && pip install -r requirements.txt && "),
        ("from types import SimpleNamespace\n__version__ = '2.11.0+cpu'\nversion = SimpleNamespace(cuda=None)\n",
         "pip uninstall -y torch && pip install -r requirements.txt && "),
        ("", "pip install -r requirements.txt && "),
    ],
    ids=["broken", "without CUDA", "missing"],
)  # fmt: skip
def test_the_extensions_remedy_begins_with_the_torch_that_it_needs(torch: str, first: str, tmp_path: Path) -> None:
    """Building without one builds nothing and asks for one."""
    if torch:
        (tmp_path / "torch.py").write_text(torch)
    code = (
        f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(store.ROOT)!r}]\n"
        "import kernel_twins.compiler.disassembly as disassembly\n"
        "disassembly.find_extensions = list\n"
        "from kernel_twins.report import doctor\n"
        "print(doctor._extension()[2])\n"
        "try: disassembly.require_extensions()\n"
        "except RuntimeError as error: print(error)\n"
        "print(doctor._torch()[2])\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    doctors, show, its_own = done.stdout.splitlines()
    assert doctors == f"{first}python setup.py build_ext"
    assert show == f"the CUDA side is not built: run `{doctors}`"
    assert f"{its_own} && " == first


@pytest.mark.parametrize("package", ["rich", "pandas"])
def test_a_python_without_the_reports_packages_is_told_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def obey(arguments: object) -> int:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(cli, "_obey", obey)
    assert cli.main(["check"], "") == 3
    told = capsys.readouterr().err
    assert f"{package} is not installed for {sys.executable}" in told
    assert "`make`" in told and "pip install -e '.[report]'" in told


def test_trials_without_a_gpu_say_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.trials", str(tmp_path / "table.csv")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=store.ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 3
    assert done.stderr.startswith("tests.trials: cannot try at full size here: ") and "Traceback" not in done.stderr
    assert not (tmp_path / "table.csv").exists()


TIMED = {
    "softmax": 32, "softmax_backward": 25, "cross_entropy": 23, "cross_entropy_backward": 15, "layer_norm": 35,
    "layer_norm_backward": 26, "matmul_bf16": 116, "matmul_fp32": 78, "matmul_tf32x3": 24, "linear": 18,
    "vector_add": 35, "reduction": 28, "rms_norm": 29, "rms_norm_backward": 26, "dropout_add": 16,
    "dropout_add_backward": 16, "reduction_nd": 31,
}  # fmt: skip
"""Seconds, in three commands on the reference GPU that recorded everything."""
LATER = ("v18_few_rows", "v02_few_rows", "v19_fitted_tiles", "v03_fitted_tiles")
"""Steps that came since."""
PROFILED = {
    "rms_norm": 16, "reduction": 27, "layer_norm_backward": 28, "matmul_tf32x3": 14, "linear": 11,
    "rms_norm_backward": 21, "dropout_add_backward": 18,
}  # fmt: skip
"""Seconds of profiled processes after the timing, in two commands there, of the first two and of the others."""


def test_the_last_runs_come_out_as_they_were() -> None:
    steps = ([step for step in op.steps if step.name not in LATER] for op in EVERYTHING.ops)
    then = (dataclasses.replace(op, steps=tuple(its)) for op, its in zip(EVERYTHING.ops, steps, strict=True))
    planned = {each.op: each for each in plan.plan(Selection(tuple(then)), "T3", "ncu").operations}
    assert sum(planned[op].timing_s for op in TIMED) == pytest.approx(sum(TIMED.values()), rel=0.05)
    assert sum(planned[op].profiling_s for op in PROFILED) == pytest.approx(sum(PROFILED.values()), rel=0.1)
    names = list(PROFILED)
    for part, seconds in ((names[:2], 152), (names[2:], 261)):
        selection = Selection(tuple(OPS[name] for name in part))
        assert plan.plan(selection, "T3", "ncu").seconds == pytest.approx(seconds, rel=0.1)


def test_what_is_compiled_ahead_is_planned_once_for_all_and_one_case_not_at_all() -> None:
    op = OPS["softmax"]
    assert plan.plan(Selection.of([op.name], None, None, op.profile_case.slug), "T0", "ncu").compiling_s == 0
    alone, both = (plan.plan(Selection(each), "T0", "ncu") for each in ((op,), (op, OPS["rms_norm"])))
    assert plan._AHEAD_S < alone.compiling_s < both.compiling_s < 2 * alone.compiling_s
    late = plan._operation(op, Selection((op,)), "T0", "ncu", ahead=False)
    assert late.timing_s > alone.operations[0].timing_s + late.timed_cells * plan._CELL_S


def test_a_profiled_process_costs_what_the_timing_leaves_of_it() -> None:
    """With ncu both get ready while the operation is timed; with Proton one after the other, when it has been."""
    op = OPS["vector_add"]

    def planned(shape: str | None, tool: str) -> tuple[plan.OpPlan, float]:
        (each,) = plan.plan(Selection.of([op.name], None, None, shape), "T0", tool).operations
        return each, each.profiling_s - plan.PROCESSES * plan._LOADING_S

    long, rest = planned(None, "ncu")
    assert long.timing_s > plan._READY_S
    assert rest == pytest.approx(long.passes * plan._REPLAY_S, abs=0.1)
    short, rest = planned(op.profile_case.slug, "ncu")
    assert short.timing_s < plan._READY_S
    assert rest == pytest.approx(plan._READY_S - short.timing_s + short.passes * plan._REPLAY_S, abs=0.15)
    assert planned(None, "proton")[1] == pytest.approx(plan.PROCESSES * plan._READY_S, abs=0.1)


def test_what_torch_compile_takes_is_planned() -> None:
    """A baseline that was never timed is taken to be as fast as the fastest that was."""
    op, seconds = OPS["matmul_bf16"], []
    for names in (["cublaslt"], ["cublaslt", "new"], ["cublaslt", "compile"], ["cublaslt", "max_autotune"]):
        changed = dataclasses.replace(op, baselines=dict.fromkeys(names), baseline_cases={})
        selection = Selection((changed,), op.steps[0].name, "cuda", op.profile_case.slug)
        (planned,) = plan.plan(selection, "T0", "ncu").operations
        seconds.append(planned.timing_s)
    assert seconds == sorted(seconds)


def test_a_selection_plans_what_it_selects() -> None:
    op = OPS["vector_add"]
    (whole,) = plan.plan(Selection.of(["vector_add"], None, None, None), "T0", "ncu").operations
    assert whole.timed_cells == len(op.bench_cases) * (len(op.baselines) + 2 * len(op.steps))
    assert whole.profiled_cells == len(op.baselines) + 2 * len(op.steps)
    assert whole.passes == whole.profiled_cells * 11
    (cuda,) = plan.plan(Selection.of(["vector_add"], None, "cuda", None), "T0", "ncu").operations
    assert cuda.profiled_cells == len(op.baselines) + len(op.steps)
    for case, profiled in ((op.profile_case, len(op.baselines) + 1), (op.bench_cases[0], 0)):
        (one,) = plan.plan(Selection.of([op.name], "v03_vectorized", "cuda", case.slug), "T0", "ncu").operations
        assert (one.timed_cells, one.profiled_cells) == (len(op.baselines) + 1, profiled)
    assert one.timing_s < cuda.timing_s < whole.timing_s


def test_a_step_is_planned_at_its_own_profile_case() -> None:
    """Beside the step that it is compared with and the first baseline; one that is profiled nowhere costs nothing."""

    def profiled(op: str, step: str | None) -> int:
        (planned,) = plan.plan(Selection.of([op], step, "cuda", None), "T0", "ncu").operations
        return planned.profiled_cells

    assert profiled("layer_norm", "v05_cluster") == 0
    assert profiled("softmax", "v07_cluster") == 2 + 2  # at its own case and at that of v10, which is compared with it
    op = OPS["softmax"]
    others = 2  # v07 and v10, which are profiled at cases of their own
    extra = 2 + 3  # v07 at rows that v06 does not take, and v10 beside v07
    assert profiled("softmax", None) == len(op.baselines) + len(op.steps_of("cuda")) - others + extra


def test_wide_cases_are_planned_for_wide_steps_only() -> None:
    op = OPS["matmul_bf16"]
    wide = [step for step in op.steps if step.wide]
    others = [step for step in op.steps if not step.wide and step.arch == ">=8.0"]

    def baselines(*cases: Case) -> int:
        return sum(len(op.baselines_at(case)) for case in cases)

    def cells(step: str, shape: str | None) -> int:
        (planned,) = plan.plan(Selection.of([op.name], step, None, shape), "T0", "ncu").operations
        return planned.timed_cells

    served = [case for case in op.timed_cases if op.serves(wide[0], case)]
    assert cells(wide[0].name, None) == baselines(*served) + len(served) * len(wide[0].backends)
    assert cells(others[0].name, None) == baselines(*op.bench_cases) + len(op.bench_cases) * len(others[0].backends)
    assert cells(wide[0].name, op.wide_cases[0].slug) == baselines(op.wide_cases[0]) + len(wide[0].backends)
    with pytest.raises(ValueError, match="no cell in common"):
        cells(others[0].name, op.wide_cases[0].slug)


def test_other_conditions_are_planned_for_the_last_steps_of_products() -> None:
    op = OPS["matmul_fp32"]
    case, last = op.profile_case, Name("cuda", op.steps_of("cuda")[-1].name)
    known = {(case, Name("torch")): [2.0], (case, Name("cuda", "v01_naive")): [50.0]}
    assert plan._conditions_s(op, case, known) == 0
    known[case, last] = [2.0]
    rests, replays = 2 * plan.CONDITION_ROUNDS * plan.REST_MS, 2 * 2 * plan.CONDITION_ROUNDS * 2 * 2.0
    assert plan._conditions_s(op, case, known) == pytest.approx((rests + replays) / 1e3 + plan.CHAIN_S)


def test_a_higher_tier_takes_more_passes_and_proton_none_of_ncus() -> None:
    seconds = {
        tool: [plan.plan(EVERYTHING, tier, tool).seconds for tier in ("T0", "T1", "T2", "T3")]
        for tool in ("ncu", "proton")
    }
    assert seconds["ncu"] == sorted(seconds["ncu"]) and len(set(seconds["ncu"])) == 4
    assert len(set(seconds["proton"])) == 1


def test_cells_that_were_never_timed_are_guessed_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = plan.plan(EVERYTHING, "T3", "ncu")
    monkeypatch.setattr(store, "DATA", tmp_path)
    guessed = plan.plan(EVERYTHING, "T3", "ncu")
    assert all(each.guessed == each.timed_cells for each in guessed.operations)
    assert guessed.seconds == pytest.approx(known.seconds, rel=0.6)
    assert plan.run(EVERYTHING, "T3", "ncu", as_json=False) == 0
    assert "were never timed there and are guessed" in capsys.readouterr().out


def test_a_plan_as_json_holds_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.run(EVERYTHING, "T3", "ncu", as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    cells = sum(each["timing_s"] + each["profiling_s"] for each in told["operations"])
    assert told["start_s"] > 0
    assert told["seconds"] == pytest.approx(told["start_s"] + told["compiling_s"] + cells, abs=0.1)
    assert [each["op"] for each in told["operations"]] == list(OPS)


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'triton', 'rich')))\n"
        "from kernel_twins.report.measure import plan\n"
        "from kernel_twins.report.measure.selection import Selection\n"
        "sys.exit(plan.run(Selection.of(None, None, None, None), 'T3', 'ncu', False))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=store.ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "tier T3 with ncu: about" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="bench imports torch")
def test_the_plan_counts_rounds_as_the_bench_does() -> None:
    from kernel_twins.harness import bench
    from kernel_twins.report.measure.profilers import CYCLE_CALLS

    assert plan.T0_CALLS == CYCLE_CALLS
    assert (plan.ROUNDS, plan.SAMPLE_MS, plan.SETTLED_MS, plan.L2_MULTIPLE) == (
        bench.ROUNDS, bench.SAMPLE_MS, bench.SETTLED_MS, bench._L2_MULTIPLE,
    )  # fmt: skip
    assert (plan.CONDITION_ROUNDS, plan.REST_MS, plan.REST, plan.CHAIN_S) == (
        bench.CONDITION_ROUNDS, bench._REST_MS, bench._REST, bench._CHAIN_S,
    )  # fmt: skip


def test_a_verb_tells_an_argument_that_it_does_not_know_with_its_own_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["check", "--gpu", "1"], ["log", "more"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments, "")
        told = capsys.readouterr().err
        assert ended.value.code == 2
        assert told.startswith(f"usage: ncu_report.py {arguments[0]} [-h]")
        assert f"error: unrecognized arguments: {' '.join(arguments[1:])}" in told


def test_log_tells_a_gpu_of_which_nothing_was_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["log", "--gpu", "h100-smx"], "") == 2
    told = capsys.readouterr().err
    assert "--gpu is 'h100-smx'" in told and "h100-sxm is committed" in told

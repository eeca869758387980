"""A run without a GPU: the bench and ncu are stood in for, everything between them and the tables is real."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas as pd
import pytest

pytest.importorskip("torch")

from rich.console import Console
from rich.progress import Progress

from kernel_twins import OPS, ops
from kernel_twins.errors import UnavailableError
from kernel_twins.harness import bench
from kernel_twins.harness.bench import Timing
from kernel_twins.harness.check import generator
from kernel_twins.report import cli
from kernel_twins.report.meaning import regressions, static
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.measure import (
    ahead,
    collect,
    collect_compile,
    measuring,
    profilers,
    publish,
    shards,
    stage,
    worker,
)
from kernel_twins.report.measure.selection import Selection, show
from kernel_twins.report.ncu import extract, ncu
from kernel_twins.report.ncu.reader import Launch
from kernel_twins.report.pages import documents
from kernel_twins.report.rows import base, identity, libraries, store
from kernel_twins.report.rows.base import CannotRunError, InvalidDataError
from kernel_twins.report.rows.metrics import CYCLES, DURATION, METRICS, names
from kernel_twins.spec import BACKENDS, Case, Name
from tests import logs

OP = OPS["vector_add"]
NAMES = [Name(backend, step.name) for backend in BACKENDS for step in OP.steps_of(backend)]
NO_STATIC = pd.DataFrame(columns=static.STATIC)
FACTS = dict.fromkeys(store.FACTS, "1")
Bench = Callable[..., list[Timing]]


def launch(text: str, kernel: str, metrics: dict[str, float]) -> dict[str, Any]:
    units = {name: METRICS[name].unit for name in metrics}
    return {"label": text, "kernel": kernel, "metrics": metrics, "units": units}


class Machine:
    """A GPU that takes 100 µs for everything, and an ncu that counts 1 of everything."""

    def __init__(self) -> None:
        self.benched: list[str] = []
        self.interrupt_at = ""
        self.fault: Exception | None = None
        self.shares = 1.0
        self.times_us = 100.0
        self.uninstalled = ""
        self.not_judged = ""  # the backend of a step
        self.launched: dict[str, str] = {}  # another step's kernel in place of a step's own
        self.conditions: tuple[str, ...] = ()
        self.awaited: list[Path] = []  # what processes wait for that are to be profiled
        self.told: list[tuple[str, list[str]]] = []  # who is to leave the GPU, and who was told what to call by then
        self.compiled: list[str] = []  # cases, ahead of all timing
        self.waiting = 0  # processes under ncu
        self.waited: set[int] = set()  # how many did while something was timed
        self.facts = dict(FACTS)

    def compile_all(self, work: list[collect_compile.Work]) -> list[str]:
        assert self.waiting == 0
        self.compiled = [each.case.slug for each in work]
        return ["process 1 of those that compile ended with -11"]

    def bench(self, op: Any, case: Any, steps: Any, backends: Any) -> list[Timing]:
        if case.slug == self.interrupt_at:
            raise KeyboardInterrupt
        self.waited.add(self.waiting)
        self.benched.append(case.slug)
        chosen = [Name(b) for b in op.baselines] + [
            Name(backend, step.name) for backend in backends for step in steps if backend in step.backends
        ]
        timed = [name for name in chosen if name.backend not in (self.uninstalled, self.not_judged)]
        others = [Timing(name, "ok", each, [50.0] * 10, 0, 1e-7) for each in self.conditions for name in timed[-2:]]
        return [
            *(Timing(name, "ok", "fast", [self.times_us if name.step else 100.0] * 20, 0, 1e-7) for name in timed),
            *others,
            *(Timing(name, "skipped: it is not installed") for name in chosen if name.backend == self.uninstalled),
            *(Timing(name, "not judged: no memory") for name in chosen if name.backend == self.not_judged),
        ]

    @contextlib.contextmanager
    def started(self, command: list[str], report: Path, metrics: list[str]) -> Iterator[Any]:
        self.waiting += 1
        self.awaited.append(Path(command[-1]))
        try:
            yield SimpleNamespace(
                reaches=lambda file, timeout_s: self.reaches(file),
                finish=lambda timeout_s: self.profile(command, report, metrics, timeout_s),
            )
        finally:
            self.waiting -= 1

    def reaches(self, file: Path) -> None:
        told = [each.name for each in self.awaited if each.exists() and each.stat().st_size]
        self.told.append((next(each.name for each in self.awaited if profilers.left(each) == file), told))

    def profile(self, command: list[str], report: Path, metrics: list[str], timeout_s: float) -> None:
        if self.fault:
            raise self.fault
        _, _, _, op, calls, digests, awaited = command
        called = Path(awaited).read_text().split()
        if any(base.labelled(OPS[op], each)[1].backend == self.uninstalled for each in called):
            raise InvalidDataError("the application crashed: it is not installed")
        Path(digests).write_text(json.dumps({step.name: "ptx" for step in OPS[op].steps}))
        values = {name: self.shares if METRICS[name].is_share else 1.0 for name in metrics}
        values |= {name: value for name, value in ((DURATION, 1e5), (CYCLES, 2e5)) if name in metrics}
        if "gpc__cycles_elapsed.avg.per_second" in metrics:
            values["gpc__cycles_elapsed.avg.per_second"] = 1.9e9
        steps = {label: label.split(".")[3] for label in called}
        kernels = {label: self.launched.get(step, f"{op}_{step}_kernel") for label, step in steps.items()}
        launches = [launch(each, kernels[each], values) for each in called for _ in range(int(calls))]
        report.write_text(json.dumps(launches))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(stage, "_facts", lambda: dict(machine.facts))
    monkeypatch.setattr(stage, "_binaries", lambda: {f"{OP.name}/{name.step}": "sass" for name in NAMES})
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(collect, "compile_all", machine.compile_all)
    monkeypatch.setattr(collect, "bench", machine.bench)
    monkeypatch.setattr(ncu, "find", lambda: Path("ncu"))
    monkeypatch.setattr(ncu, "started", machine.started)
    monkeypatch.setattr(
        extract, "launches_of", lambda path, everything=False: [Launch(**each) for each in json.loads(path.read_text())]
    )
    return machine


class Runs:
    """Where a run's things lie."""

    def __init__(self, folder: Path) -> None:
        self.stage = folder / "unfinished"
        self.target = folder / "data"

    def collect(self, resume: bool = False, selection: Selection | None = None) -> collect.Problems:
        opened = stage.Stage.open(self.stage, resume, "")
        with Progress(disable=True) as progress:
            return collect.collect(selection or Selection((OP,)), opened, self.target, collect.Settings(), progress)

    def publish(self) -> list[str]:
        return publish.publish(self.stage, self.target)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_a_run_becomes_tables(machine: Machine, runs: Runs) -> None:
    problems = runs.collect()
    assert not problems.unproven and not problems.broken
    assert machine.benched == [case.slug for case in OP.bench_cases]
    assert machine.told == [("counters", ["counters"]), ("cycles", ["counters", "cycles"])]  # one at a time on the GPU
    assert runs.publish() == []
    timings = store.read_table(runs.target, OP.name, "timings")
    assert len(timings) == len(OP.bench_cases) * (len(NAMES) + len(OP.baselines))
    code = {row.backend: row.code.partition(":")[2] for row in timings.itertuples()}
    assert code == {**dict.fromkeys(OP.baselines, ""), "cuda": "sass", "triton": "ptx"}
    counters = store.read_table(runs.target, OP.name, "counters")
    assert set(counters["metric"]) == set(names("T3"))
    cycles = store.read_table(runs.target, OP.name, "cycles")
    assert list(cycles["cycles"]) == [" ".join(["200000"] * profilers.CYCLE_CALLS)] * (len(NAMES) + len(OP.baselines))
    assert not runs.stage.exists()


def test_profiled_processes_get_ready_while_the_operation_is_timed(machine: Machine, runs: Runs) -> None:
    machine.interrupt_at = OP.bench_cases[-1].slug
    with pytest.raises(KeyboardInterrupt):
        runs.collect()
    assert (machine.waited, machine.waiting) == ({2}, 0)
    machine.interrupt_at, machine.waited = "", set()
    machine.fault = InvalidDataError("the application crashed")
    assert runs.collect(resume=True).broken
    assert (machine.waited, machine.waiting) == ({2}, 0)
    machine.fault, machine.waited = None, set()
    assert not runs.collect(resume=True).broken
    assert (machine.waited, machine.waiting) == (set(), 0)
    assert runs.publish() == []


Started = tuple[int, list[Any]]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """What is compiled in how many processes, on a GPU with 9 GiB and a machine of 12 cores."""
    started: list[Started] = []

    def run(module: str, folder: Path, count: int, meanwhile: Callable[[], object]) -> list[str]:
        assert module == "kernel_twins.report.measure.collect_compile"
        started.append((count, json.loads((folder / "compile.json").read_text())))
        return []

    monkeypatch.setattr(ahead, "run", run)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (9 * 2**30, 9 * 2**30))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    return started


def work_of(op: str, shape: int, *steps: str) -> collect_compile.Work:
    return collect_compile.Work.of(OPS[op], Case.of(shape, dtype="fp32"), [Name(*each.split("/")) for each in steps])


def test_cases_are_compiled_in_as_many_processes_as_there_are_or_have_room(pool: list[Started]) -> None:
    small, large = work_of("vector_add", 2**10, "cuda/v01_scalar"), work_of("vector_add", 2**10, "triton/v01_scalar")
    assert collect_compile.compile_all([small] * 2 + [large]) == []
    ((count, called),) = pool
    assert count == 3
    case = small.case.slug
    baseline = f"kl.vector_add.compile.baseline.{case}"
    assert [[each for _, each in share] for share in called] == [
        [[baseline]],
        [[baseline]],
        [[baseline, f"kl.vector_add.triton.v01_scalar.{case}"]],
    ]
    collect_compile.compile_all([small] * 20)
    huge = work_of("vector_add", 2**28, "triton/v01_scalar")  # of 3 GiB, which leave 2 if as many are allocated
    collect_compile.compile_all([small, small, huge])
    assert [count for count, _ in pool[1:]] == [8, 2]


def test_large_cases_are_compiled_by_few_processes_so_that_there_is_room_for_many(pool: list[Started]) -> None:
    large = work_of("vector_add", 2**26)  # of 768 MiB, or twice that: with a process's own, two and a half GiB
    small = work_of("vector_add", 2**10, "triton/v01_scalar")
    collect_compile.compile_all([large, small, large, small, small, large])
    ((count, called),) = pool
    assert count == 5  # six would need ten and a half GiB
    assert [len(share) for share in called] == [2, 1, 1, 1, 1]


def test_one_case_is_left_to_the_bench(pool: list[Started]) -> None:
    collect_compile.compile_all([])
    collect_compile.compile_all([work_of("vector_add", 2**10, "triton/v01_scalar")])
    assert pool == []


def test_searches_are_left_to_the_bench_and_what_is_compiled_beside_steps_is_not() -> None:
    op = OPS["matmul_bf16"]
    (case, *_) = op.baseline_cases["max_autotune"]
    assert collect_compile.Work.of(op, case, [Name("cuda", "v01_naive")]).names == (Name("compile"),)
    op, step = OPS["linear"], Name("triton", OPS["linear"].steps_of("triton")[-1].name)
    assert collect_compile.Work.of(op, op.profile_case, [step]).names == (
        Name("compile"), Name("product_triton"), step,
    )  # fmt: skip


def test_what_does_not_compile_keeps_nothing_else_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    called = []

    def load(op: str, name: Name) -> Callable[..., None]:
        def call(*inputs: Any, out: Any) -> None:
            called.append((name, out.shape))
            if name.backend == "compile":
                raise RuntimeError("ptxas died")

        return call

    monkeypatch.setattr(collect_compile, "load_named", load)
    monkeypatch.setattr(collect_compile, "generator", lambda case, device: generator(case, "cpu"))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: None)
    case = Case.of(5, dtype="fp32")
    names = [Name("compile"), Name("triton", "v01_scalar")]
    other = ["vector_add", [base.label(OP, Case.of(7, dtype="fp32"), names[1])]]
    (tmp_path / "compile.json").write_text(
        json.dumps([[["vector_add", [base.label(OP, case, name) for name in names]]], [other]])
    )
    collect_compile.main(str(tmp_path), "0", "2")
    assert called == [(name, (5,)) for name in names]
    assert "kl.vector_add.compile.baseline.5-fp32 was not compiled ahead: ptxas died" in capsys.readouterr().err


def test_no_search_leaves_its_result_where_others_find_it() -> None:
    autotuner = pytest.importorskip("triton.runtime").Autotuner
    kept, searched = autotuner.check_disk_cache, []
    with ahead.searches_forgotten():
        assert autotuner.check_disk_cache is not kept
        assert not autotuner.check_disk_cache(None, "key", [], lambda: searched.append("all"))
    assert searched == ["all"]
    assert autotuner.check_disk_cache is kept


def test_no_winner_of_torch_compiles_is_kept_and_its_code_says_as_ever_that_callers_keep_theirs() -> None:
    pytest.importorskip("triton")
    cache = pytest.importorskip("torch._inductor.runtime.autotune_cache").AutotuneCache
    keeps = cache.save
    with ahead.searches_forgotten():
        cache.save(None, None, 0)  # which reads both otherwise
        assert pytest.importorskip("torch._inductor.config").autotune_local_cache
        compiled = pickle.dumps(cache("hash").save)  # as it stands in the code that is compiled
    assert cache.save is keeps
    assert pickle.loads(compiled).__func__ is keeps


def test_who_compiles_leaves_the_others_alone_and_none_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module that ends with its number, and of one that a Ctrl-C finds waiting."""
    (tmp_path / "ends.py").write_text("import sys; sys.exit(int(sys.argv[2]))")
    (tmp_path / "waits.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(store, "ROOT", tmp_path)
    assert ahead.run("ends", tmp_path, 3) == [
        f"process {each} of those that compile ended with {each}" for each in (1, 2)
    ]
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ahead.run("waits", tmp_path, 2, interrupted)
    assert [each.returncode for each in started] == [-signal.SIGKILL] * 2


def test_a_worker_imports_what_baselines_need_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def imported(module: str) -> None:
        asked.append(module)
        raise ImportError(module)

    monkeypatch.setattr(importlib, "import_module", imported)
    libraries.load(OPS["softmax"])
    libraries.load(OPS["matmul_fp32"])
    compiler = "torch._inductor.compile_fx"
    assert asked == [compiler, "liger_kernel.ops", "cutlass.cute", compiler]


def test_a_baseline_that_is_not_installed_is_left_out_and_said_to_be(machine: Machine, runs: Runs) -> None:
    runs.collect()
    runs.publish()  # a run that had it: its ratios are no bar for one that has not
    assert "not installed" not in logs.told(runs.target, [Results(OP, runs.target, None)])
    machine.uninstalled = "torch"
    problems = runs.collect()
    assert not problems.unproven and not problems.broken
    assert runs.publish() == []
    results = Results(OP, runs.target, None)
    case = OP.profile_case
    assert results.status(case, Name("torch")) == "skipped: it is not installed"
    assert results.accuracy(case, Name("torch")) == (None, None)
    assert results.best_baseline(case) in [Name(each) for each in OP.baselines if each != "torch"]
    assert (case.slug, Name("torch")) not in results.recorded.calls
    assert (case.slug, Name("cub")) in results.recorded.calls
    assert regressions.losses(results) == []
    text = logs.told(runs.target, [results])
    assert f"- torch at {case.slug}: skipped: it is not installed.\n" in text
    assert "| torch | – |" in text


def test_a_step_that_could_not_be_judged_is_told_and_neither_profiled_nor_passed_over(
    machine: Machine, runs: Runs
) -> None:
    machine.not_judged = "triton"
    problems = runs.collect()
    steps = [step.name for step in OP.steps_of("triton")]
    again = "`python profiling/ncu_report.py --op vector_add`"
    status = f"not judged: no memory; end what else uses this GPU, and measure it again: {again}"
    told = [f"{OP.name} {step} (triton) at {each.slug}: {status}" for each in OP.bench_cases for step in steps]
    assert sorted(problems.unproven) == sorted(told)
    assert runs.publish() == []
    assert {row.backend for row in store.read_table(runs.target, OP.name, "counters").itertuples()} == {
        *OP.baselines,
        "cuda",
    }
    finished = {step.name for step in OP.steps if step.finished}
    assert len(regressions.unproven(Results(OP, runs.target, None))) == len(finished & {*steps}) * len(OP.bench_cases)


def test_what_could_not_be_judged_is_measured_again_by_whoever_goes_on(machine: Machine, runs: Runs) -> None:
    machine.not_judged = "cub"
    assert len(runs.collect().unproven) == len(OP.bench_cases)
    machine.not_judged, machine.benched = "", []
    assert runs.collect(resume=True).unproven == []
    assert machine.benched == [case.slug for case in OP.bench_cases]
    machine.not_judged = "cub"
    runs.publish()
    runs.collect()
    runs.publish()
    assert len(regressions.unproven(Results(OP, runs.target, None))) == len(OP.bench_cases)


def test_a_run_tells_the_versions_of_other_peoples_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "quack-kernels":
            raise importlib.metadata.PackageNotFoundError(package)
        return "0.8.5"

    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert libraries.versions() == {"liger": "0.8.5", "quack": "unknown", "flash4": "0.8.5"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert libraries.versions() == {"liger": "", "quack": "", "flash4": ""}
    assert {*libraries.LIBRARIES} <= {*store.FACTS}


def test_only_a_baseline_may_be_unavailable() -> None:
    def call(*_: Any) -> None:
        raise UnavailableError("it takes no rows of 70000 elements")

    def judge(call: Any) -> Any:
        return call()

    timing = bench._gate(judge, Name("cub"), call)
    assert (timing.status, timing.error) == ("skipped: it takes no rows of 70000 elements", None)
    assert bench._gate(judge, NAMES[0], call).status.startswith("wrong: raised it takes no rows")


def test_wide_cases_are_measured_for_wide_steps_only(machine: Machine, runs: Runs) -> None:
    *steps, last = OP.steps
    case = Case.parse("12345-fp32")
    op = dataclasses.replace(OP, wide_cases=(case,), steps=(*steps, dataclasses.replace(last, wide=True)))
    runs.collect(selection=Selection((op,)))
    assert machine.benched == [each.slug for each in (*OP.bench_cases, case)]
    timings = store.read_table(runs.stage, op.name, "timings")
    measured = timings[timings["case"] == case.slug]
    assert set(measured["step"]) == {"", last.name}
    assert set(timings["step"]) == {"", *(step.name for step in op.steps)}
    machine.benched.clear()
    runs.collect(resume=True, selection=Selection((op,)))
    assert machine.benched == []


def test_other_conditions_become_rows_that_nothing_else_is_judged_by(machine: Machine, runs: Runs) -> None:
    machine.conditions = ("rested", "chain")
    runs.collect()
    machine.benched.clear()
    runs.collect(resume=True)
    assert machine.benched == []  # what was measured is known to be
    assert runs.publish() == []
    timings = store.read_table(runs.target, OP.name, "timings")
    assert timings["contest"].value_counts()["rested"] == timings["contest"].value_counts()["chain"]
    assert set(timings["step"][timings["contest"] == "rested"]) == {NAMES[-2].step, NAMES[-1].step}
    results = Results(OP, runs.target, None)
    assert results.time_us(OP.profile_case, NAMES[-1]) == 100.0
    assert results.time_us(OP.profile_case, NAMES[-1], "rested") == 50.0
    runs.collect()
    runs.publish()
    assert set(store.read_table(runs.target, OP.name, "previous")["ratio"]) == {"1.0000"}


def test_an_interrupted_run_goes_on(machine: Machine, runs: Runs) -> None:
    machine.interrupt_at = OP.bench_cases[3].slug
    with pytest.raises(KeyboardInterrupt):
        runs.collect()
    assert machine.compiled == [case.slug for case in OP.bench_cases]
    machine.interrupt_at = ""
    runs.collect(resume=True)
    assert machine.benched == [case.slug for case in OP.bench_cases]
    assert machine.compiled == machine.benched[3:]
    runs.collect(resume=True)
    assert machine.compiled == []


def test_a_run_that_is_not_resumed_is_kept_aside(machine: Machine, runs: Runs) -> None:
    machine.interrupt_at = OP.bench_cases[1].slug
    with pytest.raises(KeyboardInterrupt):
        runs.collect()
    first = store.read_runs(runs.stage)["run"].iloc[0]
    machine.interrupt_at = ""
    runs.collect()
    assert len(machine.benched) == 1 + len(OP.bench_cases)
    aside = runs.stage.with_name(f"unfinished-{first}")
    assert len(store.read_table(aside, OP.name, "timings"))


def test_a_run_that_cannot_begin_leaves_the_earlier_one_where_it_is(
    machine: Machine, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.interrupt_at = OP.bench_cases[1].slug
    with pytest.raises(KeyboardInterrupt):
        runs.collect()
    machine.interrupt_at = ""

    def not_built() -> dict[str, str]:
        raise ImportError("no extension")

    with monkeypatch.context() as patch:
        patch.setattr(stage, "_binaries", not_built)
        with pytest.raises(ImportError, match="no extension"):
            runs.collect()
    runs.collect(resume=True)
    assert machine.benched == [case.slug for case in OP.bench_cases]


def test_a_run_goes_on_with_the_same_versions_only(machine: Machine, runs: Runs) -> None:
    machine.interrupt_at = OP.bench_cases[1].slug
    with pytest.raises(KeyboardInterrupt):
        runs.collect()
    machine.facts["torch"] = "2"
    with pytest.raises(CannotRunError, match=r"torch was '1', is '2'.*without --resume"):
        runs.collect(resume=True)


def test_cells_of_another_binary_are_measured_again(
    machine: Machine, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers and flags are in the binary's digest alone."""
    machine.interrupt_at = OP.bench_cases[1].slug
    with pytest.raises(KeyboardInterrupt):
        runs.collect()
    machine.interrupt_at = ""
    monkeypatch.setattr(stage, "_binaries", lambda: {f"{OP.name}/{name.step}": "other" for name in NAMES})
    runs.collect(resume=True)
    assert machine.benched == [OP.bench_cases[0].slug, *(case.slug for case in OP.bench_cases)]


def test_what_cannot_be_profiled_waits_with_its_timings(machine: Machine, runs: Runs) -> None:
    runs.collect()
    runs.publish()
    recorded = store.read_table(runs.target, OP.name, "timings")
    machine.fault = InvalidDataError("the application crashed")
    assert runs.collect().broken == [f"{OP.name}: the application crashed"]
    with pytest.raises(CannotRunError, match="nothing that was profiled waits"):
        runs.publish()
    assert store.read_table(runs.target, OP.name, "timings").equals(recorded)
    machine.fault, machine.benched = None, []
    runs.collect(resume=True)
    assert machine.benched == []
    assert runs.publish() == []
    assert not store.read_table(runs.target, OP.name, "timings").equals(recorded)


def test_an_impossible_share_is_quarantined(machine: Machine, runs: Runs) -> None:
    machine.shares = 120.0
    runs.collect()
    assert all("120" in line and "quarantined" in line for line in runs.publish())
    assert not len(store.read_table(runs.target, OP.name, "counters"))
    assert len(store.read_table(runs.target, OP.name, "quarantine")) == len(NAMES) + len(OP.baselines)


def test_another_steps_kernel_is_quarantined_and_neither_counted_nor_confirmed(machine: Machine, runs: Runs) -> None:
    machine.launched["v03_vectorized"] = "vector_add_v02_grid_stride_kernel"
    runs.collect()
    told = "is quarantined: no launch is of the step's own kernel, but of vector_add_v02_grid_stride_kernel"
    assert runs.publish() == [f"{OP.name} v03_vectorized ({backend}) {told}" for backend in BACKENDS]
    for table in ("counters", "cycles"):
        assert "v03_vectorized" not in set(store.read_table(runs.target, OP.name, table)["step"])
        assert "v02_grid_stride" in set(store.read_table(runs.target, OP.name, table)["step"])


def test_a_step_is_profiled_at_its_own_case_beside_the_one_before_and_the_first_baseline(
    machine: Machine, runs: Runs
) -> None:
    case, (*_, before, name) = OP.bench_cases[0], (each for each in NAMES if each.backend == "cuda")
    own = dataclasses.replace(OP.step(name.step), profile_case={"cuda": case})
    op = dataclasses.replace(OP, steps=tuple(own if step.name == name.step else step for step in OP.steps))
    runs.collect(selection=Selection((op,)))
    launches = json.loads((runs.stage / f"{op.name}.counters.ncu-rep").read_text())
    called = [base.labelled(op, each["label"]) for each in launches]
    assert [each for where, each in called if where == case] == [Name("torch"), before, name]
    assert {each for where, each in called if where == op.profile_case} == {*map(Name, op.baselines), *NAMES} - {name}


def test_the_first_measurement_of_a_cell_is_noted_once(machine: Machine, runs: Runs) -> None:
    from kernel_twins.report.meaning.predictions import read_measured

    runs.collect()
    noted = read_measured(runs.target)
    assert {tuple(row) for row in noted[["step", "backend"]].itertuples(index=False)} == {
        (name.step, name.backend) for name in NAMES
    }
    runs.publish()
    runs.collect()
    assert read_measured(runs.target).equals(noted)


def test_the_ratios_before_are_kept(machine: Machine, runs: Runs) -> None:
    runs.collect()
    runs.publish()
    assert not len(store.read_table(runs.target, OP.name, "previous"))
    runs.collect()
    runs.publish()
    previous = store.read_table(runs.target, OP.name, "previous")
    assert len(previous) == len(OP.bench_cases) * len(NAMES)
    assert set(previous["ratio"]) == {"1.0000"}


def test_a_loss_stays_one_however_often_it_is_measured(machine: Machine, runs: Runs) -> None:
    for machine.times_us in (100.0, 120.0, 120.0):
        runs.collect()
        runs.publish()
    previous = store.read_table(runs.target, OP.name, "previous")
    assert set(previous["ratio"]) == {"1.0000"}
    assert len(regressions.losses(Results(OP, runs.target, None))) == len(previous)
    machine.times_us = 100.0
    runs.collect()
    runs.publish()
    assert regressions.losses(Results(OP, runs.target, None)) == []


def test_a_collected_run_is_extracted_before_the_next_begins(machine: Machine, runs: Runs) -> None:
    runs.collect()
    with pytest.raises(ValueError, match="was collected and not extracted"):
        runs.collect()
    runs.publish()
    with pytest.raises(CannotRunError, match="nothing that was profiled waits"):
        runs.publish()


def test_an_operation_that_was_extracted_is_not_measured_again_by_its_run(machine: Machine, runs: Runs) -> None:
    opened = stage.Stage.open(runs.stage, False, "")
    store.write(opened.folder / "other.timings.csv", store.read_table(runs.target, "other", "timings"))
    runs.collect(resume=True)
    runs.publish()
    machine.benched = []
    runs.collect(resume=True)
    assert machine.benched == []


def test_code_that_changed_between_timing_and_profiling_is_not_published(
    machine: Machine, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = machine.profile

    def edit_meanwhile(*arguments: Any) -> None:
        profile(*arguments)
        monkeypatch.setattr(identity, "source_digest", lambda *_: "edited")

    monkeypatch.setattr(machine, "profile", edit_meanwhile)
    runs.collect()
    (problem,) = runs.publish()
    assert "changed while the run was under way" in problem
    assert not len(store.read_table(runs.target, OP.name, "timings"))


def test_reports_of_a_run_are_kept_for_other_viewers(machine: Machine, runs: Runs) -> None:
    runs.collect()
    runs.publish()
    run = store.read_runs(runs.target)["run"].iloc[0]
    reports = runs.stage.with_name("reports") / run
    assert sorted(file.name for file in reports.iterdir()) == [
        "vector_add.counters.ncu-rep",
        "vector_add.cycles.ncu-rep",
    ]


def test_every_gpu_takes_the_next_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "profiling").mkdir()
    (tmp_path / "profiling" / "ncu_report.py").write_text(
        "import os, pathlib, sys\n"
        "op = sys.argv[sys.argv.index('--op') + 1]\n"
        f"pathlib.Path({str(tmp_path)!r}, op).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "sys.exit(3 if op == 'c' else 0)\n"
    )
    monkeypatch.setattr(store, "ROOT", tmp_path)
    assert shards.run(["a", "b", "c"], ["5", "7"], []) == {"a": 0, "b": 0, "c": 3}
    assert {(tmp_path / op).read_text() for op in "abc"} <= {"5", "7"}


@pytest.mark.parametrize("while_starting", [False, True])
def test_after_ctrl_c_no_gpu_takes_another_operation(monkeypatch: pytest.MonkeyPatch, while_starting: bool) -> None:
    taken, workers, released = [], [], threading.Event()
    start = threading.Thread.start

    def child(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        taken.append(command[command.index("--op") + 1])
        if len(taken) == 1:
            os.kill(os.getpid(), signal.SIGINT)  # the terminal's goes to everybody
            released.wait(10)
        return subprocess.CompletedProcess(command, 130)

    def started(thread: threading.Thread) -> None:
        workers.append(thread)
        start(thread)
        if while_starting:
            released.wait(10)  # where the signal finds the main thread

    monkeypatch.setattr(subprocess, "run", child)
    monkeypatch.setattr(threading.Thread, "start", started)
    with pytest.raises(KeyboardInterrupt):
        shards.run(list("abcdef"), ["0"], [])
    released.set()
    for worker_thread in workers:
        worker_thread.join(10)
    assert taken == ["a"]


def test_gpus_are_named_as_the_environment_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert shards.visible(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert shards.visible(2) == ["3", "GPU-abc"]


def test_part_of_a_ladder_is_printed_and_replaces_nothing(
    machine: Machine, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    selection = Selection.of([OP.name], "v03_vectorized", "cuda", OP.profile_case.slug)
    arguments = argparse.Namespace(tool="ncu", tier="T3", timeout=1.0, resume=False, publish=False, quiet=True)
    measuring.measure(selection, runs.stage, runs.target, arguments, Console(quiet=True))
    assert show(selection, runs.stage, as_json=True) == []
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["step"], row["backend"], row["ratio"]) == ("v03_vectorized", "cuda", 1.0)
    assert not list(runs.target.glob("*.timings.csv"))


def test_part_of_a_ladder_never_shows_an_earlier_parts_numbers(
    machine: Machine, runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    selection = Selection.of([OP.name], "v03_vectorized", "cuda", OP.profile_case.slug)
    runs.collect(selection=selection)
    assert show(selection, runs.stage, as_json=False) == []
    assert "100 µs" in capsys.readouterr().out
    runs.collect(selection=selection)

    def unreadable(path: Path, everything: bool = False) -> list[Launch]:
        raise InvalidDataError(f"{path.name}: it is cut short")

    monkeypatch.setattr(extract, "launches_of", unreadable)
    (problem,) = show(selection, runs.stage, as_json=False)
    assert "cut short" in problem
    assert "µs" not in capsys.readouterr().out


def test_a_part_without_the_profiled_case_is_not_profiled(machine: Machine, runs: Runs) -> None:
    other = next(case for case in OP.bench_cases if case != OP.profile_case)
    machine.fault = InvalidDataError("must not be called")
    assert not runs.collect(selection=Selection.of([OP.name], None, None, other.slug)).broken
    assert machine.waited == {0}


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (["collect"], 3, "cannot measure here"),
        (["extract"], 3, "nothing was collected here"),
        (["plan", "--step", "v99_none"], 2, "--step is 'v99_none'"),
        (["plan", "--shape", "7-fp32"], 2, "--shape is '7-fp32'"),
        (["extract", "no-such-file.ncu-rep"], 4, "no-such-file"),
        (["diff", "nonsense", "more"], 2, "nonsense"),
    ],
)
def test_exit_codes(
    argv: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernel_twins.report import commands

    monkeypatch.setattr(commands, "why_no_gpu", lambda: "no NVIDIA GPU is visible")
    assert cli.main(argv, "") == code
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


def test_without_a_gpu_and_a_verb_the_log_is_rendered_and_that_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernel_twins.report import commands

    rendered = []
    monkeypatch.setattr(commands, "why_no_gpu", lambda: "no NVIDIA GPU is visible")
    monkeypatch.setattr(documents, "render", lambda gpu, folder, console: rendered.append(gpu))
    assert cli.main([], "") == 0
    assert rendered == [store.REFERENCE_GPU]
    assert "no NVIDIA GPU is visible: rendering from the committed measurements" in capsys.readouterr().err


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """A worker for an operation whose imports are quick, and nothing that it is told of is called."""
    monkeypatch.setattr(worker, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)))
    monkeypatch.setattr(ops, "get", lambda _: dataclasses.replace(OP, baselines={}))
    return lambda: worker.main(OP.name, "1", str(tmp_path / "digests"), str(tmp_path / "labels"))


def test_a_worker_that_nobody_will_tell_what_to_call_ends(ready: Callable[[], None], tmp_path: Path) -> None:
    """Though the number of who should is still there: a zombie's, or another process's by now."""
    holds = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print()"
    command = [sys.executable, "-c", f"{holds}; sys.stdout.flush(); time.sleep(600)", str(tmp_path / "labels")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        os.kill(holder.pid, signal.SIGKILL)
        with pytest.raises(SystemExit, match="the process that says what to call is gone"):
            ready()
    assert not (tmp_path / "digests").exists()


def test_a_worker_waits_to_be_told_what_to_call(
    ready: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who tells it writes while the worker waits for a lock that is held until then."""
    (tmp_path / "labels").touch()

    def lock(_: object, kind: int) -> None:
        assert kind == fcntl.LOCK_SH
        (tmp_path / "labels").write_text("kl.told")

    def label(_: object, text: str) -> None:
        raise InvalidDataError(text)

    monkeypatch.setattr(fcntl, "flock", lock)
    monkeypatch.setattr(base, "labelled", label)
    with pytest.raises(InvalidDataError, match=r"^kl\.told$"):
        ready()


def test_a_worker_whose_imports_touched_the_gpu_says_so_and_ends(
    ready: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True)))
    with pytest.raises(SystemExit, match=r"vector_add have set up CUDA .* may touch the GPU when it is imported$"):
        ready()


def test_the_code_of_a_triton_step_is_that_of_all_kernels_that_its_first_call_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    name = Name("triton", "v01_scalar")
    known: list[str] = []

    def run(kernel: str, *, warmup: bool) -> SimpleNamespace:
        assert not warmup
        return SimpleNamespace(hash=kernel, asm={"ptx": kernel})

    def call(*, out: None) -> None:
        for kernel in () if known else ("step", "sum", "step"):  # "sum" stands in another step's module
            jit.JITFunction.run(kernel, warmup=False)
        known.append("launched from here on without JITFunction")

    spec = dataclasses.replace(OP, inputs=lambda *_: (), options=lambda _: {})
    cuda = mock.MagicMock()
    cuda.is_initialized.return_value = False
    monkeypatch.setattr(jit.JITFunction, "run", run)
    monkeypatch.setattr(worker, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(ops, "get", lambda _: spec)
    monkeypatch.setattr(worker, "load_named", lambda *_: call)
    monkeypatch.setattr(worker, "generator", lambda *_: None)
    monkeypatch.setattr(worker, "empty_outputs", lambda *_: None)
    (tmp_path / "labels").write_text(base.label(OP, OP.profile_case, name))
    worker.main("vector_add", "3", str(tmp_path / "digests"), str(tmp_path / "labels"))
    assert len(known) == 4
    assert profilers.left(tmp_path / "labels").exists()
    assert json.loads((tmp_path / "digests").read_text()) == {"v01_scalar": identity.ptx_digest(["sum", "step"])}
    assert jit.JITFunction.run is run

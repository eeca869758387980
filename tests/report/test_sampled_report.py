"""Recordings at cases that nobody chose: begun, interrupted, gone on with, told, and never forgotten."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from kernel_twins import OPS
from kernel_twins.report import cli, commands
from kernel_twins.report.calls import functions_code, sampled_table
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.calls.sampled_cases import CASES, CONTESTS, cases, is_compiled, seed_of
from kernel_twins.report.compare import history
from kernel_twins.report.meaning import static
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.measure import publish, sampled, stage
from kernel_twins.report.measure.sampled import Recording
from kernel_twins.report.pages import checks, documents
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import CannotRunError, InvalidDataError
from tests import logs

FACTS = dict.fromkeys(store.PROVENANCE[2:], "1")
RUNS = [f"2026-12-0{day}-abc{day}" for day in range(1, 6)]
SLOW = {"cuda": 40.0, "triton": 25.0, "auto": 20.0}  # microseconds, where PyTorch takes 20 and Liger 30


def made(run: str) -> dict[str, str]:
    return {"run": run, "date": f"{run[:10]}T00:00:00Z", **FACTS}


def contest_rows(function: str, direction: str, case: str, index: int, **changes: str) -> list[dict[str, str]]:
    """Of one case: CUDA is wrong in the first one of every function."""
    times = {"torch": 20.0, **({"compile": 16.0} if is_compiled(index) else {}), "liger": 30.0, **SLOW}
    return [
        {
            "function": function,
            "pass": direction,
            "case": case,
            "backend": backend,
            "status": "wrong: element (0, 1) is 3, must be 4 ± 1"
            if (wrong := backend == "cuda" and index == 0)
            else "ok",
            "chosen": "triton" if backend == "auto" else "",
            "us": "" if wrong else f"{time:.5g}",
            "spread_pct": "" if wrong else "0.4",
            **dict.fromkeys(store.SENSORS, "1"),
        }
        | changes
        for backend, time in times.items()
    ]


def recording_of(folder: Path, run: str) -> Recording:
    return Recording.begin(folder, made(run), "00000000")


def test_a_recording_that_ended_before_it_had_its_cases_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, "write_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recording_of(tmp_path / "stage", RUNS[0])
    assert recording_of(tmp_path / "stage", RUNS[1]).run["run"] == RUNS[1]
    assert len(store.read_runs(tmp_path / "stage")) == 1


def filled(recording: Recording) -> Recording:
    for function, drawn in recording.cases.items():
        rows = [
            row
            for index, case in enumerate(drawn)
            for direction in FUNCTIONS[function].passes
            for row in contest_rows(function, direction, case.slug, index)
        ]
        recording.add(function, rows)
    return recording


def written(folder: Path, *runs: str) -> Path:
    for run in runs:
        target = folder / "target"
        sampled_table.enter(target, run, "00000000")
        filled(recording_of(folder / "stage", run)).publish(target)
    return folder / "target"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("recorded"), RUNS[0])


def rendered(folder: Path) -> str:
    return logs.told(folder, [Results(op, folder, None) for op in OPS.values()])


# ----------------------------------------------------------------------------------------------------------------------
# What is told
# ----------------------------------------------------------------------------------------------------------------------


def test_a_line_a_function_and_pass_leads_the_results(recorded: Path) -> None:
    *told, blank, header, _ = (headline := sampled_table.headline(recorded))[: -len(CONTESTS) - 3]
    lines = headline[-len(CONTESTS) - 3 :]
    assert any(f"`{RUNS[0]}` (seed {seed_of(RUNS[0])})" in line for line in told)
    assert told[-1] == "An entry has geometric mean · 10th percentile · worst · share below 0.95."
    assert (blank, header) == ("", "| function | CUDA | Triton | auto |")
    # Against 20 µs in 16 cases and 16 in the others: 0.5 and 0.4 of CUDA, which in one case gave nothing.
    mean = {"cuda": 0.4**7 * 0.5**16, "triton": 0.64**8 * 0.8**16, "auto": 0.8**8}
    cuda, triton, auto = mean["cuda"] ** (1 / 23), mean["triton"] ** (1 / 24), mean["auto"] ** (1 / 24)
    cells = (
        *(f"{cuda:.3f} · 0.400 · 1 wrong · 100 %", f"{triton:.3f} · 0.640 · 0.640 · 100 %"),
        f"{auto:.3f} · 0.800 · 0.800 · 33 %",
    )
    assert lines[0] == f"| matmul forward | {' | '.join(cells)} |"
    assert {line.split(" | ")[0].removeprefix("| ") for line in lines[:-3]} == {" ".join(each) for each in CONTESTS}
    assert lines[-3].startswith("| all | ")
    assert f" · 0.400 · {len(CONTESTS)} wrong · 100 % |" in lines[-3]


def test_what_torch_compile_was_timed_at_stands_apart(recorded: Path) -> None:
    """Where it was not, it is no baseline, and everybody looks better."""
    compiled, others = sampled_table.headline(recorded)[-2:]
    assert compiled.startswith("| all, with torch.compile | ")
    assert compiled.endswith("| 0.800 · 0.800 · 0.800 · 100 % |")  # 16 µs of 20
    assert others.startswith("| all, without it | ")
    assert others.endswith("| 1.000 · 1.000 · 1.000 · 0 % |")


def test_wrong_results_of_others_are_counted(recorded: Path, tmp_path: Path) -> None:
    def change(table: pd.DataFrame) -> pd.DataFrame:
        refused = (table["backend"] == "liger") & (table["function"] == "softmax")
        table.loc[refused, ["status", "us", "spread_pct"]] = ["wrong: element (0, 1) is 3, must be 4 ± 1", "", ""]
        return table

    assert "left out" not in "".join(sampled_table.headline(recorded))
    told = "".join(sampled_table.headline(changed(recorded, tmp_path, change)))
    assert f"Wrong results of others are left out: Liger-Kernel {2 * CASES}." in told


def test_the_log_names_the_five_worst_of_each(recorded: Path) -> None:
    text = rendered(recorded)
    drawn = [case.slug for case in cases("softmax", seed_of(RUNS[0]))]
    (line,) = [line for line in text.splitlines() if line.startswith("- softmax forward, CUDA: ")]
    assert line.startswith(
        f"- softmax forward, CUDA: `{drawn[0]}` wrong: element (0, 1) is 3, must be 4 ± 1, auto chose"
    )
    assert line.count("`") == 10 and line.count("0.400 × compile, auto chose triton") == 4
    assert "| softmax forward | Triton | " in text
    assert f"- `{RUNS[0]}`: 1, driver 1" in text


def test_the_results_hold_a_line_a_function_and_pass(recorded: Path) -> None:
    text = "".join(
        f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n" for name in ("sampled", "results", "twins", "conditions")
    )
    once = documents.results_page(text, recorded, [])
    assert "| matmul forward |" in once and "old" not in once
    assert documents.results_page(once, recorded, []) == once


def test_the_front_page_has_a_line_a_function(recorded: Path) -> None:
    """Both passes pooled, in two digits; of the others those two that were the best most often."""
    text = "".join(f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n" for name in ("functions", "products", "step"))
    lines = documents.front_page(text, recorded, []).splitlines()
    rows = [line for line in lines if line.startswith("| ") and "<br>" in line]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [*(f"`{name}`" for name in FUNCTIONS), "all"]
    assert "| torch, compile | " in rows[0]
    mean = (0.4**7 * 0.5**16) ** (1 / 23)
    space = "\N{NO-BREAK SPACE}"
    assert f" | **{mean:.2f}**<br>0.40{space}·{space}2{space}wrong | " in rows[0]
    assert rows[0].endswith(" | – |")  # of what was never profiled no limit is told


def test_without_a_recording_that_is_said(tmp_path: Path) -> None:
    (line,) = sampled_table.headline(tmp_path)
    assert line.startswith("No recording of sampled cases is published yet")
    assert sampled_table.section(tmp_path) == []
    assert "Sampled cases" not in rendered(tmp_path)
    assert sampled_table.late("h100-sxm", tmp_path) == [
        "the public functions were never sampled: run `ncu_report.py sampled --compile`, then `sampled`"
    ]


def test_figures_pool_the_last_three_recordings(tmp_path: Path) -> None:
    target = written(tmp_path, *RUNS[:4])
    assert sampled_table.recorded(target) == RUNS[1:4]
    assert list(sampled_table.ledger(target)["run"]) == RUNS[:4]
    assert sorted(path.stem for path in (target / "sampled").iterdir()) == RUNS[1:4]
    assert set(store.read_runs(target)["run"]) == {*RUNS[1:4]}
    assert "Recordings that are not shown: 1 older, or of other code, machine or versions." in "".join(
        sampled_table.headline(target)
    )
    counts = sampled_table.compared(sampled_table.read(target)).groupby(["function", "pass", "backend"]).size()
    assert set(counts) == {3 * CASES} and len(counts) == 3 * len(CONTESTS)
    sampled_table.enter(target, RUNS[4], "00000000")  # which nobody finishes
    assert sampled_table.recorded(target) == RUNS[1:4]
    assert "Recordings that are not shown: 1 older, or of other code, machine or versions, 1 not finished." in "".join(
        sampled_table.headline(target)
    )
    assert list(sampled_table.ledger(target)["finished"]) == ["yes"] * 4 + [""]
    assert all(path.stat().st_size < 2**20 for path in target.rglob("*.csv"))


@pytest.mark.parametrize(("code", "facts"), [("11111111", {}), ("00000000", {"quack": "0.7.0"})])
def test_recordings_of_other_code_or_versions_are_not_pooled(tmp_path: Path, code: str, facts: dict[str, str]) -> None:
    target = written(tmp_path, *RUNS[:2])
    sampled_table.enter(target, RUNS[2], code)
    filled(Recording.begin(tmp_path / "stage", made(RUNS[2]) | facts, code)).publish(target)
    assert sampled_table.recorded(target) == RUNS[2:3]
    assert sorted(path.stem for path in (target / "sampled").iterdir()) == RUNS[:3]  # to be read by whoever doubts
    assert "Recordings that are not shown: 2 older, or of other code, machine or versions." in "".join(
        sampled_table.headline(target)
    )
    assert list(sampled_table.ledger(target)["finished"]) == ["yes"] * 3


def test_a_ledger_that_does_not_say_what_was_finished_is_read(tmp_path: Path) -> None:
    target = written(tmp_path, RUNS[0])
    sampled_table.enter(target, RUNS[1], "00000000")
    store.write(target / "sampled.csv", sampled_table.ledger(target)[sampled_table.BEGUN])
    assert list(sampled_table.ledger(target)["finished"]) == ["yes", ""]


def test_what_could_not_be_judged_has_no_time_and_is_not_called_wrong(recorded: Path, tmp_path: Path) -> None:
    def change(table: pd.DataFrame) -> pd.DataFrame:
        lacking = (table["function"] == "softmax") & table["status"].str.startswith("wrong")
        table.loc[lacking, "status"] = "not judged: the judge ran out of memory"
        return table

    lines = sampled_table.headline(changed(recorded, tmp_path, change))
    (line,) = [line for line in lines if line.startswith("| softmax forward ")]
    assert " · 0.400 · no time · 100 % |" in line


def test_changed_functions_are_told(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = sampled_table.late("h100-sxm", recorded)
    assert line.startswith("the public functions changed since they were sampled")
    monkeypatch.setattr(sampled_table, "code", lambda gpu: "00000000")
    assert sampled_table.late("h100-sxm", recorded) == []


def test_every_source_that_stands_behind_the_rows_exists() -> None:
    for pattern in sampled_table._SOURCES:
        assert list(store.ROOT.glob(pattern)), pattern


def test_whatever_draws_judges_or_times_stands_behind_the_rows() -> None:
    pytest.importorskip("triton")
    loaded = (
        "import sys\n"
        "from kernel_twins.report.calls import sampled_contests\n"
        "print(*(getattr(each, '__file__', None) for name, each in sys.modules.items() if name.startswith('kernel_')))"
    )
    told = subprocess.run([sys.executable, "-c", loaded], cwd=store.ROOT, capture_output=True, text=True, check=True)
    paths = {Path(each).resolve() for each in told.stdout.split() if each.endswith(".py")}
    known = {path.resolve() for pattern in sampled_table._SOURCES for path in store.ROOT.glob(pattern)}
    known |= {path for function in FUNCTIONS for path in functions_code.sources(function)}
    # What only passes names on, tells of kernels, looks whether a step is built, or words messages.
    elsewhere = {"__init__.py", "built.py", "disassembly.py", "interpreter.py", "remedies.py"}
    lacking = {path for path in paths - known if "report" not in path.parts and path.name not in elsewhere}
    assert not lacking and len(paths & known) > 40


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


def changed(recorded: Path, tmp_path: Path, change) -> Path:
    """A copy with other rows."""
    table = store.read(sampled_table.file(recorded, RUNS[0]), sampled_table.COLUMNS)
    store.write(sampled_table.file(tmp_path, RUNS[0]), change(table))
    for name in ("sampled.csv", "runs.csv"):
        (tmp_path / name).write_bytes((recorded / name).read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("seed", "1", "its run and seed are 2026-12-01-abc1 and 1"),
        ("backend", "numpy", "there is no such function, pass or backend"),
        ("function", "conv2d", "there is no such function, pass or backend"),
        ("case", "8x8-int8", "dtype is 'int8'"),
        ("us", "0", "status is 'ok', with a time of '0'"),
        ("us", "nan", "status is 'ok', with a time of 'nan'"),
        ("status", "wrong: all", "status is 'wrong: all', with a time of"),
    ],
)
def test_malformed_rows_are_refused(recorded: Path, tmp_path: Path, column: str, value: str, told: str) -> None:
    def change(table: pd.DataFrame) -> pd.DataFrame:
        table.loc[len(table) - 1, column] = value
        return table

    with pytest.raises(InvalidDataError, match=f"^sampled/{RUNS[0]}.csv: .*{told}"):
        sampled_table.read(changed(recorded, tmp_path, change))


def test_a_case_that_is_left_out_is_noticed(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match=r"matmul forward has 23 cases of cuda, must have 24$"):
        sampled_table.read(changed(recorded, tmp_path, lambda table: table.iloc[6:]))
    with pytest.raises(InvalidDataError, match=r"stands there twice$"):
        sampled_table.read(changed(recorded, tmp_path, lambda table: pd.concat([table, table.iloc[:1]])))


def test_a_function_that_came_after_a_recording_has_no_rows_there(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(recorded, tmp_path, lambda table: table[table["function"] != "matmul"])
    assert not any(line.startswith("| matmul ") for line in sampled_table.headline(folder))
    monkeypatch.setattr(sampled_table, "code", lambda gpu: "00000000")
    with pytest.raises(InvalidDataError, match=r"matmul forward has 0 cases of cuda, must have 24$"):
        sampled_table.headline(folder)


def test_a_recording_whose_rows_are_gone_keeps_a_release_back(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(documents, "disagreements", lambda folder, results: [])
    monkeypatch.setattr(static, "differences", lambda thorough: [])
    folder = changed(recorded, tmp_path, lambda table: table[table["function"] != "matmul"])
    monkeypatch.setattr(checks, "FOLDER", folder)
    again = "run `ncu_report.py sampled --compile`, then `sampled`"
    told = f"sampled/{RUNS[0]}.csv has no rows of matmul forward, matmul backward: {again}"
    assert told in checks.run(release=True, audit=False).failures
    assert told not in checks.run(release=False, audit=False).failures
    store.write(sampled_table.file(folder, RUNS[0]), pd.DataFrame(columns=sampled_table.COLUMNS))
    told = f"sampled/{RUNS[0]}.csv has no rows of {', '.join(map(' '.join, CONTESTS))}: {again}"
    assert told in checks.run(release=True, audit=False).failures
    store.write(folder / "sampled.csv", sampled_table.ledger(folder))
    sampled_table.file(folder, RUNS[0]).unlink()
    assert told in checks.run(release=True, audit=False).failures


def test_a_seed_is_its_runs(tmp_path: Path) -> None:
    store.write(tmp_path / "sampled.csv", pd.DataFrame([[RUNS[0], "7", "0", ""]], columns=sampled_table.LEDGER))
    with pytest.raises(InvalidDataError, match=f"the seed of {RUNS[0]} is 7, must be {seed_of(RUNS[0])}$"):
        sampled_table.ledger(tmp_path)


def test_rows_of_a_run_that_the_ledger_does_not_name_are_refused(recorded: Path, tmp_path: Path) -> None:
    folder = changed(recorded, tmp_path, lambda table: table)
    store.write(folder / "sampled.csv", pd.DataFrame(columns=sampled_table.LEDGER))
    with pytest.raises(InvalidDataError, match=f"^sampled/{RUNS[0]}.csv is of a run that sampled.csv does not name$"):
        sampled_table.headline(folder)


def test_a_committed_seed_that_is_gone_is_noticed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "kernel_twins" / "spec").mkdir(parents=True)
    (tmp_path / "kernel_twins" / "spec" / "__init__.py").touch()
    folder = tmp_path / "profiling" / "data" / "gpu"
    for run in RUNS[:2]:
        sampled_table.enter(folder, run, "00000000")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "two seeds")
    assert history.audit(folder)[0] == []
    table = sampled_table.ledger(folder)
    store.write(folder / "sampled.csv", table[table["run"] != RUNS[0]])
    (line,) = history.audit(folder)[0]
    assert line.startswith(f"sampled.csv lacks the row {RUNS[0]}, {seed_of(RUNS[0])}, 00000000 of ")


# ----------------------------------------------------------------------------------------------------------------------
# How it is recorded
# ----------------------------------------------------------------------------------------------------------------------


def test_a_recording_is_published_beside_any_data(tmp_path: Path) -> None:
    """Its seed enters the ledger once, also where that is not the one that it began in."""
    for _ in range(2):
        filled(recording_of(tmp_path / "stage", RUNS[0])).publish(tmp_path / "target")
    assert list(sampled_table.ledger(tmp_path / "target")["run"]) == [RUNS[0]]
    assert sampled_table.recorded(tmp_path / "target") == [RUNS[0]]


def test_an_interrupted_recording_tells_that_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "sampled", interrupt)
    assert cli.main(["sampled"], "") == 130
    assert capsys.readouterr().err.endswith("what was measured is kept: the same command goes on from there\n")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a GPU, of which the runs are those above, one after the other."""
    runs = iter(RUNS)
    monkeypatch.setattr(stage, "new_run", lambda: made(next(runs)))
    monkeypatch.setattr(sampled_table, "code", lambda gpu: "00000000")


def test_a_recording_is_gone_on_with_and_no_other_begun(machine: None, tmp_path: Path) -> None:
    folder, target = tmp_path / "stage", tmp_path / "target"
    with pytest.raises(CannotRunError, match="no recording to go on with: none waits; begin one by"):
        sampled.opened(folder, target, "gpu", begins=False)
    first = sampled.opened(folder, target, "gpu", begins=True)
    assert first.run["run"] == RUNS[1]  # the first id was asked for in vain
    assert first.cases["amax"] == cases("amax", seed_of(RUNS[1]))
    first.add("matmul", contest_rows("matmul", "forward", first.cases["matmul"][0].slug, 0))
    for begins in (False, True):
        again = sampled.opened(folder, target, "gpu", begins=begins)
        assert again.run == first.run
        assert again.waiting()[0] == ("matmul", 0, ["backward"])
    assert list(sampled_table.ledger(target)["run"]) == [RUNS[1]]


def test_other_code_begins_another_recording_and_the_ledger_keeps_both(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = tmp_path / "stage", tmp_path / "target"
    sampled.opened(folder, target, "gpu", begins=True)
    monkeypatch.setattr(sampled_table, "code", lambda gpu: "11111111")
    with pytest.raises(CannotRunError, match=f"run {RUNS[0]} was begun with something else: code was 00000000, is 1"):
        sampled.opened(folder, target, "gpu", begins=False)
    second = sampled.opened(folder, target, "gpu", begins=True)
    assert list(sampled_table.ledger(target)["run"]) == [RUNS[0], second.run["run"]]
    assert folder.with_name(f"stage-{RUNS[0]}").is_dir()


def test_rows_are_written_after_every_contest_and_a_lost_call_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    import contextlib

    from kernel_twins.report.calls import sampled_contests
    from kernel_twins.report.calls.sampled_timing import LostGpuError

    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    tried: list[tuple[str, str, int]] = []
    frozen: list[int] = []  # objects that the collector did not look through

    class Problem:
        def __init__(self, function, case, index):
            self.function, self.case, self.index = function, case, index

        def names(self, direction):
            return ["torch", "cuda", "triton", "auto"]

    def contest(problem, direction, lost):
        tried.append((problem.function, direction, problem.index))
        frozen.append(gc.get_freeze_count())
        if (problem.function, direction, problem.index, lost) == ("linear", "backward", 1, {}):
            raise LostGpuError("triton", "wrong: raised an illegal memory access")
        rows = contest_rows(problem.function, direction, problem.case.slug, problem.index)
        for row in rows:
            if row["backend"] in lost:
                row |= {"status": lost[row["backend"]], "us": ""}
        return rows

    monkeypatch.setattr(sampled_contests, "Problem", Problem)
    monkeypatch.setattr(sampled_contests, "contest", contest)
    recording = recording_of(tmp_path / "stage", RUNS[0])
    recording.cases = {function: recording.cases[function] for function in ("matmul", "linear")}
    with pytest.raises(CannotRunError, match=r"the GPU is lost to this process: the same command goes on without that"):
        sampled.record(recording, lambda line: None)
    assert frozen[0] == gc.get_freeze_count() == 0 < min(frozen[2:])  # two contests are the first case's
    again = Recording(recording.folder)
    again.cases = recording.cases
    assert len(again.rows("matmul")) == 2 * (5 * CASES + CASES // 3)
    done = len(tried)
    wrong = sampled.record(again, lambda line: None)
    assert tried[done - 1] == tried[done] == ("linear", "backward", 1)
    assert len(tried) == len({*tried}) + 1 == 4 * CASES + 1
    case = again.cases["linear"][1].slug
    assert f"linear backward {case} (triton): wrong: raised an illegal memory access" in wrong
    assert again.waiting() == []


def test_only_what_is_not_compiled_yet_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = recording_of(tmp_path / "stage", RUNS[0])
    (recording.folder / "compiled-0.txt").write_text("matmul 0\nmatmul 3\n")
    started = []

    class Worker:
        def __init__(self, command, env, **_):
            started.append((command[-3:], env["TORCHINDUCTOR_COMPILE_THREADS"]))

        def wait(self):
            return len(started) - 1

    monkeypatch.setattr(subprocess, "Popen", Worker)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    wrong = sampled.compile_all(recording, lambda line: None)
    assert started == [([str(recording.folder), str(number), "2"], "1") for number in range(2)]
    assert wrong == ["process 0 of those that compile ended with 1", "process 1 of those that compile ended with 1"]
    waiting = json.loads((recording.folder / "compile.json").read_text())
    assert len(waiting) == CASES * len(FUNCTIONS) - 2
    assert [is_compiled(index) for _, index in waiting[: 8 * len(FUNCTIONS) - 2]] == [True] * (8 * len(FUNCTIONS) - 2)


def test_only_what_caches_on_disk_keep_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from kernel_twins.report.calls import sampled_contests

    class Problem:
        def __init__(self, *_, sets): ...

        def names(self, direction):
            return [*sampled_table.BASELINES, *sampled_table.OURS]

    prepared = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(sampled_contests, "Problem", Problem)
    monkeypatch.setattr(sampled_contests, "prepare", lambda problem, direction, name: prepared.append(name))
    sampled._compile("attention", cases("attention", 1)[0], 1)
    assert prepared == ["compile", "liger", "quack", "triton"]


def test_the_runs_of_recordings_are_kept_while_others_go(recorded: Path, tmp_path: Path) -> None:
    folder = changed(recorded, tmp_path, lambda table: table)
    store.write(folder / "runs.csv", pd.DataFrame([made(RUNS[0]), made("r0")], columns=store.PROVENANCE))
    publish.forget_unnamed_runs(folder)
    assert list(store.read_runs(folder)["run"]) == [RUNS[0]]


def test_without_a_gpu_the_verb_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(commands, "why_no_gpu", lambda: "no NVIDIA GPU is visible")
    for arguments in (["sampled"], ["sampled", "--compile"]):
        assert cli.main(arguments, "") == 3
        assert "cannot measure here: no NVIDIA GPU is visible" in capsys.readouterr().err


def test_a_table_that_was_changed_is_invalid_data_to_check(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sampled_table.file(changed(recorded, tmp_path, lambda table: table), RUNS[0])
    file.write_text(file.read_text().replace(",20,", ",10,", 1))
    monkeypatch.setattr(checks, "FOLDER", tmp_path)
    assert cli.main(["check"], "") == 4
    assert f"{RUNS[0]}.csv does not have the digest in its footer" in capsys.readouterr().err


def test_libraries_that_took_no_part_are_named_where_they_serve_a_function(recorded: Path, tmp_path: Path) -> None:
    told = "".join(sampled_table.headline(recorded))
    assert f"In `{RUNS[0]}`, quack-kernels and FlashAttention-4 took no part." in told
    softmax = changed(recorded, tmp_path, lambda table: table[table["function"] == "softmax"])
    assert f"In `{RUNS[0]}`, quack-kernels took no part." in "".join(sampled_table.headline(softmax))


def test_the_others_that_are_named_are_those_that_have_times(recorded: Path, tmp_path: Path) -> None:
    def flash4_too(table: pd.DataFrame) -> pd.DataFrame:
        rows = table[(table["function"] == "attention") & (table["backend"] == "torch")]
        return pd.concat([table, rows.assign(backend="flash4")])

    def flash4_skipped(table: pd.DataFrame) -> pd.DataFrame:
        table = flash4_too(table)
        table.loc[table["backend"] == "flash4", ["status", "us"]] = ("skipped: no GPU", "")
        return table

    told = "the best of the others: PyTorch{}, where they serve the case, and at every third case torch.compile."
    two, three = told.format(" and Liger-Kernel"), told.format(", Liger-Kernel and FlashAttention-4")
    assert two in "".join(sampled_table.headline(recorded))
    assert three in "".join(sampled_table.headline(changed(recorded, tmp_path / "with", flash4_too)))
    assert two in "".join(sampled_table.headline(changed(recorded, tmp_path / "without", flash4_skipped)))


def test_a_recording_of_other_code_is_said_to_be(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "The functions, or how they are judged, changed since."
    assert told in "".join(sampled_table.headline(recorded))
    monkeypatch.setattr(sampled_table, "code", lambda gpu: "00000000")
    assert told not in "".join(sampled_table.headline(recorded))

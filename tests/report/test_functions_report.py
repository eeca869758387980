"""The recorded times of the public functions: what is rendered of them, and which rows are refused."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pandas as pd
import pytest

import kernel_twins
from kernel_twins import OPS
from kernel_twins.report import cli
from kernel_twins.report.calls import functions, functions_code, functions_table
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.meaning import static
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.verdict import paired_ratio
from kernel_twins.report.measure import publish
from kernel_twins.report.pages import checks, documents
from kernel_twins.report.rows import identity, store
from kernel_twins.report.rows.base import InvalidDataError
from kernel_twins.spec import BACKENDS, Case
from tests import logs

RUN = dict.fromkeys(store.PROVENANCE, "1") | {"run": "r1"}
SMALL = "256x256x256-bf16"
LARGE = "4096x4096x4096-bf16-act.gelu"
DRIFTING = [100.0 + round_ for round_ in range(20)]


def row(kind: str, backend: str, times: list[float], **changes: str) -> dict[str, str]:
    cell = {
        "kind": kind,
        "function": "matmul" if kind == "host" else "linear",
        "case": SMALL if kind == "host" else LARGE,
        "backend": backend,
        "status": "ok",
        "calls": "50" if kind == "host" else "8",
        "times_us": " ".join(map(str, times)),
        "error": "0.002",
        "cpu": "Some CPU @ 2.00GHz",
        "run": "r1",
    }
    return dict.fromkeys(functions_table.COLUMNS, "") | cell | changes


ROWS = [
    row("host", "torch", [4.6] * 20),
    row("host", "cuda", [5.75] * 20),
    row("host", "auto", [], status="wrong: the result is off by 3 % of its norm", calls="", error="0.03"),
    row("gpu", "torch", DRIFTING),
    row("gpu", "compiled", [time * 0.8 for time in DRIFTING]),
    row("gpu", "cuda", [time * 0.5 for time in DRIFTING]),
    row("backward", "torch", DRIFTING),
    row("backward", "cuda", [time * 0.25 for time in DRIFTING]),
]


def written(folder: Path, rows: list[dict[str, str]]) -> Path:
    store.write(folder / "runs.csv", pd.DataFrame([RUN], columns=store.PROVENANCE))
    store.write(functions_table.file(folder), pd.DataFrame(rows, columns=functions_table.COLUMNS))
    return folder


def rendered(folder: Path) -> str:
    results = [Results(op, folder, None) for op in OPS.values()]
    return logs.told(folder, results)


def test_the_log_tells_times_and_paired_ratios(tmp_path: Path) -> None:
    text = rendered(written(tmp_path, ROWS))
    assert "| matmul 256x256x256-bf16 | 4.6 | 5.75 | 0.800 × [0.800, 0.800] | – | – | wrong | – |" in text
    large = (
        "| 110 | 87.6 | 1.250 × [1.250, 1.250] | 54.8 | 2.000 × [2.000, 2.000] | 1.600 × [1.600, 1.600] | – | – | – |"
    )
    assert f"| linear {LARGE} {large}" in text
    assert "- matmul 256x256x256-bf16, auto: wrong: the result is off by 3 % of its norm.\n" in text
    assert f"| linear {LARGE} | 110 | – | – | 27.4 | 4.000 × [4.000, 4.000] | – | – | – | – |" in text
    assert "20 rounds of 50 calls, on Some CPU @ 2.00GHz." in text
    assert "20 rounds of 8 calls, on Some CPU @ 2.00GHz." in text
    assert "- `r1`: 1, driver 1" in text


def test_ratios_are_those_of_paired_rounds(tmp_path: Path) -> None:
    ours = [time * (0.5 if index % 3 else 0.6) for index, time in enumerate(DRIFTING)]
    text = rendered(written(tmp_path, [ROWS[3], row("gpu", "cuda", ours)]))
    ratio = paired_ratio(DRIFTING, ours)
    assert ratio.low < ratio.value
    assert f"| {ratio.value:.3f} × [{ratio.low:.3f}, {ratio.high:.3f}] |" in text


def test_without_rows_there_is_no_section(tmp_path: Path) -> None:
    assert functions_table.section(tmp_path) == []
    assert "public functions" not in rendered(tmp_path)
    assert functions_table.stale("h100-sxm", tmp_path) == []


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([row("disk", "torch", DRIFTING)], "row 1, disk linear .* there is no such kind"),
        ([ROWS[0], row("host", "compiled", DRIFTING)], "row 2, host matmul .* there is no such kind"),
        ([row("gpu", "cuda", DRIFTING, function="conv2d")], "there is no such kind, function"),
        ([row("gpu", "cuda", DRIFTING, run="r2")], "its run, 'r2', is not in runs.csv"),
        ([row("gpu", "cuda", DRIFTING, case="4096-x")], "dtype is 'x'"),
        ([row("gpu", "cuda", DRIFTING, case="8x8x8-bf16-b.1-a.2")], "one spelling"),
        ([row("gpu", "cuda", DRIFTING[:19])], "times_us must be 20 or more"),
        ([row("gpu", "cuda", [*DRIFTING, float("nan")])], "times_us must be 20 or more"),
        ([row("gpu", "cuda", [*DRIFTING, 0.0])], "times_us must be 20 or more"),
        ([row("gpu", "cuda", [], times_us="1 2 x")], "could not convert"),
        ([row("gpu", "cuda", DRIFTING, status="wrong: element 3")], "status is 'wrong: element 3', with 20 times"),
        ([row("gpu", "cuda", [], status="fine")], "status is 'fine'"),
        ([row("gpu", "cuda", DRIFTING, calls="")], "calls or error is missing"),
        ([row("gpu", "cuda", DRIFTING, error="nan")], "calls or error is missing"),
        ([ROWS[3], ROWS[3]], "stands there twice"),
        ([ROWS[3], row("gpu", "cuda", [*DRIFTING, 1.0])], "different numbers of rounds"),
    ],
)
def test_malformed_rows_are_refused(tmp_path: Path, rows: list[dict[str, str]], told: str) -> None:
    written(tmp_path, rows)
    with pytest.raises(InvalidDataError, match=f"^functions.csv: .*{told}"):
        functions_table.section(tmp_path)


def test_a_table_that_was_changed_is_invalid_data_to_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = functions_table.file(written(tmp_path, ROWS))
    file.write_text(file.read_text().replace("5.75", "4.75", 1))
    monkeypatch.setattr(checks, "FOLDER", tmp_path)
    assert cli.main(["check"], "") == 4
    assert "functions.csv does not have the digest in its footer" in capsys.readouterr().err


def test_a_changed_function_makes_its_own_rows_stale(tmp_path: Path) -> None:
    now = functions_code.codes("h100-sxm")
    fresh = [ROWS[3], row("gpu", "cuda", DRIFTING, code=now["linear"])]
    assert functions_table.stale("h100-sxm", written(tmp_path, fresh)) == []
    other = row("gpu", "cuda", DRIFTING, code="00000000", function="softmax", case="64x64-bf16")
    (line,) = functions_table.stale("h100-sxm", written(tmp_path, [*fresh, other]))
    assert line == "softmax changed since measured: run `ncu_report.py functions`"


@pytest.mark.parametrize("changed", [False, True])
def test_the_log_says_which_functions_changed(tmp_path: Path, changed: bool) -> None:
    code = "00000000" if changed else functions_code.code("1", "linear")
    text = rendered(written(tmp_path, [ROWS[3], row("gpu", "cuda", DRIFTING, code=code)]))
    assert ("Changed since: linear." in text) is changed


def test_a_function_stands_on_its_ladders_its_operators_and_its_modules_alone() -> None:
    found = {path.relative_to(store.ROOT).as_posix() for path in functions_code.sources("softmax")}
    behind = {step for backend in BACKENDS for step in OPS["softmax"].behind[backend]}
    assert {step for step in behind if any(step in path for path in found)} == behind
    assert {path.rpartition("/")[2] for path in found} >= {"softmax.py", "triton_softmax.py", "backends.py", "step.h"}
    assert not [path for path in found if "dropout" in path or "norm" in path or "ops/softmax" in path]


def test_what_is_only_looked_up_is_there() -> None:
    assert [path for path in identity._registry() if not path.is_file()] == []


def test_how_a_function_is_declared_judged_and_timed_is_code_of_its_rows() -> None:
    found = {path.relative_to(store.ROOT).as_posix() for path in functions_code.sources("softmax")}
    own = {f"kernel_twins/functional/softmax/{name}.py" for name in ("__init__", "contest")}
    assert found > own | {"kernel_twins/functional/contests.py", "kernel_twins/report/measure/functions.py"}
    assert not [path for path in found if path.endswith("/contest.py") and "/softmax/" not in path]
    sampled = {path.relative_to(store.ROOT).as_posix() for path in functions_code.sources("softmax", timed=False)}
    assert sampled >= own and "kernel_twins/report/measure/functions.py" not in sampled


def test_contests_without_a_row_keep_a_release_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    recorded = functions_table.read(checks.FOLDER)
    waiting = functions_table.unrecorded(checks.FOLDER)  # functions that are new
    gone = (recorded["function"] == "softmax") & (recorded["case"] == "4096x1024-bf16")
    gone |= (recorded["function"] == "linear") & (recorded["kind"] == "host") & (recorded["backend"] == "cuda")
    (tmp_path / "runs.csv").write_bytes((checks.FOLDER / "runs.csv").read_bytes())
    store.write(functions_table.file(tmp_path), recorded[~gone])
    told = [
        "linear was never timed at 256x256x256-bf16-act.gelu (host): run `ncu_report.py functions`",
        "linear was never timed at 256x256x256-bf16-act.gelu-grad.yes (host): run `ncu_report.py functions`",
        "softmax was never timed at 4096x1024-bf16 (gpu): run `ncu_report.py functions`",
    ]
    found = functions_table.unrecorded(tmp_path)
    assert [each for each in found if each not in waiting] == told and {*waiting} <= {*found}
    monkeypatch.setattr(checks, "FOLDER", tmp_path)
    monkeypatch.setattr(documents, "disagreements", lambda folder, results: [])
    monkeypatch.setattr(static, "differences", lambda thorough: [])
    assert {*told} <= {*checks.run(release=True, audit=False).failures}
    before = checks.run(release=False, audit=False)
    assert not {*told} & {*before.failures, *before.warnings}


def test_every_public_function_is_declared_by_its_family_alone() -> None:
    assert {*FUNCTIONS} == {*kernel_twins._MODULES}
    for function in FUNCTIONS.values():
        assert kernel_twins._MODULES[function.name].startswith(f"{function.family}.")
        assert all(OPS[op].family == function.family for op in function.ops)
        assert {*function.drawn} <= {*function.ops}


def test_a_function_that_two_families_declare_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_twins.functional import matmul

    twice = (*matmul.FUNCTIONS, matmul.FUNCTIONS[0])
    monkeypatch.setattr(matmul, "FUNCTIONS", twice)
    with pytest.raises(ValueError, match=r"^declared twice: matmul$"):
        functions._discover()
    monkeypatch.setattr(matmul, "FUNCTIONS", (replace(twice[0], ops=("softmax",)),))
    with pytest.raises(ValueError, match=r"__init__.py: matmul is of softmax, must be of its folder$"):
        functions._discover()


def test_behind_a_declared_function_are_steps_that_there_are() -> None:
    for op in {op for function in FUNCTIONS.values() for op in function.ops}:
        assert OPS[op].behind, op
        for backend, names in OPS[op].behind.items():
            assert names and {*names} <= {step.name for step in OPS[op].steps_of(backend)}


def test_every_declared_function_has_calls_and_those_that_name_what_they_expect_are_timed() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    for function in FUNCTIONS.values():
        module = function._calls_module()
        assert function.name in module.CALLS
        assert function.name in module.CONTESTS or not function.expects or function.expects != function.name
        assert {*module.CALLS} == {each.name for each in FUNCTIONS.values() if each.family == function.family}


def test_functions_are_listed_in_the_order_of_the_chapters() -> None:
    chapters = [OPS[function.ops[0]].chapter for function in FUNCTIONS.values()]
    assert chapters == sorted(chapters)
    for family in {function.family for function in FUNCTIONS.values()}:  # and of one chapter as they are declared
        declared = importlib.import_module(f"kernel_twins.functional.{family}").FUNCTIONS
        for chapter in {OPS[function.ops[0]].chapter for function in declared}:
            alike = [function.name for function in declared if OPS[function.ops[0]].chapter == chapter]
            assert [name for name in FUNCTIONS if name in alike] == alike


def test_functions_are_found_and_told_without_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'triton')))\n"
        "from kernel_twins.report.calls import fastest, functions_code\n"
        "print(len(functions_code.codes('h100-sxm')), bool(fastest.derive()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=store.ROOT)
    assert (done.returncode, done.stdout) == (0, f"{len(FUNCTIONS)} True\n"), done.stderr


def test_a_step_that_no_function_runs_makes_no_function_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    op = OPS["softmax"]
    found = functions_code.sources("softmax")
    for backend in BACKENDS:
        assert {identity.step_file("softmax", name, backend) for name in op.behind[backend]} <= found
        assert identity.step_file("softmax", "v01_three_passes", backend) not in found
    # A step's routing table, and the kernels behind it.
    assert {path.name for path in found} >= {"routes.cuh", "held_row.cuh", "shared_row.cuh"}
    before = functions_code.code("h100-sxm", "softmax")
    other = replace(op, behind={**op.behind, "cuda": (*reversed(op.behind["cuda"]),)})
    monkeypatch.setitem(OPS, "softmax", other)
    assert functions_code.code("h100-sxm", "softmax") != before


@pytest.mark.parametrize("function", ["layer_norm", "rms_norm"])
def test_a_function_stands_on_kernels_that_it_takes_from_a_ladder_beside_its_own(function: str) -> None:
    """Gradients of weights alone are both norms', and lie with the one's."""
    found = {path.name for path in functions_code.sources(function)}
    assert found >= {"weights.py", "function_parameters.cu"}


def test_every_kernel_of_a_function_stands_behind_one() -> None:
    found = {path for function in FUNCTIONS for path in functions_code.sources(function)}
    assert {*store.ROOT.glob("cuda-kernels/*/*/function_*.cu")} <= found


def test_a_function_is_digested_wherever_its_files_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text in other folders, found by other paths, is the same code; another text is not."""
    digests = []
    for folder, line in (("one", "int x;"), ("two/deep", "int x;"), ("three", "int y;")):
        there = tmp_path / folder
        there.mkdir(parents=True)
        (there / "shared.h").write_text(line)
        (there / "function.cpp").write_text(f'#include "{there}/shared.h"\n#include <vector>\nint f();')
        digests.append(identity.files_digest(identity.reached([there / "function.cpp"])))
    assert digests[0] == digests[1] != digests[2]


def test_the_run_of_the_rows_is_kept_while_others_go(tmp_path: Path) -> None:
    written(tmp_path, ROWS)
    store.write(tmp_path / "runs.csv", pd.DataFrame([RUN, RUN | {"run": "r0"}], columns=store.PROVENANCE))
    publish.forget_unnamed_runs(tmp_path)
    assert list(store.read_runs(tmp_path)["run"]) == ["r1"]


def test_without_a_gpu_the_verb_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kernel_twins.report import commands

    monkeypatch.setattr(commands, "why_no_gpu", lambda: "no NVIDIA GPU is visible")
    assert cli.main(["functions"], "") == 3
    assert "cannot measure here: no NVIDIA GPU is visible" in capsys.readouterr().err


def test_backward_passes_are_timed_after_all_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from kernel_twins.functional.contests import Contest
    from kernel_twins.report.measure import functions as measured

    x = torch.ones(8, requires_grad=True)
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))

    def forward(backend, scale):
        events.append(f"{backend} forward")
        out = x * scale

        def backward():
            events.append(f"{backend} backward")
            return out, *torch.autograd.grad(out.sum(), x)

        return backward

    scales = {"torch": 2.0, "cuda": 2.0, "triton": 3.0}
    calls = {backend: lambda backend=backend, scale=scale: forward(backend, scale) for backend, scale in scales.items()}
    judged = {backend: lambda call=call: call()() for backend, call in calls.items()}
    expected = torch.full((8,), 2.0), torch.full((8,), 2.0)
    contest = Contest("backward", "rms_norm", Case.parse("4x2-bf16"), calls, expected, judged)
    rows = measured.timed(contest)
    assert [row["status"].split(":")[0] for row in rows] == ["ok", "ok", "wrong"]
    rounds, calls_each = measured.BACKWARD_ROUNDS, measured.BACKWARD_CALLS
    assert [len(row["times_us"].split()) for row in rows] == [rounds, rounds, 0]
    assert {row["calls"] for row in rows} == {str(calls_each), ""}
    timed = events[events.index("wait") - calls_each :]  # behind the gates
    size = 2 * calls_each + 2
    samples = [timed[begin : begin + size] for begin in range(0, len(timed), size)]
    assert len(samples) == 2 * (measured._TRIED * rounds + 1)
    for sample in samples:
        backend = sample[0].removesuffix(" forward")
        passes = ([f"{backend} {which}"] * calls_each for which in ("forward", "backward"))
        assert sample == [*next(passes), "wait", *next(passes), "wait"]
    assert not any("triton" in event for event in timed)


def test_rounds_are_kept_in_which_nobody_else_ran_on_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from kernel_twins.report.measure import functions as measured

    shared = (f for number in range(measured._TRIED * 3) for f in ((1.0, 1.0) if number in (2, 5, 9) else (1.0, 1.5)))
    monkeypatch.setattr(measured, "timeit", lambda number: next(shared))
    calls = {name: partial(next, count(first)) for name, first in (("torch", 0), ("cuda", 100))}  # each tells its round
    times = measured._in_turns(calls, {"torch": 7, "cuda": 7}, 3, lambda call, _: call())
    assert times == {"torch": (7, [2, 5, 9]), "cuda": (7, [102, 105, 109])}


def test_a_wrong_call_gets_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from kernel_twins.functional.contests import Contest
    from kernel_twins.report.measure import functions as measured
    from kernel_twins.report.measure import stage

    a = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    timed = []

    def timer(calls):
        timed.extend(calls)
        return {backend: (50, [2.0] * 20) for backend in calls}, {}

    def refuse():
        raise ValueError("there is no such backend")

    calls = {"torch": lambda: a + 0.0, "cuda": lambda: a * torch.nan, "triton": refuse, "auto": lambda: a * 1.02}
    contest = Contest("host", "matmul", Case.parse("8x8x8-bf16"), calls, (a,))
    passes = {"torch": lambda: (a, a), "compiled": lambda: (a,), "cuda": lambda: (a, a[:4]), "triton": lambda: (a, -a)}
    both = Contest("gpu", "linear", Case.parse("8x8x8-bf16"), passes, (a, a))
    places = {"torch": lambda: a.argmax(-1), "cuda": lambda: a.argmax(-1) ^ 1}
    third = Contest("host", "argmax", Case.parse("8x8-bf16"), places, (a.argmax(-1),))
    monkeypatch.setattr(measured, "_TIMERS", {"host": timer, "gpu": timer})
    monkeypatch.setattr(measured, "contests", lambda: iter([contest, both, third]))
    monkeypatch.setattr(stage, "_facts", lambda: dict.fromkeys(store.PROVENANCE[2:], "1"))
    wrong = measured.record("gpu", tmp_path, lambda line: None)
    assert timed == ["torch", "torch", "torch"]
    assert len(wrong) == 7
    told = [line.partition(": wrong: ")[2] for line in wrong]
    assert told[0].startswith("the result is off by nan")
    assert told[1] == "raised there is no such backend"
    assert told[2].startswith("the result is off by 2 %")
    assert told[3] == "a gradient is missing"
    assert told[4].startswith("x's gradient has shape (4, 8)")
    assert told[5].startswith("x's gradient is off by 200 %")
    assert told[6] == "the result has other places"
    assert len(functions_table.read(tmp_path)) == 10
    assert "| matmul 8x8x8-bf16 | 2 | wrong | – |" in rendered(tmp_path)

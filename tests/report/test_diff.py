"""``diff``: any two of what was measured, of what git's history holds, or of what others recorded."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from rich.console import Console

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_twins import OPS
from kernel_twins.report import cli
from kernel_twins.report.compare import diff, tables
from kernel_twins.report.compare.changes import counter_change
from kernel_twins.report.compare.diff import counter_changes, time_changes
from kernel_twins.report.compare.operands import Cell, Operand, OperandError
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.ncu import extract
from kernel_twins.report.ncu.reader import Launch
from kernel_twins.report.rows import store
from kernel_twins.report.rows.metrics import CYCLES, METRICS, KernelClass
from kernel_twins.spec import Name

CASE = "67108864-fp32"
DRAM = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
SPILLS = "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum"
NO_UNITS = {"own": "", SPILLS: "", DRAM: "%"}


def record(folder: Path, run: str, op: str = "vector_add", **times: list[float]) -> None:
    """Tables of one run: ``v01_scalar__cuda=[…]``; every cell was profiled, with as many cycles as it took µs."""
    cells = [(backend, step, values) for name, values in times.items() for step, backend in [name.split("__")]]
    timings = [
        dict.fromkeys(store.TABLES["timings"], "")
        | {"case": CASE, "backend": backend, "step": step, "status": "ok", "contest": "fast", "run": run}
        | {"times_us": " ".join(map(str, values))}
        for backend, step, values in cells
    ]
    counters = [
        dict.fromkeys(store.TABLES["counters"], "")
        | {"case": CASE, "backend": backend, "step": step, "launch": "0", "metric": metric, "value": str(value)}
        | {"kernel": f"{op}_{step}_kernel", "run": run}
        for backend, step, values in cells
        for metric, value in ((CYCLES, values[0]), (DRAM, 50.0), (SPILLS, 0.0))
    ]
    store.write(store.path(folder, op, "timings"), pd.DataFrame(timings))
    store.write(store.path(folder, op, "counters"), pd.DataFrame(counters))
    store.write(folder / "runs.csv", pd.DataFrame([dict.fromkeys(store.PROVENANCE, "") | {"run": run}]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "ROOT", tmp_path)
    monkeypatch.setattr(store, "DATA", tmp_path / "profiling" / "data")
    monkeypatch.setattr(store, "RUNS", tmp_path / "runs")
    found = store.DATA / store.REFERENCE_GPU
    record(
        found, "2026-01-02-bb", v01_scalar__cuda=[100.0] * 20, v02_wide__cuda=[80.0] * 20, v02_wide__triton=[90.0] * 20
    )
    return found


def commit(root: Path) -> None:
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def history(folder: Path) -> Path:
    """The data of an earlier run in an earlier commit, by a version that wrote no footers yet."""
    record(folder, "2026-01-01-aa", v01_scalar__cuda=[104.0] * 20, v02_wide__cuda=[160.0] * 20)
    for file in folder.glob("vector_add.*.csv"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    commit(store.ROOT)
    record(
        folder, "2026-01-02-bb", v01_scalar__cuda=[100.0] * 20, v02_wide__cuda=[80.0] * 20, v02_wide__triton=[90.0] * 20
    )
    commit(store.ROOT)
    return folder


def test_steps_of_one_run_are_compared_round_by_round(folder: Path) -> None:
    found = diff.difference("vector_add/v01_scalar/cuda", "vector_add/v02_wide")
    (time,) = found.times
    assert (time.where, time.verdict, time.low is not None) == (CASE, "FAST", True)
    assert time.ratio == pytest.approx(1.25) and time.low == pytest.approx(1.25)
    assert [(each.metric, each.told, each.effect) for each in found.counters] == [
        (CYCLES, "−20.0 %", "better"),
        (DRAM, "=", ""),
        (SPILLS, "=", ""),
    ]


def test_only_sustained_times_are_compared(folder: Path) -> None:
    """Whatever other contests both were in; where none of these is one of both, nothing is paired."""
    file = store.path(folder, "vector_add", "timings")
    table = store.read_table(folder, "vector_add", "timings")
    rested = table.assign(contest="rested", times_us=" ".join(["70"] * 10))
    slow = table.assign(contest=["slow" if step == "v01_scalar" else "fast" for step in table["step"]])
    for rows, paired in ((table, True), (slow, False)):
        store.write(file, pd.concat([rested, rows]))
        (time,) = diff.difference("vector_add/v01_scalar/cuda", "vector_add/v02_wide").times
        assert (time.before_us, time.after_us, time.low is not None) == (100.0, 80.0, paired)


def test_a_verdict_that_is_not_believed_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff.run("vector_add/v01_scalar/cuda", "vector_add/v02_wide", as_json=False) == 0
    assert "AMBIGUOUS" not in capsys.readouterr().out
    cycles = [
        {"case": CASE, "backend": "cuda", "step": step, "cycles": " ".join(["100"] * 10), "code": ""}
        | {"run": "2026-01-02-bb"}
        for step in ("v01_scalar", "v02_wide")
    ]
    store.write(store.path(folder, "vector_add", "cycles"), pd.DataFrame(cycles))
    diff.run("vector_add/v01_scalar/cuda", "vector_add/v02_wide", as_json=False)
    assert "AMBIGUOUS: ncu's cycles do not say what the times say, or " in capsys.readouterr().out


def test_languages_and_baselines_are_compared_too(folder: Path) -> None:
    (time,) = diff.difference("vector_add/v02_wide/cuda", "vector_add/triton").times
    assert (time.after_us, time.verdict) == (90.0, "SLOW")


def test_commits_are_compared_by_medians_and_nothing_is_claimed(history: Path) -> None:
    (near,) = diff.difference("vector_add/v01_scalar/cuda@HEAD~1", "vector_add/v01_scalar/cuda").times
    assert near.ratio == pytest.approx(1.04)
    assert (near.low, near.verdict) == (None, "AMBIGUOUS")
    (far,) = diff.difference("vector_add/v02_wide/cuda@HEAD~1", "vector_add/v02_wide@HEAD").times
    assert far.ratio == pytest.approx(2) and far.verdict == ""


def test_whole_commits_are_compared(history: Path) -> None:
    found = diff.difference("@HEAD~1", "HEAD")
    assert [each.where for each in found.times] == [
        f"vector_add/v02_wide/cuda {CASE}",
        f"vector_add/v01_scalar/cuda {CASE}",
    ]
    assert all(each.low is None for each in found.times)
    assert found.counters[0].told == "×0.5"
    same = diff.difference("HEAD", "@HEAD")
    assert [(each.ratio, each.verdict) for each in same.times] == [(1.0, "SAME")] * 3


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ("vector_add/v01_scalar", "vector_add/v02_wide", "leaves the backend out"),
        ("vector_add/cuda", "vector_add/triton", "leaves the step out"),
        ("vector_add/v01_scalar/cuda", "vector_add/v09_gone", "vector_add has v01_scalar/cuda, v02_wide/cuda"),
        ("vector_add/v01_scalar/cuda", "softmax/v01_scalar", "operations that were are vector_add"),
        ("vector_add/v01_scalar/cuda", "vector_add/v02_wide@v1.0", "'v1.0' is no commit with measurements"),
        ("vector_add/v01_scalar/cuda", "@HEAD", "one names a cell, the other a whole data set"),
        ("vector_add/v01_scalar/cuda", "a.ncu-rep", "only be compared with a report"),
        ("a.ncu-rep", "b.ncu-rep", "there is no file 'a.ncu-rep'"),
        ("a.csv", "b.ncu-rep", "FILE.csv, what `ncu --import REPORT --csv --page raw"),
        ("a/b/c/d", "HEAD", "is not the name of a cell"),
        ("@", "HEAD", "is not the name of a cell"),
        ("@--all", "HEAD", "no commit with measurements"),
    ],
)
def test_operands_that_name_nothing_exit_with_2(
    history: Path, capsys: pytest.CaptureFixture[str], a: str, b: str, told: str
) -> None:
    assert cli.main(["diff", "--", a, b], "") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err


def test_operations_without_a_common_case_have_no_difference(folder: Path) -> None:
    record(folder, "2026-01-02-bb", "softmax", v01_naive__cuda=[1.0])
    table = store.path(folder, "softmax", "timings")
    store.write(table, store.read_table(folder, "softmax", "timings").assign(case="7-fp32"))
    counters = store.path(folder, "softmax", "counters")
    store.write(counters, store.read_table(folder, "softmax", "counters").assign(case="7-fp32"))
    with pytest.raises(OperandError, match="neither a timed case nor a profiled call in common"):
        diff.difference("vector_add/v01_scalar/cuda", "softmax/v01_naive/cuda")


def test_other_operations_are_never_paired(folder: Path) -> None:
    record(folder, "2026-01-02-bb", "reduction", v01_scalar__cuda=[50.0] * 20)
    (time,) = diff.difference("vector_add/v01_scalar/cuda", "reduction/v01_scalar/cuda").times
    assert (time.ratio, time.low, time.verdict) == (2.0, None, "")


def test_invalid_data_exits_with_4(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = store.path(folder, "vector_add", "timings")
    file.write_bytes(file.read_bytes()[:-9])
    assert cli.main(["diff", "vector_add/v01_scalar/cuda", "vector_add/v02_wide"], "") == 4
    assert file.name in capsys.readouterr().err


def test_text_and_json_tell_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    operands = ("vector_add/v01_scalar/cuda", "vector_add/v02_wide/triton")
    assert diff.run(*operands, as_json=False) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^{CASE} +100 +90 +1\.111 +\[1\.111, 1\.111\] +FAST$", text, re.MULTILINE)
    assert f"counter at {CASE}" in text
    assert re.search(rf"^{METRICS[CYCLES].meaning} +cycle +100 +90 +−10\.0 % +better +{CYCLES}$", text, re.MULTILINE)
    assert "2 counters did not change" in text and "unpaired" not in text
    assert diff.run(*operands, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["times"][0]["verdict"] == "FAST"
    assert found["counters"][0] | {"log_ratio": 0} == {
        "where": CASE, "metric": CYCLES, "unit": "cycle", "before": 100.0, "after": 90.0, "effect": "better",
        "change": "−10.0 %", "log_ratio": 0, "meaning": METRICS[CYCLES].meaning,
    }  # fmt: skip


def test_zero_is_told_without_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    there, back = counter_change("", SPILLS, "byte", 0.0, 256.0), counter_change("", SPILLS, "byte", 256.0, 0.0)
    assert (there.told, there.effect) == ("0 → 256", "worse")
    assert (back.told, back.effect) == ("256 → 0", "better")
    assert there.log_ratio == -back.log_ratio == math.inf


def test_a_direction_is_good_or_bad_only_for_its_class_of_kernel() -> None:
    def effects(kernel_class: KernelClass | None) -> dict[str, str]:
        return {name: counter_change("", name, "", 50.0, 60.0, kernel_class).effect for name in (DRAM, TENSOR, CYCLES)}

    assert effects("memory") == {DRAM: "better", TENSOR: "", CYCLES: "worse"}
    assert effects("arithmetic") == {DRAM: "", TENSOR: "better", CYCLES: "worse"}
    assert effects(None) == {DRAM: "", TENSOR: "", CYCLES: "worse"}


TIMES = st.lists(st.tuples(st.floats(0.5, 1e5), st.floats(0.5, 1e5)), min_size=1, max_size=22)
VALUES = st.one_of(st.just(0.0), st.floats(1e-3, 1e12))


@settings(max_examples=100)
@given(TIMES, st.booleans(), st.dictionaries(st.sampled_from(sorted(METRICS)), st.tuples(VALUES, VALUES)))
def test_the_difference_back_is_the_negative(
    rounds: list[tuple[float, float]], same_run: bool, counters: dict[str, tuple[float, float]]
) -> None:
    results = Results(OPS["vector_add"], Path("nowhere"), None)
    cells = [Cell(results, Name("cuda", step)) for step in ("v01_scalar", "v02_grid_stride")]
    for side, each in enumerate(cells):
        times = " ".join(repr(both[side]) for both in rounds)
        row = SimpleNamespace(status="ok", times_us=times, code="", run="r1" if same_run else f"r{side}")
        results.recorded.rows[CASE, each.name] = {"fast": row}
        results.recorded.calls[CASE, each.name] = {metric: both[side] for metric, both in counters.items()}
    (there,), (back,) = time_changes("", *cells), time_changes("", *cells[::-1])
    assert there.log_ratio == pytest.approx(-back.log_ratio, abs=1e-12)
    assert (there.low is not None) == (back.low is not None) == same_run
    opposite = {"better": "worse", "worse": "better", "": ""}
    for one, other in zip(counter_changes("", *cells), counter_changes("", *cells[::-1]), strict=True):
        assert one.log_ratio == -other.log_ratio
        assert one.effect == opposite[other.effect]


def launch(kernel: str, metrics: dict[str, float], units: dict[str, str] | None = None) -> Launch:
    return Launch("", kernel, metrics, units or dict.fromkeys(metrics, ""))


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Launch]]:
    """Reports by name, as a reader of such files would have them."""
    content: dict[str, list[Launch]] = {}
    for name in ("a", "b"):
        (tmp_path / f"{name}.ncu-rep").touch()
    monkeypatch.chdir(tmp_path)

    def launches_of(path: Path, everything: bool) -> list[Launch]:
        assert everything
        return content[path.stem]

    monkeypatch.setattr(extract, "launches_of", launches_of, raising=False)
    return content


def test_foreign_reports_are_paired_by_kernel_and_order(reports: dict[str, list[Launch]]) -> None:
    reports["a"] = [launch("x", {CYCLES: 10, "own": 1}), launch("y", {CYCLES: 7}), launch("x", {CYCLES: 30})]
    reports["b"] = [launch("z", {CYCLES: 1}), launch("x", {CYCLES: 20, "own": 3}), launch("x", {CYCLES: 16, "new": 9})]
    found = diff.difference("a.ncu-rep", "b.ncu-rep")
    assert [(each.where, each.metric, each.told, each.effect) for each in found.counters] == [
        ("x #1", "own", "×3", ""),
        ("x #1", CYCLES, "×2", "worse"),
        ("x #2", CYCLES, "−46.7 %", "better"),
    ]
    assert found.notes[0] == "in one report only: y, z"


def test_other_instances_of_a_template_are_paired_by_their_short_name(reports: dict[str, list[Launch]]) -> None:
    """Those of the same arguments first, wherever they stand."""
    one, two, four = ("void ns::k<1>(int)", "void ns::k<2>(int)", "void k<4>(long)")
    reports["a"] = [launch(one, {CYCLES: 10}), launch(two, {CYCLES: 20})]
    reports["b"] = [launch(two, {CYCLES: 30}), launch(four, {CYCLES: 50})]
    found = diff.difference("a.ncu-rep", "b.ncu-rep")
    assert {(each.where, each.before, each.after) for each in found.counters} == {
        ("k #2 → k #1", 20, 30),
        ("k #1 → k #2", 10, 50),
    }


def test_one_kernel_is_compared_with_another_where_none_is_in_both(reports: dict[str, list[Launch]]) -> None:
    reports["a"], reports["b"] = [launch("old", {CYCLES: 10})], [launch("new<3>", {CYCLES: 11})]
    (change,) = diff.difference("a.ncu-rep", "b.ncu-rep").counters
    assert (change.where, change.told) == ("old → new", "+10.0 %")
    reports["b"] = [launch("new<3>", {CYCLES: 11}), launch("newer", {CYCLES: 12})]
    with pytest.raises(OperandError, match=r"has old, .* has new, newer"):
        diff.difference("a.ncu-rep", "b.ncu-rep")


def test_metrics_in_other_units_are_left_out(reports: dict[str, list[Launch]]) -> None:
    reports["a"] = [launch("x", {CYCLES: 10, "t": 1, "u": 1, "n": 1}, {CYCLES: "cycle", "t": "ns", "u": "us", "n": ""})]
    reports["b"] = [
        launch(
            "x", {CYCLES: 10, "t": 1, "u": 2000, "n": math.nan}, {CYCLES: "cycle", "t": "furlong", "u": "ns", "n": ""}
        )
    ]
    found = diff.difference("a.ncu-rep", "b.ncu-rep")
    assert {each.metric: each.after for each in found.counters} == {CYCLES: 10, "u": 2000}
    assert found.notes[:2] == ["left out, since their units differ: t", "left out, since they are no numbers: n"]


def test_known_counters_of_reports_are_shown_with_their_meaning_and_others_on_demand(
    reports: dict[str, list[Launch]], capsys: pytest.CaptureFixture[str]
) -> None:
    reports["a"] = [launch("void x<1>(int)", {CYCLES: 10, "own": 1, SPILLS: 0, DRAM: 90}, {CYCLES: "cycle"} | NO_UNITS)]
    reports["b"] = [launch("void x<1>(int)", {CYCLES: 20, "own": 3, SPILLS: 8, DRAM: 40}, {CYCLES: "cycle"} | NO_UNITS)]
    assert cli.main(["diff", "a.ncu-rep", "b.ncu-rep"], "") == 0
    text = capsys.readouterr().out
    assert "counter at x " in text
    assert re.search(rf"^{METRICS[CYCLES].meaning} +cycle +10 +20 +×2 +worse +{CYCLES}$", text, re.MULTILINE)
    assert re.search(rf"^{METRICS[SPILLS].meaning} .* new +worse", text, re.MULTILINE)
    assert "A: Limited by device memory, 90 % busy\nB: Undecided: " in text
    assert "own  " not in text and "that the registry does not know: 1, --all shows them" in text
    assert cli.main(["diff", "--all", "a.ncu-rep", "b.ncu-rep"], "") == 0
    assert re.search(r"^own +1 +3 +×3", capsys.readouterr().out, re.MULTILINE)


def test_two_pages_are_compared_like_reports(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[1] / "fixtures" / "ncu"
    assert cli.main(["diff", str(folder / "nvtx.csv"), str(folder / "base_c.csv")], "") == 0
    text = capsys.readouterr().out
    places = [
        line.removeprefix("counter at ").partition("  ")[0] for line in text.splitlines() if "name in ncu" in line
    ]
    assert places == ["vectorized_elementwise_kernel #1", "vectorized_elementwise_kernel #2", "reduce_kernel"]
    assert "B: Limited by launch: 128 blocks for 132 multiprocessors" in text


def test_what_is_unpaired_is_explained(history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", "vector_add/v02_wide/cuda@HEAD~1", "vector_add/v02_wide@HEAD"], "") == 0
    assert "unpaired: A and B were timed in different runs" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_is_not_overrun(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "console", lambda: Console(file=io.StringIO(), width=width, color_system=None))
    assert diff.run("matmul_bf16/v02_tensor_cores/cuda", "matmul_bf16/v03_swizzled", as_json=False) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"^wavefronts lost to banks +million +[\d,.]+ +[\d,.]+ +×[\d.]+ +better", text, re.MULTILINE)
    assert "A: Limited by bank conflicts" in text


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("op/v01_a/cuda", ("op", "v01_a", "cuda", "")),
        ("op/cuda/v01_a@HEAD~2", ("op", "v01_a", "cuda", "HEAD~2")),
        ("op/torch", ("op", "", "torch", "")),
        ("op/triton", ("op", None, "triton", "")),
        ("HEAD", ("", None, None, "HEAD")),
        ("@feature/x", ("", None, None, "feature/x")),
    ],
)
def test_operands_are_read(text: str, operand: tuple[str, str | None, str | None, str]) -> None:
    read = Operand.parse(text)
    assert (read.op, read.step, read.backend, read.ref) == operand

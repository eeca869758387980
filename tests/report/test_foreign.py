"""A stranger's report: a column for each launch, short names of kernels, and what limits each launch."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from kernel_twins.harness import ceilings
from kernel_twins.report import cli
from kernel_twins.report.compare import foreign, launches, tables
from kernel_twins.report.meaning import limiter, write
from kernel_twins.report.ncu import extract, kernel_names
from kernel_twins.report.ncu.reader import Launch
from kernel_twins.report.rows.metrics import CYCLES, DURATION, METRICS, stall_metric

FIXTURES = Path(__file__).parents[1] / "fixtures" / "ncu"
PAGE, AUTOMATIC = FIXTURES / "base_c.csv", FIXTURES / "auto_c.csv"
H100 = "NVIDIA H100 80GB HBM3"
DRAM = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
SECTORS = "lts__t_sectors_srcunit_tex.sum"
READ = {name for names in limiter.COUNTERS.values() for name in names}


def launch(kernel: str = "k", device: str = H100, /, **changes: float | None) -> Launch:
    """All that the limiter reads, every unit idle, for 100 µs; what changes to None is not recorded."""
    metrics = dict.fromkeys(METRICS, 1.0) | {DURATION: 1e5, "launch__grid_size": 1e4} | changes
    known = {metric: value for metric, value in metrics.items() if value is not None}
    return Launch(
        "", kernel, known, {metric: METRICS[metric].unit if metric in METRICS else "" for metric in known}, device
    )


def terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(tables, "console", lambda: Console(file=io.StringIO(), width=width, color_system=None))


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, f::operator ()()>>(T3)", "reduce_kernel"),
        ("void vectorized_elementwise_kernel<4, unnamed>::launch_clamp_scalar(T &)::[lambda() (instance 1)]::operator "
         "()() const, std::array<char *, 2>>(int, T2, T3)", "vectorized_elementwise_kernel"),
        ("void (anonymous namespace)::softmax_warp_forward<float, int>(T1)", "softmax_warp_forward"),
        ("void at::<unnamed>::fill(int)", "fill"),
        ("_Z11step_kernelIfLi8EEvPf", "step_kernel"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ('say "hi"/reduce_kernel', 'say "hi"/reduce_kernel'),
        ("<odd>", "<odd>"),
    ],
)  # fmt: skip
def test_a_kernels_short_name_has_neither_namespaces_nor_arguments(kernel: str, name: str) -> None:
    assert kernel_names.short_name(kernel) == name


def test_short_names_that_occur_twice_are_counted() -> None:
    assert kernel_names.numbered(["a<1>", "b", "a<2>"]) == ["a #1", "b", "a #2"]


@pytest.mark.parametrize(
    ("unit", "values", "written"),
    [
        ("byte", [4_203_008.0, 512.0], ("Kbyte", ["4,203", "0.512"])),
        ("byte", [65_536.0], ("byte", ["65,536"])),
        ("byte", [204_800.0], ("Kbyte", ["204.8"])),
        ("ns", [1.5e9], ("ms", ["1,500"])),
        ("hz", [1.96e9], ("Mhz", ["1,960"])),
        ("", [5e15, 1.0], ("billion", ["5,000,000", "1e-09"])),
        ("%", [99.5, math.nan], ("%", ["99.5", "n/a"])),
        ("byte/block", [2e6], ("byte/block", ["2,000,000"])),
        ("furlong", [0.0], ("furlong", ["0"])),
    ],
)
def test_large_numbers_are_written_in_a_larger_unit(
    unit: str, values: list[float], written: tuple[str, list[str]]
) -> None:
    assert write.in_unit(unit, values) == written


def test_a_pipe_gets_a_column_for_each_launch_and_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["extract", str(PAGE)], "") == 0
    printed = capsys.readouterr().out
    heading = next(line for line in printed.splitlines() if line.startswith("counter"))
    assert re.split(r"  +", heading) == [
        "counter", "unit", "[0] vectorized_elementwise_kernel #1", "[1] vectorized_elementwise_kernel #2",
        "[2] reduce_kernel", "name in ncu",
    ]  # fmt: skip
    rows = {re.split(r"  +", line)[-1]: re.split(r"  +", line)[:-1] for line in printed.splitlines() if "  " in line}
    assert rows["dram__bytes_read.sum"] == [METRICS["dram__bytes_read.sum"].meaning, "Kbyte", "4,203", "4,199", "4,257"]
    assert "launch__occupancy_limit_shared_mem" in rows
    assert not {name for name in rows if "__" in name} - METRICS.keys()
    assert "0 in every launch: bytes written to device memory" in printed
    assert "[2] reduce_kernel: Limited by launch: 128 blocks for 132 multiprocessors" in printed
    assert "314 more metrics" in printed and "extract --all" in printed


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_is_never_too_narrow(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(monkeypatch, width)
    launches.show(PAGE)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    assert re.search(r"bytes read from device memory +Kbyte +4,203 +4,199 +4,257", printed)
    assert ("dram__bytes_read.sum" in printed) == (width == 160)
    assert ("wider terminal" in printed) == (width == 80)


def test_launches_that_do_not_fit_beside_each_other_follow_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(monkeypatch, 80)
    monkeypatch.setattr(extract, "foreign_launches", lambda path: [launch(**{CYCLES: 1_000.0 + n}) for n in range(40)])
    launches.show(Path("a.ncu-rep"))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert printed.count("\ncounter ") > 1
    assert all(f"{1_000 + n:,}" in printed and f"[{n}] k #{n + 1}: Limited by" in printed for n in range(40))


def test_what_a_launch_lacks_is_a_dash(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    both = [launch("a"), launch("b", **{CYCLES: None, DRAM: math.nan})]
    monkeypatch.setattr(extract, "foreign_launches", lambda path: both)
    launches.show(Path("a.ncu-rep"))
    printed = capsys.readouterr().out
    assert re.search(rf" 1 +– +{re.escape(CYCLES)}", printed)
    assert re.search(rf" 1 +n/a +{re.escape(DRAM)}", printed)


def test_every_metric_is_csv_or_json_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["extract", "--all", str(PAGE)], "") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 3 * 349
    assert {row["launch"] for row in rows} == {"0", "1", "2"}
    assert cli.main(["extract", "--json", str(PAGE)], "") == 0
    assert len(json.loads(capsys.readouterr().out)) == len(rows)


def test_a_launch_is_limited_by_its_busy_unit() -> None:
    (verdict,) = foreign.judge([launch(**{DRAM: 91.0})], Path("a.ncu-rep")).verdicts
    assert verdict.told.startswith("Limited by device memory, 91 % busy (next: ")
    assert foreign.judge([launch(**{DRAM: 91.0})], Path("a.ncu-rep")).notes == ()


def test_a_counter_that_a_verdict_lacks_is_named_with_the_command_that_records_it() -> None:
    found = foreign.judge([launch(**{SECTORS: None, TENSOR: math.nan})], Path("a.ncu-rep"))
    (verdict,) = found.verdicts
    assert verdict.told.startswith("Undecided: tensor pipe, L2 not measured")
    assert set(verdict.lacking) == {SECTORS, TENSOR}
    told, command = found.notes
    assert SECTORS in told and TENSOR in told
    (listed,) = re.findall(r"--metrics (\S+)", command)
    assert command.strip().startswith("ncu ") and set(listed.split(",")) == READ
    *_, export = foreign.judge([launch(**{SECTORS: None})], FIXTURES / "quote.csv").notes
    assert "--csv --page raw --print-units base" in export


def test_a_report_without_any_counter_that_the_limiter_reads_is_not_judged() -> None:
    (verdict,) = foreign.judge([Launch("", "k", {"other": 1.0}, {"other": ""}, H100)], Path("a.ncu-rep")).verdicts
    assert verdict.told.startswith("Not judged") and set(verdict.lacking) == READ


def test_stalls_that_latency_needs_are_asked_for() -> None:
    stalls = {metric: None for metric in METRICS if "issue_stalled" in metric}
    found = foreign.judge([launch(**stalls)], Path("a.ncu-rep"))
    assert found.verdicts[0].told.startswith("Limited by latency: stalls not measured")
    assert "--section WarpStateStats" in found.notes[0]
    waiting = foreign.judge([launch(**{stall_metric("barrier"): 7.0})], Path("a.ncu-rep"))
    assert waiting.verdicts[0].told.startswith("Limited by latency: barrier 7.0 cycles an issue")
    assert waiting.notes == ()


@pytest.mark.parametrize(
    ("device", "why"),
    [("", "does not name its GPU"), ("NVIDIA GeForce RTX 4090", "has no survey")],
)
def test_a_gpu_without_a_survey_is_judged_by_what_ncu_gives_shares_of(
    device: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ceilings, "PRIVATE", tmp_path)
    many = {"device__attribute_multiprocessor_count": 128.0}
    found = foreign.judge(
        [
            launch("a", device, **many),
            launch("b", device, **many, **{DRAM: 91.0}),
            launch("c", device, **many, launch__grid_size=2.0),
        ],
        Path("a.ncu-rep"),
    )
    undecided, busy, small = (verdict.told for verdict in found.verdicts)
    assert undecided.startswith("Undecided: L2, shared memory not measured")
    assert busy.startswith("Limited by device memory")
    assert small == "Limited by launch: 2 blocks for 128 multiprocessors"
    (note,) = found.notes
    assert why in note and not any(verdict.lacking for verdict in found.verdicts)


def test_zeros_of_a_page_in_automatic_units_are_asked_for_in_base_units() -> None:
    """Which the report holds: nothing must be profiled again."""
    (note,) = foreign.judge(extract.foreign_launches(AUTOMATIC), AUTOMATIC).notes
    assert TENSOR in note and "--print-units base" in note

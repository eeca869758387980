"""From ncu's reports and pages to rows: never a wrong number; what cannot be trusted is refused by name."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from kernel_twins import OPS
from kernel_twins.report.ncu import csv_page, extract
from kernel_twins.report.ncu.reader import Launch
from kernel_twins.report.ncu.units import to_base
from kernel_twins.report.rows import base, store
from kernel_twins.report.rows.base import CannotRunError, InvalidDataError
from kernel_twins.report.rows.metrics import CYCLES, DURATION, METRICS, fold, names
from kernel_twins.spec import Case, Name

OP = OPS["vector_add"]
LABEL, KERNEL = "kl.vector_add.cuda.v01_scalar", "vector_add_v01_scalar_kernel"
CLOCK, HITS, SECTORS = "gpc__cycles_elapsed.avg.per_second", "lts__t_sectors_lookup_hit.sum", "lts__t_sectors.sum"
SHARE, FMAS = "lts__t_sector_hit_rate.pct", "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"


def launch(label: str = LABEL, kernel: str = KERNEL, /, **changes: float) -> Launch:
    metrics = dict.fromkeys(METRICS, 1.0) | {DURATION: 1_000.0, CLOCK: 1.5e9}
    return Launch(label, kernel, metrics | changes, {name: metric.unit for name, metric in METRICS.items()})


# Units

SPELLINGS = {
    "ns": [("ns", 0), ("nsecond", 0), ("us", 3), ("usecond", 3), ("ms", 6), ("msecond", 6), ("s", 9), ("second", 9)],
    "byte": [("byte", 0), ("Kbyte", 3), ("Mbyte", 6), ("Gbyte", 9), ("Tbyte", 12)],
    "hz": [("hz", 0), ("Khz", 3), ("Mhz", 6), ("Ghz", 9), ("cycle/second", 0), ("cycle/usecond", 6), ("cycle/ns", 9)],
    "byte/s": [("byte/s", 0), ("byte/second", 0), ("Kbyte/s", 3), ("Gbyte/second", 9), ("Tbyte/s", 12), ("byte/ns", 9)],
    "byte/block": [("byte/block", 0), ("Kbyte/block", 3)],
    "inst": [("inst", 0), ("Kinst", 3), ("Minst", 6)],
    "inst/cycle": [("inst/cycle", 0)],
    "register/thread": [("register/thread", 0)],
    "sector": [("sector", 0)],
    "cycle": [("cycle", 0)],
    "block": [("block", 0)],
    "warp": [("warp", 0)],
    "%": [("%", 0)],
    "": [("", 0)],
}
"""Base units, and how else ncu prints them: the spelling, and its power of ten."""
ALL_SPELLINGS = [(base, *each) for base, spellings in SPELLINGS.items() for each in spellings]


@given(st.sampled_from(ALL_SPELLINGS), st.decimals(0, 10**12, places=6))
def test_units_go_to_base_units_and_back(spelling: tuple[str, str, int], value: Decimal) -> None:
    base, unit, exponent = spelling
    assert to_base(value.scaleb(-exponent), unit, "m") == (float(value), base)
    again, same = to_base(float(value.scaleb(-exponent)), unit, "m")
    assert again == pytest.approx(float(value), rel=1e-15, abs=0) and same == base
    assert to_base(again, base, "m") == (again, base)


def test_registry_is_in_base_units() -> None:
    assert {metric.unit for metric in METRICS.values()} <= SPELLINGS.keys()
    assert all(to_base(1.5, metric.unit, name) == (1.5, metric.unit) for name, metric in METRICS.items())


@pytest.mark.parametrize("unit", ["furlong", "Kfurlong", "Kibyte", "byte/", "/s", "byte/s/s", "K%", "K", "µs", "Byte"])
def test_an_unknown_unit_is_named(unit: str) -> None:
    with pytest.raises(InvalidDataError, match=rf"some__metric.*{re.escape(repr(unit))}.*byte"):
        to_base(1, unit, "some__metric")


# Folding the launches of a call

METRIC_VALUES = st.fixed_dictionaries({name: st.integers(1, 10**9) for name in METRICS})


@given(st.lists(METRIC_VALUES, min_size=1, max_size=4), st.randoms())
def test_folding_does_not_depend_on_the_order_of_launches(launches: list[dict[str, int]], order: random.Random) -> None:
    shuffled = order.sample(launches, len(launches))
    assert fold(list(shuffled)) == pytest.approx(fold(list(launches)), rel=1e-12)


@given(st.lists(METRIC_VALUES, min_size=1, max_size=4))
def test_ratios_are_recomputed_where_both_parts_are_recorded(launches: list[dict[str, int]]) -> None:
    folded = fold(list(launches))
    hits, sectors = (sum(each[part] for each in launches) for part in (HITS, SECTORS))
    assert folded[SHARE] == pytest.approx(100 * hits / sectors)
    without = fold([{name: value for name, value in each.items() if name != HITS} for each in launches])
    cycles = sum(each[CYCLES] for each in launches)
    assert without[SHARE] == pytest.approx(sum(each[SHARE] * each[CYCLES] for each in launches) / cycles)


# The raw page: a writer that prints tables as ncu does, with all its traps

FIXED = {
    "ID": "0",
    "Process ID": "4711",
    "Process Name": "python3.11",
    "Host Name": "127.0.0.1",
    "Context": "1",
    "Stream": "7",
    "Block Size": "(256, 1, 1)",
    "Grid Size": "(132, 1, 1)",
    "Device": "0",
    "CC": "9.0",
}
PUSH_POP = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
START_STOP = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
OTHERS = {"dram__bytes.sum.per_second": "byte/s", "sm__inst_executed.avg.per_cycle_active": "inst/cycle"}
UNITS = {name: metric.unit for name, metric in METRICS.items()} | OTHERS
NOISE = ["==PROF== Connected to process 4711 (/usr/bin/python3.11)", '==WARNING== "0" is, in fact, "fine"', ""]
SEPARATORS = {"C": ("", "."), "en_US": (",", "."), "de_DE": (".", ",")}


@dataclass(frozen=True)
class Page:
    """What is on a page, and how it was printed; ``names`` are the texts that a user chose."""

    text: str
    launches: list[Launch]
    locale: str
    style: str
    numbers: list[str]
    names: list[tuple[str, str]]


def printed(value: Decimal, locale: str) -> str:
    group, point = SEPARATORS[locale]
    whole, _, rest = f"{value:,f}".partition(".")
    return whole.replace(",", group) + (point + rest if rest else "")


def line(cells: list[str], style: str) -> str:
    if style == "ncu":
        return ",".join(f'"{cell}"' for cell in cells)
    stream = io.StringIO()
    quoted = csv.writer(stream, quoting=csv.QUOTE_ALL, lineterminator="")
    (quoted if style == "quoted" else csv.writer(stream, lineterminator="")).writerow(cells)
    return stream.getvalue()


@st.composite
def pages(draw: st.DrawFn) -> Page:
    locale, style = draw(st.sampled_from(list(SEPARATORS))), draw(st.sampled_from(["ncu", "quoted", "minimal"]))
    metrics = draw(st.lists(st.sampled_from(list(UNITS)), min_size=1, max_size=6, unique=True))
    spelled = {metric: draw(st.sampled_from(SPELLINGS[UNITS[metric]])) for metric in metrics}
    nvtx, others = draw(st.booleans()), draw(st.lists(st.sampled_from(list(FIXED)), unique=True))
    texts = [*others, "Kernel Name", "device__attribute_display_name", *([PUSH_POP, START_STOP] if nvtx else [])]
    columns = draw(st.permutations([*texts, *metrics]))
    name = st.text(st.sampled_from('ab<>(),":* 1'), min_size=1, max_size=10)
    rows, chosen, launches, numbers = [], [], [], []
    for _ in range(draw(st.integers(1, 3))):
        kernel, pushed = (re.sub('"+', '"', draw(name)) for _ in range(2))  # two in a row read as one, escaped
        cells = FIXED | {"Kernel Name": kernel, "device__attribute_display_name": "NVIDIA H100 80GB HBM3"}
        cells |= {PUSH_POP: pushed, START_STOP: f"0:<default domain>:{LABEL}:none:none:none"}
        found: dict[str, float] = {}
        for metric in metrics:
            kind = draw(st.sampled_from(["number"] * 6 + ["nan", "", "n/a"]))
            value = draw(st.decimals(Decimal("0.001"), 10**7, places=draw(st.integers(0, 6))).filter(bool))
            cells[metric] = printed(value, locale) if kind == "number" else kind
            if kind == "number":
                numbers.append(cells[metric])
            if kind in ("number", "nan"):
                found[metric] = float(value.scaleb(spelled[metric][1])) if kind == "number" else math.nan
        chosen.append((kernel, pushed))
        rows.append([cells[column] for column in columns])
        launches.append(Launch(LABEL if nvtx else "", kernel, found, {each: UNITS[each] for each in found}))
    units = [spelled[column][0] if column in spelled else "" for column in columns]
    lines = draw(st.lists(st.sampled_from([*NOISE, "step 1, loss 0.5"]), max_size=2))
    for row in (columns, units, *rows):
        lines += [line(row, style), *draw(st.lists(st.sampled_from(NOISE), max_size=1))]
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    text = "".join(each + newline for each in lines)
    return Page(text, launches, locale, style, numbers, chosen)


def same(one: list[Launch], other: list[Launch]) -> bool:
    """Equal, NaN being NaN."""
    return repr([_sorted(each) for each in one]) == repr([_sorted(each) for each in other])


def _sorted(each: Launch) -> Launch:
    return Launch(each.label, each.kernel, dict(sorted(each.metrics.items())), dict(sorted(each.units.items())))


def may_refuse(page: Page, reason: str) -> bool:
    """Whether a page may be refused for this reason: no number tells the locale, or the quotes tell no column."""
    if "depending on the locale" in reason:
        return all(re.fullmatch(r"\d+|[1-9]\d{0,2}[.,]\d{3}", number) for number in page.numbers)
    texts = [text for row in page.names for text in row]
    return (
        "quotes do not tell" in reason and page.style == "ncu" and any(re.search(r'",|,"|^,$', text) for text in texts)
    )


@given(pages())
def test_any_page_reads_back_as_it_was_or_is_refused(page: Page) -> None:
    try:
        launches, reason = csv_page.parse(page.text, "page.csv", everything=True), ""
    except InvalidDataError as error:
        launches, reason = page.launches, str(error)
    assert same(launches, page.launches)
    assert not reason or may_refuse(page, reason), reason


@given(pages(), st.data())
def test_a_page_cut_short_yields_no_wrong_launch(page: Page, data: st.DataObject) -> None:
    """One that ends between two rows cannot be noticed here; the number of launches is checked with the labels."""
    cut = page.text[: data.draw(st.integers(0, len(page.text) - 1))]
    try:
        launches = csv_page.parse(cut, "page.csv", everything=True)
    except InvalidDataError:
        return
    assert same(launches, page.launches[: len(launches)])


def raw_page(*rows: list[str], header: list[str], units: list[str]) -> str:
    return "".join(line(row, "ncu") + "\n" for row in (header, units, *rows))


def one_cell(metric: str, unit: str, cell: str, *more: str) -> str:
    """A page with one launch and one metric; further cells are further launches."""
    rows = [["k", START_STOP_CELL, each] for each in (cell, *more)]
    return raw_page(*rows, header=["Kernel Name", START_STOP, metric], units=["", "", unit])


START_STOP_CELL = f"0:<default domain>:{LABEL}:none:none:none"


@pytest.mark.parametrize("cell", ["1,313", "1.313", "12,345", "-1.313"])
def test_a_number_that_depends_on_the_locale_is_not_guessed(cell: str) -> None:
    with pytest.raises(InvalidDataError, match=r"depending on the locale.*LC_ALL=C"):
        csv_page.parse(one_cell("dram__bytes_read.sum", "byte", cell), "page.csv")


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (("1,313", "1,313.50"), (1313, 1313.5)),
        (("1,313", "12,5"), (1.313, 12.5)),
        (("1.313", "0.5"), (1.313, 0.5)),
        (("1.313", "1.313.055,74"), (1313, 1313055.74)),
        (("1234.567", "1.313"), (1234.567, 1.313)),
        (("1.5e3", "2"), (1500, 2)),
    ],
)
def test_one_clear_number_tells_the_locale_of_the_others(cells: tuple[str, str], values: tuple[float, float]) -> None:
    launches = csv_page.parse(one_cell("dram__bytes_read.sum", "byte", *cells), "page.csv")
    assert tuple(each.metrics["dram__bytes_read.sum"] for each in launches) == values


@pytest.mark.parametrize(("cells"), [("12,50", "12.50"), ("1,2,3",), ("12 345",), ("twelve",), ("1,2345.0",)])
def test_what_is_no_number_in_the_tables_locale_is_refused(cells: tuple[str, ...]) -> None:
    with pytest.raises(InvalidDataError, match=r"dram__bytes_read\.sum is.* not? "):
        csv_page.parse(one_cell("dram__bytes_read.sum", "byte", *cells), "page.csv")


@pytest.mark.parametrize("metric", [DURATION, CYCLES])
def test_nan_printed_as_zero_is_refused(metric: str) -> None:
    with pytest.raises(InvalidDataError, match=rf"{re.escape(metric)}.*NaN.*--print-units base"):
        csv_page.parse(one_cell(metric, METRICS[metric].unit, "0.000000"), "page.csv")


def test_units_of_a_page_become_base_units() -> None:
    (found,) = csv_page.parse(one_cell(DURATION, "usecond", "177.280000"), "page.csv")
    assert (found.label, found.metrics, found.units) == (LABEL, {DURATION: 177280.0}, {DURATION: "ns"})


def test_quotes_that_ncu_does_not_escape_do_not_shift_values() -> None:
    name = 'f<"a","b">(int, "5","6")'
    text = raw_page(
        ["0", name, "7", "1234.50"], header=["ID", "Kernel Name", "Context", DURATION], units=[""] * 3 + ["ns"]
    )
    (found,) = csv_page.parse(text, "page.csv", everything=True)
    assert (found.kernel, found.metrics) == (name, {DURATION: 1234.5})
    odd = raw_page(['"', ",1", "7.50"], header=[PUSH_POP, "Kernel Name", DURATION], units=["", "", "ns"])
    (found,) = csv_page.parse(odd, "page.csv", everything=True)
    assert (found.kernel, found.metrics) == (",1", {DURATION: 7.5})
    two = raw_page(["a", name, "7.50"], header=[PUSH_POP, "Kernel Name", DURATION], units=["", "", "ns"])
    with pytest.raises(InvalidDataError, match=r"fields.*Kernel Name.*pip install ncu-report"):
        csv_page.parse(two, "page.csv", everything=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no raw page"),
        ("==WARNING== No kernels were profiled.\n", "No kernels were profiled"),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ERR_NVGPUCTRPERM"),
        ('"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n', "another page"),
        (f'"Kernel Name","{DURATION}"\n', "no row of units"),
        (f'"Kernel Name","{DURATION}"\n"k","5.00"\n', "no row of units"),
        (f'"Kernel Name","{DURATION}"\n"","ns"\n', "no launch"),
        (f'"Kernel Name","{DURATION}"\n"","ns"\n"k","5.00"\n"k","6.0', "last line has no end: it is cut short"),
        (f"Kernel Name,{DURATION}\n,ns\nk,5.00\nk,6", "last line has no end: it is cut short"),
        (f'"Kernel Name","{DURATION}"\n"","ns"\n"k"\n', "fields"),
        (f'"Kernel Name","{DURATION}","{DURATION}"\n"","ns","us"\n"k","5.00","5.00"\n', "two columns"),
        (f'"Context","Kernel Name","{DURATION}"\n"","","ns"\n"k","1","5.00"\n', "Context"),
        (f'"Kernel Name","{DURATION}"\n"","furlong"\n"k","5.00"\n', "furlong"),
        ('"Kernel Name","gpu__time_duration.avg"\n"","ns"\n"k","5.00"\n', r"nearest.*gpu__time_duration\.avg"),
        (f'"Kernel Name","{DURATION}"\n"","ns"\n"k","5.00"\n', "0 labelled ranges"),
    ],
)
def test_what_is_no_raw_page_is_named(text: str, reason: str) -> None:
    with pytest.raises(InvalidDataError, match=rf"^page\.csv: .*{reason}"):
        csv_page.parse(text, "page.csv")


TENSOR_FLOPS = tuple(name for name in METRICS if name.startswith("sm__ops_path_tensor"))
FIXTURES = Path(__file__).parents[1] / "fixtures" / "ncu"


EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


@pytest.mark.parametrize("file", [FIXTURES / name for name in EXPECTED], ids=lambda file: file.name)
def test_pages_that_ncu_printed_hold_what_nvidias_module_read(file: Path) -> None:
    """Base units have two decimals, automatic ones six, of which zeros are left out, since they may be NaN."""
    expected = EXPECTED[file.name]
    launches = csv_page.parse(file.read_bytes().decode(), file.name, everything=True)
    assert len(launches) == len(expected)
    for found, wanted in zip(launches, expected, strict=True):
        assert wanted["kernel"] in found.kernel
        values = {name: value for name, value in wanted.items() if name != "kernel"}
        lacking = values.keys() - found.metrics
        assert not lacking or (file.name.startswith("auto") and not any(values[name] for name in lacking))
        assert {name: found.metrics[name] for name in values.keys() - lacking} == pytest.approx(
            {name: values[name] for name in values.keys() - lacking}, rel=1e-6, abs=0.005001, nan_ok=True
        )


def test_a_german_page_of_ncu_is_refused_since_it_mixes_two_locales() -> None:
    """Numbers with a unit are in C's form, those without in the locale's: 4.096 wavefronts are 4,096."""
    page = (FIXTURES / "auto_de.csv").read_text()
    assert '"4.096"' in page and '"131072.000000"' in page
    with pytest.raises(InvalidDataError, match=r"auto_de\.csv: .* locale .*LC_ALL=C ncu --import"):
        csv_page.parse(page, "auto_de.csv", everything=True)


# NVIDIA's module: a stand-in that holds what a JSON file says, and the real one

STUB = """
import json
class Metric:
    def __init__(self, value, unit): self._value, self._unit = value, unit
    def value(self): return self._value
    def unit(self): return self._unit
class Domain:
    def __init__(self, names): self._names = names
    def start_end_ranges(self): return self._names
class State:
    def __init__(self, names): self._names = names
    def domains(self): return [0]
    def domain_by_id(self, index): return Domain(self._names)
class Action:
    def __init__(self, launch): self._launch = launch
    def name(self): return self._launch["kernel"]
    def metric_names(self): return tuple(self._launch["metrics"])
    def metric_by_name(self, name): return Metric(*self._launch["metrics"][name])
    def nvtx_state(self): return State(self._launch["ranges"]) if self._launch["ranges"] else None
class Range:
    def __init__(self, launches): self._launches = launches
    def num_actions(self): return len(self._launches)
    def action_by_idx(self, index): return Action(self._launches[index])
class Context:
    def __init__(self, ranges): self._ranges = ranges
    def num_ranges(self): return len(self._ranges)
    def range_by_idx(self, index): return Range(self._ranges[index])
def load_report(path): return Context(json.load(open(path)))
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module that stands in for NVIDIA's; there is no ncu."""
    file = tmp_path / "modules" / "ncu_report.py"
    file.parent.mkdir()
    file.write_text(STUB)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(file.parent))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("NCU", str(tmp_path / "bin" / "ncu"))  # not that of a toolkit of this machine
    return file


def action(kernel: str = "k", ranges: tuple[str, ...] = (LABEL,), /, **metrics: Any) -> dict[str, Any]:
    every = {name: (7.0, metric.unit) for name, metric in METRICS.items()} | metrics
    return {"kernel": kernel, "ranges": list(ranges), "metrics": every}


def report(tmp_path: Path, *ranges: list[dict[str, Any]]) -> Path:
    file = tmp_path / "some.ncu-rep"
    file.write_text(json.dumps(ranges))
    return file


def test_labelled_launches_are_read_in_order(stub: Path, tmp_path: Path) -> None:
    flops = 2 * 4096**3 + 1
    foreign = {"other__metric.sum": (1.0, "furlong"), "device__attribute_display_name": ("H100", "")}
    file = report(
        tmp_path, [action("a"), action("b", (LABEL, "user range"), **foreign)], [action("c", **{FMAS: (flops, "inst")})]
    )
    launches = extract.launches_of(file)
    assert [(each.kernel, each.label) for each in launches] == [("a", LABEL), ("b", LABEL), ("c", LABEL)]
    assert all(list(each.metrics) == list(METRICS) for each in launches)
    assert launches[2].metrics[FMAS] == flops


def test_anybodys_report_is_read_with_all_its_numbers(stub: Path, tmp_path: Path) -> None:
    metrics = {
        "other__time.sum": (1.5, "us"),
        "other__length.sum": (2.5, "furlong"),
        "device__attribute_display_name": ("H100", ""),
        DURATION: (9.0, "nsecond"),
    }
    file = report(tmp_path, [{"kernel": "k", "ranges": ["user range"], "metrics": metrics}])
    table = extract.foreign_table(file).set_index("metric")
    assert sorted(table.index) == [DURATION, "other__length.sum", "other__time.sum"]
    assert table.loc["other__length.sum", ["value", "unit"]].to_list() == [2.5, "furlong"]
    assert table.loc["other__time.sum"].to_dict() == {
        "launch": 0, "kernel": "k", "label": "", "value": 1500.0, "unit": "ns", "meaning": ""
    }  # fmt: skip
    assert table.loc[DURATION, "meaning"] == METRICS[DURATION].meaning
    with pytest.raises(InvalidDataError, match=r"some\.ncu-rep: k lies in 0 labelled ranges"):
        extract.launches_of(file)


def test_anybodys_page_is_read_like_a_report(tmp_path: Path) -> None:
    file = tmp_path / "page.csv"
    file.write_text(one_cell("other__bytes.sum.per_second", "Tbyte/s", "2.50"))
    (row,) = extract.foreign_table(file).to_dict("records")
    assert (row["metric"], row["value"], row["unit"]) == ("other__bytes.sum.per_second", 2.5e12, "byte/s")
    with pytest.raises(InvalidDataError, match=r"gone\.csv"):
        extract.foreign_table(tmp_path / "gone.csv")


@pytest.mark.parametrize("ranges", [(), (LABEL, "kl.vector_add.cuda.v02_other")])
def test_a_launch_must_lie_in_one_label(stub: Path, tmp_path: Path, ranges: tuple[str, ...]) -> None:
    with pytest.raises(InvalidDataError, match=f"k lies in {len(ranges)} labelled ranges"):
        extract.launches_of(report(tmp_path, [action("k", ranges)]))


@pytest.mark.parametrize("ranges", [[], [[]], [[action()], []]])
def test_a_report_without_launches_is_noticed(stub: Path, tmp_path: Path, ranges: list[Any]) -> None:
    with pytest.raises(InvalidDataError, match=r"some\.ncu-rep: it holds no launch: it is cut short"):
        extract.launches_of(report(tmp_path, *ranges))


def test_a_missing_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match=r"gone\.ncu-rep"):
        extract.launches_of(tmp_path / "gone.ncu-rep")


def test_a_reader_that_crashes_or_hangs_is_named(stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    with pytest.raises(InvalidDataError, match=r"some\.ncu-rep: NVIDIA's reader failed with exit code -11"):
        extract.launches_of(report(tmp_path))
    stub.write_text("import time\ntime.sleep(30)\n")
    monkeypatch.setattr(extract, "_TIMEOUT_S", 0.5)
    with pytest.raises(InvalidDataError, match=r"some\.ncu-rep: reading it did not end within 0\.5 s"):
        extract.launches_of(report(tmp_path))


NCU = """#!/bin/sh
case "$LC_ALL $*" in
"C --import {report} --csv --page raw --print-units base") page={base} ;;
"C --import {report} --csv --page raw --print-units auto") page={auto} ;;
*) exit 9 ;;
esac
while IFS= read -r line; do printf '%s\\n' "$line"; done < $page
"""


def test_ncu_reads_where_nvidias_module_is_missing(stub: Path, tmp_path: Path) -> None:
    stub.write_text("raise ImportError('built for another Python')\n")
    file, base, auto, ncu = report(tmp_path), tmp_path / "base.csv", tmp_path / "auto.csv", tmp_path / "bin" / "ncu"
    with pytest.raises(CannotRunError, match=r"another Python.*pip install ncu-report.*Nsight Compute"):
        extract.launches_of(file)
    ncu.write_text(NCU.format(report=file, base=base, auto=auto))
    ncu.chmod(0o755)
    stall = "smsp__average_warps_issue_stalled_misc_per_issue_active.ratio"
    for metric, unit, printed, scaled, digits, value in (
        (DURATION, "ns", "177280.00", "us", "177.280000", 177280.0),
        (stall, "inst", "0.00", "inst", "0.001234", 0.001234),  # two decimals make a zero of it
        (stall, "inst", "nan", "inst", "0.000000", math.nan),  # and six digits one of what was not measured
    ):
        base.write_text(one_cell(metric, unit, printed))
        auto.write_text(one_cell(metric, scaled, digits))
        (launch,) = extract.launches_of(file)
        assert launch.metrics[metric] == pytest.approx(value, rel=1e-9, nan_ok=True)
    base.write_text(one_cell(stall, "inst", "3.00"))
    with pytest.raises(InvalidDataError, match=r"some\.ncu-rep: ncu prints .* as 3 in base units, as 0 in others"):
        extract.launches_of(file)
    ncu.write_text("#!/bin/sh\necho '==ERROR== The file could not be opened'\nexit 1\n")
    with pytest.raises(InvalidDataError, match=r"some\.ncu-rep: ncu --import failed.*could not be opened"):
        extract.launches_of(file)


@pytest.fixture(scope="module")
def nvidias_module() -> None:
    found = subprocess.run([sys.executable, "-c", "import ncu_report"], capture_output=True, check=False, cwd="/")
    if found.returncode:
        pytest.skip("NVIDIA's module is not installed: pip install ncu-report")


@pytest.mark.usefixtures("nvidias_module")
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"NVR\0", b"NVR\0\x08\0\0\0\x0a\x06abcdef", bytes(range(256)) * 40]
)
def test_nvidias_module_does_not_pass_off_garbage_as_a_report(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "some.ncu-rep").write_bytes(content)
    with pytest.raises(InvalidDataError, match=r"some\.ncu-rep: "):
        extract.launches_of(tmp_path / "some.ncu-rep", everything=True)


def test_the_readers_process_imports_the_standard_library_only() -> None:
    code = (
        "import sys, kernel_twins.report.ncu.reader\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names - {'kernel_twins'})"
    )
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(store.ROOT)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.split() == ["__main__"]


# Rows

CODES = {LABEL: "c0de"}
CASE = OP.profile_case.slug


def rows_of(*launches: Launch, expected: int = 1, tier: Any = "T3") -> tuple[Any, Any]:
    return extract.counter_rows(launches, {LABEL: expected}, OP, "run", CODES, tier)


def test_rows_hold_every_metric_of_the_tier_with_all_digits() -> None:
    flops = 2 * 4096**3 + 1
    counters, refused = rows_of(launch(**{FMAS: float(flops), SHARE: 1 / 3}))
    assert refused.empty and list(counters["metric"]) == names("T3")
    values = dict(zip(counters["metric"], counters["value"], strict=True))
    assert (values[FMAS], float(values[SHARE]), values[DURATION]) == (str(flops), 1 / 3, "1000")
    assert set(counters["code"]) == {"c0de"} and set(counters["step"]) == {"v01_scalar"}
    assert list(rows_of(launch(), tier="T0")[0]["metric"]) == names("T0")


def test_rows_stand_in_the_order_that_was_expected() -> None:
    called = ["kl.vector_add.torch.baseline", LABEL, "kl.vector_add.triton.v01_scalar"]
    launches = [launch(label) for label in reversed(called)] + [launch(called[0], "second")]
    expected = dict.fromkeys(called, 1) | {called[0]: 0}
    counters, _ = extract.counter_rows(launches, expected, OP, "run", {}, "T0")
    cells = counters[["backend", "step", "launch", "kernel"]].drop_duplicates().to_numpy().tolist()
    steps = [[*each.split(".")[2:], "0", KERNEL] for each in called[1:]]
    assert cells == [["torch", "", "0", KERNEL], ["torch", "", "1", "second"], *steps]


def test_another_spelling_of_a_unit_is_converted() -> None:
    each = launch(**{DURATION: 177.28, "dram__bytes_read.sum": 1.5})
    each.units.update({DURATION: "usecond", "dram__bytes_read.sum": "Mbyte", CLOCK: "cycle/second"})
    counters, refused = rows_of(each)
    found = counters.set_index("metric").loc[[DURATION, "dram__bytes_read.sum", CLOCK], ["value", "unit"]]
    assert refused.empty
    assert found.to_numpy().tolist() == [["177280", "ns"], ["1500000", "byte"], ["1500000000", "hz"]]


FAULTS: dict[str, tuple[str, float, str]] = {
    "nan": ("dram__bytes_read.sum", math.nan, "nan byte, must be a finite number"),
    "infinite": ("dram__bytes_read.sum", math.inf, "inf byte, must be a finite number"),
    "negative": ("dram__bytes_read.sum", -1.0, "-1 byte, must be at least 0"),
    "share": (SHARE, 102.5, "102.5 %, must be at most 102 %"),
    "no time": (DURATION, 0.0, "0 ns, must be more than 0"),
    "no cycles": (CYCLES, 0.0, "0 cycle, must be more than 0"),
    "slow clock": (CLOCK, 99e6, "99000000 hz, must be from 1e+08 to 4e+09 hz"),
    "fast clock": (CLOCK, 4.1e9, "4100000000 hz, must be from 1e+08 to 4e+09 hz"),
    "hits": (HITS, 1.03, "1.03, must be at most 102 % of lts__t_sectors.sum, which is 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_impossible_value_costs_its_cell_alone(fault: str) -> None:
    metric, value, reason = FAULTS[fault]
    other = "kl.vector_add.triton.v01_scalar"
    launches = [launch(**{metric: value}), launch(other)]
    counters, refused = extract.counter_rows(launches, {LABEL: 1, other: 1}, OP, "run", CODES, "T3")
    assert set(counters["backend"]) == {"triton"} and len(counters) == len(names("T3"))
    assert refused.to_numpy().tolist() == [[CASE, "cuda", "v01_scalar", f"{metric} is {reason}", "c0de", "run"]]


@pytest.mark.parametrize(
    ("metric", "value"), [(SHARE, 102.0), (HITS, 1.02), (CLOCK, 100e6), ("dram__bytes_read.sum", 0.0)]
)
def test_possible_values_are_kept(metric: str, value: float) -> None:
    assert rows_of(launch(**{metric: value}))[1].empty


@pytest.mark.parametrize(("unit", "reason"), [("furlong", "'furlong'"), ("sector", "1 sector, must be in byte")])
def test_another_unit_costs_the_cell(unit: str, reason: str) -> None:
    each = launch()
    each.units["dram__bytes_read.sum"] = unit
    counters, refused = rows_of(each)
    assert counters.empty and "dram__bytes_read.sum" in refused["reason"][0] and reason in refused["reason"][0]


def test_a_missing_metric_costs_the_cell_and_names_its_like() -> None:
    each = launch()
    del each.metrics["dram__bytes_read.sum"]
    counters, refused = rows_of(each)
    assert counters.empty
    assert re.search(r"no dram__bytes_read\.sum.*dram__bytes_write\.sum", refused["reason"][0])


def test_a_cell_with_many_faults_tells_how_many() -> None:
    _, refused = rows_of(Launch(LABEL, KERNEL, {}, {}), tier="T3")
    assert refused["reason"][0].endswith(f"; and {len(names('T3')) - 3} more")


@pytest.mark.parametrize(("found", "expected"), [(0, 1), (2, 1), (1, 2), (0, 0)])
def test_another_number_of_launches_costs_the_cell(found: int, expected: int) -> None:
    counters, refused = rows_of(*[launch()] * found, expected=expected)
    assert counters.empty
    assert refused["reason"][0] == f"{found} launches were profiled, {expected or 'at least 1'} expected"


def test_a_label_of_another_report_costs_the_report() -> None:
    with pytest.raises(
        InvalidDataError, match=r"vector_add_v01_scalar_kernel has the label 'kl\.vector_add\.cuda\.v09_other'"
    ):
        rows_of(launch("kl.vector_add.cuda.v09_other"))


FOREIGN = (
    (
        ("vector_add_v02_grid_stride_kernel",),
        "no launch is of the step's own kernel, but of vector_add_v02_grid_stride_kernel",
    ),
    ((KERNEL, "fill_kernel"), "fill_kernel ran beside the step's kernel and is no helper of its Step"),
)


@pytest.mark.parametrize(("kernels", "reason"), FOREIGN)
def test_another_steps_kernel_costs_the_cell(kernels: tuple[str, ...], reason: str) -> None:
    launches = [launch(LABEL, kernel) for kernel in kernels]
    counters, refused = rows_of(*launches, expected=0)
    assert counters.empty
    assert list(refused["reason"]) == [reason]
    assert extract.cycle_rows(launches, {LABEL: 0}, 1, OP, "run", CODES).empty


def test_helpers_that_the_spec_names_are_the_steps() -> None:
    op, label = OPS["reduction"], "kl.reduction.triton.v06_atomic"
    launches = [launch(label, kernel) for kernel in ("vectorized_elementwise_kernel", "reduction_v06_atomic_kernel")]
    counters, refused = extract.counter_rows(launches, {label: 0}, op, "run", {}, "T0")
    assert refused.empty and set(counters["launch"]) == {"0", "1"}


def test_a_label_tells_a_case_that_is_not_the_operations() -> None:
    op, case = OPS["softmax"], Case.parse("8192x32768-bf16-log.yes")
    name = Name("cuda", "v07_cluster")
    label = base.label(op, case, name)
    assert label == "kl.softmax.cuda.v07_cluster.8192x32768-bf16-log.yes"
    assert base.labelled(op, label) == (case, name)
    assert base.labelled(op, "kl.softmax.torch.baseline") == (op.profile_case, Name("torch"))
    counters, _ = extract.counter_rows([launch(label, "softmax_v07_cluster_kernel")], {label: 1}, op, "run", {}, "T0")
    assert set(counters["case"]) == {case.slug}


def calls_of(cycles: list[float], expected: int, repeats: int) -> str:
    launches = [Launch(LABEL, KERNEL, {CYCLES: each}, {CYCLES: "cycle"}) for each in cycles]
    table = extract.cycle_rows(launches, {LABEL: expected}, repeats, OP, "run", CODES)
    assert list(table.columns) == store.TABLES["cycles"]
    assert table.drop(columns="cycles").to_numpy().tolist() == [[CASE, "cuda", "v01_scalar", "c0de", "run"]]
    return str(table["cycles"][0])


@pytest.mark.parametrize("expected", [2, 0])
def test_a_calls_cycles_are_those_of_all_its_launches(expected: int) -> None:
    assert calls_of([10.0, 1.0, 20.0, 2.0, 30.0, 3.0], expected, repeats=3) == "11 22 33"


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (5, 0), (2, 1), (4, 1), (0, 1)])
def test_calls_with_launches_missing_are_refused(count: int, expected: int) -> None:
    with pytest.raises(InvalidDataError, match=f"{LABEL}: {count} launches"):
        calls_of([10.0] * count, expected, repeats=3)


@pytest.mark.parametrize("cycles", [0.0, math.nan, -1.0])
def test_calls_without_cycles_are_refused(cycles: float) -> None:
    with pytest.raises(InvalidDataError, match=f"{LABEL}: {re.escape(CYCLES)} is"):
        calls_of([10.0, cycles, 10.0], 1, repeats=3)


# What the reference GPU recorded

PRODUCTS = {"matmul_bf16": 1, "matmul_tf32x3": 3}
"""How many products on the tensor cores make one product of the operation."""
WITHOUT_TENSOR_CORES = {("matmul_bf16", "v01_naive"), ("matmul_tf32x3", "")}
"""The one that says so, and PyTorch's product in full fp32."""


def tensor_work() -> Iterator[Any]:
    for op in PRODUCTS:
        table = store.read_table(store.DATA / store.REFERENCE_GPU, op, "counters")
        for (backend, step), rows in table.groupby(["backend", "step"], sort=False):
            yield pytest.param(op, step, rows, id=f"{op}-{backend}-{step or 'baseline'}")


@pytest.mark.parametrize(("op", "step", "rows"), list(tensor_work()))
def test_recorded_tensor_counters_are_the_products_arithmetic(op: str, step: str, rows: Any) -> None:
    """The profile case, 4096³, is a multiple of every tile, so that no padding is computed."""
    wanted = [name for name in TENSOR_FLOPS if ("tf32" if op == "matmul_tf32x3" else "bf16") in name]
    if absent := sorted(set(wanted) - set(rows["metric"])):
        pytest.skip(f"not recorded: {', '.join(absent)}")
    m, n, k = OPS[op].profile_case.shape
    assert m % 256 == n % 256 == k % 256 == 0
    flops = rows[rows["metric"].isin(TENSOR_FLOPS)]["value"].astype(float).sum()
    factor = 0 if (op, step) in WITHOUT_TENSOR_CORES else PRODUCTS[op]
    assert flops == pytest.approx(factor * 2 * m * n * k, rel=1e-9)

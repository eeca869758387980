"""From launches to rows, from rows to statements, from statements to documents."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from kernel_twins import OPS
from kernel_twins.harness.ceilings import Ceilings
from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results, load
from kernel_twins.report.measure import plan
from kernel_twins.report.pages import documents, front, ladder_page, scoreboard
from kernel_twins.report.rows import store
from kernel_twins.report.rows.base import InvalidDataError
from kernel_twins.report.rows.metrics import METRICS, fold
from kernel_twins.spec import BACKENDS, Name
from tests import logs
from tests.logs import CASE, OP, launch, timing

CASE_GBPS = OP.bytes(CASE) / 300e3  # of a call of 300 µs


def rendered(folder: Path, ceilings: Ceilings | None = None) -> str:
    return logs.told(folder, [Results(op, folder, ceilings) for op in OPS.values()])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return logs.measured(tmp_path)


def test_counters_survive_the_way_through_the_file(folder: Path) -> None:
    table = store.read_table(folder, "vector_add", "counters")
    assert len(table) == 2 * len(METRICS)
    results = Results(OP, folder, None)
    assert results.quantities(Name("cuda", "v01_scalar"), CASE)["dram_share"] == 85.0
    assert results.quantities(Name("cuda", "v02_grid_stride"), CASE)["dram_share"] == 91.0
    assert results.quantities(Name("triton", "v01_scalar"), CASE)["dram_share"] is None


def test_launches_of_one_call_fold_by_kind() -> None:
    short, long = launch(sm__cycles_elapsed=100.0), launch(sm__cycles_elapsed=300.0)
    a = short.metrics | {"dram__bytes_read.sum": 5.0, "launch__registers_per_thread": 32.0}
    b = long.metrics | {"dram__bytes_read.sum": 7.0, "launch__registers_per_thread": 40.0}
    share = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
    folded = fold([a | {share: 10.0}, b | {share: 90.0}])
    assert folded["dram__bytes_read.sum"] == 12.0
    assert folded["launch__registers_per_thread"] == 40.0
    assert folded[share] == pytest.approx(70.0)
    assert folded == fold([b | {share: 90.0}, a | {share: 10.0}])


def test_predictions_are_judged(folder: Path) -> None:
    results = Results(OP, folder, None)
    step = OP.step("v02_grid_stride")
    judged = {each.prediction.quantity: each for each in results.judge(step, "cuda")}
    assert judged["time"].verdict == "miss"  # 300 after 330 µs is more than the 4 % it was predicted to stay within
    assert judged["time"].actual == pytest.approx(300 / 330)
    assert judged["sectors_per_load"].verdict == "miss"
    assert all(each.verdict == "not judged" for each in results.judge(step, "triton"))


def test_limiter_names_the_saturated_unit(folder: Path) -> None:
    limit = Results(OP, folder, None).limiter(Name("cuda", "v02_grid_stride"), CASE)
    assert limit is not None
    assert limit.told().startswith("device memory, 91 % busy")
    assert Results(OP, folder, None).limiter(Name("triton", "v02_grid_stride"), CASE) is None


def test_log_tells_wrong_steps_and_ratios(folder: Path) -> None:
    text = rendered(folder)
    assert "wrong: element 3 is nan" in text
    assert "1.200 × [1.192, 1.208] FAST" in text
    assert "**miss** (0.909 ×), not frozen" in text


def test_log_tells_ratios_by_shape(tmp_path: Path) -> None:
    op = OPS["matmul_bf16"]
    wide = [Name(backend, step.name) for backend in BACKENDS for step in op.steps_of(backend) if step.wide]
    title = " | ".join(f"{'CUDA' if name.backend == 'cuda' else 'Triton'} {name.step}" for name in wide)
    first, others = wide[0], wide[1:]
    times = {"1024x1024x1024-bf16": 100.0, "1024x1024x1024-bf16-b.col": 25.0, "3333x5555x7777-bf16": 10.0}
    rows = []
    for case, ours in times.items():
        rows += [
            timing(baseline, "", [50.0 if baseline == "cublaslt" else 90.0] * 20, case=case)
            for baseline in op.baselines
        ]
        rows.append(timing(first.backend, first.step, [ours] * 20, case=case))
    store.write(tmp_path / "matmul_bf16.timings.csv", pd.DataFrame(rows, columns=store.TABLES["timings"]))
    text = rendered(tmp_path)
    assert f"| case | best baseline | {title} |" in text
    dashes = " | ".join("–" for _ in others)
    assert f"| 1024x1024x1024-bf16-b.col | 42.9 TFLOP/s cublaslt | 2.000 × [2.000, 2.000] FAST | {dashes} |" in text
    assert f"| 3333x5555x7777-bf16 | 5,760 TFLOP/s cublaslt | 5.000 × [5.000, 5.000] FAST | {dashes} |" in text
    assert "| 64x4096x4096-bf16-b.col | – |" in text
    assert "| 4096x4096x4096-fp16 |" not in text  # but on the scoreboard
    # The geometric mean of a half and two: that of the shape which is no multiple of 8 is not in it.
    aligned = [case for case in op.timed_cases if case.dtype == "bf16" and not any(n % 8 for n in case.shape)]
    lowest = "the lowest 0.500 × at 1024x1024x1024-bf16"
    assert f"- CUDA {first.step}: 1.000 × over 2 of {len(aligned)}, {lowest}\n" in text
    assert all(f" {name.step}: –\n" in text for name in others)


def under_conditions(folder: Path) -> None:
    """A product: sustained 200 against 190 µs at 1,590 MHz, rested 180 each at 1,980, in a chain 205 and 210."""
    op, case = OPS["matmul_bf16"], OPS["matmul_bf16"].profile_case
    last = op.steps_of("cuda")[-1].name
    times = {
        "fast": (200.0, 190.0, 20, "1590"),
        "rested": (180.0, 180.0, 10, "1980"),
        "chain": (205.0, 210.0, 10, "1620"),
    }
    chip = {"power_w": "700", "temperature_c": "58", "throttle": "none"}
    rows = [
        timing(*cell, [time] * rounds, case=case.slug) | {"contest": contest, "sm_clock_mhz": clock} | chip
        for contest, (theirs, ours, rounds, clock) in times.items()
        for cell, time in ((("cublaslt", ""), theirs), (("cuda", last), ours))
    ]
    rows.append(timing("torch", "", [210.0] * 20, case=case.slug))
    store.write(folder / "matmul_bf16.timings.csv", pd.DataFrame(rows, columns=store.TABLES["timings"]))


MARKED = "".join(
    f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n" for name in ("sampled", "results", "twins", "conditions")
)
CONDITIONS = (
    "| matmul_bf16 4096x4096x4096-bf16 | sustained | 1,590 MHz, 700 W, 58 °C, throttle none | 200 cublaslt | 190 † | "
    "1.053 × [1.053, 1.053] FAST | – | – |",
    "|  | rested | 1,980 MHz, 700 W, 58 °C, throttle none | 180 cublaslt | 180 † | 1.000 × [1.000, 1.000] SAME | "
    "– | – |",
    "|  | in a chain | 1,620 MHz, 700 W, 58 °C, throttle none | 205 cublaslt | 210 † | 0.976 × [0.976, 0.976] SLOW | "
    "– | – |",
)


def test_products_are_told_under_every_condition(tmp_path: Path) -> None:
    under_conditions(tmp_path)
    results = [Results(op, tmp_path, None) for op in OPS.values()]
    page, log_text = documents.results_page(MARKED, tmp_path, results), rendered(tmp_path)
    for text in (page, log_text):
        assert "\n".join(CONDITIONS) in text
        assert write.STALE_NOTE in text
    assert "*rested*, each sample begins when the SM clock is back at its maximum" in log_text
    table = store.read_table(tmp_path, "matmul_bf16", "timings")
    sustained = table[table["contest"] == "fast"]
    store.write(tmp_path / "matmul_bf16.timings.csv", sustained)
    results = [Results(op, tmp_path, None) for op in OPS.values()]
    assert "Rested and in a chain, nothing has been recorded yet." in documents.results_page(MARKED, tmp_path, results)
    assert "rested" not in rendered(tmp_path)


def test_the_front_page_has_a_product_sustained_and_rested(tmp_path: Path) -> None:
    under_conditions(tmp_path)
    (header, _, row) = front.parts(tmp_path, [Results(OPS["matmul_bf16"], tmp_path, None)])["products"]
    assert header == "| product | against | CUDA, sustained | CUDA, rested | Triton, sustained | Triton, rested |"
    row = row.replace("\N{NO-BREAK SPACE}", " ")
    rates = (f"{2 * 4096**3 / us / 1e6:.0f} TFLOP/s" for us in (190, 180))
    sustained, rested = (
        f"{rate}<br>{told}" for rate, told in zip(rates, ("1.053 × FAST", "1.000 × SAME"), strict=True)
    )
    assert row == f"| matmul_bf16 4096x4096x4096-bf16 | cublaslt | {sustained} | {rested} | – | – |"


def test_the_front_page_tells_the_limit_of_a_step_that_only_hands_on() -> None:
    """A last step that only says which sizes go where is profiled nowhere."""
    op = OPS["layer_norm"]
    last = op.step(op.behind["cuda"][0])
    steps = (dataclasses.replace(step, profile_case={"cuda": None}) if step is last else step for step in op.steps)
    handing = dataclasses.replace(op, steps=tuple(steps))
    assert handing.profile_case_of(handing.step(last.name), "cuda") is None
    folder = store.DATA / store.REFERENCE_GPU
    results = [each for each in load(store.REFERENCE_GPU, folder) if each.op.name != op.name]
    rows = front.parts(folder, [*results, Results(handing, folder, None)])["functions"]
    assert [row.split(" | ")[-1][:13] for row in rows if row.startswith("| `layer_norm` ")] == ["device memory"]


def test_a_language_without_a_step_has_a_dash_under_every_condition(tmp_path: Path) -> None:
    under_conditions(tmp_path)
    op = OPS["matmul_bf16"]
    one_sided = dataclasses.replace(op, steps=tuple(step for step in op.steps if "cuda" in step.backends))
    one_sided = dataclasses.replace(
        one_sided, steps=tuple(dataclasses.replace(step, no_triton="none") for step in one_sided.steps)
    )
    assert "\n".join(CONDITIONS) in "\n".join(scoreboard.by_condition([Results(one_sided, tmp_path, None)]))


def test_a_baseline_that_was_never_timed_is_said_to_be(folder: Path) -> None:
    results = Results(OP, folder, None)
    assert results.new == ["compile"]
    assert "\n- compile: not timed yet; the best baseline is that of the others.\n" in rendered(folder)
    rows = store.read_table(folder, "vector_add", "timings")
    skipped = pd.DataFrame([timing("compile", "", [], status="skipped: no")], columns=store.TABLES["timings"])
    store.write(folder / "vector_add.timings.csv", pd.concat([rows, skipped]))
    assert "not timed yet" not in rendered(folder)


def test_no_other_condition_is_taken_for_a_sustained_time(tmp_path: Path) -> None:
    under_conditions(tmp_path)
    op, case = OPS["matmul_bf16"], OPS["matmul_bf16"].profile_case
    results = Results(op, tmp_path, None)
    ours, theirs = Name("cuda", op.steps_of("cuda")[-1].name), Name("cublaslt")
    assert results.time_us(case, ours) == 190
    assert [results.time_us(case, ours, each) for each in ("sustained", "rested", "chain")] == [190, 180, 210]
    ratios = [results.ratio(case, ours, theirs, each) for each in ("sustained", "rested", "chain")]
    assert [each and each.verdict for each in ratios] == ["FAST", "SAME", "SLOW"]
    assert results.ratio(case, ours, theirs) == ratios[0]
    assert results.ratio(case, ours, Name("torch"), "rested") is None  # which was not timed rested
    assert results.best_baseline(case) == theirs
    assert results.sensors(case) == "1,590 MHz, 700 W, 58 °C, throttle none"
    table = store.read_table(tmp_path, op.name, "timings")
    store.write(tmp_path / f"{op.name}.timings.csv", table.iloc[::-1])  # in whatever order they lie
    again = Results(op, tmp_path, None)
    assert again.time_us(case, ours) == 190 and again.sensors(case).startswith("1,590 MHz")
    store.write(tmp_path / f"{op.name}.timings.csv", table[table["contest"] != "fast"])
    assert Results(op, tmp_path, None).time_us(case, ours) is None


def test_cycles_are_asked_about_sustained_times_alone(tmp_path: Path) -> None:
    under_conditions(tmp_path)
    op, case = OPS["matmul_bf16"], OPS["matmul_bf16"].profile_case
    ours, theirs = Name("cuda", op.steps_of("cuda")[-1].name), Name("cublaslt")
    rows = [
        {"case": case.slug, "backend": name.backend, "step": name.step, "cycles": " ".join(["100"] * 10)}
        | {"code": "", "run": "r1"}
        for name in (ours, theirs)
    ]
    store.write(tmp_path / f"{op.name}.cycles.csv", pd.DataFrame(rows, columns=store.TABLES["cycles"]))
    results = Results(op, tmp_path, None)
    standings = [results.standing(case, ours, theirs, each) for each in ("sustained", "rested", "chain")]
    assert standings == ["AMBIGUOUS", "SAME", "SLOW"]


def test_a_verdict_that_cycles_do_not_confirm_is_ambiguous(folder: Path) -> None:
    assert "1.200 × [1.192, 1.208] FAST" in rendered(folder)

    def cycles(backend: str, step: str, count: int) -> dict[str, str]:
        cell = {"case": CASE.slug, "backend": backend, "step": step}
        return cell | {"cycles": " ".join([str(count)] * 10), "code": "", "run": "r1"}

    for ours, verdict in ((80, "FAST"), (100, "AMBIGUOUS"), (120, "AMBIGUOUS")):
        rows = [cycles("torch", "", 100), cycles("cuda", "v06_bulk_tile", ours)]
        store.write(folder / "vector_add.cycles.csv", pd.DataFrame(rows, columns=store.TABLES["cycles"]))
        assert f"1.200 × [1.192, 1.208] {verdict}" in rendered(folder)


def test_counters_of_another_run_are_not_shown_beside_new_times(folder: Path) -> None:
    table = store.read_table(folder, "vector_add", "timings")
    store.write(folder / "vector_add.timings.csv", table.assign(run="r2"))
    assert Results(OP, folder, None).quantities(Name("cuda", "v01_scalar"), CASE)["dram_share"] is None


def test_quarantined_cells_say_why(folder: Path) -> None:
    row = dict.fromkeys(store.TABLES["quarantine"], "") | {
        "case": CASE.slug,
        "backend": "cuda",
        "step": "v06_bulk_tile",
        "reason": "a share of 120 %",
        "run": "r1",
    }
    table = pd.DataFrame([row], columns=store.TABLES["quarantine"])
    store.write(folder / "vector_add.quarantine.csv", table)
    assert "Counters quarantined: a share of 120 %." in rendered(folder)


def test_without_counters_the_log_tells_what_proton_saw(folder: Path) -> None:
    row = dict.fromkeys(store.TABLES["proton"], "") | {
        "case": CASE.slug,
        "backend": "cuda",
        "step": "v06_bulk_tile",
        "kernel": "the_kernel",
        "count": "10",
        "time_ns": "2500000",
        "bytes": str(10 * OP.bytes(CASE)),
        "flops": "0",
        "run": "r1",
    }
    store.write(folder / "vector_add.proton.csv", pd.DataFrame([row], columns=store.TABLES["proton"]))
    text = rendered(folder)
    assert "the_kernel 250 µs a call" in text
    assert "counters were not collected" in text


def test_entries_are_short(folder: Path) -> None:
    pages = logs.pages(folder, [Results(op, folder, None) for op in OPS.values()])
    entries = [entry for page in pages.values() for entry in page.split("\n### ")[1:]]
    assert len(entries) == sum(len(op.steps) for op in OPS.values())
    assert max(len(entry.strip().splitlines()) for entry in entries) <= 25


def test_log_tells_error_and_extra_memory(folder: Path) -> None:
    text = rendered(folder)
    assert "| torch | 2e-07 · 1 · 4,096 |  |  |" in text
    assert "| v06_bulk_tile |  | 3e-07 · 1.5 · 4,096 | wrong |" in text
    assert "| v03_vectorized |  | – | – |" in text


def test_a_rate_above_its_ceiling_is_told_as_it_is(folder: Path) -> None:
    """The ceiling of fp32 products is that of the FMA pipes, which tensor cores pass."""
    ceilings = Ceilings("H100", 1_000, 1_000, CASE_GBPS / 2, 1_000, 1_000, 1, 1, 132)
    share = Results(OP, folder, ceilings).quantities(Name("cuda", "v01_scalar"), CASE)["ceiling_share"]
    assert share == pytest.approx(200 * 300 / 330)
    assert f"330 · {write.number(share)}" in rendered(folder, ceilings)


def test_rendering_is_a_fixed_point(folder: Path) -> None:
    results = [Results(op, folder, None) for op in OPS.values()]
    for page, names in (
        (documents.results_page, ("sampled", "results", "twins", "conditions")),
        (documents.front_page, ("functions", "products", "step")),
    ):
        tables = [f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n" for name in names]
        once = page("".join(["before\n", *tables, "after\n"]), folder, results)
        assert page(once, folder, results) == once
        assert once.startswith("before\n")
        assert once.endswith("after\n")
        assert "old" not in once
        for missing, name in enumerate(names):
            with pytest.raises(ValueError, match=f"has 0 pairs of markers {name}, must have 1: <!-- {name}:begin -->"):
                page("".join(tables[:missing]), folder, results)


PAGE = "".join(
    f"prose on {name}\n<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n"
    for name in ("limit", *(f"counters:{step.name}" for step in OP.steps))
)


def test_pages_tell_what_was_measured_and_what_was_not(folder: Path) -> None:
    results = Results(OP, folder, None)
    text = ladder_page.render(PAGE, results)
    assert ladder_page.render(text, results) == text
    assert "old" not in text
    assert all(f"prose on counters:{step.name}\n" in text for step in OP.steps)
    parts = {step.name: text.partition(f"counters:{step.name}:begin")[2].partition(":end")[0] for step in OP.steps}
    assert "| time, µs | 330 → 300 (−9.1 %) |" in parts["v02_grid_stride"]
    measure = "run `python profiling/ncu_report.py --op vector_add` on a machine with the GPU"
    assert f"Triton: *not measured* yet: {measure}." in parts["v02_grid_stride"]
    assert f"*Not measured* yet: {measure}.\n" in parts["v03_vectorized"]
    assert "Triton: wrong: element 3 is nan." in parts["v06_bulk_tile"]


def test_a_page_that_lacks_a_step_is_found(folder: Path) -> None:
    assert ladder_page.gaps(PAGE, OP) == []
    gone = PAGE.replace("counters:v03_vectorized", "counters:v03_gone")
    assert [line.split()[0] for line in ladder_page.gaps(gone, OP)] == ["docs/vector_add.md"] * 2
    missing, surplus = ladder_page.gaps(gone, OP)
    assert "write a section on v03_vectorized" in missing and "<!-- counters:v03_vectorized:end -->" in missing
    assert "no step has this name, take <!-- counters:v03_gone:begin -->" in surplus


def test_changed_source_makes_rows_stale(folder: Path) -> None:
    from kernel_twins.report.rows.identity import source_digest

    table = store.read_table(folder, "vector_add", "timings")
    fresh = source_digest("vector_add", "v01_scalar", "cuda")
    table["code"] = [f"{fresh}:0" if step == "v01_scalar" else "00000000:0" for step in table["step"]]
    store.write(folder / "vector_add.timings.csv", table)
    results = Results(OP, folder, None)
    assert not results.stale(Name("cuda", "v01_scalar"))
    assert results.stale(Name("cuda", "v02_grid_stride"))


def test_the_scoreboard_marks_what_changed_since_it_was_measured(tmp_path: Path) -> None:
    from kernel_twins.report.rows.identity import source_digest

    step, case = OP.steps_of("cuda")[-1].name, OP.profile_case
    for code, marked in ((source_digest("vector_add", step, "cuda"), False), ("00000000", True)):
        rows = [timing("torch", "", [90.0] * 20), timing("cuda", step, [60.0] * 20) | {"code": f"{code}:0"}]
        store.write(tmp_path / "vector_add.timings.csv", pd.DataFrame(rows, columns=store.TABLES["timings"]))
        lines = scoreboard.scoreboard((Results(OP, tmp_path, None), case) for case in OP.bench_cases)
        (line,) = (each for each in lines if each.startswith(f"| vector_add {case.slug} "))
        assert ("GB/s † |" in line) is marked
        assert ("†: the step's code changed since it was measured." in lines) is marked


def test_the_source_digest_is_the_same_on_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_twins.report.rows import identity

    # From Python 3.12 on the tokenizer takes f-strings apart; this digest is 3.11's.
    file = tmp_path / "step.py"
    file.write_text('x = f"{a!r:>{w}} and {f\'{b}\'}" "c"\ny = rf"""q {\n1}"""\n')
    monkeypatch.setattr(identity, "step_file", lambda *_: file)
    assert identity.source_digest("op", "step", "triton") == "4e7dadc1"


def test_a_comment_does_not_change_the_source_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_twins.report.rows import identity

    texts = {
        "cuda": ['int x = 1;  // one\n/* two */ const char* s = "// kept";\n', 'int x = 1; const char* s = "// kept";'],
        "triton": [
            '"""Doc."""\nx = 1  # one\n\n\ndef f():\n    """Doc."""\n    return "kept"\n',
            'x = 1\ndef f():\n  return "kept"\n',
        ],
    }
    for backend, (commented, bare) in texts.items():
        file = tmp_path / backend
        monkeypatch.setattr(identity, "step_file", lambda *_, file=file: file)
        file.write_text(commented)
        first = identity.source_digest("op", "step", backend)
        file.write_text(bare)
        assert identity.source_digest("op", "step", backend) == first
        file.write_text(bare.replace("1", "2"))
        assert identity.source_digest("op", "step", backend) != first


@pytest.mark.parametrize(
    ("backend", "uses"),
    [
        ("cuda", "void softmax_v01_first(const Args&);\n"),
        ("triton", "from kernel_twins._triton.softmax.softmax.v01_first import f\n"),
        ("triton", "def g():\n    from kernel_twins._triton.softmax.softmax.v01_first import f\n"),
        ("triton", "from kernel_twins._triton.softmax.softmax import v01_first\n"),
        ("triton", "from kernel_twins._triton.softmax.softmax import (\n    other as o,\n    v01_first as f,\n)\n"),
    ],
)
def test_the_source_digest_covers_the_steps_that_code_is_taken_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, uses: str
) -> None:
    """Directly or through another, and back; without any it is what it was before others were covered."""
    from kernel_twins.report.rows import identity

    suffix = "cu" if backend == "cuda" else "py"
    first, second, third = (tmp_path / f"{step}.{suffix}" for step in ("v01_first", "v02_second", "v03_third"))
    monkeypatch.setattr(identity, "step_file", lambda op, step, backend: tmp_path / f"{step}.{suffix}")
    first.write_text("x = 1\n")
    second.write_text(uses)
    third.write_text(uses.replace("v01_first", "v02_second"))
    alone, through = (identity.source_digest("op", step, backend) for step in ("v01_first", "v03_third"))
    assert "+" not in alone
    first.write_text("x = 2\n")
    changed = identity.source_digest("op", "v03_third", backend)
    assert changed != through
    assert changed.partition("+")[0] == through.partition("+")[0]
    first.write_text(uses.replace("v01_first", "v03_third"))
    assert "+" in identity.source_digest("op", "v01_first", backend)


@pytest.mark.parametrize(
    ("backend", "texts", "same"),
    [
        (
            "cuda",
            ('#include "../common.cuh"\nint x;', '#include "lib/common.cuh"\n#include "lib/step.h"\nint x;'),
            True,
        ),
        ("cuda", ("#include <cmath>\nint x;", "#include <mma.h>\nint x;"), False),
        ("cuda", ('const char* s = "#include";', 'const char* s = "#define";'), False),
        (
            "triton",
            (
                "import triton\nfrom kernel_twins._triton.device import sms\nfrom kernel_twins.spec import A, B\nx = 1",
                "import triton\nfrom kernel_twins.spec import (\n    A,\n    B,\n)\n"
                "from kernel_twins._triton.lib.device import sms  # of the GPU\nx = 1",
            ),
            True,
        ),
        ("triton", ("from kernel_twins.a import f", "from kernel_twins.a import g"), False),
        ("triton", ("from kernel_twins.a import f", "from kernel_twins.a import g as f"), False),
        ("triton", ("from triton.a import f", "from triton.b import f"), False),
        (
            "triton",
            ("def f():\n  from kernel_twins.a import g\n  g()", "def f():\n  from kernel_twins.b import g\n  g()"),
            True,
        ),
        ("triton", ("@triton.jit\ndef f(x, N): x", "@triton.jit\ndef f(x: Tensor, N: Any): x"), True),
        ("triton", ("@triton.jit\ndef f(x, N): x", "@triton.jit\ndef f(x, N: tl.constexpr): x"), False),
        ("triton", ("@triton.jit\ndef f(x, N): x", "@triton.jit\ndef f(x, N: tl.int64): x"), False),
        ("triton", ("def f(x, N): x", "def f(x: Tensor, N): x"), False),
    ],
)
def test_a_move_changes_no_source_digest_and_a_change_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, texts: tuple[str, str], same: bool
) -> None:
    from kernel_twins.report.rows import identity

    digests = []
    for folder, text in zip(("here", "there/deep"), texts, strict=True):
        file = tmp_path / folder / "v01_step"
        file.parent.mkdir(parents=True)
        file.write_text(text + "\n")
        monkeypatch.setattr(identity, "step_file", lambda *_, file=file: file)
        digests.append(identity.source_digest("op", "step", backend))
    assert (digests[0] == digests[1]) is same


def test_the_order_of_other_steps_is_that_of_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_twins.report.rows import identity

    digests = []
    for one, two in (("a", "b"), ("z/a", "b")):  # by their paths they would change places
        files = {"linear": tmp_path / one / "a", "softmax": tmp_path / two / "b", "last": tmp_path / two / "c"}
        for op, folder in files.items():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "v01_step.cu").write_text(
                "softmax_v01_step(); linear_v01_step();" if op == "last" else f"int {op};"
            )
        monkeypatch.setattr(identity, "step_file", lambda op, step, backend, files=files: files[op] / "v01_step.cu")
        digests.append(identity.source_digest("last", "v01_step", "cuda"))
    assert digests[0] == digests[1]


def test_every_recorded_code_of_the_first_digest_was_translated() -> None:
    """None is left in the tables; the committed pairs say what each became."""
    pairs = store.read(store.DATA / "rekeyed.csv", ["name", "step", "backend", "before", "after"])
    changed = pairs[pairs["before"] != pairs["after"]]
    before = {(row.name, row.step, row.backend): row.before for row in changed.itertuples(index=False)}
    for op in OPS:
        for row in store.read_table(store.DATA / store.REFERENCE_GPU, op, "timings").itertuples():
            assert row.code.partition(":")[0] != before.get((op, row.step, row.backend))


def test_what_is_moved_out_of_a_loop_changes_the_source_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_twins.report.rows import identity

    file = tmp_path / "step.py"
    monkeypatch.setattr(identity, "step_file", lambda *_: file)
    digests = set()
    for indentation in ("    ", ""):
        file.write_text(f"for i in range(2):\n    a += 1\n{indentation}b += 1\n")
        digests.add(identity.source_digest("op", "step", "triton"))
    assert len(digests) == 2


def test_a_table_of_another_tool_is_refused(tmp_path: Path) -> None:
    store.write(tmp_path / "vector_add.timings.csv", pd.DataFrame({"a": ["1"]}))
    with pytest.raises(InvalidDataError, match="case"):
        store.read_table(tmp_path, "vector_add", "timings")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (1234.5, "1,234"), (12.345, "12.3"), (0.01234, "0.0123"), (4.0, "4"), (99.96, "100")],
)
def test_numbers_are_written_short(value: float | None, text: str) -> None:
    assert write.number(value) == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [(1, 1, "="), (0, 3, "new"), (100, 95, "−5.0 %"), (4, 16, "×4"), (100, 5, "×0.05"), (None, 1, "")],
)
def test_changes_are_written_short(before: float | None, after: float | None, text: str) -> None:
    assert write.change(before, after) == text


def test_the_script_does_not_shadow_nvidias_reader() -> None:
    """The script's own name is that of NVIDIA's module, which must stay importable from inside it."""
    code = (
        "import runpy, sys; sys.argv = ['ncu_report.py', 'check'];"
        "sys.path.insert(0, 'profiling');"
        "module = runpy.run_path('profiling/ncu_report.py', run_name='not_main');"
        "import importlib.util; spec = importlib.util.find_spec('ncu_report');"
        "assert spec is None or 'profiling' not in spec.origin, spec"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=store.ROOT)


def test_a_run_that_will_lack_a_recorded_librarys_times_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = OPS["softmax"]
    rows = [timing("liger", "", [50.0]), timing("quack", "", [], status="skipped: no")]
    store.write(store.path(tmp_path, op.name, "timings"), pd.DataFrame(rows, columns=store.TABLES["timings"]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = plan.missed([op], tmp_path)
    assert told.startswith("Liger-Kernel not installed here") and "`pip install liger-kernel` first" in told
    assert plan.missed([OPS["vector_add"]], tmp_path) == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert plan.missed([op], tmp_path) == ""

"""What `ncu_report.py check` fails on, and what it only tells."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("matplotlib")

from kernel_twins import OPS
from kernel_twins.report import cli
from kernel_twins.report.meaning import static
from kernel_twins.report.pages import checks, documents
from kernel_twins.report.rows import store
from kernel_twins.report.sweeps import stages
from kernel_twins.spec import BACKENDS

OP = OPS["vector_add"]
CASE = OP.bench_cases[0]
LOSER = "vector_add/v03_vectorized/cuda"


def timing(backend: str, step: str, time: float) -> dict[str, str]:
    row = dict.fromkeys(store.TABLES["timings"], "")
    times = " ".join([str(time)] * 20)
    cell = {"case": CASE.slug, "backend": backend, "step": step, "status": "ok", "contest": "fast", "times_us": times}
    return row | cell | {"run": "r2", "code": "00000000:0" if step else ""}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A step whose ratio to torch was 1.0 and is 0.9 now, in documents that agree with their data."""
    timings = [timing("torch", "", 90.0), timing("cuda", "v03_vectorized", 100.0)]
    previous = {
        "case": CASE.slug,
        "backend": "cuda",
        "step": "v03_vectorized",
        "baseline": "torch",
        "ratio": "1.0000",
        "run": "r1",
        "reason": "",
    }
    store.write(tmp_path / "vector_add.timings.csv", pd.DataFrame(timings, columns=store.TABLES["timings"]))
    store.write(tmp_path / "vector_add.previous.csv", pd.DataFrame([previous], columns=store.TABLES["previous"]))
    monkeypatch.setattr(checks, "FOLDER", tmp_path)
    monkeypatch.setattr(documents, "disagreements", lambda folder, results: [])
    monkeypatch.setattr(static, "differences", lambda thorough: [])
    monkeypatch.setattr(static, "not_compared", str)
    return tmp_path


def test_a_file_without_a_step_is_told_before_what_hangs_on_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the public functions, whose code it counts for."""
    root = folder / "clone"
    for op in OPS.values():
        for backend in BACKENDS:
            for step in op.steps_of(backend):
                (root / op.file(step.name, backend)).parent.mkdir(parents=True, exist_ok=True)
                (root / op.file(step.name, backend)).touch()
    monkeypatch.setattr(store, "ROOT", root)
    stray, gone = OPS["softmax"].file("v99_idea", "cuda"), OPS["softmax"].file("v02_online", "triton")
    (root / stray).touch()
    (root / gone).unlink()
    assert cli.main(["check"], "") == 1
    first, second = checks.run(release=False, audit=False).failures
    assert first.startswith(f"{stray} has no step in the spec: add a Step to kernel_twins/ops/softmax/softmax.py")
    assert second.startswith(f"{gone} is missing, the spec has the step: ") and "no_triton" in second


def test_a_step_that_lost_fails(folder: Path) -> None:
    (failure,) = checks.run(release=False, audit=False).failures
    assert failure.startswith(f"{LOSER} at {CASE.slug}: 0.900 × torch, was 1.000 ×")
    assert cli.main(["check"], "") == 1


def test_a_step_that_turned_wrong_fails(folder: Path) -> None:
    table = store.read_table(folder, "vector_add", "timings")
    table.loc[table["step"] != "", ["status", "times_us"]] = ["wrong: element 3 is nan", ""]
    store.write(folder / "vector_add.timings.csv", table)
    failures = checks.run(release=False, audit=False).failures
    assert f"{LOSER[:-5]}/cuda at {CASE.slug}: wrong: element 3 is nan" in failures
    assert any(line.startswith(f"{LOSER} at {CASE.slug}: wrong: element 3 is nan, was 1.000 ×") for line in failures)


@pytest.mark.parametrize("ratio", ["0.9400", "0.8000"])
def test_a_loss_of_less_than_a_twentieth_is_none(folder: Path, ratio: str) -> None:
    table = store.read_table(folder, "vector_add", "previous")
    store.write(folder / "vector_add.previous.csv", table.assign(ratio=ratio))
    assert checks.run(release=False, audit=False).failures == []


FOREIGN = [
    "cross_entropy/v04_rows_per_block",
    "cross_entropy/v05_cluster",
    "cross_entropy_backward/v03_rows_per_block",
    "layer_norm/v05_cluster",
    "softmax/v07_cluster",
    "softmax/v10_cluster_registers",
    "softmax_backward/v04_cluster",
]


def test_counters_of_another_steps_kernel_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were recorded once, when all steps were profiled at one case, which some left to others."""
    recorded = pd.read_csv(Path(__file__).parents[1] / "fixtures" / "kernels.csv", dtype=str)
    for op, rows in recorded.groupby("op"):
        store.write(store.path(tmp_path, op, "counters"), rows[store.TABLES["counters"]])
    monkeypatch.setattr(checks, "FOLDER", tmp_path)
    monkeypatch.setattr(documents, "disagreements", lambda folder, results: [])
    monkeypatch.setattr(static, "differences", lambda thorough: [])
    monkeypatch.setattr(static, "not_compared", str)
    told = checks.run(release=False, audit=False).failures
    assert sorted(line.partition("/cuda at ")[0] for line in told) == FOREIGN
    assert (
        "layer_norm/v05_cluster/cuda at 65536x4096-bf16: no launch is of the step's own kernel, but of "
        "layer_norm_v04_rows_per_block_kernel: give" in " ".join(told)
    )
    assert cli.main(["check"], "") == 1


def test_a_step_that_is_yet_to_be_profiled_is_told_and_keeps_a_release_back(folder: Path) -> None:
    op = OPS["softmax"]
    case = op.profile_case_of(op.step("v07_cluster"), "cuda")
    assert case
    row = timing("cuda", "v07_cluster", 90.0) | {"case": case.slug}
    store.write(folder / "softmax.timings.csv", pd.DataFrame([row], columns=store.TABLES["timings"]))
    measure = "run `python profiling/ncu_report.py --op softmax` on a machine with the GPU"
    line = f"softmax/v07_cluster/cuda was not profiled at {case.slug}: {measure}"
    assert line in checks.run(release=False, audit=False).warnings
    assert line in checks.run(release=True, audit=False).failures


def test_stages_of_other_code_are_told_and_keep_a_release_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stages").mkdir()
    name = "vector_add.v01_scalar.triton.txt"
    recorded = (stages.FOLDER / name).read_text()
    (tmp_path / "stages" / name).write_text(re.sub(r"^# code: \w+", "# code: 0", recorded, flags=re.MULTILINE))
    monkeypatch.setattr(stages, "FOLDER", tmp_path / "stages")
    remedy = "run `python profiling/ncu_report.py sweeps stages vector_add/v01_scalar`"
    line = f"vector_add/v01_scalar/triton changed since its stages were recorded: {remedy}"
    assert line in checks.run(release=False, audit=False).warnings
    assert line in checks.run(release=True, audit=False).failures


def test_a_loss_can_be_accepted_with_its_reason(folder: Path) -> None:
    assert cli.main(["check", "--accept", "clears its output first"], "") == 0
    found = checks.run(release=False, audit=False)
    assert found.failures == []
    assert any("accepted: clears its output first" in line for line in found.warnings)


def test_a_later_reason_does_not_replace_the_one_that_was_given(folder: Path) -> None:
    checks.accept("clears its output first")
    checks.accept("another one's reason")
    (line,) = (line for line in checks.run(release=False, audit=False).warnings if "accepted" in line)
    assert "accepted: clears its output first" in line


def test_stale_and_unfrozen_cells_fail_a_release_only(folder: Path) -> None:
    checks.accept("known")
    found = checks.run(release=False, audit=False)
    assert found.failures == []
    assert any(line.startswith(f"{LOSER} changed since it was measured") for line in found.warnings)
    assert any(line.startswith(f"{LOSER} has predictions that are not frozen") for line in found.warnings)
    assert any(LOSER in line for line in checks.run(release=True, audit=False).failures)


def test_what_was_never_measured_fails_a_release_only(folder: Path) -> None:
    checks.accept("known")
    measure = "run `python profiling/ncu_report.py --op {}` on a machine with the GPU"
    for told in (
        f"reduction was never measured: {measure.format('reduction')}",
        f"vector_add/v04_streaming/triton was not measured yet: {measure.format('vector_add')}",
        f"vector_add/v03_vectorized/cuda was not timed at {OP.bench_cases[1].slug} yet: {measure.format('vector_add')}",
    ):
        assert told in checks.run(release=False, audit=False).warnings
        assert told in checks.run(release=True, audit=False).failures


def test_a_file_that_no_spec_has_fails_with_the_remedy_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with what hangs on it, such as functions that seem to have changed."""
    files = [op.file(step.name, backend) for op in OPS.values() for step in op.steps for backend in step.backends]
    surplus = OP.file("v99_surplus", "cuda")
    for file in (tmp_path / "tree" / name for name in (*files, surplus)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.setattr(store, "ROOT", tmp_path / "tree")
    spec = "kernel_twins/ops/elementwise/vector_add.py"
    told = f"{surplus} has no step in the spec: add a Step to {spec}, or delete the file"
    assert checks.run(release=False, audit=False) == checks.Findings(failures=[told])


def test_that_nothing_was_compared_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.accept("known")
    monkeypatch.setattr(static, "not_compared", lambda: "there is no built extension")
    assert any("no built extension" in line for line in checks.run(release=False, audit=False).warnings)
    assert any("no built extension" in line for line in checks.run(release=True, audit=False).failures)


def test_documents_and_binaries_that_disagree_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.accept("known")
    monkeypatch.setattr(
        documents, "disagreements", lambda folder, results: ["KERNEL_LOG.md is not what the data make it"]
    )
    monkeypatch.setattr(static, "differences", lambda thorough: ["31 registers, were 30"])
    failures = checks.run(release=False, audit=False).failures
    assert any("KERNEL_LOG.md" in line for line in failures)
    assert any("31 registers" in line for line in failures)


def test_a_table_that_was_cut_short_is_invalid_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "vector_add.timings.csv"
    file.write_text(file.read_text()[:-40])
    assert cli.main(["check"], "") == 4
    assert "vector_add.timings.csv" in capsys.readouterr().err

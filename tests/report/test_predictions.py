"""Predictions: frozen before measurements, marked for good, judged against what came, and audited by git's history."""

from __future__ import annotations

import dataclasses
import datetime
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

from kernel_twins import OPS
from kernel_twins.report.compare import history
from kernel_twins.report.meaning import retired
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.judgement import Judgement, explained, judge, score
from kernel_twins.report.meaning.predictions import (
    Cell,
    Marks,
    canonical,
    digest,
    freeze,
    note_measured,
    read_frozen,
    read_measured,
    violations,
)
from kernel_twins.report.meaning.retired import withdrawn
from kernel_twins.report.meaning.verdict import Ratio
from kernel_twins.report.ncu.extract import counter_rows
from kernel_twins.report.ncu.reader import Launch
from kernel_twins.report.pages import ladder_page
from kernel_twins.report.rows import base, store
from kernel_twins.report.rows.metrics import CYCLES, DURATION, METRICS, stall_metric
from kernel_twins.spec import Backend, Case, Name, Op, Prediction
from tests import logs

OP = OPS["vector_add"]
TIME = Prediction("time", "<=", 0.98, relative=True)
OTHER = next(case for case in OP.bench_cases if case != OP.profile_case)
ELSEWHERE = dataclasses.replace(TIME, case=OTHER)
EARLY, LATE = (datetime.datetime(2026, 1, day, tzinfo=datetime.UTC) for day in (1, 2))


def with_predictions(*predictions: Prediction, step: str = "v03_vectorized") -> Op:
    """Vector add with one step that predicts, and nothing else."""
    chosen = dataclasses.replace(OP.step(step), predictions=predictions)
    return dataclasses.replace(OP, steps=(chosen,))


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        (TIME, "time <= 0.98 x"),
        (Prediction("sectors_per_load", "==", 16, tolerance=0.01), "sectors_per_load = 16 ± 1 %"),
        (Prediction("dram_share", ">=", 80), "dram_share >= 80 %"),
        (Prediction("time", "==", 1.0, relative=True, tolerance=0.015), "time = 1 x ± 1.5 %"),
        (ELSEWHERE, f"time <= 0.98 x at {OTHER.slug}"),
        (
            Prediction("time", "==", 1.0, relative=True, tolerance=0.03, case=Case.of(4_096, 65_536, dtype="bf16")),
            "time = 1 x ± 3 % at 4096x65536-bf16",
        ),
    ],
)
def test_a_prediction_has_one_spelling(prediction: Prediction, text: str) -> None:
    assert canonical(prediction) == text


def test_only_a_prediction_at_another_case_is_another_prediction(tmp_path: Path) -> None:
    cell = Cell("vector_add", "v03_vectorized", "cuda")
    assert digest(cell, canonical(TIME)) == "05e46702c5f0"  # as it was before predictions could name a case
    freeze(tmp_path, [with_predictions(TIME)], EARLY)
    assert Marks(tmp_path).mark(cell.op, cell.step, "cuda", TIME) == "pre-registered"
    assert Marks(tmp_path).mark(cell.op, cell.step, "cuda", ELSEWHERE) == "not frozen"


def test_but_at_its_own_profile_case_nothing_but_the_time_can_be_predicted_of_a_step_elsewhere() -> None:
    step, share = OP.step("v03_vectorized"), Prediction("dram_share", ">=", 80, case=OTHER)
    dataclasses.replace(step, predictions=(share,), profile_case=dict.fromkeys(step.backends, OTHER))
    others: tuple[dict[Backend, Case | None], ...] = ({}, {"cuda": OTHER}, {"cuda": None, "triton": None})
    for profile_case in others:
        with pytest.raises(ValueError, match=f"quantity is 'dram_share'; at {OTHER.slug} it must be time"):
            dataclasses.replace(step, predictions=(share,), profile_case=profile_case)


def test_predictions_at_another_case_can_be_judged() -> None:
    """The specs': both the step and one before it are timed there."""
    for op in OPS.values():
        for step in op.steps:
            for each in (each for each in step.predictions if each.case):
                for backend in (backend for backend in step.backends if backend in each.backends):
                    told = f"{op.name} {step.name} {backend}: {canonical(each)}"
                    ladder = op.steps_of(backend)
                    assert each.case in op.timed_cases and op.times(step, each.case), told
                    assert not each.relative or any(
                        op.times(before, each.case) for before in ladder[: ladder.index(step)]
                    ), told


def test_frozen_before_the_first_measurement_is_pre_registered_and_after_it_is_not(tmp_path: Path) -> None:
    later = Prediction("dram_share", ">=", 88)
    assert Marks(tmp_path).mark("vector_add", "v03_vectorized", "cuda", TIME) == "not frozen"
    lines = freeze(tmp_path, [with_predictions(TIME)], EARLY)
    assert lines[0] == "vector_add v03_vectorized cuda: time <= 0.98 x (pre-registered)"
    assert len(lines) == 2  # a row for each language
    note_measured(tmp_path, "vector_add", [Name("cuda", "v03_vectorized"), Name("torch")], LATE, "run r1")
    freeze(tmp_path, [with_predictions(TIME, later)], LATE)
    marks = Marks(tmp_path)
    assert marks.mark("vector_add", "v03_vectorized", "cuda", TIME) == "pre-registered"
    assert marks.mark("vector_add", "v03_vectorized", "cuda", later) == "post hoc"
    assert marks.mark("vector_add", "v03_vectorized", "triton", later) == "pre-registered"
    assert marks.mark("vector_add", "v02_grid_stride", "cuda", TIME) == "not frozen"


def test_a_prediction_that_is_changed_is_a_new_one(tmp_path: Path) -> None:
    freeze(tmp_path, [with_predictions(TIME)], EARLY)
    note_measured(tmp_path, "vector_add", [Name("cuda", "v03_vectorized")], EARLY, "run r1")
    relaxed = Prediction("time", "<=", 1.02, relative=True)
    freeze(tmp_path, [with_predictions(relaxed)], LATE)
    assert Marks(tmp_path).mark("vector_add", "v03_vectorized", "cuda", relaxed) == "post hoc"
    # What was predicted at first stays in the table, and so does its mark when it comes back.
    assert Marks(tmp_path).mark("vector_add", "v03_vectorized", "cuda", TIME) == "pre-registered"
    assert freeze(tmp_path, [with_predictions(TIME)], LATE) == []


def test_measuring_again_changes_nothing(tmp_path: Path) -> None:
    name = [Name("cuda", "v03_vectorized")]
    note_measured(tmp_path, "vector_add", name, EARLY, "search for configurations")
    before = (tmp_path / "measured.csv").read_bytes()
    note_measured(tmp_path, "vector_add", name, LATE, "run r2")
    assert (tmp_path / "measured.csv").read_bytes() == before
    freeze(tmp_path, [with_predictions(TIME)], LATE)
    frozen = (tmp_path / "predictions.csv").read_bytes()
    note_measured(tmp_path, "vector_add", name, LATE, "run r3")
    freeze(tmp_path, [with_predictions(TIME)], LATE)
    assert (tmp_path / "predictions.csv").read_bytes() == frozen
    assert Marks(tmp_path).mark("vector_add", "v03_vectorized", "cuda", TIME) == "post hoc"


def test_baselines_are_not_noted(tmp_path: Path) -> None:
    note_measured(tmp_path, "vector_add", [Name("torch")], EARLY, "run r1")
    assert not (tmp_path / "measured.csv").exists()


def judged(prediction: Prediction, before: float | None, after: float | None, ratio: Ratio | None = None) -> str:
    quantity = prediction.quantity
    return judge(prediction, {quantity: before}, {quantity: after}, ratio).verdict


def relative(compare: str, value: float, quantity: str = "instructions", tolerance: float = 0.1) -> Prediction:
    return Prediction(quantity, compare, value, relative=True, tolerance=tolerance)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prediction", "after", "verdict"),
    [
        (relative("<=", 0.5), 50, "hit"),
        (relative("<=", 0.5), 51, "miss"),
        (relative("<=", 0.5), 101.1, "wrong direction"),
        (relative("<=", 0.5), 100.9, "miss"),  # within the noise of a counter
        (relative(">=", 2), 200, "hit"),
        (relative(">=", 2), 150, "miss"),
        (relative(">=", 2), 98, "wrong direction"),
        (relative("==", 0.5), 54.9, "hit"),
        (relative("==", 0.5), 110, "wrong direction"),
        (relative("==", 4), 370, "hit"),
        (relative("==", 4), 90, "wrong direction"),
        (relative("==", 1), 105, "hit"),
        (relative("==", 1), 120, "miss"),  # it was to stay: there is no direction to be wrong about
        (relative("<=", 1.5), 149, "hit"),
        (relative("<=", 1.5), 160, "miss"),  # a bound on a rise is no fall predicted
        (relative("<=", 1), 98.9, "hit"),
        (relative("<=", 1), 99.1, "miss"),
        (relative("<=", 1), 101.1, "wrong direction"),
        (relative(">=", 1), 101.1, "hit"),
        (relative(">=", 1), 100.9, "miss"),
        (relative(">=", 1), 98.9, "wrong direction"),
        (relative("<=", 1, "time"), 99.4, "hit"),
        (relative("<=", 1, "time"), 99.6, "miss"),
        (relative("<=", 0.05), 0, "hit"),
    ],
)
def test_relative_predictions_are_judged_on_after_over_before(
    prediction: Prediction, after: float, verdict: str
) -> None:
    assert judged(prediction, 100.0, after) == verdict


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Ratio(1.02, 1.01, 1.03), "hit"),
        (Ratio(1.02, 1.001, 1.04), "miss"),  # the medians differ by 2 %, the rounds do not bear it out
        (Ratio(0.98, 0.97, 0.99), "wrong direction"),
    ],
)
def test_a_direction_of_time_must_exceed_the_noise_of_the_paired_rounds(ratio: Ratio, verdict: str) -> None:
    assert judged(relative("<=", 1, "time"), 100.0, 98.0, ratio) == verdict


def test_time_is_judged_by_paired_rounds_where_there_are_some() -> None:
    judgement = judge(relative("<=", 0.98, "time"), {"time": 100.0}, {"time": 99.0}, Ratio(1.25, 1.2, 1.3))
    assert judgement.verdict == "hit" and judgement.actual == pytest.approx(0.8)
    assert judgement.by == "paired rounds, 0.8 [0.7692, 0.8333]"
    # Time's pairs say nothing of another quantity.
    assert judged(relative("<=", 0.5), 100.0, 100.0, Ratio(3, 2.9, 3.1)) == "miss"


@pytest.mark.parametrize(("value", "verdict"), [(80.0, "hit"), (79.9, "miss")])
def test_absolute_predictions_hit_or_miss(value: float, verdict: str) -> None:
    assert judged(Prediction("dram_share", ">=", 80), None, value) == verdict


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (100.0, None, "not measured"),
        (100.0, float("nan"), "not measured"),
        (None, 100.0, "the step before was not measured"),
        (0.0, 100.0, "it was 0 before, 100 after"),
    ],
)
def test_what_was_not_measured_is_not_judged(before: float | None, after: float | None, reason: str) -> None:
    judgement = judge(relative("<=", 0.5), {"instructions": before}, {"instructions": after})
    assert (judgement.verdict, judgement.by) == ("not judged", reason)
    assert judge(relative("<=", 0.5), {}, {}).verdict == "not judged"


@dataclasses.dataclass
class Measured:
    """Vector add whose v03 predicts the time at another case; v02 does not take that case, so v01 is the one before."""

    folder: Path

    @property
    def results(self) -> Results:
        first, second, third = (OP.step(name) for name in ("v01_scalar", "v02_grid_stride", "v03_vectorized"))
        second = dataclasses.replace(second, accepts=lambda case: "too short" if case == OTHER else "")
        third = dataclasses.replace(third, predictions=(TIME, ELSEWHERE))
        return Results(dataclasses.replace(OP, steps=(first, second, third)), self.folder, None)

    def time(self, case: Case, **times: float) -> None:
        table = store.read_table(self.folder, OP.name, "timings")
        for step, time in times.items():
            row = dict.fromkeys(store.TABLES["timings"], "") | {"case": case.slug, "backend": "cuda", "step": step}
            row |= {"status": "ok", "contest": "fast", "run": "r1"}
            # Every other round is slower, for all alike: only rounds that are paired tell what the ratio is.
            row["times_us"] = " ".join(str(time * (1 + round_ % 2)) for round_ in range(20))
            table = pd.concat([table, pd.DataFrame([row])], ignore_index=True)
        store.write(store.path(self.folder, OP.name, "timings"), table)

    def judged(self) -> list[Judgement]:
        results = self.results
        return results.judge(results.op.step("v03_vectorized"), "cuda")


@pytest.mark.parametrize(("time", "verdict"), [(90.0, "hit"), (99.0, "miss"), (110.0, "wrong direction")])
def test_time_at_another_case_is_judged_there(tmp_path: Path, time: float, verdict: str) -> None:
    measured = Measured(tmp_path)
    measured.time(OP.profile_case, v01_scalar=300.0, v02_grid_stride=200.0, v03_vectorized=100.0)
    measured.time(OTHER, v01_scalar=100.0, v03_vectorized=time)
    here, elsewhere = measured.judged()
    assert here.verdict == "hit" and here.actual == pytest.approx(0.5)
    assert elsewhere.verdict == verdict and elsewhere.actual == pytest.approx(time / 100)
    assert elsewhere.by.startswith("paired rounds")


def test_time_at_another_case_is_not_judged_where_it_is_not_measured(tmp_path: Path) -> None:
    measured = Measured(tmp_path)
    measured.time(OP.profile_case, v01_scalar=300.0, v02_grid_stride=200.0, v03_vectorized=100.0)
    assert (measured.judged()[1].verdict, measured.judged()[1].by) == ("not judged", "not measured")
    measured.time(OTHER, v03_vectorized=100.0)
    assert (measured.judged()[1].verdict, measured.judged()[1].by) == ("not judged", "the step before was not measured")


SHARE = Prediction("dram_share", "<=", 0.9, relative=True, case=OTHER)


@dataclasses.dataclass
class Elsewhere(Measured):
    """v03 leaves the profile case to v02's kernel, and is profiled at another one beside v01, whose kernel it replaces.

    One that is ``nowhere`` profiled leaves all cases to others.
    """

    nowhere: bool = False

    @property
    def results(self) -> Results:
        steps = [OP.step(name) for name in ("v01_scalar", "v02_grid_stride", "v03_vectorized")]
        predictions = (TIME, ELSEWHERE) if self.nowhere else (TIME, ELSEWHERE, SHARE)
        steps[2] = dataclasses.replace(
            steps[2],
            predictions=predictions,
            no_triton="none",
            profile_case={"cuda": None if self.nowhere else OTHER},
            replaces="v01_scalar",
        )
        return Results(dataclasses.replace(OP, steps=tuple(steps)), self.folder, None)

    def profile(self, **shares: float) -> None:
        """Counters of the other case, of whichever kernel."""
        op, launches = self.results.op, []
        for step, share in shares.items():
            metrics = dict.fromkeys(METRICS, 1.0) | {DURATION: 1e3, "gpc__cycles_elapsed.avg.per_second": 1.5e9}
            metrics["gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"] = share
            label = base.label(op, OTHER, Name("cuda", step))
            units = {name: metric.unit for name, metric in METRICS.items()}
            launches.append(Launch(label, f"vector_add_{step}_kernel", metrics, units))
        counters, _ = counter_rows(launches, {each.label: 1 for each in launches}, op, "r1", {}, "T3")
        store.write(store.path(self.folder, OP.name, "counters"), counters)


def test_what_was_predicted_of_another_steps_kernel_is_void_and_in_no_score(tmp_path: Path) -> None:
    measured = Elsewhere(tmp_path)
    measured.time(OP.profile_case, v01_scalar=300.0, v02_grid_stride=200.0, v03_vectorized=100.0)
    measured.time(OTHER, v01_scalar=100.0, v02_grid_stride=100.0, v03_vectorized=90.0)
    measured.profile(v01_scalar=50.0, v03_vectorized=40.0)
    void, time, share = measured.judged()
    assert (void.verdict, void.actual) == ("void", None)
    assert time.verdict == share.verdict == "hit" and share.actual == pytest.approx(0.8)
    found = score([("ladder", "pre-registered", each) for each in (void, time, share)])
    assert found == {("ladder", "pre-registered"): {"hit": 2, "void": 1}}
    text = logs.told(tmp_path, [measured.results])
    assert "Predicted time ≤ 0.98 ×: **void**, not frozen; " in text
    assert f"| at {OTHER.slug} | CUDA v01 → v03 |" in text
    assert "| kernels | `vector_add_v01_scalar_kernel` → `vector_add_v03_vectorized_kernel` |" in text
    assert f"- CUDA: Leaves `{OP.profile_case.slug}` to another step's kernel. 1.111 × as fast as v01, FAST. " in text


def test_a_step_is_told_to_be_profiled_where_that_is_yet_to_be_recorded(tmp_path: Path) -> None:
    measured = Elsewhere(tmp_path)
    measured.time(OTHER, v01_scalar=100.0, v03_vectorized=90.0)
    text = logs.told(tmp_path, [measured.results])
    assert f"Profiled at `{OTHER.slug}`: not recorded yet." in text
    assert (OTHER, Name("cuda", "v03_vectorized")) in measured.results.unprofiled()


def test_a_step_that_is_profiled_nowhere_shows_times_alone(tmp_path: Path) -> None:
    measured = Elsewhere(tmp_path, nowhere=True)
    measured.time(OP.profile_case, v01_scalar=300.0, v02_grid_stride=200.0, v03_vectorized=100.0)
    measured.time(OTHER, v01_scalar=100.0, v02_grid_stride=100.0, v03_vectorized=90.0)
    assert [each.verdict for each in measured.judged()] == ["void", "hit"]
    text = logs.told(tmp_path, [measured.results])
    assert f"- CUDA: Not profiled: leaves `{OP.profile_case.slug}` to another step's kernel.\n" in text
    page = ladder_page.render(
        "<!-- counters:v03_vectorized:begin -->\n<!-- counters:v03_vectorized:end -->\n", measured.results
    )
    assert "| time, µs |" not in page
    assert f"| time at {OTHER.slug}, µs | v02: " in page


def test_where_the_step_before_does_not_take_the_case_values_stand_alone(tmp_path: Path) -> None:
    op, name = OPS["softmax_backward"], Name("cuda", "v04_cluster")
    step = op.step(name.step)
    case = op.profile_case_of(step, "cuda")
    assert case and op.before(step, "cuda") is None
    assert [each for where, each in op.profiled_cells if where == case] == [Name("torch"), name]
    row = dict.fromkeys(store.TABLES["timings"], "") | {"case": case.slug, "backend": "cuda", "step": name.step}
    row |= {"status": "ok", "contest": "fast", "times_us": "90.0 90.0", "run": "r1"}
    store.write(store.path(tmp_path, op.name, "timings"), pd.DataFrame([row], columns=store.TABLES["timings"]))
    text = logs.told(tmp_path, [Results(op, tmp_path, None)])
    assert f"v03 does not take `{case.slug}`. " in text


def test_documents_tell_at_which_case_a_prediction_was_judged(tmp_path: Path) -> None:
    measured = Measured(tmp_path)
    measured.time(OP.profile_case, v01_scalar=300.0, v02_grid_stride=200.0, v03_vectorized=100.0)
    measured.time(OTHER, v01_scalar=100.0, v03_vectorized=99.0)
    text = logs.told(tmp_path, [measured.results])
    assert "Predicted time ≤ 0.98 ×: **hit** (0.5 ×)" in text
    assert f"; time ≤ 0.98 × at {OTHER.slug}: **miss** (0.99 ×)" in text
    page = ladder_page.render(
        "<!-- counters:v03_vectorized:begin -->\n<!-- counters:v03_vectorized:end -->\n", measured.results
    )
    assert f"| time at {OTHER.slug}, µs | v01: 150 → " in page


def test_scores_keep_marks_apart() -> None:
    hit, miss = (Judgement(TIME, verdict, 0.9, "") for verdict in ("hit", "miss"))
    found = score(
        [("a", "post hoc", hit), ("a", "pre-registered", miss), ("b", "post hoc", hit), ("a", "post hoc", hit)]
    )
    assert list(found.items()) == [
        (("a", "pre-registered"), {"miss": 1}),
        (("a", "post hoc"), {"hit": 2}),
        (("b", "post hoc"), {"hit": 1}),
    ]


def test_a_miss_is_explained_by_instructions_and_stalls() -> None:
    instructions, far, barrier, wait = (
        "smsp__inst_executed.sum",
        *(stall_metric(reason) for reason in ("long_scoreboard", "barrier", "wait")),
    )
    told = explained(
        {CYCLES: 1000.0, instructions: 500.0, far: 9.1, barrier: 1.0, stall_metric("not_selected"): 0.0},
        {CYCLES: 1200.0, instructions: 250.0, far: 18.3, barrier: 1.5, stall_metric("not_selected"): 50.0, wait: 99.0},
    )
    assert told == (
        "cycles × 1.2 = instructions × 0.5 · cycles an instruction × 2.4; long_scoreboard 9.1 → 18.3 cycles an issue"
    )
    assert explained({}, {}) == ""
    assert explained({far: 9.11}, {far: 9.12}) == ""


SPEC = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Prediction:
    quantity: str
    compare: str
    value: float
    relative: bool = False

@dataclass(frozen=True)
class Step:
    name: str
    predictions: tuple

@dataclass(frozen=True)
class Op:
    name: str
    steps: tuple
"""  # as an early commit may have it: without tolerance, backends, and much else


class Repository:
    """A repository of the project's form, with a commit for every ``commit``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "profiling" / "data" / "h100-sxm"
        self._day = 0
        self.git("init", "-q")
        self.write("kernel_twins/spec/__init__.py", SPEC)

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
        self._day += 1
        date = f"2026-01-{self._day:02}T00:00:00Z"
        environment = os.environ | {"GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date}
        command = ["git", *identity, *arguments]
        done = subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True, env=environment)
        return done.stdout

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x")

    def freeze(self, *values: float, at: datetime.datetime = EARLY) -> list[str]:
        op = with_predictions(*(Prediction("time", "<=", value, relative=True) for value in values))
        return freeze(self.folder, [op], at)

    def measure(self, backend: str = "cuda", by: str = "run r1") -> None:
        note_measured(self.folder, "vector_add", [Name(backend, "v03_vectorized")], LATE, by)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_prediction_that_was_committed_first_is_borne_out(repository: Repository) -> None:
    repository.freeze(0.98)
    repository.commit()
    repository.measure()
    assert history.audit(repository.folder) == ([], [])  # not committed yet, and so later than what is
    repository.commit()
    assert history.audit(repository.folder) == ([], [])


def test_prediction_and_measurement_in_one_commit_are_found(repository: Repository) -> None:
    repository.freeze(0.98)
    repository.measure()
    repository.commit()
    (line,), notes = history.audit(repository.folder)
    assert notes == []
    assert line.startswith(
        "vector_add/v03_vectorized/cuda `time <= 0.98 x` is marked pre-registered, but was first committed in "
    )


def test_every_measurement_of_a_cell_must_come_later(repository: Repository) -> None:
    """A row that is added for a cell that was measured before does not move the first one."""
    repository.measure()
    repository.commit()
    repository.freeze(0.98)
    frozen = read_frozen(repository.folder)
    store.write(repository.folder / "predictions.csv", frozen.assign(mark="pre-registered"))
    repository.commit()
    again = read_measured(repository.folder)
    store.write(repository.folder / "measured.csv", pd.concat([again, again.assign(first="2026-03-01T00:00:00Z")]))
    repository.commit()
    (line,) = history.audit(repository.folder)[0]
    assert "v03_vectorized/cuda" in line and "is marked pre-registered, but was first committed in" in line


def test_a_prediction_that_was_never_committed_is_found(repository: Repository) -> None:
    repository.commit()
    repository.freeze(0.5)
    repository.measure()
    (line,), _ = history.audit(repository.folder)
    assert line.endswith("`time <= 0.5 x` is marked pre-registered, but was measured before it was committed")


@pytest.mark.parametrize("borne_out", [True, False])
def test_rows_that_are_older_than_their_tables_name_their_commits(repository: Repository, borne_out: bool) -> None:
    repository.commit()
    repository.write("later", "")
    repository.commit()
    one, two = repository.git("log", "--reverse", "--format=%h").split()
    predicted, measured = (one, two) if borne_out else (two, one)
    repository.freeze(0.98)
    store.write(repository.folder / "predictions.csv", read_frozen(repository.folder).assign(commit=predicted))
    repository.measure(by=f"commit {measured}")
    repository.commit()
    found, _ = history.audit(repository.folder)
    assert len(found) == (not borne_out)


def test_a_commit_that_is_gone_proves_nothing_and_the_row_still_does(repository: Repository) -> None:
    repository.freeze(0.98)
    store.write(repository.folder / "predictions.csv", read_frozen(repository.folder).assign(commit="0123456"))
    repository.commit()
    repository.measure()
    repository.commit()
    assert history.audit(repository.folder) == ([], [])


def test_a_measured_cell_is_post_hoc_for_every_prediction_after(repository: Repository) -> None:
    repository.measure()
    repository.freeze(0.98)
    assert read_frozen(repository.folder)["mark"].tolist() == ["post hoc", "pre-registered"]


def test_rows_changed_by_hand_are_found(repository: Repository) -> None:
    assert repository.freeze(0.98, 0.5)
    table = read_frozen(repository.folder)
    table.loc[table["prediction"] == "time <= 0.98 x", "prediction"] = "time <= 1 x"
    store.write(repository.folder / "predictions.csv", table)
    assert sum("changed by another hand" in line for line in violations(repository.folder)) == 2


def test_without_history_nothing_is_audited_and_nothing_fails(repository: Repository, tmp_path: Path) -> None:
    repository.freeze(0.98)
    repository.commit()
    repository.measure()
    repository.commit()
    shallow = tmp_path / "shallow"
    repository.git("clone", "-q", "--depth=1", f"file://{repository.root}", str(shallow))
    folder = shallow / "profiling" / "data" / "h100-sxm"
    violations, notes = history.audit(folder)
    assert violations == []
    assert "not audited" in notes[0] and "shallow" in notes[0]


def test_a_wheel_inside_somebody_elses_repository_is_not_audited_by_it(repository: Repository) -> None:
    repository.freeze(0.98)
    (repository.root / "kernel_twins" / "spec" / "__init__.py").unlink()
    repository.commit()
    violations, notes = history.audit(repository.folder)
    assert violations == []
    assert "not that of kernel-twins" in notes[0]


def test_outside_a_repository_nothing_is_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "tarball"
    folder.mkdir()
    assert "not a git repository" in history.audit(folder)[1][0]
    monkeypatch.setenv("PATH", str(folder))
    assert "git is not installed" in history.audit(folder)[1][0]


def test_every_cell_that_has_a_committed_time_has_its_first_measurement() -> None:
    folder = store.DATA / store.REFERENCE_GPU
    known = {tuple(row) for row in read_measured(folder)[["op", "step", "backend"]].itertuples(index=False)}
    timed = {
        (op, row.step, row.backend)
        for op in OPS
        for row in store.read_table(folder, op, "timings").itertuples()
        if row.step and row.status == "ok"
    }
    assert timed <= known and len(timed) > 100


def test_the_committed_predictions_are_all_frozen() -> None:
    """Every prediction that a spec makes has its mark in the reference GPU's data."""
    marks = Marks(store.DATA / store.REFERENCE_GPU)
    loose = [
        f"{op.name} {step.name} {backend}: {canonical(prediction)}"
        for op in OPS.values()
        for step in op.steps
        for backend in step.backends
        for prediction in step.predictions
        if backend in prediction.backends and marks.mark(op.name, step.name, backend, prediction) == "not frozen"
    ]
    assert loose == [], "run `python profiling/ncu_report.py predict`"


def test_frozen_tables_end_in_a_footer_like_all_others(tmp_path: Path) -> None:
    freeze(tmp_path, [with_predictions(TIME)], EARLY)
    file = tmp_path / "predictions.csv"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match="predictions"):
        Marks(tmp_path)


def test_traffic_that_missed_is_explained_by_what_l2_held() -> None:
    before, after = {"lts__t_sector_hit_rate.pct": 74.6}, {"lts__t_sector_hit_rate.pct": 80.3}
    assert explained(before, after, ["dram_bytes"]) == "L2 hits 74.6 → 80.3 %"
    assert explained(before, after, ["time"]) == ""


def test_several_gpus_may_note_their_first_measurements_at_once(tmp_path: Path) -> None:
    def note(index: int) -> None:
        note_measured(tmp_path, f"op{index}", [Name("cuda", "v01_naive")], EARLY, "collect")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(note, range(24)))
    assert sorted(read_measured(tmp_path)["op"]) == sorted(f"op{index}" for index in range(24))


def test_a_mark_that_the_dates_do_not_bear_out_is_found_without_git(tmp_path: Path) -> None:
    note_measured(tmp_path, "vector_add", [Name("cuda", "v03_vectorized")], EARLY, "trials")
    freeze(tmp_path, [with_predictions(TIME)], LATE)
    assert violations(tmp_path) == []
    table = read_frozen(tmp_path)
    store.write(tmp_path / "predictions.csv", table.assign(mark="pre-registered"))
    (line,) = violations(tmp_path)
    assert "v03_vectorized/cuda" in line and "is marked pre-registered, but was frozen 2026-01-02" in line


def test_audit_finds_rows_that_were_taken_away(repository: Repository) -> None:
    assert repository.freeze(0.98)
    repository.measure()
    row = dict.fromkeys(retired.COLUMNS, "") | {"op": "vector_add", "step": "v02_grid_stride"}
    store.write(repository.folder / "retired.csv", pd.DataFrame([row]))
    repository.commit()
    for name in ("predictions.csv", "measured.csv", "retired.csv"):
        (repository.folder / name).unlink()
    lost, _ = history.audit(repository.folder)
    assert any(line.startswith("predictions.csv lacks the row vector_add, v03_vectorized, cuda") for line in lost)
    assert any(line.startswith("measured.csv lacks the row vector_add, v03_vectorized, cuda") for line in lost)
    assert any(line.startswith("retired.csv lacks the row vector_add, v02_grid_stride") for line in lost)


def test_predictions_that_left_the_spec_are_counted(tmp_path: Path) -> None:
    freeze(tmp_path, [with_predictions(TIME)], EARLY)
    assert withdrawn(tmp_path, with_predictions(TIME)) == []
    assert withdrawn(tmp_path, with_predictions()) == ["pre-registered", "pre-registered"]

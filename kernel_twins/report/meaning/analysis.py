"""From committed rows to statements: medians, ratios, quantities, the limiter, the verdict on predictions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from kernel_twins import OPS
from kernel_twins.harness.ceilings import Ceilings, gpu_slug
from kernel_twins.harness.ceilings import load as load_ceilings
from kernel_twins.report.meaning import predictions, static
from kernel_twins.report.meaning.judgement import Direction, Judgement, direction, explained, judge
from kernel_twins.report.meaning.limiter import Limit, limiter
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.meaning.verdict import Ratio, confirmed, cycle_ratio, paired_ratio
from kernel_twins.report.rows import identity, store
from kernel_twins.report.rows.metrics import CYCLES, top_stalls
from kernel_twins.report.rows.recorded import CONDITIONS, Recorded, median_us, times_us
from kernel_twins.spec import Backend, Case, Name, Op, Prediction, Step

_PASSED = 0.95  # of the floor: what is further below it has another one


def load(gpu: str, folder: Path) -> list[Results]:
    """Every operation's results on a GPU; without a survey of it, shares stay blank."""
    try:
        ceilings = load_ceilings(gpu)
    except FileNotFoundError:
        ceilings = None
    return [Results(op, folder, ceilings) for op in OPS.values()]


class Results:
    """One operation's committed measurements on one GPU, answering questions about them."""

    def __init__(self, op: Op, folder: Path, ceilings: Ceilings | None) -> None:
        self.op = op
        self.ceilings = ceilings
        self.ceiling = getattr(ceilings, op.ceiling) if ceilings else None
        self.recorded = Recorded(op, folder)
        self._ratios: dict[tuple[str, Name, Name, str], Ratio | None] = {}
        self._quantities: dict[tuple[Case, Name], dict[str, float | None]] = {}
        self._stale: dict[Name, bool] = {}

    @property
    def measured(self) -> bool:
        return bool(self.recorded.rows)

    @property
    def new(self) -> list[str]:
        """The baselines that came after the operation was measured."""
        tried = {name.backend for _, name in self.recorded.rows}
        return [baseline for baseline in self.op.baselines if self.measured and baseline not in tried]

    @cached_property
    def unmeasured(self) -> list[Name]:
        """The steps that are in the spec and have no row yet."""
        tried = {name for _, name in self.recorded.rows}
        steps = (Name(backend, step.name) for step in self.op.steps for backend in step.backends)
        return [name for name in steps if name not in tried]

    @property
    def untimed(self) -> list[tuple[Case, Name]]:
        """The cells without a row of steps that have rows elsewhere: of a case that came after they were measured."""
        return [
            (case, name)
            for case in self.op.timed_cases
            for step in self.op.steps
            for name in (Name(backend, step.name) for backend in step.backends)
            if self.op.times(step, case) and name not in self.unmeasured and not self.status(case, name)
        ]

    def last(self, backend: Backend, case: Case) -> Name | None:
        """The last step of a language that takes the case and was measured; before any was, the last that takes it."""
        ladder = [Name(backend, step.name) for step in self.op.steps_of(backend) if self.op.times(step, case)]
        tried = [name for name in ladder if self.status(case, name)]
        return next(reversed(tried or ladder), None)

    def status(self, case: Case, name: Name) -> str:
        """``ok``, the reason why there is no time, or an empty string where the cell was never tried."""
        row = self.recorded.row(case, name)
        return row.status if row else ""

    def time_us(self, case: Case, name: Name, condition: str = "sustained") -> float | None:
        """The median over the rounds, under one of recorded.CONDITIONS."""
        row = self.recorded.row(case, name, condition)
        return median_us(row) if row and row.status == "ok" else None

    def best_baseline(self, case: Case, condition: str = "sustained") -> Name | None:
        """The fastest of what a user would call instead; of those timed under the condition."""
        timed = [(self.time_us(case, Name(baseline), condition), baseline) for baseline in self.op.baselines]
        known = [(time, baseline) for time, baseline in timed if time is not None]
        return Name(min(known)[1]) if known else None

    def ratio(self, case: Case, name: Name, against: Name, condition: str = "sustained") -> Ratio | None:
        """How many times faster ``name`` is than ``against``, where both were timed in one contest of one run."""
        key = (case.slug, name, against, condition)
        if key not in self._ratios:
            self._ratios[key] = self._paired(*key)
        return self._ratios[key]

    def _paired(self, slug: str, name: Name, against: Name, condition: str) -> Ratio | None:
        ours, theirs = (self.recorded.rows.get((slug, each), {}) for each in (name, against))
        for contest in CONDITIONS[condition]:
            row, other = ours.get(contest), theirs.get(contest)
            if row and other and row.status == other.status == "ok" and row.run == other.run:
                return paired_ratio(times_us(other), times_us(row))
        return None

    def standing(self, case: Case, name: Name, against: Name, condition: str = "sustained") -> str | None:
        """The ratio's verdict; of sustained times, confirmed by ncu's cycles where the case was profiled."""
        ratio = self.ratio(case, name, against, condition)
        if ratio is None or condition != "sustained":
            return ratio.verdict if ratio else None
        ours, theirs = (self.recorded.cycles.get((case.slug, each)) for each in (name, against))
        return confirmed(ratio, None if ours is None or theirs is None else cycle_ratio(theirs, ours))

    def accuracy(self, case: Case, name: Name) -> tuple[float | None, int | None]:
        """The largest absolute error against float64, and the bytes that a call allocates for itself."""
        row = self.recorded.row(case, name)
        if row is None or row.status.startswith("wrong"):
            return None, None
        return float(row.error) if row.error else None, int(row.extra_bytes) if row.extra_bytes else None

    def sensors(self, case: Case, condition: str = "sustained") -> str:
        """The chip's state while a case was timed, such as ``1,980 MHz, 511 W, 45 °C, throttle none``."""
        rows = (self.recorded.row(case, name, condition) for slug, name in self.recorded.rows if slug == case.slug)
        row = next((row for row in rows if row and row.sm_clock_mhz), None)
        if row is None:
            return ""
        clock, power = float(row.sm_clock_mhz), float(row.power_w or "nan")
        return f"{clock:,.0f} MHz, {power:.0f} W, {row.temperature_c} °C, throttle {row.throttle}"

    def rate(self, case: Case, name: Name, condition: str = "sustained") -> float | None:
        """GB/s of the operation's minimum bytes, or TFLOP/s of its arithmetic."""
        time = self.time_us(case, name, condition)
        return self._work(case) / time if time else None

    def _work(self, case: Case) -> float:
        """What rates are of: the rate times µs."""
        return self.op.bytes(case) / 1e3 if self.rate_unit == "GB/s" else self.op.flops(case) / 1e6

    def ceiling_us(self, case: Case) -> float | None:
        """The time that the surveyed ceiling allows."""
        return self._work(case) / self.ceiling if self.ceiling else None

    @property
    def rate_unit(self) -> str:
        return "GB/s" if self.op.ceiling.startswith("dram") else "TFLOP/s"

    def quantities(self, name: Name, case: Case) -> dict[str, float | None]:
        """Everything the log speaks of; None where it was not measured."""
        if (case, name) not in self._quantities:
            self._quantities[case, name] = self._computed(name, case)
        return self._quantities[case, name]

    def _computed(self, name: Name, case: Case) -> dict[str, float | None]:
        counters = self.counters(name, case)
        values = {key: quantity.compute(counters) for key, quantity in QUANTITIES.items()}
        values["time"] = self.time_us(case, name)
        rate = values["rate"] = self.rate(case, name)
        values["ceiling_share"] = 100 * rate / self.ceiling if rate is not None and self.ceiling else None
        error, _ = self.accuracy(case, name)
        torch_error, _ = self.accuracy(case, Name(next(iter(self.op.baselines))))
        values["error_over_torch"] = error / torch_error if error is not None and torch_error else None
        moved = values["dram_bytes"]
        values["bytes_over_minimum"] = 1e6 * moved / self.op.bytes(case) if moved is not None else None
        return values

    def counters(self, name: Name, case: Case) -> dict[str, float]:
        """One call's; empty where it was not profiled."""
        return self.recorded.calls.get((case.slug, name), {})

    def longest_launch(self, name: Name, case: Case) -> dict[str, float]:
        """The counters of the call's longest kernel; empty where it was not profiled."""
        launches = self.recorded.launches.get((case.slug, name), [{}])
        return max(launches, key=lambda launch: launch.get(CYCLES, 0.0))

    def unprofiled(self) -> list[tuple[Case, Name]]:
        """The cells whose counters are yet to be recorded: of steps that were timed there, and not quarantined."""
        known = self.recorded.calls.keys() | self.recorded.quarantined.keys()
        return [
            (case, name)
            for case, name in self.op.profiled_cells
            if name.step and self.status(case, name) == "ok" and (case.slug, name) not in known
        ]

    def judge(self, step: Step, backend: Backend) -> list[Judgement]:
        """The step's predictions for one language, against what was measured."""
        return [self._judged(each, step, backend) for each in step.predictions if backend in each.backends]

    def _judged(self, prediction: Prediction, step: Step, backend: Backend) -> Judgement:
        if prediction.case is None and self.op.profile_case_of(step, backend) != self.op.profile_case:
            return Judgement(prediction, "void", None, "another step's kernel runs there")
        return judge(prediction, *self._compared(prediction, step, backend))

    def went(self, prediction: Prediction, step: Step, backend: Backend) -> Direction | None:
        """Which way the prediction's quantity went from the step before; None where that is not known."""
        before, after, ratio = self._compared(prediction, step, backend)
        return direction(prediction.quantity, before.get(prediction.quantity), after.get(prediction.quantity), ratio)

    def _compared(
        self, prediction: Prediction, step: Step, backend: Backend
    ) -> tuple[dict[str, float | None], dict[str, float | None], Ratio | None]:
        """The quantities of the step before and of the step at the prediction's case, and the ratio of their times.

        The time, and where the step is profiled all of them.
        """
        name, case = Name(backend, step.name), prediction.case or self.op.profile_case
        profiled, previous = self.op.profile_case_of(step, backend), self.previous(step, backend, case)

        def known(name: Name) -> dict[str, float | None]:
            return self.quantities(name, case) if case == profiled else {"time": self.time_us(case, name)}

        if previous is None:
            return {}, known(name), None
        before = Name(backend, previous.name)
        return known(before), known(name), self.ratio(case, name, before)

    def explained(self, step: Step, backend: Backend, case: Case, missed: Iterable[str]) -> str:
        """The counters that stand beside missed predictions; without a step before, what the warps wait for."""
        previous, after = self.previous(step, backend, case), self.counters(Name(backend, step.name), case)
        if previous is None:
            return "; ".join(f"{stall} {cycles:.1f} cycles an issue" for stall, cycles in top_stalls(after))
        return explained(self.counters(Name(backend, previous.name), case), after, missed)

    def mark(self, step: Step, backend: Backend, judgement: Judgement) -> predictions.Mark:
        """Whether the prediction was frozen before the first measurement."""
        return self._marks.mark(self.op.name, step.name, backend, judgement.prediction)

    @cached_property
    def _marks(self) -> predictions.Marks:
        return predictions.Marks(self.recorded.folder)

    def previous(self, step: Step, backend: Backend, case: Case) -> Step | None:
        """What a step is compared with: at its profile case ``Op.before``, else the last before it that is timed."""
        if case == self.op.profile_case_of(step, backend):
            return self.op.before(step, backend)
        ladder = [each for each in self.op.steps_of(backend) if each == step or self.op.times(each, case)]
        index = ladder.index(step)
        return ladder[index - 1] if index else None

    def case_of(self, step: Step, backend: Backend) -> Case | None:
        """Where one row tells of a step: where it is profiled, else at the first case that its predictions name."""
        named = (each.case for each in step.predictions if each.case and backend in each.backends)
        return self.op.profile_case_of(step, backend) or next(named, None)

    def limiter(self, name: Name, case: Case) -> Limit | None:
        """What holds the call back; None where it was not profiled."""
        time_us, floor_us = self.time_us(case, name), self._floor_us(case)
        return limiter(self.counters(name, case), time_us=time_us, ceilings=self.ceilings, floor_us=floor_us)

    def _floor_us(self, case: Case) -> float | None:
        """The ceiling's time, None where somebody passed it by far.

        An fp32 product by tensor cores does: the rate of the FMA pipes is what it is compared with, and no floor.
        """
        times = [time for slug, name in self.recorded.rows if slug == case.slug and (time := self.time_us(case, name))]
        floor_us = self.ceiling_us(case)
        return floor_us if floor_us and times and min(times) > _PASSED * floor_us else None

    def stale(self, name: Name) -> bool:
        """Whether the step's code has changed since it was measured: its file, or what it is compiled to.

        The latter pins shared headers and tuned configurations. It is that of the static rows, and so is compared only
        with measurements of the reference GPU by the same compiler; other differences say nothing about the sources.
        """
        if name not in self._stale:
            self._stale[name] = self._has_changed(name)
        return self._stale[name]

    def _has_changed(self, name: Name) -> bool:
        source = identity.source_digest(self.op.name, name.step, name.backend)
        toolchain, compiled = self._compiled.get((self.op.name, name.step, name.backend), ("", ""))
        for row in (row for (_, each), rows in self.recorded.rows.items() if each == name for row in rows.values()):
            measured, _, binary = row.code.partition(":")
            comparable = binary not in ("", "-") and self._toolchains.get((row.run, name.backend)) == toolchain
            if measured != source or (comparable and binary != compiled):
                return True
        return False

    @cached_property
    def _compiled(self) -> dict[static.Cell, tuple[str, str]]:
        return static.codes()

    @cached_property
    def _toolchains(self) -> dict[tuple[str, str], str]:
        """What compiled each language in the runs on the reference GPU, by run and language."""
        runs = store.read_runs(self.recorded.folder).to_dict("records")
        return {
            (run["run"], backend): static.toolchain(backend, run[compiler])
            for run in runs
            if gpu_slug(run["gpu"]) == store.REFERENCE_GPU
            for backend, compiler in static.COMPILERS.items()
        }

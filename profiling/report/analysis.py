"""From committed rows to statements: medians, paired ratios, quantities, the limiter, the verdict on predictions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from kernel_twins._profiling.report import identity, store
from kernel_twins._profiling.report.metrics import fold, top_stalls
from kernel_twins._profiling.report.quantities import QUANTITIES
from kernel_twins.ceilings import Ceilings
from kernel_twins.spec import Backend, Case, Name, Op, Prediction, Step

_RESAMPLES = 2_000
_CONFIDENCE = 0.99
_SAME = 0.005  # a ratio counts as different from 1 when its whole interval lies further away than this
_SATURATED = 80.0  # percent: NVIDIA's own cut-off for "this unit is the limit"
_CONFLICTED = 20.0  # percent of shared-memory wavefronts


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster, as the median over paired rounds, with its 99 % bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> Literal["FAST", "SLOW", "SAME"]:
        if self.low > 1 + _SAME:
            return "FAST"
        return "SLOW" if self.high < 1 - _SAME else "SAME"


def paired_ratio(baseline_us: np.ndarray, ours_us: np.ndarray) -> Ratio:
    """Ratio of times, round by round; the same samples always give the same interval."""
    ratios = baseline_us / ours_us
    picks = np.random.default_rng(0).integers(len(ratios), size=(_RESAMPLES, len(ratios)))
    medians = np.median(ratios[picks], axis=1)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Ratio(float(np.median(ratios)), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Judgement:
    """A prediction beside what was measured; ``held`` is None where there is nothing to judge it by."""

    prediction: Prediction
    actual: float | None
    held: bool | None


class Results:
    """One operation's committed measurements on one GPU, answering questions about them."""

    def __init__(self, op: Op, folder: Path, ceilings: Ceilings | None) -> None:
        self.op = op
        self.ceiling = getattr(ceilings, op.ceiling) if ceilings else None
        self._timings = store.read_table(folder, op.name, "timings")
        self._counters = store.read_table(folder, op.name, "counters")

    @property
    def measured(self) -> bool:
        return len(self._timings) > 0

    @property
    def runs(self) -> list[str]:
        return sorted(set(self._timings["run"]) | set(self._counters["run"]))

    @cached_property
    def _samples(self) -> dict[tuple[str, Name, str], np.ndarray]:
        return {
            (row.case, Name(row.backend, row.step), row.contest): np.array(row.times_us.split(), dtype=float)
            for row in self._timings.itertuples()
            if row.status == "ok"
        }

    @cached_property
    def _calls(self) -> dict[Name, dict[str, float]]:
        """Counters by call, but only of the profiled case and of the code that was timed."""
        timed = dict(
            zip(map(Name, self._timings["backend"], self._timings["step"]), self._timings["code"], strict=True)
        )
        current = self._counters[self._counters["case"] == self.op.profile_case.slug]
        calls = {}
        for (backend, step), rows in current.groupby(["backend", "step"]):
            if set(rows["code"]) != {timed.get(Name(backend, step))}:
                continue
            wide = rows.assign(value=rows["value"].astype(float)).pivot(
                index="launch", columns="metric", values="value"
            )
            calls[Name(backend, step)] = fold(wide.to_dict("records"))
        return calls

    def status(self, case: Case, name: Name) -> str:
        """``ok``, the reason why there is no time, or an empty string where the cell was never tried."""
        rows = self._row(case, name)
        return rows["status"].iloc[0] if len(rows) else ""

    def _row(self, case: Case, name: Name) -> pd.DataFrame:
        table = self._timings
        return table[(table["case"] == case.slug) & (table["backend"] == name.backend) & (table["step"] == name.step)]

    def time_us(self, case: Case, name: Name) -> float | None:
        """The median over the rounds."""
        for contest in ("fast", "slow"):
            if (samples := self._samples.get((case.slug, name, contest))) is not None:
                return float(np.median(samples))
        return None

    def best_baseline(self, case: Case) -> Name | None:
        """The fastest of what a user would call instead."""
        timed = [(self.time_us(case, Name(baseline)), baseline) for baseline in self.op.baselines]
        known = [(time, baseline) for time, baseline in timed if time is not None]
        return Name(min(known)[1]) if known else None

    def ratio(self, case: Case, name: Name, against: Name) -> Ratio | None:
        """How many times faster ``name`` is than ``against``, where both were timed in one contest."""
        for contest in ("fast", "slow"):
            ours = self._samples.get((case.slug, name, contest))
            theirs = self._samples.get((case.slug, against, contest))
            if ours is not None and theirs is not None:
                return paired_ratio(theirs, ours)
        return None

    def accuracy(self, case: Case, name: Name) -> tuple[float | None, int | None]:
        """The largest absolute error against float64, and the bytes that a call allocates for itself."""
        rows = self._row(case, name)
        if not len(rows) or rows["status"].iloc[0].startswith("wrong"):
            return None, None
        error, extra_bytes = rows["error"].iloc[0], rows["extra_bytes"].iloc[0]
        return float(error) if error else None, int(extra_bytes) if extra_bytes else None

    def rate(self, case: Case, name: Name) -> float | None:
        """GB/s of the operation's minimum bytes, or TFLOP/s of its arithmetic."""
        time = self.time_us(case, name)
        if not time:
            return None
        return self.op.bytes(case) / time / 1e3 if self.rate_unit == "GB/s" else self.op.flops(case) / time / 1e6

    @property
    def rate_unit(self) -> str:
        return "GB/s" if self.op.ceiling.startswith("dram") else "TFLOP/s"

    def quantities(self, name: Name) -> dict[str, float | None]:
        """Everything the log speaks of, at the profile case; None where it was not measured."""
        case, counters = self.op.profile_case, self._calls.get(name, {})
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

    def stalls(self, name: Name) -> list[tuple[str, float]]:
        return top_stalls(self._calls[name]) if name in self._calls else []

    def judge(self, step: Step, backend: Backend) -> list[Judgement]:
        """The step's predictions for one language, against what was measured."""
        after = self.quantities(Name(backend, step.name))
        previous = self.previous(step, backend)
        before = self.quantities(Name(backend, previous.name)) if previous else {}
        judgements = []
        for prediction in step.predictions:
            if backend not in prediction.backends:
                continue
            actual = after[prediction.quantity]
            if prediction.relative and actual is not None:
                base = before.get(prediction.quantity)
                actual = actual / base if base else None
            judgements.append(Judgement(prediction, actual, None if actual is None else _holds(prediction, actual)))
        return judgements

    def previous(self, step: Step, backend: Backend) -> Step | None:
        """The step before this one in the same language."""
        ladder = self.op.steps_of(backend)
        index = ladder.index(step)
        return ladder[index - 1] if index else None

    def limiter(self, name: Name) -> str:
        """What holds the call back, with the number that says so and the runner-up."""
        values = self.quantities(name)
        busy = {
            "device memory": values["dram_share"],
            "tensor pipe": values["tensor_pipe"],
            "FMA pipe": values["fma_pipe"],
            "issue slots": values["issue_active"],
        }
        known = sorted(((share, unit) for unit, share in busy.items() if share is not None), reverse=True)
        if not known:
            return "not profiled"
        (share, unit), (second_share, second) = known[:2]
        runner_up = f"{second} {second_share:.0f} %"
        if share >= _SATURATED:
            return f"{unit}, {share:.0f} % busy (next: {runner_up})"
        conflicts = values["bank_conflicts"] or 0.0
        if conflicts >= _CONFLICTED:
            return f"shared-memory bank conflicts, {conflicts:.0f} % of wavefronts (next: {unit} {share:.0f} %)"
        stall, cycles = self.stalls(name)[0]
        return f"latency: {stall} {cycles:.1f} cycles an issue (busiest: {unit} {share:.0f} %, {runner_up})"

    def stale(self, name: Name) -> bool:
        """Whether the step's source has changed since it was measured."""
        rows = self._timings[(self._timings["backend"] == name.backend) & (self._timings["step"] == name.step)]
        recorded = {code.partition(":")[0] for code in rows["code"]}
        return bool(recorded) and recorded != {identity.source_digest(self.op.name, name.step, name.backend)}


def _holds(prediction: Prediction, actual: float) -> bool:
    if prediction.compare == "<=":
        return actual <= prediction.value
    if prediction.compare == ">=":
        return actual >= prediction.value
    return abs(actual - prediction.value) <= prediction.tolerance * abs(prediction.value)

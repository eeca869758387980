"""Predictions held against what was measured: the verdicts, the score, and why one missed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from kernel_twins.report.meaning.predictions import Mark
from kernel_twins.report.meaning.verdict import Ratio, Verdict
from kernel_twins.report.rows.metrics import CYCLES, STALLS, top_stalls
from kernel_twins.spec import Prediction

Outcome = Literal["hit", "miss", "wrong direction", "not judged", "void"]
Direction = Literal["up", "same", "down"]

_INSTRUCTIONS = "smsp__inst_executed.sum"
_L2_HIT = "lts__t_sector_hit_rate.pct"
_TRAFFIC = {"dram_bytes", "dram_share", "bytes_over_minimum"}
_TIMED = ("time", "rate", "ceiling_share")  # what the bench gives
NOISE = {True: 0.005, False: 0.01}  # of what the bench gives, and of counters: less than that is no change
_WENT: dict[Verdict, Direction] = {"FAST": "down", "SLOW": "up", "SAME": "same"}  # the time


@dataclass(frozen=True, slots=True)
class Judgement:
    """A prediction beside what was measured.

    ``actual`` is in the quantity's unit, or, for a relative prediction, the multiple of the step before. ``by`` says
    what it was judged by, or why it was not. It is void where it is of a case that is another step's kernel's.
    """

    prediction: Prediction
    verdict: Outcome
    actual: float | None
    by: str


def judge(
    prediction: Prediction,
    before: Mapping[str, float | None],
    after: Mapping[str, float | None],
    time_ratio: Ratio | None = None,
) -> Judgement:
    """A prediction against the quantities of the step before and of the step itself, at the prediction's case.

    ``time_ratio`` says how many times faster the step is than the one before, from paired rounds; a prediction of the
    time is judged by it, else by the medians. A mere direction (a multiple of at most or at least 1) is hit when the
    change exceeds the noise: the verdict on the paired rounds, 0.5 % of a time without them, 1 % of a counter. A change
    by more than the noise in the other direction than predicted is told apart from a miss.
    """
    name = prediction.quantity
    actual, base = after.get(name), before.get(name)
    if actual is None or not math.isfinite(actual):
        return Judgement(prediction, "not judged", None, "not measured")
    if not prediction.relative:
        return Judgement(prediction, "hit" if _holds(prediction, actual) else "miss", actual, "the value measured")
    if base is None or not math.isfinite(base):
        return Judgement(prediction, "not judged", None, "the step before was not measured")
    if base == 0:
        return Judgement(prediction, "not judged", None, f"it was 0 before, {actual:.4g} after")
    factor = actual / base
    by = f"{base:.4g} before, {actual:.4g} after"
    if name == "time" and time_ratio:
        factor = 1 / time_ratio.value
        by = f"paired rounds, {factor:.4g} [{1 / time_ratio.high:.4g}, {1 / time_ratio.low:.4g}]"
    went = direction(name, base, actual, time_ratio)
    fell, rose = went == "down", went == "up"
    fall, rise = _direction(prediction)
    mere_direction = prediction.value == 1 and (fall or rise)
    hit = (fell if fall else rose) if mere_direction else _holds(prediction, factor)
    wrong = not hit and ((fall and rose) or (rise and fell))
    return Judgement(prediction, "hit" if hit else "wrong direction" if wrong else "miss", factor, by)


def direction(
    quantity: str, before: float | None, after: float | None, time_ratio: Ratio | None = None
) -> Direction | None:
    """Which way a quantity went from the step before, by the noise that ``judge`` knows; None if one is not known."""
    if before is None or after is None or not math.isfinite(before) or not math.isfinite(after):
        return None
    if quantity == "time" and time_ratio:
        return _WENT[time_ratio.verdict]
    noise = NOISE[quantity in _TIMED]
    return "down" if after < before * (1 - noise) else "up" if after > before * (1 + noise) else "same"


def _direction(prediction: Prediction) -> tuple[bool, bool]:
    """Whether a relative prediction says that its quantity falls, and whether that it rises."""
    reach = prediction.tolerance * prediction.value if prediction.compare == "==" else 0.0
    return (
        (prediction.compare == "<=" and prediction.value <= 1)
        or (prediction.compare == "==" and prediction.value + reach < 1),
        (prediction.compare == ">=" and prediction.value >= 1)
        or (prediction.compare == "==" and prediction.value - reach > 1),
    )


def _holds(prediction: Prediction, actual: float) -> bool:
    if prediction.compare == "<=":
        return actual <= prediction.value
    if prediction.compare == ">=":
        return actual >= prediction.value
    return abs(actual - prediction.value) <= prediction.tolerance * abs(prediction.value)


def score(judged: Iterable[tuple[str, Mark, Judgement]]) -> dict[tuple[str, Mark], Counter[Outcome]]:
    """How often each outcome came, by ladder, in the order given, and mark; from (ladder, mark, judgement)."""
    counts: dict[str, dict[Mark, Counter[Outcome]]] = {}
    for ladder, mark, judgement in judged:
        counts.setdefault(ladder, {name: Counter() for name in get_args(Mark)})[mark][judgement.verdict] += 1
    return {(ladder, mark): found for ladder, marks in counts.items() for mark, found in marks.items() if found}


def explained(before: Mapping[str, float], after: Mapping[str, float], missed: Iterable[str] = ()) -> str:
    """Why the cycles moved as they did, in a sentence; empty where the counters do not say.

    From the folded counters of two calls (names of metrics.py). The change of cycles is that of instructions times that
    of cycles an instruction; beside it stands the reason whose wait changed most, if one did. Where one of the
    ``missed`` quantities is of device memory's traffic, L2's hits come first: what L2 holds is not fetched.
    """
    parts = []
    if _TRAFFIC & {*missed} and all(_L2_HIT in each for each in (before, after)):
        parts.append(f"L2 hits {before[_L2_HIT]:.1f} → {after[_L2_HIT]:.1f} %")
    if all(each.get(CYCLES) and each.get(_INSTRUCTIONS) for each in (before, after)):
        cycles, instructions = (after[name] / before[name] for name in (CYCLES, _INSTRUCTIONS))
        parts.append(
            f"cycles × {cycles:.3g} = instructions × {instructions:.3g} · cycles an instruction × "
            f"{cycles / instructions:.3g}"
        )
    was, now = (dict(top_stalls(counters, len(STALLS))) for counters in (before, after))
    if both := was.keys() & now.keys():
        moved = max(sorted(both), key=lambda reason: abs(now[reason] - was[reason]))
        told = f"{was[moved]:.1f}", f"{now[moved]:.1f}"
        parts += [f"{moved} {told[0]} → {told[1]} cycles an issue"] if told[0] != told[1] else []
    return "; ".join(parts)

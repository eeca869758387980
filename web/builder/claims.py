"""The front page's figures, each chosen by a rule over the rows: no hand picks a case, a step or a number.

A figure's source is ``rule#NAME``, the ends of its interval ``rule#NAME/low`` and ``rule#NAME/high``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import geometric_mean

from builder.contests import Contest, contests
from kernel_twins.report.meaning import judged
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.judged import Judged
from kernel_twins.spec import BACKENDS, Backend, Case, Name

PRODUCT = "matmul_bf16"
_COLLAPSED = 0.5  # of the best rate that a baseline has at another case of the operation
_NORMAL_99 = 2.5758293035489004  # the normal distribution's 99.5 % quantile

Measured = Sequence[Results]


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure with its 99 % interval, and the contests that its rule took."""

    value: float
    low: float
    high: float
    rows: tuple[Contest, ...] = ()

    @property
    def row(self) -> Contest:
        """The one contest of a claim that is an extreme."""
        (row,) = self.rows
        return row


def product(measured: Measured, backend: Backend) -> Claim:
    """Geometric mean of a language's last matmul_bf16 step over all bf16 shapes, those of odd sizes among them.

    The interval goes from the mean of the ratios' lower ends to that of their upper ends, which is wider than it must
    be: not all ratios are low at once.
    """
    results = next(each for each in measured if each.op.name == PRODUCT)
    dtype = results.op.profile_case.dtype
    rows = tuple(each for each in _timed([results]) if each.backend == backend and each.case.dtype == dtype)
    value, low, high = (geometric_mean(getattr(each.paired, end) for each in rows) for end in ("value", "low", "high"))
    return Claim(value, low, high, rows)


def collapse(measured: Measured) -> Claim:
    """The largest FAST ratio where even the best baseline has less than half of its own best rate.

    That best rate is of the same operation and dtype, at whichever case.
    """
    fast = (each for each in _timed(measured) if each.verdict == "FAST" and fallen(each) < _COLLAPSED)
    return _extreme(max(fast, key=lambda each: each.paired.value))


def slowest(measured: Measured) -> Claim:
    """The smallest ratio of all last steps and cases."""
    return _extreme(min(_timed(measured), key=lambda each: each.paired.value))


def predicted(measured: Measured) -> Claim:
    """The share of hits among the predictions frozen before measuring that were judged, in percent.

    The interval is Wilson's. Predictions of one ladder are not independent, which it does not know of.
    """
    hits, n = count(measured, "hits"), count(measured, "judged")
    share, z = hits / n, _NORMAL_99
    middle, reach = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = ((middle + sign * reach) / (1 + z * z / n) for sign in (-1, 1))
    return Claim(100 * share, 100 * low, 100 * high)


RULES: Mapping[str, Callable[[Measured], Claim]] = {
    **{f"product/{backend}": partial(product, backend=backend) for backend in BACKENDS},
    "collapse": collapse,
    "slowest": slowest,
    "predictions": predicted,
}
"""By the name that sources have."""


def value(measured: Measured, key: str) -> float:
    """Of what a source says behind ``rule#``: a claim, an end of its interval, or a count; KeyError for another."""
    name, _, end = key.rpartition("/")
    if name in RULES and end in ("low", "high"):
        found: float = getattr(RULES[name](measured), end)
        return found
    return RULES[key](measured).value if key in RULES else count(measured, key)


def count(measured: Measured, key: str) -> int:
    """How many there are of something; KeyError where nothing of that name is counted."""
    return COUNTS[key](tuple(measured))


def _timed(measured: Measured) -> Iterator[Contest]:
    """The contests in which one run timed both."""
    return (each for each in contests(measured) if each.ratio)


def best(results: Results, case: Case) -> Name:
    """The best baseline at a case; LookupError where none was measured."""
    if found := results.best_baseline(case):
        return found
    raise LookupError(f"no baseline of {results.op.name} was measured at {case.slug}")


def fallen(contest: Contest) -> float:
    """The baseline's rate over its best one."""
    rate = contest.results.rate(contest.case, contest.baseline)
    most = contest.results.rate(best_case(contest), contest.baseline)
    return rate / most if rate and most else math.nan


def best_case(contest: Contest) -> Case:
    """Where the contest's baseline has its best rate, of the operation's cases of the dtype."""
    results = contest.results
    cases = [each for each in results.op.timed_cases if each.dtype == contest.case.dtype]
    return max(cases, key=lambda each: results.rate(each, contest.baseline) or 0.0)


def place(ratio: float) -> float:
    """Where a ratio lies on a scale from a quarter to four times, in percent; 1 is in the middle."""
    return min(max(50 + 25 * math.log2(ratio), 0.0), 100.0)


def stale(measured: Measured) -> list[Name]:
    """The measured steps whose code changed since."""
    return [name for results in measured for name in _steps(results) if results.stale(name)]


def unmeasured(measured: Measured) -> list[Results]:
    """The operations without a row."""
    return [results for results in measured if not results.measured]


def runs(measured: Measured) -> set[str]:
    """The runs that rows are of."""
    return {run for results in measured for run in results.recorded.runs}


def _extreme(row: Contest) -> Claim:
    return Claim(row.paired.value, row.paired.low, row.paired.high, (row,))


def _steps(results: Results) -> list[Name]:
    steps = (Name(backend, step.name) for step in results.op.steps for backend in step.backends)
    return [name for name in steps if name not in results.unmeasured]


@cache
def _frozen(measured: tuple[Results, ...]) -> tuple[Judged, ...]:
    return tuple(each for each in judged.of_all(measured) if each.mark == "pre-registered")


def _outcomes(measured: tuple[Results, ...]) -> Counter[str]:
    return Counter(each.judgement.verdict for each in _frozen(measured))


def _missed(measured: tuple[Results, ...]) -> int:
    return sum(each.missed for each in _frozen(measured))


COUNTS: Mapping[str, Callable[[tuple[Results, ...]], int]] = {
    "hits": lambda measured: _outcomes(measured)["hit"],
    "misses": _missed,
    "wrong direction": lambda measured: _outcomes(measured)["wrong direction"],
    "judged": lambda measured: _outcomes(measured)["hit"] + _missed(measured),
    "frozen": lambda measured: len(_frozen(measured)),
    "shapes": lambda measured: len({each.case for each in product(measured, "cuda").rows}),
    "runs": lambda measured: len(runs(measured)),
    "steps": lambda measured: sum(len(_steps(results)) for results in measured),
    "stale": lambda measured: len(stale(measured)),
    "unmeasured": lambda measured: len(unmeasured(measured)),
}
"""What is counted, by the name that sources have."""

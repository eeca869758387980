"""Which of two is faster: the ratio of times with its interval, the same ratio of cycles, and whether the two agree.

A ratio is kept as the difference of logarithms until the end, so that swapping the two sides inverts it exactly. Its
interval is the 99 % percentile interval of the bootstrap (B. Efron, R. Tibshirani, An Introduction to the Bootstrap,
1993, chapter 13). Nothing is drawn at random for it: the median of a resample is the mean of its two middle elements,
and how probable each pair of elements is as that middle can be computed. That is the limit of infinitely many
resamples, takes microseconds, and gives the same samples the same interval on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

_TAIL = (1 - 0.99) / 2
SAME = 1.005  # as a factor either way: FAST for one side is SLOW for the other
_NEGLIGIBLE = 1e-9  # pairs of elements that less of all resamples have in their middle are left out
_MOST = 1_000  # elements of a sample: the number of ways to halve more is beyond a float

Verdict = Literal["FAST", "SLOW", "SAME"]
Standing = Literal["FAST", "SLOW", "SAME", "AMBIGUOUS"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster, with the 99 % interval."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """FAST or SLOW where the whole interval lies more than 0.5 % from 1, else SAME."""
        if self.low > SAME:
            return "FAST"
        return "SLOW" if self.high < 1 / SAME else "SAME"


def paired_ratio(baseline_us: ArrayLike, ours_us: ArrayLike) -> Ratio:
    """How many times faster ours is, from times of the same rounds; ValueError where they are not pairs of times."""
    baseline, ours = _logs("baseline_us", baseline_us), _logs("ours_us", ours_us)
    if len(baseline) != len(ours):
        raise ValueError(f"baseline_us has {len(baseline)} rounds, ours_us {len(ours)}: the rounds must be paired")
    differences = np.sort(baseline - ours)
    lower, upper, weights = _middles(len(differences))
    return _ratio(_median(differences), (differences[lower] + differences[upper]) / 2, weights)


def cycle_ratio(baseline_cycles: ArrayLike, ours_cycles: ArrayLike) -> Ratio:
    """How many times fewer cycles ours takes, from two samples of which no element belongs to one of the other's.

    Each sample is resampled by itself. ValueError where a sample is empty or holds something that is not positive.
    """
    samples = [np.sort(_logs("baseline_cycles", baseline_cycles)), np.sort(_logs("ours_cycles", ours_cycles))]
    medians, weights = [], []
    for sample in samples:
        lower, upper, weight = _middles(len(sample))
        medians.append((sample[lower] + sample[upper]) / 2)
        weights.append(weight)
    differences = np.subtract.outer(*medians).ravel()
    return _ratio(_median(samples[0]) - _median(samples[1]), differences, np.multiply.outer(*weights).ravel())


def confirmed(time: Ratio, cycles: Ratio | None) -> Standing:
    """The verdict by time, where the cycles that ncu counted agree with it or where there are none.

    Clocks move while the bench runs, cycles do not depend on them; but ncu runs a kernel alone, with cold caches. Where
    one of the two calls a difference real and the other does not, or they contradict each other, neither is believed.
    After NVIDIA's nvbench, whose nvbench_compare.py checks a difference of times against cycles in the same way.
    """
    return time.verdict if cycles is None or cycles.verdict == time.verdict else "AMBIGUOUS"


def _logs(name: str, samples: ArrayLike) -> Floats:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or not 1 <= len(values) <= _MOST or not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError(f"{name} must be a list of 1 to {_MOST} positive numbers, is {values}")
    logs: Floats = np.log(values)
    return logs


def _median(ordered: Floats) -> float:
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _ratio(middle: float, medians: Floats, weights: Floats) -> Ratio:
    """From the logarithms of all resampled medians; the upper end is found as the lower one is, from above."""
    low, high = _low_end(medians, weights), -_low_end(-medians, weights)
    return Ratio(math.exp(middle), math.exp(min(low, middle)), math.exp(max(high, middle)))


def _low_end(medians: Floats, weights: Floats) -> float:
    order = np.argsort(medians, kind="stable")
    reached = np.cumsum(weights[order])
    return float(medians[order][np.searchsorted(reached, _TAIL * reached[-1])])


@cache
def _middles(n: int) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats]:
    """The pairs of ranks (0 to n - 1) that can be the two middle ones of a resample of n, and how probable each is.

    An odd resample has one middle element, told as a pair of equal ranks. The probabilities are those of n draws of
    which exactly half fall on rank i or below, one of them on i itself, and the others on rank j or above, one on j.
    """
    half = (n + 1) // 2
    steps = np.arange(n + 1) / n
    ways = [float(math.comb(n, k)) for k in range(n + 1)]
    at_least = np.array([sum(ways[k] * p**k * (1 - p) ** (n - k) for k in range(half, n + 1)) for p in steps])
    single = np.diff(at_least)  # the element of rank `half` (from 1) in a resample is i
    pairs = np.zeros((n, n))
    if n % 2 == 0:
        below = steps[1:] ** half - steps[:-1] ** half
        pairs = np.triu(math.comb(n, half) * np.outer(below, below[::-1]), 1)
        single = single - pairs.sum(axis=1)
    pairs += np.diag(single)
    pairs = (pairs + pairs[::-1, ::-1].T) / 2  # equal under reversal but for rounding; now exactly
    lower, upper = np.nonzero(pairs > _NEGLIGIBLE)
    return lower, upper, pairs[lower, upper]

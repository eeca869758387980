"""Ratios with their intervals, and when cycles confirm them."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_twins.report.meaning.verdict import Ratio, confirmed, cycle_ratio, paired_ratio

TIMES = st.floats(0.5, 1e5)
FAST, SLOW, SAME = Ratio(1.2, 1.1, 1.3), Ratio(0.8, 0.7, 0.9), Ratio(1.0, 0.999, 1.001)


@pytest.mark.parametrize(("factor", "verdict"), [(1.02, "FAST"), (0.98, "SLOW"), (1.0, "SAME"), (1.004, "SAME")])
@pytest.mark.parametrize("rounds", [20, 21, 24])
def test_verdict_follows_the_interval(factor: float, verdict: str, rounds: int) -> None:
    noise = np.random.default_rng(1).normal(1, 0.001, size=(2, rounds))
    ratio = paired_ratio(100 * factor * noise[0], 100 * noise[1])
    assert ratio.verdict == verdict
    assert ratio.low <= ratio.value <= ratio.high


def test_a_difference_counts_when_the_whole_interval_passes_half_a_percent() -> None:
    assert Ratio(1.1, 1.0051, 1.2).verdict == "FAST"
    assert Ratio(1.1, 1.0049, 1.2).verdict == "SAME"
    assert Ratio(0.9, 0.8, 0.9949).verdict == "SLOW"
    assert Ratio(0.9, 0.8, 0.9951).verdict == "SAME"


def test_noisy_rounds_are_not_called_different() -> None:
    noise = np.random.default_rng(1).normal(1, 0.1, size=(2, 24))
    assert paired_ratio(102 * noise[0], 100 * noise[1]).verdict == "SAME"


def test_what_rounds_have_in_common_does_not_widen_the_interval() -> None:
    """The chip's clock drifts by a tenth; both kernels feel it in every round."""
    drift, noise = np.linspace(1, 1.1, 20), np.random.default_rng(2).normal(1, 0.001, size=(2, 20))
    paired, apart = (each(103 * drift * noise[0], 100 * drift * noise[1]) for each in (paired_ratio, cycle_ratio))
    assert paired.verdict == "FAST"
    assert apart.verdict == "SAME"


@pytest.mark.parametrize("n", [3, 10, 20, 21])
@pytest.mark.parametrize("paired", [True, False])
def test_intervals_are_those_of_the_bootstrap(n: int, paired: bool) -> None:
    """Against 200,000 resamples: the same ends, but for the pairs of elements next to them."""
    rng = np.random.default_rng(n)
    ours, theirs = rng.normal(100, 2, size=(2, n))

    def picks() -> np.ndarray:
        return rng.integers(n, size=(200_000, n))

    if paired:
        medians = np.median((np.log(theirs) - np.log(ours))[picks()], axis=1)
    else:
        medians = np.median(np.log(theirs)[picks()], axis=1) - np.median(np.log(ours)[picks()], axis=1)
    ratio = (paired_ratio if paired else cycle_ratio)(theirs, ours)
    for tail, end in ((0.005, ratio.low), (0.995, ratio.high)):
        lower, upper = np.quantile(medians, [max(0, tail - 0.0008), min(1, tail + 0.0008)])
        assert lower - 1e-12 <= math.log(end) <= upper + 1e-12


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=25))
def test_swapping_the_sides_inverts_the_ratio(rounds: list[tuple[float, float]]) -> None:
    a, b = np.array(rounds).T
    for ratio_of in (paired_ratio, cycle_ratio):
        there, back = ratio_of(a, b), ratio_of(b, a)
        for one, other in ((there.value, back.value), (there.low, back.high), (there.high, back.low)):
            assert one * other == pytest.approx(1, rel=1e-14)  # exp rounds; the logarithms are each other's negatives
        opposite = {"FAST": "SLOW", "SLOW": "FAST", "SAME": "SAME"}
        border = any(math.isclose(end, 1.005, rel_tol=1e-12) for end in (there.low, back.low))
        assert border or back.verdict == opposite[there.verdict]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=25), st.randoms())
def test_the_order_of_rounds_does_not_matter(rounds: list[tuple[float, float]], random) -> None:
    shuffled = random.sample(rounds, len(rounds))
    assert paired_ratio(*np.array(rounds).T) == paired_ratio(*np.array(shuffled).T)


def test_samples_of_cycles_need_not_be_of_one_length() -> None:
    ratio = cycle_ratio([200.0] * 10, [100.0] * 7)
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx([2, 2, 2])


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [1.0, float("nan")], [1.0, -2.0]])
def test_what_is_no_time_is_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="ours_us"):
        paired_ratio([1.0] * len(samples) or [1.0], samples)


def test_rounds_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rounds, ours_us 3"):
        paired_ratio([1.0, 2.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("time", "cycles", "verdict"),
    [
        (FAST, FAST, "FAST"),
        (SLOW, SLOW, "SLOW"),
        (SAME, SAME, "SAME"),
        (FAST, None, "FAST"),
        (SAME, None, "SAME"),
        (FAST, SLOW, "AMBIGUOUS"),
        (FAST, SAME, "AMBIGUOUS"),
        (SAME, SLOW, "AMBIGUOUS"),
    ],
)
def test_a_verdict_stands_where_cycles_agree(time: Ratio, cycles: Ratio | None, verdict: str) -> None:
    assert confirmed(time, cycles) == verdict

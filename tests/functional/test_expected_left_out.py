"""How good what "auto" expects is: each committed case is left out and expected from the others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from statistics import fmean, median, quantiles

import pytest

from kernel_twins.functional import expected
from kernel_twins.functional.expected import BACKENDS, Problem
from kernel_twins.spec import Case

GPU = "h100-sxm"
FUNCTIONS: dict[str, dict[str, dict[str, list[float]]]] = json.loads(expected.FILE.read_text())[GPU]

# Geometric mean, 90th percentile and worst of the regret: the time of the backend that is taken over the best one's.
# Just above what the rule has, so that a rule that is much worse fails.
BOUNDS = {
    ("matmul", False): (1.04, 1.1, 1.5),
    ("matmul", True): (1.05, 1.1, 1.4),
    ("linear", False): (1.05, 1.2, 1.4),
    ("linear", True): (1.05, 1.1, 1.6),
}
ROWS = 1.1  # the geometric mean of every other function
FACTOR = 1.3  # between the expected time and the measured one, the median


Left = Iterator[tuple[Problem, dict[str, float]]]


@pytest.fixture
def left_out(monkeypatch) -> Callable[[str, bool], Left]:
    """Each measured case of a function in turn, with its times, while it is not among those that are known."""
    for kept in ("table", "timed"):  # what is left out is not to be kept
        monkeypatch.setattr(expected, kept, getattr(expected, kept).__wrapped__)

    def cases(function: str, differentiated: bool) -> Left:
        for slug in FUNCTIONS[function].keys() - expected.HOST.values():
            times = FUNCTIONS[function][slug]
            if min(len(times[backend]) for backend in BACKENDS) > differentiated:
                others = {other: told for other, told in FUNCTIONS[function].items() if other != slug}
                monkeypatch.setattr(expected, "_content", lambda others=others: {GPU: {function: others}})
                problem = expected.measured(Case.parse(slug))
                assert problem
                yield problem, {backend: sum(times[backend][: 1 + differentiated]) for backend in BACKENDS}

    return cases


@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_taken_takes_little_longer_than_the_best(left_out, function: str, differentiated: bool) -> None:
    regrets = []
    for problem, gpu in left_out(function, differentiated):
        host = expected.host_times(GPU, function, problem.itemsize)
        times = {backend: max(us, (1 + differentiated) * host[backend]) for backend, us in gpu.items()}
        regrets.append(times[expected.ordered(GPU, function, problem, differentiated)[0]] / min(times.values()))
    if not regrets:
        assert function == "argmax"  # which has no gradient
        return
    found = math.exp(fmean(map(math.log, regrets))), quantiles(regrets, n=10, method="inclusive")[-1], max(regrets)
    bounds = BOUNDS.get((function, differentiated), (ROWS,))
    assert all(each <= bound for each, bound in zip(found, bounds, strict=False)), found


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_expected_time_is_near_the_measured_one(left_out, function: str) -> None:
    factors = [
        math.exp(abs(math.log(us / times[backend])))
        for problem, times in left_out(function, False)
        for backend, us in expected.estimate(GPU, function, problem, False).us.items()
    ]
    assert median(factors) <= FACTOR

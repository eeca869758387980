"""What the bench decides without a GPU: who is timed under other conditions, and how many calls a sample has."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kernel_twins import OPS
from kernel_twins.harness import bench
from kernel_twins.harness.bench import Timing
from kernel_twins.spec import BACKENDS, Name

OP = OPS["matmul_bf16"]
CASE = OP.profile_case
LASTS = [Name(backend, step.name) for backend in BACKENDS if (step := OP.last_step(backend, CASE))]


def timed(**baselines_us: float) -> list[Timing]:
    names = {Name(name): time for name, time in baselines_us.items()} | dict.fromkeys(LASTS, 190.0)
    return [Timing(name, "ok", "fast", [time] * 20) for name, time in names.items()]


def test_the_fastest_baseline_and_the_last_steps_are_timed_under_other_conditions() -> None:
    assert [name.step for name in LASTS] == ["v19_fitted_tiles", "v18_few_rows"]
    found = timed(torch=200.0, cublaslt=195.0, compile=196.0)
    assert bench._finalists(OP, CASE, found) == [Name("cublaslt"), *LASTS]
    beside_slow_steps = [Timing(Name("cublaslt"), "ok", "slow", [210.0] * 20)]
    assert bench._finalists(OP, CASE, found + beside_slow_steps) == [Name("cublaslt"), *LASTS]


def test_a_last_step_that_has_no_time_is_left_out() -> None:
    found = [each for each in timed(torch=200.0) if each.name != LASTS[1]]
    assert bench._finalists(OP, CASE, found) == [Name("torch"), LASTS[0]]
    assert bench._finalists(OP, CASE, [each for each in found if each.name not in LASTS]) == []
    assert bench._finalists(OP, CASE, [each for each in found if each.name.step]) == []


def test_other_conditions_are_for_headlines_of_what_arithmetic_bounds() -> None:
    (wide, *_) = OP.wide_cases
    assert bench._finalists(OP, wide, timed(torch=200.0)) == []
    for op in OPS.values():
        assert op.condition_cases == (op.headline_cases if op.ceiling in ("fp32", "bf16") else ())


def test_a_sample_is_long_and_goes_round_the_sets_or_is_one_long_call() -> None:
    assert bench.calls_of(0.01, 3) == 100
    assert bench.calls_of(0.9, 3) == 3
    assert bench.calls_of(19.0, 3) == 3
    assert bench.calls_of(20.0, 3) == 1

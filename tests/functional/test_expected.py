"""What "auto" expects of rows, from tables that are made up; neither torch nor a GPU is needed."""

from __future__ import annotations

import json

import pytest

from kernel_twins.functional import choice, expected
from kernel_twins.functional.expected import Problem, reduced, rows
from kernel_twins.report.calls import fastest
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.pages import checks
from kernel_twins.spec import Case

Times = dict[str, list[float]]


def times(cuda: float, torch: float, triton: float) -> Times:
    return {"cuda": [cuda], "torch": [torch], "triton": [triton]}


@pytest.fixture
def first(monkeypatch):
    """The backend that is expected to be the fastest, from cases of "softmax" on "gpu" and their times."""

    monkeypatch.setattr(expected, "table", expected.table.__wrapped__)  # what is made up here is not to be kept

    def of(cases: dict[str, Times], problem: Problem, differentiated: bool = False) -> str | None:
        monkeypatch.setattr(expected, "_content", lambda: {"gpu": {"softmax": cases}})
        return next(iter(expected.ordered("gpu", "softmax", problem, differentiated)), None)

    return of


def test_a_measured_case_gets_its_own_winner_and_one_between_the_nearer_ones(first) -> None:
    cases = {"1024x1024-bf16": times(10, 30, 20), "1024x65536-bf16": times(20, 30, 10)}
    assert first(cases, rows(1024, 1024, 1024, 2)) == "cuda"
    assert first(cases, rows(1024, 65536, 65536, 2)) == "triton"
    assert first(cases, rows(1024, 2048, 2048, 2)) == "cuda"
    assert first(cases, rows(1024, 32768, 32768, 2)) == "triton"


def test_how_much_is_lost_counts_and_not_who_wins_more_often(first) -> None:
    cases = {
        "1024x1024-bf16": times(10, 99, 11),
        "1024x4096-bf16": times(80, 99, 10),
    }
    assert first(cases, rows(1024, 2000, 2000, 2)) == "triton"


def test_a_layout_is_compared_with_its_own(first) -> None:
    """Rows 3 elements further apart begin at every alignment, those 8 further apart at a thread's word."""
    cases = {
        "1024x4096-bf16": times(10, 30, 20),
        "1024x4096-bf16-x.spaced": times(20, 30, 10),
        "1024x4096-bf16-x.pitched": times(20, 10, 30),
    }
    for pitch, backend in ((3000, "cuda"), (3000 + 16, "triton"), (3000 + 1, "torch")):
        assert first(cases, rows(1000, 3000, pitch, 2)) == backend


def test_pytorch_is_taken_only_where_it_is_clearly_faster(first) -> None:
    problem = rows(64, 64, 64, 2)
    assert first({"64x64-bf16": times(10, 9.9, 12)}, problem) == "cuda"
    assert first({"64x64-bf16": times(10, 9, 12)}, problem) == "torch"
    assert first({"64x64-bf16": times(10, 12, 9.9)}, problem) == "triton"


def test_nothing_is_expected_of_elements_that_were_not_measured(first) -> None:
    cases = {"64x64-bf16": times(10, 30, 20), "64x64-fp32-values.nan": times(10, 30, 20)}
    assert first(cases, rows(64, 64, 64, 4)) is None
    assert first({}, rows(64, 64, 64, 2)) is None


def test_where_gradients_are_wanted_both_passes_count(first) -> None:
    both = {"cuda": [10.0, 50.0], "torch": [30.0, 99.0], "triton": [20.0, 20.0]}
    forward_alone = times(1, 2, 3)
    cases = {"64x64-bf16": both, "64x72-bf16": forward_alone}
    problem = rows(64, 64, 64, 2)
    assert first(cases, problem) == "cuda"
    assert first(cases, problem, differentiated=True) == "triton"
    assert first({"64x72-bf16": forward_alone}, problem, differentiated=True) == "cuda"


def test_a_reduction_is_the_one_that_is_left_when_axes_are_merged() -> None:
    assert reduced((2, 3, 40), (120, 40, 1), (1, 2), 2) == reduced((2, 120), (120, 1), (1,), 2)
    assert reduced((2, 3, 40), (120, 40, 1), (0, 1, 2), 2) == reduced((240,), (1,), (0,), 2)
    assert reduced((3, 40), (40, 1), (0,), 2) != reduced((3, 40), (40, 1), (1,), 2)
    for slug, (shape, strides) in {
        "6x40-bf16-axes.1-kind.sum-x.permuted": ((6, 40), (1, 6)),
        "2x3x40-bf16-axes.1-kind.sum-x.pitched": ((2, 3, 40), (129, 43, 1)),
        "2x3x40-bf16-axes.1-kind.sum": ((2, 3, 40), (120, 40, 1)),
    }.items():
        assert expected.measured(Case.parse(slug)) == reduced(shape, strides, (1,), 2)


def test_a_measured_reduction_that_names_no_axes_is_one_over_the_last_axis() -> None:
    assert expected.measured(Case.parse("6x40-bf16-kind.argmax")) == reduced((6, 40), (40, 1), (1,), 2)


@pytest.mark.parametrize("name", sorted({function.expects for function in FUNCTIONS.values()} - {""}))
def test_any_problem_of_a_function_can_be_compared_with_all_that_were_measured(name: str) -> None:
    for gpu, functions in json.loads(choice.FILE.read_text()).items():
        for slug in functions[name]:
            problem = expected.measured(Case.parse(slug))
            assert problem
            assert expected.ordered(gpu, name, problem, False)


def test_every_time_in_the_file_is_of_a_problem_and_is_read() -> None:
    content = json.loads(choice.FILE.read_text())
    for gpu, functions in content.items():
        for name in {function.expects for function in FUNCTIONS.values()} - {""}:
            known = expected.table(gpu, name, False)
            assert sum(map(len, known.values())) == len(functions[name]) > 0
    assert choice.FILE.stat().st_size <= 200_000


def test_options_that_a_function_fixes_tell_its_cases_from_those_of_others() -> None:
    of = FUNCTIONS.__getitem__
    log, plain = Case.parse("64x64-bf16-log.yes"), Case.parse("64x64-bf16")
    assert [fastest.is_offered(of(name), log) for name in ("softmax", "log_softmax")] == [False, True]
    assert [fastest.is_offered(of(name), plain) for name in ("softmax", "log_softmax")] == [True, False]
    maximum = Case.parse("64x64-bf16-axes.1-kind.max")
    assert [fastest.is_offered(of(name), maximum) for name in ("amax", "argmax", "sum")] == [True, False, False]


def test_check_fails_where_the_file_is_older_than_the_rows(monkeypatch) -> None:
    assert checks.stale_choices() == []
    monkeypatch.setattr(fastest, "render", lambda: "{}")
    (line,) = checks.stale_choices()
    assert "run python -m kernel_twins.report.calls.fastest" in line

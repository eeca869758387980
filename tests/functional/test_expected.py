"""What "auto" expects, from tables that are made up; neither torch nor a GPU is needed."""

from __future__ import annotations

import json

import pytest

from kernel_twins.functional import expected
from kernel_twins.functional.expected import Problem, product, reduced, rows
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

    def of(
        cases: dict[str, Times], problem: Problem | None, differentiated: bool = False, traced: bool = False
    ) -> str | None:
        monkeypatch.setattr(expected, "_content", lambda: {"gpu": {"softmax": cases}})
        return next(iter(expected.ordered("gpu", "softmax", problem, differentiated, traced)), None)

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


def test_a_call_that_takes_the_host_longer_goes_by_the_hosts_times(first) -> None:
    host = {expected.HOST[2]: times(10, 30, 20)}
    small, large = {"64x64-bf16": times(9, 3, 1)}, {"8192x8192-bf16": times(90, 30, 10)}
    assert first(small, rows(64, 64, 64, 2)) == "triton"
    assert first(small | host, rows(64, 64, 64, 2)) == "cuda"
    assert first(large | host, rows(8192, 8192, 8192, 2)) == "triton"
    assert first(large | host, rows(64, 64, 64, 2)) == "cuda"  # of which no like was measured
    assert expected.ordered("gpu", "softmax", rows(64, 64, 64, 2), False, replayed=True)[0] == "triton"


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


def test_a_product_is_compared_with_those_of_its_layout_and_of_tiles_that_are_as_full(first) -> None:
    def asked(m: int, n: int, k: int, copied: bool = True, column_major: bool = False) -> str | None:
        return first(cases, product(m, n, k, 2, copied=copied, column_major=column_major))

    cases = {
        "4096x4096x4096-bf16": times(10, 30, 20),
        "4096x4096x4096-bf16-b.col": times(30, 10, 20),
        "4095x4097x4096-bf16": times(30, 20, 10),
    }
    assert asked(4096, 4096, 4096) == asked(8192, 4096, 2048) == "cuda"
    assert asked(8192, 4096, 2048, column_major=True) == "torch"
    assert asked(8191, 4099, 2048, copied=False) == "triton"
    cases = {"2048x2112x4096-fp16": times(10, 30, 20), "528x2048x4096-fp16": times(30, 10, 20)}
    assert asked(1024, 4096, 4096) == "cuda"  # 128 tiles on 132 SMs
    assert asked(1024, 1024, 4096) == "torch"  # 32


def test_a_product_that_was_measured_without_gradients_counts_where_they_are_wanted(first) -> None:
    cases = {
        "4096x4096x4096-bf16": {"cuda": [10.0, 50.0], "torch": [20.0, 20.0], "triton": [30.0, 30.0]},
        "64x64x4096-bf16": times(20, 30, 10),
    }
    large, small = (product(m, m, 4096, 2, copied=True, column_major=False) for m in (4096, 64))
    assert [first(cases, large, differentiated) for differentiated in (False, True)] == ["cuda", "torch"]
    assert [first(cases, small, differentiated) for differentiated in (False, True)] == ["triton", "triton"]


def test_inductor_is_taken_unless_rows_of_ours_take_half_its_time_and_products_less(first) -> None:
    def traced(cuda: float, inductor: float, slug: str, *, symbols: bool = False) -> str | None:
        cases = {slug: {**times(cuda, 1, 99), "compile": [inductor]}}
        return first(cases, None if symbols else expected.measured(Case.parse(slug)), traced=True)

    for symbols in (False, True):
        assert traced(10, 19, "64x64-bf16", symbols=symbols) == "torch"
        assert traced(10, 21, "64x64-bf16", symbols=symbols) == "cuda"
        assert traced(10, 10, "64x64x64-bf16", symbols=symbols) == "torch"
        assert traced(10, 11, "64x64x64-bf16", symbols=symbols) == "cuda"
    assert first({"64x64-bf16": times(10, 30, 20)}, rows(64, 64, 64, 2), traced=True) is None
    assert first({"64x64-bf16": times(10, 30, 20)}, None, traced=True) is None


def test_the_time_of_a_measured_case_is_told_and_that_of_others_by_their_work(monkeypatch) -> None:
    both = {"cuda": [100.0, 300.0], "torch": [200.0, 400.0], "triton": [400.0, 100.0]}
    monkeypatch.setattr(expected, "timed", expected.timed.__wrapped__)
    monkeypatch.setattr(expected, "_content", lambda: {"gpu": {"softmax": {"8192x4096-bf16": both}}})
    alike, longer = (rows(m, 4096, 4096, 2) for m in (8192, 8192 * 1024))
    told = expected.estimate("gpu", "softmax", alike, False)
    assert told.us == pytest.approx({"cuda": 100, "torch": 200, "triton": 400})
    assert told.nearest == (("8192x4096-bf16", 0.0),)
    assert expected.estimate("gpu", "softmax", alike, True).us == pytest.approx(
        {"cuda": 400, "torch": 600, "triton": 500}
    )
    assert 800 < expected.estimate("gpu", "softmax", longer, False).us["cuda"] / 100 < 1200
    assert expected.estimate("gpu", "softmax", rows(64, 64, 64, 4), False) == expected.Estimate({}, ())


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
    for gpu, functions in json.loads(expected.FILE.read_text()).items():
        for slug in functions.get(name, {}).keys() - expected.HOST.values():
            problem = expected.measured(Case.parse(slug))
            assert problem
            assert expected.ordered(gpu, name, problem, False)


def test_every_time_in_the_file_is_of_a_problem_and_is_read() -> None:
    content = json.loads(expected.FILE.read_text())
    for gpu, functions in content.items():
        assert {function.expects for function in FUNCTIONS.values()} - {"", "attention"} == {*functions}
        for name in functions:
            known = expected.table(gpu, name, False)
            assert sum(map(len, known.values())) == len(functions[name].keys() - expected.HOST.values()) > 0
            assert all(expected.host_times(gpu, name, width).keys() == {*expected.BACKENDS} for width in expected.HOST)
    assert expected.FILE.stat().st_size <= 200_000


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

"""Contests at sampled cases on a GPU: everybody who serves a case is right there, and has a time."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernel_twins.harness import bench  # noqa: E402
from kernel_twins.report.calls import sampled_contests, sampled_results, sampled_table, sampled_timing  # noqa: E402
from kernel_twins.report.calls.sampled_cases import CONTESTS  # noqa: E402
from kernel_twins.report.calls.sampled_contests import Problem, contest  # noqa: E402
from kernel_twins.report.measure import sampled  # noqa: E402
from kernel_twins.report.measure.sampled import Recording  # noqa: E402
from kernel_twins.report.rows import store  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

SMALL = {
    "matmul": ["640x512x1024-bf16-b.col", "333x777x555-fp32-a.col"],
    "linear": ["640x512x1024-bf16-act.gelu", "333x776x555-fp16-act.relu-w.col"],
    "softmax": ["4096x1024-bf16", "3x200003-fp16-x.pitched"],
    "log_softmax": ["4096x1024-bf16-log.yes", "3x200003-fp32-log.yes-x.spaced"],
    "layer_norm": ["4096x1024-bf16-residual.yes", "517x1003-fp32-affine.none-x.pitched"],
    "rms_norm": ["4096x1024-bf16-residual.yes", "517x1003-fp16-x.spaced"],
    "cross_entropy": ["1024x32000-bf16-target.ignored", "517x1003-fp32-logits.pitched-smoothing.tenth"],
    "cross_entropy_gradient_": ["1024x32000-bf16-target.ignored", "517x1003-fp32-logits.pitched-smoothing.tenth"],
    "dropout_add": ["4096x1024-bf16-act.gelu-bias.yes-p.10-residual.yes", "517x1003-fp32-p.10-x.pitched"],
    "sum": ["64x1024x512-bf16-axes.02-kind.sum", "517x1003-fp32-axes.0-kind.sum-x.permuted"],
    "mean": ["64x1024x512-bf16-axes.1-kind.mean", "517x1003-fp32-axes.01-kind.mean-x.pitched"],
    "amax": ["64x1024x512-bf16-axes.1-kind.max", "517x1003-fp32-axes.1-kind.max-x.permuted"],
    "argmax": ["64x1024x512-bf16-axes.1-kind.argmax", "517x1003-fp32-axes.01-kind.argmax"],
    "attention": ["2x16x1024x128-bf16-kv.4-mask.causal", "1x8x517x64-fp16-keys.1003"],
    "scaled_dot_product_attention": ["2x16x1024x128-bf16-kv.4-mask.causal", "1x8x517x64-fp16-keys.1003"],
}


@pytest.fixture(autouse=True)
def on_a_stream_of_its_own():
    with torch.cuda.stream(torch.cuda.Stream()), sampled_contests.compiling():
        yield


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("function", "direction"), CONTESTS)
def test_all_of_ours_are_right_and_timed(function, direction, number) -> None:
    problem = Problem(function, Case.parse(SMALL[function][number]), number)
    rows = {row["backend"]: row for row in contest(problem, direction, {})}
    assert {*rows} == {*problem.names(direction)} and ("compile" in rows) is (number == 0)
    for name, row in rows.items():
        assert row["status"] == "ok" or row["status"].startswith("skipped: "), f"{name}: {row['status']}"
        if row["status"] == "ok":
            assert 0.5 < float(row["us"]) < 100_000
    assert all(rows[name]["status"] == "ok" for name in ("torch", *sampled_table.OURS))
    assert rows["auto"]["chosen"] in ("cuda", "triton", "torch")
    if number == 0:
        assert rows["compile"]["status"] == "ok"


@pytest.mark.parametrize("function", ["softmax", "rms_norm", "linear", "cross_entropy", "argmax"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_result_that_nobody_writes_is_not_the_right_one_of_before(function, direction) -> None:
    """Memory that other results have just left is not taken for a call's own."""
    if (function, direction) not in CONTESTS:
        pytest.skip("it has no gradient")
    problem = Problem(function, Case.parse(SMALL[function][0]), 1)
    forms = problem.entrant("cuda", direction, 0).forms

    def allocated():
        return [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in forms]

    left = allocated()
    for each in left:
        each.fill_(1)
    del left, each
    sampled_results.poison(forms, "cuda")
    for each in allocated():
        assert bool((each.isnan() if each.is_floating_point() else each == -1).all())


@pytest.mark.parametrize("number", [0, 1])
def test_a_call_that_misses_its_tail_is_wrong(number, monkeypatch) -> None:
    problem = Problem("softmax", Case.parse(SMALL["softmax"][number]), 1)

    def ours(x, backend):
        y, right = torch.empty(x.shape, dtype=x.dtype, device="cuda"), torch.softmax(x, -1)
        y.view(-1)[:-1] = right.view(-1)[:-1]
        return y

    monkeypatch.setattr(problem, "calls", dataclasses.replace(problem.calls, ours=ours))
    rows = {row["backend"]: row["status"] for row in contest(problem, "forward", {})}
    assert rows["cuda"].startswith("wrong: element") and rows["triton"].startswith("wrong: element")


def test_one_wrong_element_of_linears_gradients_is_found() -> None:
    problem = Problem("linear", Case.parse(SMALL["linear"][0]), 1)
    entrant = problem.entrant("cuda", "backward", 0)
    right = entrant.trial()
    assert entrant.fault is not None
    assert entrant.fault(right) == ""
    for index, each in enumerate(right):
        wrong = each.clone()
        wrong[(-1,) * each.dim()] += each.float().square().mean().sqrt() / 4 + each[(-1,) * each.dim()].abs() / 16
        assert entrant.fault((*right[:index], wrong, *right[index + 1 :])) != ""


def test_a_loss_whose_rows_are_all_ignored_is_nan_and_timed() -> None:
    for direction in ("forward", "backward"):
        problem = Problem("cross_entropy", Case.parse("1x500000-bf16-target.ignored"), 1)
        rows = {row["backend"]: row["status"] for row in contest(problem, direction, {})}
        assert [rows[name] for name in ("torch", *sampled_table.OURS)] == ["ok"] * 4


def test_what_is_compiled_is_right_and_is_compiled_for_every_shape() -> None:
    for m in range(2, 13):
        problem = Problem("rms_norm", Case.parse(f"{m}x2048-bf16-residual.yes"), 0, sets=1)
        entrant = problem.entrant("compile", "forward", 0)
        assert sampled_contests.judged(entrant, entrant.trial()) == "ok"


def test_a_sample_goes_round_the_sets_however_long_the_host_takes() -> None:
    x = [torch.zeros(1000, device="cuda") for _ in range(2)]
    sample = sampled_timing._sample("fine", [partial(each.add_, 1) for each in x], torch.cuda.graph_pool_handle())
    assert sample.is_short and sample.calls > bench.few(2)


def test_graphs_hold_as_many_calls_as_are_asked_for() -> None:
    x = torch.zeros(1000, device="cuda")
    graph = bench.captured([lambda: x.add_(1), lambda: x.add_(10)], 5, torch.cuda.graph_pool_handle())
    graph.replay()
    torch.cuda.synchronize()
    assert x.unique().tolist() == [23.0]


def test_a_call_that_cannot_be_captured_is_told_and_the_others_are_timed() -> None:
    x = torch.ones(2**20, device="cuda")
    calls = {"fine": [lambda: x * 2], "waits": [lambda: x.sum().item()]}
    times, _ = sampled_timing.timed(calls)
    assert times["waits"].status.startswith("not captured: ") and not times["waits"].times_us
    assert times["fine"].status == "ok" and len(times["fine"].times_us) == sampled_timing.ROUNDS


def test_a_recording_of_two_cases_is_compiled_measured_and_gone_on_with(tmp_path: Path) -> None:
    run = {"run": "2026-12-01-abc1", "date": "2026-12-01T00:00:00Z", **dict.fromkeys(store.PROVENANCE[2:], "1")}
    folder = Recording.begin(tmp_path / "stage", run, "0").folder
    told = json.loads((folder / "sampled.json").read_text())
    cases = {"softmax": SMALL["softmax"][:1], "rms_norm": SMALL["rms_norm"][1:]}
    (folder / "sampled.json").write_text(json.dumps({**told, "cases": cases}))
    (folder / "compile.json").write_text(json.dumps([["softmax", 0], ["rms_norm", 0]]))
    command = [sys.executable, "-m", "kernel_twins.report.measure.sampled", str(folder), "0", "1"]
    subprocess.run(command, check=True, cwd=store.ROOT)
    recording = Recording(folder)
    assert recording.compiled() == {("softmax", 0), ("rms_norm", 0)}
    assert sampled.record(recording, lambda line: None) == []
    rows = pd.concat([Recording(folder).rows(function) for function in cases])
    assert len(rows[rows["status"] == "ok"]) >= 2 * 2 * 4
    assert Recording(folder).waiting() == []

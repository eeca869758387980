"""Times the public functions as a user calls them, beside PyTorch: the host's part, the GPU's, and the backward pass.

Every call's result, and its gradients where they are timed, must agree with those in fp32 first; a wrong call gets no
time. Then the calls of a contest take turns in random order, round after round (see harness/bench.py for why).
There is no CUDA graph here: what a user pays for is timed, autograd and allocation included. Since hosts are shared,
the rounds are kept in which a loop that has nothing to do with the calls ran fastest.
"""

from __future__ import annotations

import math
import platform
import random
import re
import time
from collections.abc import Callable, Mapping
from itertools import repeat
from pathlib import Path
from timeit import timeit
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kernel_twins.errors import UnavailableError
from kernel_twins.functional.contests import OURS, Contest, Result
from kernel_twins.harness.bench import raised
from kernel_twins.harness.sensors import Sampler
from kernel_twins.ops.baselines import environment_kept
from kernel_twins.report.calls import functions_code, functions_table
from kernel_twins.report.calls.functions import contests
from kernel_twins.report.measure import publish, stage
from kernel_twins.report.rows import store

Call = Callable[[], Any]
Times = dict[str, tuple[int, list[float]]]  # by backend: calls a sample, and microseconds a call, one a round

HOST_ROUNDS = 40
HOST_CALLS = 50  # launches that the driver queues without waiting for the GPU
GPU_ROUNDS = 20
BACKWARD_ROUNDS = 100  # since another thread is woken for each pass, times scatter
BACKWARD_CALLS = 20  # whose forward passes are held in memory at once
_TRIED = 8  # rounds for each that is kept
_SPINS = 20_000  # of the loop that tells whether the core was shared
_SAMPLE_MS = 5.0
_WARM_UP = 200  # calls, of the host alone
_NAMES = ("the result", "x's gradient", "weight's gradient", "bias's gradient")
_LIMIT = 0.01  # of the norm: PyTorch's roundings to bf16 are 0.3 %, a missing tile is 2 % or more


def record(gpu: str, target: Path, progress: Callable[[str], None]) -> list[str]:
    """Measure, and replace the recorded rows in a folder; returns what was wrong, a line each."""
    run, codes = stage.new_run(), functions_code.codes(gpu)
    rows = []
    for contest in contests():
        progress(f"{contest.kind} {contest.function} {contest.case.slug}")
        for row in timed(contest):
            rows.append(row | {"code": codes[contest.function] if row["backend"] in OURS else "", "run": run["run"]})
        torch.cuda.empty_cache()
    stage.enter_run(target, run)
    store.write(functions_table.file(target), pd.DataFrame(rows, columns=functions_table.COLUMNS))
    publish.forget_unnamed_runs(target)
    return [
        f"{row['function']} {row['case']} ({row['backend']}): {row['status']}" for row in rows if row["status"] != "ok"
    ]


def timed(contest: Contest) -> list[dict[str, str]]:
    """A row for every backend, without code and run."""
    with torch.set_grad_enabled(contest.kind in ("gpu", "backward") or bool(contest.case.get("grad"))):
        judged: dict[str, Call] = {**contest.calls, **contest.judged}
        gates = {backend: _gate(call, contest.expected) for backend, call in judged.items()}
        right = {backend: contest.calls[backend] for backend, (status, _) in gates.items() if status == "ok"}
        times, sensors = _TIMERS[contest.kind](right)
    rows = []
    for backend, (status, error) in gates.items():
        calls, samples = times.get(backend, (0, []))
        rows.append(
            {
                "kind": contest.kind,
                "function": contest.function,
                "case": contest.case.slug,
                "backend": backend,
                "status": status,
                "calls": str(calls) if calls else "",
                "times_us": " ".join(f"{sample:.5g}" for sample in samples),
                "error": f"{error:.3g}",
                **store.sensor_fields(sensors),
                "cpu": _cpu(),
            }
        )
    return rows


def _gate(call: Callable[[], Result], expected: tuple[Tensor, ...]) -> tuple[str, float]:
    """``ok`` or what is wrong, and the largest error as a share of the norm."""
    try:
        with environment_kept():  # torch.compile compiles now
            result = call()
    except UnavailableError:  # nothing of a backend can be measured here, which is for the user to mend
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        return raised(error), math.nan
    got = (result,) if isinstance(result, Tensor) else result
    if len(got) != len(expected):
        return "wrong: a gradient is missing", math.nan
    largest = 0.0
    for name, tensor, right in zip(_NAMES, got, expected, strict=False):
        if tensor.shape != right.shape:
            return f"wrong: {name} has shape {tuple(tensor.shape)}, must have {tuple(right.shape)}", math.nan
        if not right.is_floating_point():  # places, of which none is nearly right
            if not torch.equal(tensor, right):
                return f"wrong: {name} has other places", math.nan
            continue
        share = float((tensor.detach().float() - right).norm() / right.norm())
        if not share <= _LIMIT:  # written so that a NaN fails
            return f"wrong: {name} is off by {100 * share:.3g} % of its norm, the limit is {100 * _LIMIT:g} %", share
        largest = max(largest, share)
    return "ok", largest


def _host_times(calls: Mapping[str, Call]) -> tuple[Times, dict[str, Any]]:
    """By the host's clock; nothing else may run on it, so the sensors are not read."""

    def sample(call: Call, count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in repeat(None, count):
            call()
        return 1e6 * (time.perf_counter() - begin) / count

    for call in calls.values():
        for _ in repeat(None, _WARM_UP):
            call()
    times = _in_turns(calls, dict.fromkeys(calls, HOST_CALLS), HOST_ROUNDS, sample)
    torch.cuda.synchronize()
    return times, {}


def _backward_times(calls: Mapping[str, Call]) -> tuple[Times, dict[str, Any]]:
    """By the host's clock, from the first of several backward passes to the end of the GPU's work for the last.

    As in ``_host_times``, nothing else may run on it.
    """

    def sample(prepared: Call, count: int) -> float:
        passes = [prepared() for _ in range(count)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for backward in passes:
            backward()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - begin) / count

    for prepared in calls.values():
        sample(prepared, BACKWARD_CALLS)
    return _in_turns(calls, dict.fromkeys(calls, BACKWARD_CALLS), BACKWARD_ROUNDS, sample), {}


def _gpu_times(calls: Mapping[str, Call]) -> tuple[Times, dict[str, Any]]:
    """By events, behind an untimed call that keeps the GPU busy until the host is ahead of it."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample(call: Call, count: int) -> float:
        call()
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end)) / count

    counts = {backend: math.ceil(1e3 * _SAMPLE_MS / sample(call, 3)) for backend, call in calls.items()}
    with Sampler() as sampler:
        times = _in_turns(calls, counts, GPU_ROUNDS, sample)
    return times, sampler.summary()


_TIMERS = {"host": _host_times, "forward": _gpu_times, "gpu": _gpu_times, "backward": _backward_times}


def _in_turns(
    calls: Mapping[str, Call], counts: Mapping[str, int], rounds: int, sample: Callable[[Call, int], float]
) -> Times:
    """A sample of every backend once a round, in random order; of the rounds in which the core was shared least."""
    tried: list[tuple[float, dict[str, float]]] = []
    shuffle, order = random.Random(0).shuffle, list(calls)
    for _ in range(_TRIED * rounds):
        shuffle(order)
        before = timeit(number=_SPINS)
        samples = {backend: sample(calls[backend], counts[backend]) for backend in order}
        tried.append((max(before, timeit(number=_SPINS)), samples))
    kept = sorted(tried, key=lambda round_: round_[0])[:rounds]
    return {backend: (counts[backend], [samples[backend] for _, samples in kept]) for backend in calls}


def _cpu() -> str:
    """The host's processor as it calls itself."""
    try:
        found = re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor()

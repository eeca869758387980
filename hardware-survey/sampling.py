"""Times something on the current GPU over and over, and asks the sensors meanwhile."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from kernel_twins.harness.sensors import Sampler

SAMPLES = 20  # of each quantity
SAMPLE_MS = 50.0  # length of each: all of them last a second, long enough for power and clock to settle
WARM_UP = 3  # samples thrown away

Run = Callable[[int], None]
"""Does that many iterations of something on the current stream."""


def repeated(call: Callable[..., object], *arguments: object, **options: object) -> Run:
    """A call of Python's for each iteration."""

    def run(iterations: int) -> None:
        for _ in range(iterations):
            call(*arguments, **options)

    return run


def rate(name: str, unit: str, work: int, run: Run) -> dict[str, Any]:
    """Work per time; ``work`` in bytes or FLOP an iteration."""
    per_ms = {"GB/s": 1e6, "TFLOP/s": 1e9}[unit]
    return _measure(name, unit, run, lambda iterations, ms: work * iterations / ms / per_ms)


def latency(name: str, launches: int, run: Run) -> dict[str, Any]:
    """Microseconds a launch; ``launches`` an iteration."""
    return _measure(name, "us", run, lambda iterations, ms: 1e3 * ms / (iterations * launches))


def _measure(name: str, unit: str, run: Run, value: Callable[[int, float], float]) -> dict[str, Any]:
    """The median over the samples of ``value(iterations, milliseconds)``, its spread, and the sensors meanwhile."""
    print(f"measuring {name}", file=sys.stderr, flush=True)
    iterations = 1
    _elapsed_ms(run, iterations)  # the first call loads the kernel
    while (elapsed := _elapsed_ms(run, iterations)) < SAMPLE_MS / 5:
        iterations *= 2
    iterations = max(1, round(iterations * SAMPLE_MS / elapsed))
    for _ in range(WARM_UP):
        _elapsed_ms(run, iterations)
    with Sampler(torch.cuda.current_device()) as sampler:
        values = [value(iterations, _elapsed_ms(run, iterations)) for _ in range(SAMPLES)]
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "name": name,
        "value": _rounded(median),
        "unit": unit,
        "n": len(values),
        "iqr": _rounded(third - first),
        "min": _rounded(min(values)),
        "max": _rounded(max(values)),
        "iterations": iterations,
        **sampler.summary(),
    }


def _elapsed_ms(run: Run, iterations: int) -> float:
    start: Any = torch.cuda.Event(enable_timing=True)
    end: Any = torch.cuda.Event(enable_timing=True)
    start.record()
    run(iterations)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")

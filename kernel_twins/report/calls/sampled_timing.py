"""The GPU's time of calls that take turns: graphs of several calls each, over operands that leave nothing in L2.

As harness/bench.py does it, for calls that return what they allocate, in fewer rounds: many cases are to be timed
once, and none of them exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_twins.harness.bench import SETTLED_MS, calls_of, captured, few, raised, warm_ms
from kernel_twins.harness.sensors import Sampler

Call = Callable[[], Any]

ROUNDS = 7


class LostGpuError(RuntimeError):
    """A call left a GPU on which this process can do nothing more: ``backend`` names whose, ``status`` says how."""

    def __init__(self, backend: str, status: str) -> None:
        super().__init__(f"{backend}: {status}")
        self.backend, self.status = backend, status


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds a call, a value a round; or why there are none."""

    status: str = "ok"
    times_us: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Sample:
    graph: torch.cuda.CUDAGraph
    calls: int
    is_short: bool  # it would notice what ran before it


def timed(calls: Mapping[str, Sequence[Call]]) -> tuple[dict[str, Times], dict[str, float | str | None]]:
    """The times by name, and the sensors'. Of each name there is a call a set of operands; all were made before.

    All must run on the current stream, which is not the default one, since it is captured.
    """
    pool = torch.cuda.graph_pool_handle()  # graphs take turns, and nobody reads what they leave there
    samples: dict[str, _Sample] = {}
    found: dict[str, Times] = {}
    for name, its in calls.items():
        try:
            samples[name] = _sample(name, its, pool)
        except LostGpuError:
            raise
        except Exception as error:  # of anybody's library
            found[name] = Times(f"not captured: {raised(error).removeprefix('wrong: ')}")
    times: dict[str, list[float]] = {name: [] for name in samples}
    order, shuffle = list(samples), random.Random(0).shuffle
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with Sampler() as sampler:
        for _ in range(ROUNDS):
            shuffle(order)
            for name in order:
                sample = samples[name]
                try:
                    if sample.is_short:
                        sample.graph.replay()  # untimed: the same predecessor for everybody
                    start.record()
                    sample.graph.replay()
                    end.record()
                    end.synchronize()
                except RuntimeError as error:
                    raise LostGpuError(name, raised(error)) from None
                times[name].append(1e3 * start.elapsed_time(end) / sample.calls)
    return {**found, **{name: Times(times_us=values) for name, values in times.items()}}, sampler.summary()


def _sample(name: str, calls: Sequence[Call], pool: Any) -> _Sample:
    """As long as bench.py's, by what a short graph's replay takes: the host has no say in it."""
    count = few(len(calls))
    graph = captured(calls, count, pool)
    try:
        call_ms = warm_ms(graph) / count
    except RuntimeError as error:
        raise LostGpuError(name, raised(error)) from None
    if (enough := calls_of(call_ms, len(calls))) != count:
        graph = captured(calls, enough, pool)
    return _Sample(graph, enough, enough * call_ms < SETTLED_MS)

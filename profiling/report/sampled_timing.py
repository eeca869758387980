"""The GPU's time of calls that take turns: graphs of several calls each, over operands that leave nothing in L2.

As kernel_twins/bench.py does it, for calls that return what they allocate, in fewer and shorter rounds: many cases are
to be timed once, and none of them exactly.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_twins.bench import raised
from kernel_twins.sensors import Sampler

Call = Callable[[], Any]

ROUNDS = 7
SAMPLE_MS = 1.0
SETTLED_MS = 20.0  # a sample longer than this does not notice what ran before it, and no graph need be longer
_L2_MULTIPLE = 3


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


def sets_of(operand_bytes: int) -> int:
    """How many sets of operands exceed L2 several times."""
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    return max(1, math.ceil(_L2_MULTIPLE * l2_bytes / max(1, operand_bytes)))


def timed(
    calls: Mapping[str, Sequence[Call]], call_us: float
) -> tuple[dict[str, Times], dict[str, float | str | None]]:
    """The times by name, and the sensors'. Of each name there is a call a set of operands; all were made before.

    A call takes ``call_us`` or more: so many make a sample. All must run on the current stream, which is not the
    default one, since it is captured.
    """
    pool = torch.cuda.graph_pool_handle()  # graphs take turns, and nobody reads what they leave there
    graphs, found = {}, {}
    for name, its in calls.items():
        try:
            milliseconds = _once(its[0])
            most = math.ceil(SETTLED_MS / max(milliseconds, 1e-3))
            count = min(most, max(len(its), math.ceil(1e3 * SAMPLE_MS / call_us)))
            graphs[name] = captured(its, count, pool), count, count * milliseconds < SETTLED_MS
        except Exception as error:  # of anybody's library
            found[name] = Times(f"not captured: {raised(error).removeprefix('wrong: ')}")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    order, shuffle = list(graphs), random.Random(0).shuffle
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with Sampler() as sampler:
        for _ in range(ROUNDS):
            shuffle(order)
            for name in order:
                graph, count, is_short = graphs[name]
                try:
                    if is_short:
                        graph.replay()  # untimed: the same predecessor for everybody
                    start.record()
                    graph.replay()
                    end.record()
                    end.synchronize()
                except RuntimeError as error:
                    raise LostGpuError(name, raised(error)) from None
                times[name].append(1e3 * start.elapsed_time(end) / count)
    return {**found, **{name: Times(times_us=values) for name, values in times.items()}}, sampler.summary()


def captured(calls: Sequence[Call], count: int, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of ``count`` calls, going round those that there are."""
    kept: deque[object] = deque(maxlen=len(calls) - 1)  # results rotate as operands do, see kernel_twins/bench.py
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin(pool=pool)
    try:
        for index in range(count):
            kept.append(calls[index % len(calls)]())
    except BaseException:
        with contextlib.suppress(RuntimeError):  # which would say no more than that the capture failed
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # unless it got as far as this itself
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise
    graph.capture_end()
    return graph


def _once(call: Call) -> float:
    """Milliseconds of one call, the host's included."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)

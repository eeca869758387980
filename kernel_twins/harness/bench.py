"""Times every step and baseline of one case, interleaved in one process.

Compared calls take turns in a random order, round after round, because the chip is power-limited and its clocks drift
by more than the differences that matter. Each sample replays a CUDA graph of several calls, so that no host time is
measured. The calls rotate over sets of inputs and outputs of more than three times L2's size, so that nothing stays in
L2. Data are random normal. A wrong call gets no time.

That is *sustained*: samples follow each other, and products make the chip hot and slow. At the op's ``condition_cases``
the last step of each language and the fastest baseline are also timed *rested* and *in a chain*. Each condition has
rounds of its own, and times pair only within a condition. A chain runs for a while before its first sample.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_twins.errors import UnavailableError
from kernel_twins.harness.check import Judge, NotJudgedError, Verdict, generator, judging
from kernel_twins.harness.load import Call, load_named
from kernel_twins.harness.sensors import Readings, Sampler
from kernel_twins.ops.tensors import empty_outputs
from kernel_twins.spec import BACKENDS, NOT_JUDGED, Backend, Case, Name, Op, Step

CallSet = tuple[tuple[Tensor, ...], Tensor | tuple[Tensor, ...]]  # inputs and out of one call

ROUNDS = 20
CONDITION_ROUNDS = 10  # for rested and for chain
SAMPLE_MS = 1.0  # a sample lasts at least this long, a thousand times the resolution of an event
SETTLED_MS = 20.0  # a sample longer than this does not depend on the call before it
_L2_MULTIPLE = 3
_FEW = 32
_CONTENDER = 4.0  # a call within this factor of the fastest baseline is timed beside the other fast ones
_LONGEST_MS = 500.0  # a call longer than this is not timed
_REST_MS = 20.0  # the least rest before a rested sample
_REST = 5.0  # the least rest in multiples of the sample's length
_CHAIN_S = 1.0  # how long a chain runs before its first sample: longer than a sensor's delay
_BETWEEN = 2**18  # fp32 elements of the small kernel in a chain: some for every SM, in the time of a launch


@dataclass(slots=True)
class Timing:
    """One cell: ``status`` is ``ok`` or says why there are no times; ``times_us`` has one value for each round.

    Ratios pair rounds of the same ``contest``. Calls far slower than the baseline are timed in the contest ``slow``, so
    that their long launches at low power do not disturb the calls in ``fast``. Both are sustained; ``rested`` and
    ``chain`` are the other conditions. A time of ``chain`` is that of the call and the small kernel behind it.
    ``extra_bytes`` is the peak of memory allocated during a call beyond inputs and outputs; ``error`` and ``margin``
    are the gate's (see check.Verdict). All three are None if nothing was computed.
    """

    name: Name
    status: str = "ok"
    contest: str = ""
    times_us: list[float] = field(default_factory=list)
    extra_bytes: int | None = None
    error: float | None = None
    margin: float | None = None
    sensors: dict[str, float | str | None] = field(default_factory=dict)


def bench(op: Op, case: Case, steps: tuple[Step, ...], backends: tuple[Backend, ...] = BACKENDS) -> list[Timing]:
    """Gate and time the given steps of one case beside every baseline and reference.

    One Timing for each, in the spec's order.
    """
    capability = torch.cuda.get_device_capability()
    references = [Name(name) for name, reference in op.references.items() if reference.backend in backends]
    ours = [
        Name(backend, step.name)
        for step in steps
        for backend in backends
        if backend in step.backends and op.serves(step, case) and step.runs_on(capability)
    ]
    names = [Name(baseline) for baseline in op.baselines_at(case)] + references + ours
    calls = {name: load_named(op.name, name) for name in names}
    timings = _gated(op, case, calls)
    torch.cuda.empty_cache()  # the judges' references are as large as many sets of inputs
    ready = {
        name: partial(calls[name], **op.options(case)) for name, timing in timings.items() if timing.status == "ok"
    }

    sets = _input_sets(op, case)
    milliseconds: dict[Name, float] = {}
    for name, call in ready.items():
        milliseconds[name], timings[name].extra_bytes = _once(call, sets)
        if milliseconds[name] < SETTLED_MS:
            milliseconds[name] = _without_host(call, sets)
        if milliseconds[name] > _LONGEST_MS:
            timings[name].status = f"skipped: {milliseconds[name]:.0f} ms a call, the limit is {_LONGEST_MS:.0f} ms"
    ready = {name: call for name, call in ready.items() if timings[name].status == "ok"}

    baselines = {name: call for name, call in ready.items() if name.backend in op.baselines}
    bar = _CONTENDER * min((milliseconds[name] for name in baselines), default=math.inf)
    fast = {name: call for name, call in ready.items() if milliseconds[name] <= bar or not name.step}
    slow = {name: call for name, call in ready.items() if name not in fast}
    results: list[Timing] = []

    def compete(contest: str, entrants: Mapping[Name, Call], rounds: int) -> None:
        for name, times, sensors in _interleave(entrants, milliseconds, sets, rounds, contest):
            timing = timings[name]
            results.append(Timing(name, "ok", contest, times, timing.extra_bytes, timing.error, timing.margin, sensors))

    compete("fast", fast, ROUNDS)
    if slow:
        compete("slow", baselines | slow, ROUNDS)
    if finalists := _finalists(op, case, results):
        chosen = {name: ready[name] for name in finalists}
        compete("rested", chosen, CONDITION_ROUNDS)
        compete("chain", {name: _before_another(call) for name, call in chosen.items()}, CONDITION_ROUNDS)
    return results + [timing for timing in timings.values() if timing.status != "ok"]


def _finalists(op: Op, case: Case, timed: list[Timing]) -> list[Name]:
    """The fastest baseline and each language's last step, if the case is timed under other conditions as well.

    Empty if none of these steps is timed, as when an earlier step is tried.
    """
    if case not in op.condition_cases:
        return []
    lasts = [Name(backend, step.name) for backend in BACKENDS if (step := op.last_step(backend, case))]
    ours = [name for name in lasts if any(each.name == name for each in timed)]
    baselines = [each for each in timed if each.name.backend in op.baselines and each.contest == "fast"]
    best = min(baselines, key=lambda each: statistics.median(each.times_us), default=None)
    return [best.name, *ours] if best and ours else []


def _before_another(call: Call) -> Call:
    """The call with a small kernel behind it, which works on its own memory. The next call waits for that kernel.

    The small kernel does not use programmatic dependent launch. So a product after it starts when all before it is
    done, and is not set up under the product before.
    """
    memory = torch.zeros(_BETWEEN, device="cuda").add_(1)  # loads the kernel, which a capture may not do

    def both(*inputs: Tensor, out: Tensor | tuple[Tensor, ...]) -> object:
        result = call(*inputs, out=out)
        memory.add_(1)
        return result

    return both


def _gated(op: Op, case: Case, calls: Mapping[Name, Call]) -> dict[Name, Timing]:
    """Run each call for the first time, and judge it. References are not judged: they compute something else.

    A baseline whose library is not installed, or does not take the case, is skipped.
    """
    judge = Judge(op, case)
    settled = op.settled(case)
    baselines = partial(judge, is_baseline=True)
    if settled != case:
        baselines = partial(_judged_elsewhere, Judge(op, settled), op, case)
    judges = {name: judge if name.step else baselines for name in calls if name.backend not in op.references}
    return {name: _gate(judges.get(name, partial(_run, op, case)), name, call) for name, call in calls.items()}


def _gate(judge: Callable[[Call], Verdict], name: Name, call: Call) -> Timing:
    try:
        verdict = judge(call)
    except NotJudgedError as error:
        return Timing(name, f"{NOT_JUDGED}: {error}")
    except UnavailableError as error:
        return Timing(name, raised(error) if name.step else f"skipped: {error}")
    except (RuntimeError, TypeError, ValueError) as error:
        return Timing(name, raised(error))
    status = "ok" if verdict.ok else f"wrong: {verdict.reason}"
    return Timing(name, status, error=verdict.error, margin=verdict.margin)


def raised(error: Exception) -> str:
    """The status of a call that raised instead of computing anything."""
    return f"wrong: raised {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _judged_elsewhere(judge: Judge, op: Op, case: Case, call: Call) -> Verdict:
    """Judge a baseline at the settled case, then call it at the case itself, for which it may have to compile."""
    verdict = judge(call, is_baseline=True)
    if verdict.ok:
        _run(op, case, call)
    return verdict


def _run(op: Op, case: Case, call: Call) -> Verdict:
    with judging():
        inputs, out = op.inputs(case, generator(case, "cuda")), empty_outputs(op, case, "cuda")
    call(*inputs, **op.options(case), out=out)
    torch.cuda.synchronize()
    return Verdict(True)


def _input_sets(op: Op, case: Case) -> list[CallSet]:
    """As many sets of inputs and outputs as exceed L2 several times."""
    source = generator(case, "cuda")
    sets = []
    for _ in range(sets_of(op.bytes(case))):
        inputs = op.inputs(case, source)
        sets.append((inputs, empty_outputs(op, case, "cuda")))
    return sets


def sets_of(operand_bytes: int) -> int:
    """The number of sets of operands that exceed L2 several times."""
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    return math.ceil(_L2_MULTIPLE * l2_bytes / max(1, operand_bytes))


def _once(call: Call, sets: list[CallSet]) -> tuple[float, int]:
    """Milliseconds of one call (the host's, if it is slower than the GPU), and the bytes that it allocates for itself.

    Returned results do not count, since other calls get theirs as ``out``. The call must have run before, since the
    first one may compile.
    """
    inputs, out = sets[0]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    returned = call(*inputs, out=out)
    end.record()
    end.synchronize()
    results = returned if isinstance(returned, tuple) else (returned,)
    storages = [each.untyped_storage() for each in results if isinstance(each, Tensor)]
    returned_bytes = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
    return start.elapsed_time(end), torch.cuda.max_memory_allocated() - before - returned_bytes


def _without_host(call: Call, sets: list[CallSet]) -> float:
    """Milliseconds of one call on the GPU alone, from a short graph that is replayed warm."""
    count = few(len(sets))
    return warm_ms(_capture(call, sets, count)) / count


def few(sets: int) -> int:
    """The number of calls in the short graph by which other graphs are sized."""
    return min(sets, _FEW)


def warm_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of a graph's second replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


def _interleave(
    calls: Mapping[Name, Call], milliseconds: Mapping[Name, float], sets: list[CallSet], rounds: int, contest: str
) -> list[tuple[Name, list[float], dict[str, float | str | None]]]:
    """Time the calls in turns: (name, microseconds a call for every round, sensors) for each.

    In ``rested`` every sample begins at full clock, after a rest that is long compared with the sample. Sensors are
    then read only while a sample runs, since the GPU idles most of the time.
    """
    rested = contest == "rested"
    counts = {name: calls_of(milliseconds[name], len(sets)) for name in calls}
    graphs = {name: _capture(call, sets, counts[name]) for name, call in calls.items()}
    times: dict[Name, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if contest == "chain":
        _run_for(_CHAIN_S, [*graphs.values()])
    with contextlib.nullcontext(Readings()) if rested else Sampler() as sensors:
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                graph, count = graphs[name], counts[name]
                sample_ms = count * milliseconds[name]
                if rested:
                    time.sleep(max(_REST_MS, _REST * sample_ms) / 1e3)
                    sensors.wait_for_full_clock()
                if sample_ms < SETTLED_MS:
                    graph.replay()  # untimed: every sample has the same predecessor
                start.record()
                graph.replay()
                end.record()
                while rested and not end.query():
                    sensors.take()
                    time.sleep(SAMPLE_MS / 1e3)
                end.synchronize()
                times[name].append(1e3 * start.elapsed_time(end) / count)
    read = sensors.summary()
    return [(name, values, read) for name, values in times.items()]


def _run_for(seconds: float, graphs: list[torch.cuda.CUDAGraph]) -> None:
    """Replay the graphs in turns, untimed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()  # else far more than this time would be queued


def calls_of(call_ms: float, sets: int) -> int:
    """The number of calls in a sample: enough to last long and to use all sets; one, if a call is long by itself."""
    return 1 if call_ms >= SETTLED_MS else max(sets, math.ceil(SAMPLE_MS / max(call_ms, 1e-3)))


def _capture(call: Call, sets: list[CallSet], count: int) -> torch.cuda.CUDAGraph:
    """A graph of ``count`` calls that rotate over the sets."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return captured([partial(call, *inputs, out=out) for inputs, out in sets], count)


def captured(calls: Sequence[Callable[[], object]], count: int, pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of ``count`` calls, in rotation, on the current stream, which must not be the default one.

    ``pool`` is shared by graphs that run in turns and whose results are not read. If a call raises, the capture is
    ended and the stream is usable.
    """
    # Results that a call allocates rotate as ``out`` does. If they were freed at once, every call would get the same
    # memory, which stays in L2. So the results of the last calls are kept, one for each set.
    kept: deque[object] = deque(maxlen=len(calls) - 1)
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    graph.capture_begin(pool=pool)
    try:
        for index in range(count):
            kept.append(calls[index % len(calls)]())
    except BaseException:
        with contextlib.suppress(RuntimeError):  # its error would only say that the capture failed
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # unless that has ended the capture
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise
    graph.capture_end()
    return graph

"""The reduction's last steps, on a GPU: a counter that no two launches share, the same bits, and an error without n."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS, load  # noqa: E402
from kernel_twins.harness.check import compare  # noqa: E402
from kernel_twins.ops.tensors import DTYPE  # noqa: E402
from kernel_twins.spec import Backend, Case  # noqa: E402
from tests.gpu_memory import held_bytes  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import CUDAGraph, Stream

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[3]
OP = OPS["reduction"]
SINGLE_LAUNCH = [("v07_last_block", "cuda"), ("v07_last_block", "triton"), ("v08_polling", "cuda")]
COMPENSATED = [("v05_grid_stride", "cuda"), ("v05_grid_stride", "triton"), *SINGLE_LAUNCH]
N = 2**20 + 3
ROUNDS = 200


def ready(step: str, backend: Backend) -> Callable[..., None]:
    """The step, once it has run: compiled, for an output that is aligned to 16 bytes and for one that is not."""
    call = load("reduction", step, backend)
    for out in torch.empty(2, device="cuda").unbind():
        call(vector(0), out=out)
    return call


def vector(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator(device="cuda").manual_seed(seed), device="cuda")


def nans(*shape: int) -> Tensor:
    return torch.full(shape, math.nan, device="cuda")


def spoil_free_memory() -> None:
    """Leave ones where memory is allocated next, as nobody may rely on finding zeros there."""
    blocks = [torch.full((2**21,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(32)]
    torch.cuda.synchronize()
    blocks.clear()
    torch.cuda.empty_cache()


def hold_back(*streams: Stream) -> None:
    """Let the streams wait a tenth of a second, so that what is queued on them meanwhile runs at the same time."""
    torch.cuda._sleep(200_000_000)
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())


def capture(call: Callable[..., None], x: Tensor, outs: Tensor, stream: Stream) -> CUDAGraph:
    """A graph that sums x as often as there are outs, each of which it spoils before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for out in outs.unbind():
            out.fill_(math.nan)
            call(x, out=out)
    return graph


def give_up_a_capture(call: Callable[..., None], x: Tensor, out: Tensor, stream: Stream) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        call(x, out=out)
        raise InterruptedError


def assert_right(x: Tensor, outs: Tensor) -> None:
    """Every number among outs is the sum of x, to the bit the same one."""
    torch.cuda.synchronize()
    bits = outs.flatten().view(torch.int32)
    assert torch.equal(bits, bits[:1].expand_as(bits))
    verdict = compare(OP, Case.of(x.numel(), dtype="fp32"), (x,), (outs.flatten()[0],))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("step", "backend"), SINGLE_LAUNCH)
def test_a_thousand_runs_agree_bit_by_bit(step: str, backend: Backend) -> None:
    """Of two vectors in turn, so that a sum of a block that is read too early is another one's."""
    call, xs, outs = ready(step, backend), (vector(0), vector(1)), nans(1000, 2)
    for pair in outs.unbind():
        for x, out in zip(xs, pair.unbind(), strict=True):
            call(x, out=out)
    for x, out in zip(xs, outs.t(), strict=True):
        assert_right(x, out)


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize(("step", "backend"), SINGLE_LAUNCH)
def test_calls_are_right_after_a_capture_that_was_given_up(step: str, backend: Backend, used_before: bool) -> None:
    call, x, outs = ready(step, backend), vector(0), nans(5)
    spoil_free_memory()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    if used_before:
        with torch.cuda.stream(stream):
            call(x, out=outs[0])
    with pytest.raises(InterruptedError):
        give_up_a_capture(call, x, outs[1], stream)
    with torch.cuda.stream(stream):
        for out in outs[:3].unbind():
            call(x, out=out)
    graph = capture(call, x, outs[3:], stream)
    graph.replay()
    assert_right(x, outs)


@pytest.mark.parametrize(("step", "backend"), SINGLE_LAUNCH)
def test_two_graphs_of_one_stream_run_at_once(step: str, backend: Backend) -> None:
    call, xs = ready(step, backend), (vector(0), vector(1))
    captured_on, *streams = (torch.cuda.Stream() for _ in range(3))
    outs = [nans(4) for _ in xs]
    results = [nans(ROUNDS, 4) for _ in xs]
    graphs = [capture(call, x, out, captured_on) for x, out in zip(xs, outs, strict=True)]
    hold_back(*streams)
    for i in range(ROUNDS):
        for stream, graph, out, result in zip(streams, graphs, outs, results, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                result[i].copy_(out)
    for x, result in zip(xs, results, strict=True):
        assert_right(x, result)


@pytest.mark.parametrize(("step", "backend"), SINGLE_LAUNCH)
def test_a_graph_runs_beside_calls_on_the_stream_that_it_was_captured_on(step: str, backend: Backend) -> None:
    call, xs = ready(step, backend), (vector(0), vector(1))
    captured_on, other = torch.cuda.Stream(), torch.cuda.Stream()
    out, of_graph, of_calls = nans(1), nans(ROUNDS, 1), nans(ROUNDS)
    graph = capture(call, xs[0], out, captured_on)
    hold_back(captured_on, other)
    for i in range(ROUNDS):
        with torch.cuda.stream(other):
            graph.replay()
            of_graph[i].copy_(out)
        with torch.cuda.stream(captured_on):
            call(xs[1], out=of_calls[i])
    assert_right(xs[0], of_graph)
    assert_right(xs[1], of_calls)


@pytest.mark.parametrize(("step", "backend"), SINGLE_LAUNCH)
def test_calls_on_two_streams_run_at_once(step: str, backend: Backend) -> None:
    call, xs = ready(step, backend), (vector(0), vector(1))
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    outs = [nans(ROUNDS) for _ in xs]
    hold_back(*streams)
    for i in range(ROUNDS):
        for stream, x, out in zip(streams, xs, outs, strict=True):
            with torch.cuda.stream(stream):
                call(x, out=out[i])
    for x, out in zip(xs, outs, strict=True):
        assert_right(x, out)


@pytest.mark.parametrize(("step", "backend"), [each for each in SINGLE_LAUNCH if each[1] == "cuda"])
def test_streams_of_others_leave_no_memory_behind(step: str, backend: Backend) -> None:
    """Made and destroyed with work on them, so that handles come back as those of other streams."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    call, x, outs = ready(step, backend), vector(0), nans(3000)

    def use(part: Tensor) -> None:
        """On streams that are there at once, and make no other wait."""
        made = [runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking) for _ in part]
        assert all(error == runtime.cudaError_t.cudaSuccess for error, _ in made)
        for out, (_, stream) in zip(part.unbind(), made, strict=True):
            with torch.cuda.stream(torch.cuda.ExternalStream(int(stream))):
                call(x, out=out)
        for _, stream in made:
            runtime.cudaStreamDestroy(stream)

    use(outs[:10])
    before = held_bytes()
    for part in outs.split(10):
        use(part)
    assert held_bytes() - before <= 2**22  # a few pieces come in blocks of the driver's
    assert_right(x, outs)


@pytest.mark.parametrize(("step", "backend"), SINGLE_LAUNCH)
def test_streams_of_others_work_while_another_is_captured(step: str, backend: Backend) -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    call, x, outs = ready(step, backend), vector(0), nans(2)
    torch.cuda.synchronize()
    error, handle = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
    assert error == runtime.cudaError_t.cudaSuccess
    stream, graph = torch.cuda.ExternalStream(int(handle)), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        kept = torch.empty(1, device="cuda")  # so that torch has memory for the stream, which it must not allocate then
    with torch.cuda.graph(graph):
        call(x, out=outs[0])
        with torch.cuda.stream(stream):
            call(x, out=outs[1])
    graph.replay()
    torch.cuda.synchronize()
    assert_right(x, outs)
    del kept
    runtime.cudaStreamDestroy(handle)


@pytest.mark.parametrize(("step", "backend"), SINGLE_LAUNCH)
def test_two_calls_in_one_graph(step: str, backend: Backend) -> None:
    call, xs, outs = ready(step, backend), (vector(0), vector(1, 1000)), nans(2)
    call(xs[1], out=outs[1])  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs.fill_(math.nan)
        for x, out in zip(xs, outs.unbind(), strict=True):
            call(x, out=out)
    for seed in (2, 3):
        for x in xs:
            x.copy_(vector(seed, x.numel()))
        graph.replay()
        for x, out in zip(xs, outs, strict=True):
            assert_right(x, out)


@pytest.mark.parametrize(("step", "backend"), SINGLE_LAUNCH)
def test_two_branches_of_one_graph(step: str, backend: Backend) -> None:
    call, xs, outs = ready(step, backend), (vector(0), vector(1)), nans(2, 4)
    stream, branch = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outs.fill_(math.nan)
        branch.wait_stream(stream)
        for first, second in outs.t().unbind():
            call(xs[0], out=first)
            with torch.cuda.stream(branch):
                call(xs[1], out=second)
        stream.wait_stream(branch)
    for _ in range(ROUNDS):
        graph.replay()
        for x, out in zip(xs, outs, strict=True):
            assert_right(x, out)


@pytest.mark.slow
@pytest.mark.parametrize("values", ["uniform", "a tenth"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("step", "backend"), COMPENSATED)
def test_error_stays_within_what_the_step_states(step: str, backend: Backend, dtype: str, values: str) -> None:
    """On positive numbers, whose sum is sum|x|; "a tenth" in fp32 rounds each running total the same way."""
    path = OP.file(step, backend)
    text = " ".join((ROOT / path).read_text().replace("//", "").split())
    stated = re.search(r"at most (\d+) eps sum\|x\|, eps = 2\^-23, for any n", text)
    assert stated, f"{path} states no bound"

    case = Case.of(2**30, dtype=dtype)
    x, out = torch.empty(case.shape, dtype=DTYPE[dtype], device="cuda"), nans(1)[0]
    if values == "uniform":
        x.uniform_(generator=torch.Generator(device="cuda").manual_seed(0))
    else:
        x.fill_(0.1)
    load("reduction", step, backend)(x, out=out)
    expected, terms = OP.reference(case, (x,), slice(0, 1))
    error = (out.double() - expected).abs() / terms
    assert bool(error <= int(stated[1]) * 2.0**-23)  # false for NaN

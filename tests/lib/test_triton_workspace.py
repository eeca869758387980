"""Memory that Triton's kernels share: each graph has its own and gives it back, and streams cost nothing."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import kernel_twins  # noqa: E402
from tests.gpu_memory import held_bytes  # noqa: E402

workspace: Any = importlib.import_module("kernel_twins._triton.lib.workspace")

# ----------------------------------------------------------------------------------------------------------------------
# Without a GPU: what is lent, by a driver that only keeps the books
# ----------------------------------------------------------------------------------------------------------------------


class Graph(list[tuple[int, int]]):
    """Its user objects; when it is gone, a thread of the driver's calls them back."""

    def drop(self) -> None:
        def call_back() -> None:
            for pointer, destroy in self:
                ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destroy)(pointer)

        thread = threading.Thread(target=call_back)
        thread.start()
        thread.join()


@pytest.fixture
def borrowed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``borrowed(graph)``: the address that is lent to it."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    right, addresses = runtime.cudaError_t.cudaSuccess, itertools.count(2**20, 2**16)

    def retain(graph: Graph, loan: tuple[int, int], count: int, flags: int) -> tuple[Any]:
        assert count == flags == 1
        graph.append(loan)
        return (right,)

    monkeypatch.setattr(runtime, "cudaMalloc", lambda size: (right, next(addresses)))
    monkeypatch.setattr(runtime, "cudaThreadExchangeStreamCaptureMode", lambda mode: (right, mode))
    monkeypatch.setattr(runtime, "cudaUserObjectCreate", lambda pointer, call, *_: (right, (pointer, call)))
    monkeypatch.setattr(runtime, "cudaGraphRetainUserObject", retain)
    monkeypatch.setattr(workspace, "_lent", {})
    return lambda graph: workspace._borrowed(0, graph).__cuda_array_interface__["data"][0]


def test_graphs_that_are_there_at_once_have_memory_of_their_own(borrowed) -> None:
    assert len({borrowed(Graph()) for _ in range(5)}) == 5


def test_what_a_graph_had_is_the_next_ones_and_not_before_it_is_gone(borrowed) -> None:
    graphs = [Graph() for _ in range(3)]
    first = [borrowed(graph) for graph in graphs]
    for turn in range(3):
        graphs[turn].drop()
        graphs[turn] = Graph()
        assert borrowed(graphs[turn]) == first[turn]
        assert borrowed(Graph()) not in first


def test_many_graphs_one_after_the_other_share_one_piece(borrowed) -> None:
    seen = set()
    for _ in range(100):
        graph = Graph()
        seen.add(borrowed(graph))
        graph.drop()
    assert len(seen) == 1


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows() -> Any:
    """Too long for one program and too many for L2, so that resident programs share a row; their kernel is loaded."""
    x = torch.randn(64, 262_144, device="cuda", dtype=torch.bfloat16)
    softmax(x)
    torch.cuda.synchronize()
    return x


def softmax(x: Any) -> Any:
    return kernel_twins.softmax(x, backend="triton")


def captured(x: Any) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x)
    return graph, y


def piece() -> Any:
    """What the newest capture was lent."""
    return max(workspace._captured.values(), key=lambda each: each[0])[1]


def lost_mib(work: Any, times: int, warm: int) -> int:
    """What this process holds more after so many times than after the first ones."""
    for _ in range(warm):
        work()
    before = held_bytes()
    for _ in range(times):
        work()
    return (held_bytes() - before) >> 20


@pytest.mark.gpu
def test_captures_that_are_given_up_cost_nothing(rows) -> None:
    def work() -> None:
        with contextlib.suppress(KeyError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            softmax(rows)
            raise KeyError

    assert lost_mib(work, 320, 40) <= 4
    right = softmax(rows)
    graph, y = captured(rows)
    graph.replay()
    assert torch.equal(y, right)


@pytest.mark.gpu
def test_a_dropped_graphs_memory_is_zeroed_inside_the_next_one(rows) -> None:
    right, seen = softmax(rows), []
    for _ in range(50):
        graph, y = captured(rows)
        memory = piece()
        seen.append(memory.data_ptr())
        graph.replay()
        assert torch.equal(y, right)
        torch.cuda.synchronize()
        del graph
        memory.fill_(7)
    assert len(set(seen)) < len(seen)


@pytest.mark.gpu
def test_graphs_replayed_at_once_do_not_meet(rows) -> None:
    given = [rows, rows.flip(0).contiguous()]
    right = [softmax(x) for x in given]
    graphs = [captured(x) for x in given]
    assert len({memory.data_ptr() for memory in (piece(), *workspace._counters.values())}) > 1
    streams = [torch.cuda.Stream() for _ in given]
    for _ in range(100):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        softmax(rows)  # beside them
    torch.cuda.synchronize()
    assert all(torch.equal(y, each) for (_, y), each in zip(graphs, right, strict=True))


@pytest.mark.gpu
def test_a_graph_keeps_its_memory_when_nobody_remembers_it(rows) -> None:
    right = softmax(rows)
    graph, y = captured(rows)
    workspace._captured.clear()
    others = [captured(rows) for _ in range(3)]
    gc.collect()
    for _ in range(20):
        y.zero_()
        for each, _ in (*others, (graph, y)):
            each.replay()
        assert torch.equal(y, right)


@pytest.mark.gpu
def test_streams_that_are_made_and_destroyed_cost_nothing(rows) -> None:
    runtime = importlib.import_module("cuda.bindings.runtime")
    right = softmax(rows)
    torch.cuda.synchronize()

    def work() -> None:
        _, handle = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
        stream = torch.cuda.ExternalStream(int(handle))
        with torch.cuda.stream(stream):
            y = softmax(rows)
            again = softmax(rows)
        stream.synchronize()
        assert torch.equal(y, right) and torch.equal(again, right)
        runtime.cudaStreamDestroy(handle)

    before = len(workspace._counters)
    assert lost_mib(work, 1000, 40) <= 4
    assert len(workspace._counters) == before


@pytest.mark.gpu
def test_external_streams_at_once_do_not_meet(rows) -> None:
    runtime = importlib.import_module("cuda.bindings.runtime")
    right = softmax(rows)
    torch.cuda.synchronize()
    handles = [runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)[1] for _ in range(8)]
    outs = []
    for handle in handles * 10:
        with torch.cuda.stream(torch.cuda.ExternalStream(int(handle))):
            outs.append(softmax(rows))
    torch.cuda.synchronize()
    assert all(torch.equal(out, right) for out in outs)
    for handle in handles:
        runtime.cudaStreamDestroy(handle)


@pytest.mark.gpu
def test_external_streams_may_be_destroyed_at_work(rows) -> None:
    """Their handles come back as those of others, which run beside what the first ones still work at."""
    runtime = importlib.import_module("cuda.bindings.runtime")
    right, outs = softmax(rows), []
    torch.cuda.synchronize()
    for _ in range(100):
        handles = [runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)[1] for _ in range(8)]
        for handle in handles:
            with torch.cuda.stream(torch.cuda.ExternalStream(int(handle))):
                outs.append(softmax(rows))
        for handle in handles:
            runtime.cudaStreamDestroy(handle)
    torch.cuda.synchronize()
    assert all(torch.equal(out, right) for out in outs)

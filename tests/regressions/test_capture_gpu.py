"""Calls under graph capture, and many graphs, streams and threads at once."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins as kt  # noqa: E402

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
THREADS = 8
FIRST_CALL = """
import sys
import torch
import kernel_twins as kt

logits = torch.randn(2048, 131072, device="cuda", dtype=torch.bfloat16)
target = torch.randint(0, 131072, (2048,), device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = kt.cross_entropy(logits, target, backend=sys.argv[1])
graph.replay()
torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target))
print("captured")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_graph_capture_without_warm_up(backend: str) -> None:
    """A process's first call, of a shape whose fastest backend is Triton, has its kernels loaded while it captures."""
    command = [sys.executable, "-c", FIRST_CALL, backend]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "captured\n", done.stderr


def test_probe_threads_streams_and_graphs_at_once() -> None:
    """Eager calls and a graph of each thread's, on streams that change with every turn, agree bit by bit."""
    a = torch.randn(256, 16_384, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(16_384, 256, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(64, 131_072, device="cuda", dtype=torch.bfloat16)
    logits, target = torch.randn(40_000, 64, device="cuda"), torch.randint(0, 64, (40_000,), device="cuda")
    calls = (
        lambda: kt.matmul(a, b, backend="cuda"),  # K is split
        lambda: kt.sum(rows, backend="cuda"),  # the last block adds up
        lambda: kt.sum(a, 0, backend="cuda"),
        lambda: kt.cross_entropy(logits, target, backend="cuda"),  # a mean of several blocks
        lambda: kt.layer_norm(rows[:, :50_001], 50_001, backend="cuda"),  # skewed unlike its result: rows are drawn
        lambda: kt.softmax(rows, backend="triton"),  # programs wait for each other
    )
    wanted = [call() for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(THREADS)]
    graphs = []
    for stream in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            made = [call() for call in calls]
        graphs.append((graph, made))

    def differing(which: int) -> list[tuple[str, int]]:
        graph, made = graphs[which]
        found = []
        for turn in range(25):
            with torch.cuda.stream(streams[(which + turn) % THREADS]):
                graph.replay()
                eager = [call() for call in calls]
                torch.cuda.current_stream().synchronize()
            for kind, results in (("graph", made), ("eager", eager)):
                pairs: Any = enumerate(zip(results, wanted, strict=True))
                found += [(kind, i) for i, pair in pairs if not torch.equal(*pair)]
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        assert [*chain.from_iterable(pool.map(differing, range(THREADS)))] == []


def test_probe_triton_masks_of_two_threads() -> None:
    """What a thread draws lies elsewhere in the generator's sequence than what any other draws."""
    x = torch.ones(64, 64, device="cuda")
    kt.dropout_add(x, p=0.5, backend="triton")
    torch.cuda.synchronize()

    def masks(_: int) -> list[bytes]:
        with torch.cuda.stream(torch.cuda.Stream()):
            mine = [kt.dropout_add(x, p=0.5, backend="triton") > 0 for _ in range(300)]
            return [each.cpu().numpy().tobytes() for each in mine]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            drawn = [*chain.from_iterable(pool.map(masks, range(THREADS)))]
    finally:
        sys.setswitchinterval(before)
    assert len(set(drawn)) == len(drawn) == THREADS * 300

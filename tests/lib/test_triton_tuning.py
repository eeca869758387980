"""Which configuration an autotuned step is launched with: committed, searched, or the first where none can be timed."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernel_twins.spec import Case

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

tuning = importlib.import_module("kernel_twins._triton.lib.tuning")
from kernel_twins import OPS  # noqa: E402
from kernel_twins._triton.matmul.matmul_bf16.v06_autotuned import matmul_bf16_v06_autotuned_kernel as kernel  # noqa: E402

STEP = "matmul_bf16/v06_autotuned"
SMALL = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 4, "num_ctas": 1}
HALVED = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 4, "num_ctas": 1}
LARGE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 8, "num_stages": 3, "num_ctas": 1}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A GPU named Test, with three winners committed."""
    winners = {STEP: {"256x256x256-bf16": SMALL, "256x256x256-fp16": HALVED, "8192x8192x8192-bf16": LARGE}}
    (tmp_path / "test.json").write_text(json.dumps(winners))
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(tuning, "_searched", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tuning.nearest.cache_clear()
    return monkeypatch


def choose(slug: str) -> tuple[Any, dict[str, int]]:
    return tuning.choose(kernel, STEP, Case.parse(slug), torch.device("cuda"))


@pytest.mark.parametrize(
    ("slug", "winner"),
    [
        ("256x256x256-bf16", SMALL),
        ("300x200x1000-bf16", SMALL),
        ("300x200x1000-fp16", HALVED),
        ("4096x4096x4096-bf16", LARGE),
        ("4096x4096x4096-fp16", LARGE),
    ],
)
def test_nearest_committed_winner_is_launched_without_a_search(
    on_gpu: pytest.MonkeyPatch, slug: str, winner: dict[str, int]
) -> None:
    assert choose(slug) == (kernel.fn, winner)


def test_another_layout_is_searched(on_gpu: pytest.MonkeyPatch) -> None:
    assert choose("4096x4096x4096-bf16-b.col") == (tuning.Search(kernel), {})


def test_threads_search_one_after_another(on_gpu: pytest.MonkeyPatch) -> None:
    """The autotuner keeps a call's arguments in itself: another thread's call would take them away."""
    running = threading.Lock()

    def run(*_: Any, **__: Any) -> None:
        assert running.acquire(blocking=False)
        sum(range(1000))  # time for another thread to come
        running.release()

    on_gpu.setattr(kernel, "run", run)
    on_gpu.setattr(kernel, "best_config", kernel.configs[0], raising=False)
    launch, _ = choose("4096x4096x4096-bf16-b.col")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(lambda _: launch[1,](), range(400))]
    finally:
        sys.setswitchinterval(before)


def test_nothing_is_searched_under_graph_capture(on_gpu: pytest.MonkeyPatch) -> None:
    choose("64x64x64-bf16-b.col")  # searched before, but the same problem may come with other strides
    on_gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose("4096x4096x4096-bf16-b.col") == (kernel.fn, kernel.configs[0].all_kwargs())
    assert choose("64x64x64-bf16-b.col")[0] is kernel.fn
    assert choose("4096x4096x4096-bf16") == (kernel.fn, LARGE)


def test_a_search_waits_for_what_is_under_way_each_time(on_gpu: pytest.MonkeyPatch) -> None:
    """It writes into memory that this stream may still be using, and one problem is searched for several layouts."""
    events: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: events.append("waits"))

    def timed(*_: Any, **__: Any) -> list[float]:
        events.append("times")
        return [1.0]

    on_gpu.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    on_gpu.setattr(tuning, "do_bench_cudagraph", timed)
    for _ in range(2):
        choose("256x256x256-bf16")
        assert tuning.bench(lambda: None, quantiles=(0.5,)) == [1.0]
    assert events == ["waits", "times"] * 2


@pytest.mark.gpu
def test_a_search_overwrites_nothing_that_is_still_read() -> None:
    source = torch.zeros(2**20, device="cuda")
    torch.cuda._sleep(100_000_000)  # about 50 ms of the GPU's time
    copy = source.clone()
    tuning.bench(lambda: source.fill_(1.0), quantiles=(0.5,))
    torch.cuda.synchronize()
    assert not copy.any() and bool(source.all())


def test_committed_winners_are_among_the_configurations() -> None:
    for path in tuning.FOLDER.glob("*.json"):
        for step, winners in json.loads(path.read_text()).items():
            op, name = step.split("/")
            module = importlib.import_module(OPS[op].module(name))
            searched = [config.all_kwargs() for config in getattr(module, f"{op}_{name}_kernel").configs]
            for slug, winner in winners.items():
                assert winner in searched, f"{path.name}: {step}, {slug}"

"""The configuration of an autotuned step: a committed winner if this GPU has one, otherwise Triton searches.

Winners are committed in ``tuned/<gpu>.json``: step, then problem (the slug of a Case), then configuration. On such a
GPU the winner of the nearest problem is used and nothing is timed. On other GPUs, and for layouts without a committed
winner, ``triton.autotune`` times its list once for each problem and keeps the result on disk.
TRITON_PRINT_AUTOTUNING=1 prints the choice in both cases.

A committed winner bypasses the autotuner: even with a list of one entry the autotuner times it, which fails under CUDA
graph capture.
"""

from __future__ import annotations

import datetime
import json
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import Autotuner
from triton.runtime.jit import KernelInterface
from triton.testing import do_bench_cudagraph

from kernel_twins import ops
from kernel_twins._triton.lib.device import Layout, layout_of, sm_count
from kernel_twins.harness.ceilings import gpu_slug
from kernel_twins.harness.load import load
from kernel_twins.ops.tensors import empty_outputs, name_of
from kernel_twins.spec import ITEMSIZE, Case, Name

Config = dict[str, int]

FOLDER = Path(__file__).parents[1] / "tuned"

_searched: dict[tuple[str, Case], Autotuner] = {}  # searches by Triton in this process
_recording = False
_searching = threading.Lock()


@dataclass
class Search:
    """An autotuner's launch for one call: it is shared by threads, and keeps a call's arguments until that returns."""

    kernel: Autotuner
    best_config: triton.Config = field(init=False, compare=False)  # once launched

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            with _searching:
                self.kernel[grid](*args, **kwargs)
                self.best_config = self.kernel.best_config

        return launch

    @property
    def fn(self) -> KernelInterface:
        """The kernel without its search."""
        return self.kernel.fn

    @property
    def configs(self) -> list[triton.Config]:
        """All that are timed."""
        configs: list[triton.Config] = self.kernel.configs
        return configs


def problem_of(*shape: int, dtype: torch.dtype, **variant: str) -> Case:
    """The key of a choice: sizes, dtype, and any other variant that changes the launch."""
    return Case.of(*shape, dtype=name_of(dtype), **variant)


def layouts(**operands: Tensor | Layout) -> dict[str, str]:
    """The layouts of a problem's operands, as a variant: nothing for a row-major matrix with aligned rows, "col" for
    its transpose, "pointers" for any other matrix, which no descriptor can describe.
    """
    kinds = {name: operand if isinstance(operand, str) else layout_of(operand) for name, operand in operands.items()}
    return {name: kind for name, kind in kinds.items() if kind != "row"}


def bench(call: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
    """Time a configuration, for ``triton.autotune``: ten replays of a graph of some 5 ms.

    A graph, because single launches of a small product would measure the host. It is captured on another stream and
    writes into out, whose memory earlier work on this stream may still use: so that is waited for first.
    """
    torch.cuda.current_stream().synchronize()
    times: list[float] = do_bench_cudagraph(call, rep=5, quantiles=quantiles)
    return times


def likely(count: int) -> Callable[..., list[triton.Config]]:
    """An ``early_config_prune`` that keeps the ``count`` configurations of a product that ``estimate`` ranks first."""

    def prune(configs: list[triton.Config], args: dict[str, Any], **meta: Any) -> list[triton.Config]:
        sms = sm_count(args["a"].device)
        return sorted(configs, key=lambda config: estimate(config, args["M"], args["N"], args["K"], sms))[:count]

    return prune


def estimate(config: triton.Config, M: int, N: int, K: int, sms: int) -> float:
    """A rough estimate of a product's time, in multiply-adds of one SM.

    SMs compute tiles in waves, and a partial last wave takes as long as a full one. A smaller tile fetches more bytes
    for each multiply-add. Each tile adds a fixed cost; with split K it is doubled, and each part adds more.
    """
    m, n, k = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    parts = config.kwargs.get("SPLIT_K", 1)
    rounds = triton.cdiv(triton.cdiv(M, m) * triton.cdiv(N, n) * parts, sms)
    columns = triton.cdiv(triton.cdiv(K, k), parts) * k
    cost: float = rounds * m * n * (columns * (1 + 30 / m + 30 / n) + (256 if parts == 1 else 512 + 64 * parts))
    return cost


def choose(
    kernel: Autotuner, step: str, problem: Case, device: torch.device
) -> tuple[KernelInterface | Search, Config]:
    """The kernel to launch and its meta-parameters; none if it is a ``Search``.

    ``step`` is like "matmul_bf16/v06_autotuned". Only problems of the same variant and element size count as near.
    Nothing can be timed in the interpreter, which takes the first configuration, nor under graph capture, where an
    unsearched problem gets the kernel's last winner, or the first configuration.
    """
    if device.type != "cuda":
        return kernel.fn, kernel.configs[0].all_kwargs()
    if not _recording and (winner := nearest(step, problem, _gpu(device))):
        return kernel.fn, winner
    if torch.cuda.is_current_stream_capturing():
        # The autotuner would search again if a known problem came with other strides.
        best = getattr(_searched.get((step, problem)), "best_config", None) or kernel.configs[0]
        return kernel.fn, best.all_kwargs()
    _searched[step, problem] = kernel
    return Search(kernel), {}


def is_recording() -> bool:
    """True while ``record`` runs: every call must then choose anew."""
    return _recording


@lru_cache(4096)
def nearest(step: str, problem: Case, gpu: str) -> Config | None:
    """The committed winner of the nearest problem, by the logarithms of sizes, then by dtype; None if there is none."""
    winners = _read(gpu).get(step, {})
    near = [
        (_distance(known, problem), known.dtype != problem.dtype, slug)
        for slug in winners
        if (known := Case.parse(slug)).variant == problem.variant and ITEMSIZE[known.dtype] == ITEMSIZE[problem.dtype]
    ]
    if not near:
        return None
    *_, slug = min(near)
    if triton.knobs.autotuning.print:
        print(f"{step}, {problem.slug}: the committed configuration of {slug}, {winners[slug]}")
    return winners[slug]


def _distance(case: Case, other: Case) -> float:
    return math.dist(*([math.log(max(1, size)) for size in each.shape] for each in (case, other)))


def record(op: str, step: str, cases: Iterable[Case]) -> dict[str, Config]:
    """Search on this GPU for each case of an op, write the winners into this GPU's file, and return them by problem.

    A case takes about a second of GPU time, plus compilation. Results in Triton's disk cache are not timed again:
    remove that cache to search anew. A search is a measurement: predictions frozen after it count as post hoc.
    """
    from kernel_twins.report.meaning.predictions import note_measured  # pandas, which launching does not need
    from kernel_twins.report.rows.store import ledger

    global _recording
    gpu = gpu_slug(torch.cuda.get_device_name())
    now = datetime.datetime.now(datetime.UTC)
    note_measured(ledger(gpu), op, [Name("triton", step)], now, "search for configurations")
    call, spec = load(op, step, "triton"), ops.get(op)
    winners: dict[str, Config] = {}
    _recording = True
    try:
        for case in cases:
            inputs = spec.inputs(case, torch.Generator("cuda").manual_seed(0))
            _searched.clear()
            call(*inputs, **spec.options(case), out=empty_outputs(spec, case, "cuda"))
            winners |= {problem.slug: kernel.best_config.all_kwargs() for (_, problem), kernel in _searched.items()}
    finally:
        _recording = False
    content = _read(gpu)
    content[f"{op}/{step}"] = dict(sorted((content.get(f"{op}/{step}", {}) | winners).items()))
    (FOLDER / f"{gpu}.json").write_text(json.dumps(content, indent=2) + "\n")
    nearest.cache_clear()
    return winners


@cache
def _gpu(device: torch.device) -> str:
    return gpu_slug(torch.cuda.get_device_name(device))


def _read(gpu: str) -> dict[str, dict[str, Config]]:
    path = FOLDER / f"{gpu}.json"
    return json.loads(path.read_text()) if path.exists() else {}

"""Which configuration an autotuned step runs with: a committed winner where this GPU has one, else Triton searches.

Winners are committed in ``tuned/<gpu>.json``: step, then problem (the slug of a Case), then configuration. On such a
GPU the winner of the nearest problem is used and nothing is timed. Elsewhere, and for a layout of which no winner is
committed, ``triton.autotune`` times its list once for a problem and keeps the result on disk.
TRITON_PRINT_AUTOTUNING=1 shows either.

The winner goes past the autotuner, because an autotuner whose list is pruned to one entry still times it, and timing
fails under CUDA graph capture.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterable
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

_searched: dict[tuple[str, Case], Autotuner] = {}  # what Triton has been asked to search in this process
_recording = False


def problem_of(*shape: int, dtype: torch.dtype, **variant: str) -> Case:
    """What a choice depends on: sizes, dtype, and whatever else tells launches apart."""
    return Case.of(*shape, dtype=name_of(dtype), **variant)


def layouts(**operands: Tensor | Layout) -> dict[str, str]:
    """The variant that tells operands of other layouts apart: nothing for a row-major matrix with aligned rows, "col"
    for such a matrix transposed, "pointers" for all others, which no descriptor can take.
    """
    kinds = {name: operand if isinstance(operand, str) else layout_of(operand) for name, operand in operands.items()}
    return {name: kind for name, kind in kinds.items() if kind != "row"}


def bench(call: Callable[[], None], quantiles: tuple[float, ...]) -> list[float]:
    """Time a configuration, for ``triton.autotune``: ten replays of a graph of some 5 ms.

    Launched one by one, a small product's time would be the host's. The graph is captured on a stream of its own and
    writes into out, whose memory may still be in use by what is under way on this one: that must be done.
    """
    torch.cuda.current_stream().synchronize()
    times: list[float] = do_bench_cudagraph(call, rep=5, quantiles=quantiles)
    return times


def likely(count: int) -> Callable[..., list[triton.Config]]:
    """An ``early_config_prune`` that keeps those configurations of a product that a rough estimate puts first."""

    def prune(configs: list[triton.Config], args: dict[str, Any], **meta: Any) -> list[triton.Config]:
        sms = sm_count(args["a"].device)
        return sorted(configs, key=lambda config: estimate(config, args["M"], args["N"], args["K"], sms))[:count]

    return prune


def estimate(config: triton.Config, M: int, N: int, K: int, sms: int) -> float:
    """Roughly how long a product takes, in multiply-adds of an SM.

    SMs compute tiles in rounds, and the last round takes as long as a full one. A small tile fetches more bytes for a
    multiply-add; and each costs its start and its end, a split one's end twice over and once more for every part.
    """
    m, n, k = (config.kwargs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    parts = config.kwargs.get("SPLIT_K", 1)
    rounds = triton.cdiv(triton.cdiv(M, m) * triton.cdiv(N, n) * parts, sms)
    columns = triton.cdiv(triton.cdiv(K, k), parts) * k
    cost: float = rounds * m * n * (columns * (1 + 30 / m + 30 / n) + (256 if parts == 1 else 512 + 64 * parts))
    return cost


def choose(kernel: Autotuner, step: str, problem: Case, device: torch.device) -> tuple[KernelInterface, Config]:
    """The kernel to launch, and the meta-parameters to launch it with: none where it is the autotuner itself.

    ``step`` is like "matmul_bf16/v06_autotuned". Problems with another variant or another size of element are never
    near. Without a GPU (in the interpreter), and for an unsearched problem under graph capture, where nothing can be
    timed, the choice is the kernel's last winner, or the first of its list.
    """
    if device.type != "cuda":
        return kernel.fn, kernel.configs[0].all_kwargs()
    if not _recording and (winner := nearest(step, problem, _gpu(device))):
        return kernel.fn, winner
    if torch.cuda.is_current_stream_capturing():
        # Even a searched problem may come with other strides, for which the autotuner would search again.
        best = getattr(_searched.get((step, problem)), "best_config", None) or kernel.configs[0]
        return kernel.fn, best.all_kwargs()
    _searched[step, problem] = kernel
    return kernel, {}


def is_recording() -> bool:
    """Whether ``record`` is at work: every call must then choose anew."""
    return _recording


@lru_cache(4096)
def nearest(step: str, problem: Case, gpu: str) -> Config | None:
    """The committed winner of the problem closest in the logarithms of its sizes, then of its dtype; None if none."""
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
    """Search on this GPU for each case of an op, write the winners into this GPU's file, return them by problem.

    A case takes about a second of the GPU, plus compilation. What Triton has kept on disk is not timed again:
    remove its cache to search anew. A search is a measurement: predictions frozen after it count as post hoc.
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

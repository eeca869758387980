"""The process that ncu watches: calls every step and baseline of one operation, each under its label.

Run by collect.py as ``python -m kernel_twins._profiling.report.worker OP CALLS FILE LABEL...``. Warm-up, compilation
and autotuning happen outside ``cudaProfilerStart``; the CALLS calls that count lie in an NVTX range named after their
cell. FILE receives the digests of the Triton code that was launched, by step.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch

from kernel_twins import aot, ops
from kernel_twins._load import load_named
from kernel_twins._profiling.report import labels
from kernel_twins._profiling.report.identity import ptx_digest
from kernel_twins.check import generator
from kernel_twins.spec import BACKENDS, Name
from kernel_twins.tensors import empty_outputs


def cells(op: str) -> list[Name]:
    """What is profiled of an operation: its baselines, then its ladders."""
    spec = ops.get(op)
    capability = torch.cuda.get_device_capability()
    case = spec.profile_case
    steps = [
        Name(b, s.name) for b in BACKENDS for s in spec.steps_of(b) if s.runs_on(capability) and spec.serves(s, case)
    ]
    return [Name(baseline) for baseline in spec.baselines] + steps


def main(op: str, calls: str, digests_file: str, *chosen: str) -> None:
    spec = ops.get(op)
    case = spec.profile_case
    inputs = spec.inputs(case, generator(case, "cuda"))
    out = empty_outputs(spec, case, "cuda")
    options = spec.options(case)
    digests = {}
    for name in cells(op):
        if labels.write(op, name) not in chosen:
            continue
        call = partial(load_named(op, name), *inputs, **options, out=out)
        if name.backend == "triton":
            with aot.noted() as kernels:
                call()
            digests[name.step] = ptx_digest(kernel.asm["ptx"] for kernel in kernels.values())
        else:
            call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        mark = torch.cuda.nvtx.range_start(labels.write(op, name))
        for _ in range(int(calls)):
            call()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_end(mark)
        torch.cuda.cudart().cudaProfilerStop()
    Path(digests_file).write_text(json.dumps(digests))


if __name__ == "__main__":
    main(*sys.argv[1:])

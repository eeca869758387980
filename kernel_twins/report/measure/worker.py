"""The process that ncu watches: calls the labelled steps and baselines of one operation, where they are profiled.

Run by profilers.py as ``python -m kernel_twins.report.measure.worker OP CALLS FILE LABELS``. It gets ready without
touching the GPU and then reads the file LABELS, once nobody holds a lock of it: who is still to write it does, and lets
go of it by ending, too. Warm-up, compilation and autotuning happen outside ``cudaProfilerStart``; the CALLS calls that
count lie in an NVTX range named after their cell. FILE receives the digests of the Triton code that was launched, by
step: of a step's own profile case. What ``profilers.left`` names is made when the GPU is needed no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from kernel_twins import ops
from kernel_twins.built import ladder
from kernel_twins.compiler import aot
from kernel_twins.errors import UnavailableError
from kernel_twins.harness.check import generator
from kernel_twins.harness.load import extension, load_named
from kernel_twins.ops.tensors import empty_outputs
from kernel_twins.report.measure.profilers import left
from kernel_twins.report.rows import base, libraries
from kernel_twins.report.rows.identity import ptx_digest
from kernel_twins.spec import Case, Name, Op


def main(op: str, calls: str, digests_file: str, labels_file: str) -> None:
    spec = ops.get(op)
    with contextlib.suppress(UnavailableError):  # whose steps are then not among the called
        extension()
        ladder()
    libraries.load(spec)
    if torch.cuda.is_initialized():
        sys.exit(
            f"imports for {op} have set up CUDA in the process to be profiled, which disturbs what is timed meanwhile: "
            "none of its modules may touch the GPU when it is imported"
        )
    called = [base.labelled(spec, label) for label in _awaited(Path(labels_file))]
    digests = _call(spec, called, int(calls))
    torch.cuda.empty_cache()  # whoever comes next may need it
    Path(digests_file).write_text(json.dumps(digests))
    left(Path(labels_file)).touch()


def _call(spec: Op, called: Sequence[tuple[Case, Name]], calls: int) -> dict[str, str]:
    """All of them, case by case; returns the digests."""
    digests: dict[str, str] = {}
    for case, name, call in prepared(spec, called):
        if name.backend == "triton":
            with aot.noted() as kernels:
                call()
            if case == spec.profile_case_of(spec.step(name.step), "triton"):
                digests[name.step] = ptx_digest(kernel.asm["ptx"] for kernel in kernels.values())
        else:
            call()
        _profiled(call, calls, base.label(spec, case, name))
    return digests


def prepared(spec: Op, called: Sequence[tuple[Case, Name]]) -> Iterator[tuple[Case, Name, Callable[[], object]]]:
    """Each with its call, case by case: those of one case have the same operands."""
    for case in dict.fromkeys(case for case, _ in called):
        inputs = spec.inputs(case, generator(case, "cuda"))
        out, options = empty_outputs(spec, case, "cuda"), spec.options(case)
        for name in (name for its, name in called if its == case):
            yield case, name, partial(load_named(spec.name, name), *inputs, **options, out=out)


def _awaited(file: Path) -> list[str]:
    with file.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        called = stream.read().split()
    if not called:
        sys.exit("the process that says what to call is gone")
    return called


def _profiled(call: Callable[[], object], calls: int, label: str) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    mark = torch.cuda.nvtx.range_start(label)
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_end(mark)
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main(*sys.argv[1:])

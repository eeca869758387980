"""What a run times is compiled before it, in many processes at once, see ahead.py: a case after the other in each.

Each is ``python -m kernel_twins.report.measure.collect_compile FOLDER NUMBER COUNT``, as ahead.py starts them; its
share is the one of that number in compile.json. It calls what is to be timed as the gate does, and judges nothing.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path

import torch
from torch._inductor import config

from kernel_twins import ops
from kernel_twins.harness.check import GuardedOutput, generator
from kernel_twins.harness.load import load_named
from kernel_twins.report.measure import ahead
from kernel_twins.report.rows import base, libraries
from kernel_twins.spec import Case, Name, Op

_LARGEST = 2  # times a call's operands, with what it allocates
_CONTEXT_BYTES = 2**30  # of a process, before it has any operands


@dataclass(frozen=True, slots=True)
class Work:
    """A case that is to be timed, and what there is to compile for it."""

    op: Op
    case: Case
    names: tuple[Name, ...]

    @classmethod
    def of(cls, op: Op, case: Case, steps: Iterable[Name]) -> Work:
        """For those steps, and the baselines and references that are timed beside them."""
        triton = [name for name in steps if name.backend == "triton"]
        references = [Name(name) for name, each in op.references.items() if triton and each.backend == "triton"]
        baselines = [Name(name) for name in op.baselines_at(case) if name in libraries.COMPILED]
        return cls(op, case, (*baselines, *references, *triton))

    def labels(self) -> list[str]:
        return [base.label(self.op, self.case, name) for name in self.names]

    def bytes(self) -> int:
        """Of the GPU's memory, that a process needs which calls these."""
        return _LARGEST * self.op.bytes(self.case) + _CONTEXT_BYTES


def compile_all(work: Iterable[Work]) -> list[str]:
    """Compile for these cases; returns which processes failed, a line each. The bench makes up for what stays undone.

    One process would take longer than the bench does for the same, which has to load as much: nothing is done then.
    """
    waiting = [each for each in work if each.names]
    shares = _shares(waiting)
    if len(shares) < 2:
        return []

    def load() -> None:
        for each in waiting:
            libraries.load(each.op)

    with tempfile.TemporaryDirectory() as folder, config.patch(compile_threads=1):
        called = [[(each.op.name, each.labels()) for each in share] for share in shares]
        (Path(folder) / "compile.json").write_text(json.dumps(called))
        return ahead.run(__name__, Path(folder), len(shares), meanwhile=load)


def _shares(waiting: Iterable[Work]) -> list[list[Work]]:
    """One for each process, about as much to compile in each: as many as cores, or as the GPU has room for at once.

    Cases of about one size are one process's, so that few processes need the room of the largest. A case that the GPU
    has no room for is left out.
    """
    free, _ = torch.cuda.mem_get_info()
    by_size = sorted((each for each in waiting if each.bytes() <= free), key=Work.bytes, reverse=True)
    cores = len(os.sched_getaffinity(0))
    for count in range(sum(len(each.names) for each in by_size), 1, -1):  # a cut may give fewer runs than that
        shares = _cut(by_size, count)
        if len(shares) <= cores and sum(share[0].bytes() for share in shares) <= free:
            return shares
    return [by_size]


def _cut(works: Sequence[Work], count: int) -> list[list[Work]]:
    """Into runs of about as many names each; none is empty."""
    before = accumulate((len(each.names) for each in works), initial=0)
    total = sum(len(each.names) for each in works)
    numbered = zip(works, (names * count // total for names in before), strict=False)  # the total is left over
    return [[each for each, _ in share] for _, share in groupby(numbered, key=itemgetter(1))]


def main(folder: str, number: str, _: str) -> None:
    shares = json.loads((Path(folder) / "compile.json").read_text())
    with ahead.searches_forgotten():
        for op, called in shares[int(number)]:
            _compile(ops.get(op), called)


def _compile(op: Op, called: list[str]) -> None:
    """Call what these labels of one case name. An error is the bench's to tell, which meets it again, alone."""
    cells = [base.labelled(op, label) for label in called]
    case, _ = cells[0]
    try:
        inputs = op.inputs(case, generator(case, "cuda"))
        offset = int(case.get("offset", "0"))
        outs = tuple(GuardedOutput(each, inputs[0].device, offset).tensor for each in op.outputs(case))
    except torch.OutOfMemoryError:
        return
    for label, (_, name) in zip(called, cells, strict=True):
        try:
            load_named(op.name, name)(*inputs, **op.options(case), out=outs[0] if len(outs) == 1 else outs)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{label} was not compiled ahead: {error}"[:300], file=sys.stderr)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])

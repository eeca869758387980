"""Trials of wrong kernels: at a case, what each of them computes, whether that counts, and what the checker says.

``python -m tests.trials tests/records/wrong_kernels.csv`` tries all of them on a GPU at full size; ``--op`` names those
of which rows are made anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from kernel_twins import OPS
from kernel_twins.harness.check import Problem, generator
from kernel_twins.harness.load import why_no_gpu
from kernel_twins.ops.tensors import empty_outputs
from kernel_twins.spec import Case, Op
from tests import wrong
from tests.cases import with_axes_halved, with_fewer_rows

DTYPES = ("fp32", "bf16", "fp16")
_CHUNK = 2**26  # elements compared at a time
_MOST_ROWS = 64
_MOST_ELEMENTS = 2**16
_MOST_QUERIES = 320


@dataclass(frozen=True)
class Trial:
    """Inputs of a case, with what float64 and PyTorch make of them, which all wrong kernels share."""

    op: Op
    problem: Problem
    exact: tuple[Tensor, ...]

    @classmethod
    def of(cls, op: Op, case: Case, device: str) -> Trial:
        problem = Problem(op, case, op.inputs(case, generator(case, device)))
        sizes = [each.shape[0] if each.shape else 1 for each in op.outputs(case)]
        return cls(op, problem, tuple(problem.exact(index, slice(0, size)) for index, size in enumerate(sizes)))

    def results(self, fault: wrong.Fault) -> tuple[Tensor, ...]:
        """What a kernel with the fault computes."""
        case, inputs = self.problem.case, self.problem.inputs
        out = empty_outputs(self.op, case, inputs[0].device)
        wrong.call_of(self.op.name, fault)(*inputs, **self.op.options(case), out=out)
        return out if isinstance(out, tuple) else (out,)

    def counts(self, results: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
        """Whether an element is further than a unit in the last place from the right result.

        Near 0 float64 itself may be, so ``right``, what the formula gives without the fault, must be another result.
        """
        return any(map(_differs, results, self.exact)) and not all(map(torch.equal, results, right))

    def refusal(self, results: tuple[Tensor, ...]) -> str:
        """What the checker says, or nothing."""
        return self.problem.compare(results).reason


def _differs(result: Tensor, exact: Tensor) -> bool:
    rows = max(1, _CHUNK * max(1, len(exact)) // max(1, exact.numel()))
    pairs = zip(result.reshape(exact.shape).split(rows), exact.split(rows), strict=True)
    return any(map(_differs_here, *zip(*pairs, strict=True)))


def _differs_here(result: Tensor, exact: Tensor) -> bool:
    if not result.is_floating_point():
        return not torch.equal(result, exact)
    numbers = torch.finfo(result.dtype)
    right = exact.to(result.dtype).double()
    exponent = torch.frexp(right).exponent + int(math.log2(numbers.eps)) - 1
    smallest = numbers.smallest_normal * numbers.eps
    unit = torch.ldexp(torch.ones_like(right), exponent).clamp_min(smallest).masked_fill(right == 0, smallest)
    within = (result.double() - right).abs() <= unit  # which NaN is not
    return not bool(within[exact.isfinite()].all())


def trials(op: Op, case: Case, device: str) -> Iterator[Trial]:
    """On plain inputs, and on hostile ones."""
    return (Trial.of(op, each, device) for each in op.judged_cases(case))


def judged(op: Op, case: Case, faults: Iterable[wrong.Fault], device: str) -> dict[wrong.Fault, str | None]:
    """Of each fault that counts at the case, what the checker says on its plain inputs or its hostile ones."""
    faults = tuple(faults)
    verdicts: dict[wrong.Fault, str | None] = {}
    for trial in trials(op, case, device):
        right = trial.results(wrong.RIGHT)
        for fault in faults:
            if verdicts.get(fault):
                continue
            results = trial.results(fault)
            if fault in verdicts or trial.counts(results, right):
                verdicts[fault] = trial.refusal(results)
            del results
    return verdicts


def cases(op: Op, dtype: str) -> list[Case]:
    """The timed cases in that dtype, but for those that the formulas of wrong kernels do not know, and their own."""
    timed = [case for case in op.timed_cases if wrong.knows(op.name, case)]
    tried = [dataclasses.replace(case, dtype=dtype) for case in (*timed, *wrong.FORMULAS[op.name].cases)]
    return [case for case in dict.fromkeys(tried) if not op.accepts(case)]


def shown(op: Op, dtype: str) -> list[Case]:
    """Those of them that docs/results.md shows, the profiled one, and small ones: all of them would take an hour."""
    shown = (*op.headline_cases, op.profile_case, *wrong.FORMULAS[op.name].cases)
    known = {dataclasses.replace(case, dtype=dtype) for case in shown}
    return [case for case in cases(op, dtype) if case in known]


def cut(op: Op, case: Case) -> Case:
    """With as many rows (and columns, of products) as a CPU has time for; what is summed stays as long as it is.

    Of attention, a batch, two heads and some hundred queries and keys. The formulas' own cases are small.
    """
    if dataclasses.replace(case, dtype="bf16") in wrong.FORMULAS[op.name].cases:
        return case
    if (dims := op.options(case).get("dims")) is not None:
        reduced = set(dims)
        kept = set(range(len(case.shape))) - reduced
        return with_axes_halved(with_axes_halved(case, kept, _MOST_ROWS), reduced, _MOST_ELEMENTS)
    if len(case.shape) == 3:
        m, n, k = case.shape
        return dataclasses.replace(case, shape=(min(m, _MOST_ROWS), min(n, _MOST_ROWS), k))
    if len(case.shape) == 4:
        _, _, s, d = case.shape
        return dataclasses.replace(case, shape=(1, 2, min(s, _MOST_QUERIES), d))
    if len(case.shape) == 1:
        return dataclasses.replace(case, shape=(min(case.shape[0], _MOST_ELEMENTS),))
    return with_fewer_rows(case, min(_MOST_ELEMENTS, _MOST_ROWS * case.shape[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether the checker refuses wrong kernels at full size, on this GPU.")
    parser.add_argument("table", type=Path)
    parser.add_argument("--op", action="append", choices=list(wrong.FORMULAS), help="may be given several times")
    asked = parser.parse_args()
    if reason := why_no_gpu():
        print(f"tests.trials: cannot try at full size here: {reason}; pytest tries them cut down", file=sys.stderr)
        return 3
    ops = asked.op or list(wrong.FORMULAS)
    rows = [row for op in ops for dtype in DTYPES for row in _tried(OPS[op], dtype)]
    table = pd.DataFrame(rows, columns=["op", "place", "fault", "dtype", "cases", "counts", "refused", "gpu"])
    if asked.table.exists():
        before = pd.read_csv(asked.table)
        table = pd.concat([before[~before["op"].isin(ops)], table])
    table.to_csv(asked.table, index=False, lineterminator="\n")
    return 0


def _tried(op: Op, dtype: str) -> Iterator[tuple[str | int, ...]]:
    """A row for each fault: at how many cases it counts, and at how many of these it is refused."""
    tried = shown(op, dtype)
    verdicts = [judged(op, case, wrong.faults(op.name), "cuda") for case in tried]
    for fault in wrong.faults(op.name) if tried else ():
        said = [verdict[fault] for verdict in verdicts if fault in verdict]
        gpu = torch.cuda.get_device_name()
        yield op.name, fault.place, fault.name, dtype, len(tried), len(said), sum(map(bool, said)), gpu


if __name__ == "__main__":
    sys.exit(main())

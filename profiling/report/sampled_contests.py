"""A public function at one sampled case, forward or backward: who takes part, who is right, how long each takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_twins import OPS, check, environment
from kernel_twins._load import UnavailableError
from kernel_twins._profiling.report import sampled_timing, store
from kernel_twins._profiling.report.sampled_calls import (
    Function,
    Operands,
    calls,
    gradient_operands,
    loss_and_gradient,
)
from kernel_twins._profiling.report.sampled_cases import Pass, is_compiled, op_of
from kernel_twins._profiling.report.sampled_checks import backward_fault, forward_fault
from kernel_twins.bench import raised, sets_of
from kernel_twins.check import generator
from kernel_twins.spec import Case, Op
from kernel_twins.tensors import empty_outputs

OURS = ("cuda", "triton")
OTHERS = ("liger", "quack")

_LONGEST = 160  # characters of a status

Call = Callable[[], Any]
Fault = Callable[[Any], str]  # what is wrong with a call's result, empty where nothing is


class Problem:
    """A function's case of that number, and its operands, as often as it takes for them to exceed L2 several times."""

    def __init__(self, function: str, case: Case, index: int, device: str = "cuda", sets: int | None = None) -> None:
        self.function, self.case, self.index = function, case, index
        self.op = OPS[op_of(function, case)]
        self.calls = calls(function, case)
        source = generator(case, device)
        count = sets_of(self.op.bytes(case)) if sets is None else sets
        self.operands: list[Operands] = [self.op.inputs(case, source) for _ in range(count)]
        self._source = source
        self._compiled: Function | None = None

    def names(self) -> list[str]:
        """Who takes part, PyTorch first."""
        others = [name for name in OTHERS if name in self.op.baselines and self.function != "cross_entropy_gradient_"]
        return ["torch", *(["compile"] if is_compiled(self.index) else []), *others, *OURS, "auto"]

    def chosen(self) -> str:
        """The backend that "auto" takes."""
        return self.calls.chosen(*self.operands[0])

    def entrant(self, name: str, direction: Pass, number: int) -> tuple[Call, Fault]:
        """A call with that set of operands, and what judges its result where it is the first set."""
        operands = self.operands[number]
        if name in OTHERS:
            if direction == "forward":
                return self._of_library(self.op, self.case, name, operands)
            assert self.calls.backward is not None  # or the library would have no baseline there
            op, case = self.calls.backward
            if name not in op.baselines:
                raise UnavailableError(f"{name} has no {op.name}")
            out = _tuple(self._forward(self.calls.eager, operands, False))
            given = gradient_operands(self.case, self.calls, operands, self._douts(out), out)
            return self._of_library(op, case, name, given)
        function = self._function(name)
        if direction == "forward":
            return self._forward_entrant(name, function, operands, number == 0)
        leaves = self.calls.leaves
        given = tuple(
            each.detach().requires_grad_() if index in leaves else each for index, each in enumerate(operands)
        )
        out = _tuple(self._forward(function, given, True))
        douts = self._douts(out)
        call = partial(torch.autograd.grad, out, [given[index] for index in leaves], douts, retain_graph=True)

        def fault(gradients: Any) -> str:
            kept = tuple(each.detach() for each in out)
            return backward_fault(self.function, self.case, self.calls, operands, douts, kept, gradients)

        return call, fault if name in OURS else _trusted

    def _forward_entrant(
        self, name: str, function: Function, operands: Operands, is_judged: bool
    ) -> tuple[Call, Fault]:
        call = partial(self._forward, function, operands, False)
        if name not in OURS:
            return call, _trusted
        if self.function != "cross_entropy_gradient_":
            return call, lambda results: forward_fault(self.function, self.case, operands, _tuple(results), name)
        logits, target = operands
        before = logits.clone() if is_judged else logits

        def fault(results: Any) -> str:
            told = forward_fault(self.function, self.case, (before, target), _tuple(results), name)
            logits.copy_(before)  # for who comes next
            return told

        return call, fault

    def _of_library(self, op: Op, case: Case, name: str, inputs: Operands) -> tuple[Call, Fault]:
        """Of a library's kernel, in the form of an operation's baseline; of rows' losses the mean, too."""
        baseline = op.baselines[name]
        assert baseline is not None  # no library's is compiled into our extension
        out = empty_outputs(op, case, inputs[0].device)
        call = partial(baseline, *inputs, **op.options(case), out=out)

        def with_mean() -> Any:
            return call(), out.mean()  # type: ignore[union-attr]  # one tensor

        def fault(returned: Any) -> str:
            results = returned if isinstance(returned, (Tensor, tuple)) and op.name != "cross_entropy" else out
            return check.Problem(op, case, inputs).compare(_tuple(results), is_baseline=True).reason

        return with_mean if op.name == "cross_entropy" else call, fault

    def _function(self, name: str) -> Function:
        if name == "torch":
            return self.calls.eager
        if name != "compile":
            return partial(self.calls.ours, backend=name)
        if self._compiled is None:
            torch.compiler.reset()  # else a new shape is compiled for any shape
            in_place = self.function == "cross_entropy_gradient_"
            eager = calls("cross_entropy", self.case).eager if in_place else self.calls.eager

            def function(*operands: Tensor) -> Any:
                return eager(*operands)

            made: Function = torch.compile(function, fullgraph=True, dynamic=False)
            self._compiled = loss_and_gradient(made) if in_place else made
        return self._compiled

    def _forward(self, function: Function, operands: Operands, differentiated: bool) -> Any:
        with torch.set_grad_enabled(differentiated):
            return function(*operands)

    def _douts(self, out: Operands) -> Operands:
        """Of a mean, one; of all else, random."""
        return tuple(
            torch.empty_like(each, memory_format=torch.contiguous_format, requires_grad=False).normal_(
                generator=self._source
            )
            if each.dim() or not self.function.startswith("cross_entropy")
            else torch.ones_like(each, requires_grad=False)
            for each in out
        )


def contest(problem: Problem, direction: Pass, lost: dict[str, str]) -> list[dict[str, str]]:
    """A row for everybody who takes part; ``lost`` has the statuses of those who are not to be called again.

    LostGpuError where a call left the GPU in a state in which nothing can be measured.
    """
    statuses: dict[str, str] = {}
    ready: dict[str, list[Call]] = {}
    chosen = problem.chosen()
    for name in problem.names():
        if name in lost:
            statuses[name] = lost[name]
            continue
        statuses[name], made = _admitted(problem, direction, name)
        if name == "auto" and chosen in OURS and statuses[name] == "ok":
            statuses[name] = statuses[chosen]  # whose calls its are
        if statuses[name] == "ok":
            ready[name] = made
    times, sensors = sampled_timing.timed(ready)
    return [
        {
            "function": problem.function,
            "pass": direction,
            "case": problem.case.slug,
            "backend": name,
            "status": (times[name].status if name in times else status)[:_LONGEST],
            "chosen": chosen if name == "auto" else "",
            **_summary(times[name].times_us if name in times else []),
            **store.sensor_fields(sensors),
        }
        for name, status in statuses.items()
    ]


def prepare(problem: Problem, direction: Pass, name: str) -> None:
    """Have compiled what a call needs; whatever it raises is for the contest to tell."""
    call, _ = problem.entrant(name, direction, 0)
    with environment.kept():
        call()
    torch.cuda.synchronize()


def _admitted(problem: Problem, direction: Pass, name: str) -> tuple[str, list[Call]]:
    """The status of the first call, and a call a set of operands where it is ok."""
    try:
        torch.cuda.manual_seed(0)  # which masks are judged by
        with environment.kept():  # torch.compile compiles now, and in the first call
            first, fault = problem.entrant(name, direction, 0)
            results = first()
        torch.cuda.synchronize()
        if told := fault(results):
            return f"wrong: {told}", []
        del results
        return "ok", [first, *(problem.entrant(name, direction, i)[0] for i in range(1, len(problem.operands)))]
    except UnavailableError as error:
        if name in OURS:  # nothing of a backend can be measured here, which is for the user to mend
            raise
        return f"skipped: {error}", []
    except Exception as error:  # of anybody's compiler or library
        status = raised(error) if name in (*OURS, "auto") else f"skipped: {raised(error).removeprefix('wrong: ')}"
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise sampled_timing.LostGpuError(name, status[:_LONGEST]) from None
    return status, []


def _summary(times_us: list[float]) -> dict[str, str]:
    """The median of the rounds, and half the distance of their quartiles as a share of it."""
    if not times_us:
        return {"us": "", "spread_pct": ""}
    low, median, high = statistics.quantiles(times_us, n=4, method="inclusive")
    return {"us": f"{median:.5g}", "spread_pct": f"{50 * (high - low) / median:.2g}"}


def _tuple(results: Any) -> Operands:
    return results if isinstance(results, tuple) else (results,)


def _trusted(results: Any) -> str:
    """PyTorch, and what it compiles, is taken at its word; so is "auto", which is one of those that are judged."""
    return ""

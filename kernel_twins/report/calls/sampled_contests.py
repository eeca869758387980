"""A public function at one sampled case, forward or backward: who takes part, who is right, how long each takes.

PyTorch is taken at its word, and so is "auto", which is one of those that are judged. Of torch.compile, gradients, what
is drawn by chance and a loss are.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch import Tensor

from kernel_twins import OPS
from kernel_twins.errors import UnavailableError
from kernel_twins.functional.function import Pass
from kernel_twins.functional.sampled import Call as Function
from kernel_twins.functional.sampled import Fault, Forward, Operands
from kernel_twins.harness import check
from kernel_twins.harness.bench import raised, sets_of
from kernel_twins.harness.check import NotJudgedError, generator, judging
from kernel_twins.ops.baselines import environment_kept
from kernel_twins.ops.tensors import empty_outputs
from kernel_twins.report.calls import sampled_timing
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.calls.sampled_cases import is_compiled, op_of
from kernel_twins.report.calls.sampled_results import POISON, Form, forms_of, misformed, poison
from kernel_twins.report.rows import store
from kernel_twins.spec import NOT_JUDGED, Case

OURS = ("cuda", "triton")
OTHERS = ("liger", "quack", "flash4")

_LONGEST = 160  # characters of a status
_SHAPES = 1024  # that are compiled in a recording, and more

T = TypeVar("T")
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Entrant:
    """A call with one set of operands; ``trial`` is what is called first.

    ``fault`` tells what is wrong with what the trial gave, which must be of these ``forms``; without one it is taken at
    its word.
    """

    call: Call
    trial: Call
    forms: tuple[Form, ...] = ()
    fault: Callable[[Operands], str] | None = None


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """How torch.compile is set while a recording is compiled for or measured.

    Gradients are taken again and again. A new shape is compiled without forgetting those before. No other processes
    are started to compile, of which there is one for each core already, or what is compiled lies in the caches.
    """
    limits = {"recompile_limit": _SHAPES, "accumulated_recompile_limit": _SHAPES}
    with (
        torch._functorch.config.patch(donated_buffer=False),
        torch._dynamo.config.patch(limits),
        torch._inductor.config.patch(compile_threads=1),
    ):
        yield


class Problem:
    """A function's case of that number, and its operands, as often as it takes for them to exceed L2 several times.

    What several entrants need is made once: gradients of results, operands of the gradient's operation, judges.
    """

    def __init__(self, function: str, case: Case, index: int, device: str = "cuda", sets: int | None = None) -> None:
        self.function, self.case, self.index, self.device = function, case, index, device
        self.op = OPS[op_of(function, case)]
        self.calls = FUNCTIONS[function].calls(case)
        source = generator(case, device)
        count = sets_of(self.op.bytes(case)) if sets is None else sets
        self.operands: list[Operands] = [self.op.inputs(case, source) for _ in range(count)]
        self._source = source
        self._compiled: Function | None = None
        self._douts: dict[int, Operands] = {}
        self._given: dict[int, Operands] = {}
        self._forward_judges: dict[Case, Forward] = {}
        self._gradients_fault: Fault | None = None
        self._others_problems: dict[str, check.Problem] = {}

    def names(self, direction: Pass) -> list[str]:
        """Who takes part, PyTorch first; others where an operation says what they are to compute."""
        told = not self.calls.in_place and (direction == "forward" or self.calls.backward is not None)
        others = [name for name in OTHERS if told and name in self.op.baselines]
        return ["torch", *(["compile"] if is_compiled(self.index) else []), *others, *OURS, "auto"]

    def chosen(self, direction: Pass) -> str:
        """The backend that "auto" takes, where gradients are wanted or not."""
        leaves = self.calls.leaves if direction == "backward" else ()
        given = (x.detach().requires_grad_() if i in leaves else x for i, x in enumerate(self.operands[0]))
        with torch.set_grad_enabled(direction == "backward"):
            return self.calls.chosen(*given)

    def forget(self) -> None:
        """What judges kept, which is as large as many sets of operands."""
        self._given, self._forward_judges, self._gradients_fault, self._others_problems = {}, {}, None, {}

    def entrant(self, name: str, direction: Pass, number: int) -> Entrant:
        """A call with that set of operands, of which the first one's is tried and judged."""
        if name in OTHERS:
            return self._of_library(name, direction, number)
        function = self._function(name)
        if direction == "forward":
            return self._forward_entrant(name, function, number)
        return self._backward_entrant(name, function, number)

    # ------------------------------------------------------------------------------------------------------------------
    # Forward
    # ------------------------------------------------------------------------------------------------------------------

    def _forward_entrant(self, name: str, function: Function, number: int) -> Entrant:
        call = partial(_forward, function, self.operands[number])
        if name == "compile" and self.calls.rows is None and self.op.exemplar is None:
            settled = self.op.settled(self.case)
            return Entrant(
                call,
                lambda: _forward(function, self.judge(settled).operands),
                self._forms,
                lambda found: self.judge(settled).fault(found, is_baseline=True),
            )
        if name not in (*OURS, "auto"):
            return Entrant(call, call)
        operands = self.operands[number]
        if self.calls.in_place and number == 0:  # what is written to is judged by, and tried
            operands = self.op.inputs(self.case, generator(self.case, self.device))
        trial = partial(_forward, function, operands)
        if name == "auto":
            return Entrant(call, trial)
        rows, forms = self.calls.rows, self._forms
        fault: Callable[[Operands], str] = lambda found: self.judge(self.case).fault(found)  # noqa: E731
        if rows is None:
            return Entrant(call, trial, forms, fault)

        def with_rows() -> Operands:
            of_rows = rows(*operands, backend=name)  # before a call in place writes to what they are made of
            return *_tuple(trial()), of_rows

        return Entrant(call, with_rows, (*forms, *forms_of(self.op, self.case)), fault)

    def judge(self, case: Case) -> Forward:
        """Of results, at the case or where it is settled."""
        if case not in self._forward_judges:
            operands = self.operands[0]
            if case != self.case:
                operands = self.op.inputs(case, generator(case, self.device))
            self._forward_judges[case] = FUNCTIONS[self.function].calls(case).forward(operands)
        return self._forward_judges[case]

    @cached_property
    def _forms(self) -> tuple[Form, ...]:
        """Of the results, as PyTorch's are: it is asked about tensors without memory."""
        like = (each.to("meta") for each in self.operands[0])
        return tuple((tuple(each.shape), each.dtype) for each in _tuple(_forward(self.calls.eager, tuple(like))))

    # ------------------------------------------------------------------------------------------------------------------
    # Backward
    # ------------------------------------------------------------------------------------------------------------------

    def _backward_entrant(self, name: str, function: Function, number: int) -> Entrant:
        leaves = self.calls.leaves
        given = tuple(x.detach().requires_grad_() if i in leaves else x for i, x in enumerate(self.operands[number]))
        with torch.enable_grad():
            out = _tuple(function(*given))
        differentiated = [given[index] for index in leaves]
        call = partial(torch.autograd.grad, out, differentiated, self.douts(number, out), retain_graph=True)
        if name not in OURS:
            return Entrant(call, call)
        kept = tuple(each.detach() for each in out)
        forms = tuple((tuple(each.shape), each.dtype) for each in differentiated)
        return Entrant(call, call, forms, lambda gradients: self._gradients_judge()(kept, gradients))

    def douts(self, number: int, out: Operands) -> Operands:
        """The gradients of results, everybody's the same. Of a mean, one; of all else, random."""
        if number not in self._douts:
            with judging():
                self._douts[number] = tuple(
                    torch.empty_like(each, memory_format=torch.contiguous_format, requires_grad=False).normal_(
                        generator=self._source
                    )
                    if self.calls.rows is None
                    else torch.ones_like(each, requires_grad=False)
                    for each in out
                )
        return self._douts[number]

    def given(self, number: int, out: Operands | None = None) -> Operands:
        """The inputs of the gradient's operation, from results that are told, or PyTorch's."""
        if number not in self._given:
            assert self.calls.backward is not None  # or there is no such operation
            operands = self.operands[number]
            out = out or _tuple(_forward(self.calls.eager, operands))
            self._given[number] = self.calls.backward.inputs(operands, self.douts(number, out), out)
        return self._given[number]

    def _gradients_judge(self) -> Fault:
        if self._gradients_fault is None:
            assert self.calls.gradients is not None  # or no backward pass is timed
            given = partial(self.given, 0)
            self._gradients_fault = self.calls.gradients(self.operands[0], self._douts[0], given)
        return self._gradients_fault

    # ------------------------------------------------------------------------------------------------------------------
    # Others
    # ------------------------------------------------------------------------------------------------------------------

    def _of_library(self, name: str, direction: Pass, number: int) -> Entrant:
        """Of a library's kernel, in the form of an operation's baseline; of rows' losses the mean, too.

        It is judged as in every gate: where a sum with a residual needs no rounding.
        """
        if direction == "forward":
            op, case, inputs = self.op, self.case, self.operands[number]
        else:
            assert self.calls.backward is not None  # or names() has no library
            op, case = self.calls.backward.op, self.calls.backward.case
            if name not in op.baselines:
                raise UnavailableError(f"{name} has no {op.name}")
            inputs = self.given(number)
        baseline = op.baselines[name]
        assert baseline is not None  # no library's is compiled into our extension
        out = empty_outputs(op, case, inputs[0].device)
        call = partial(baseline, *inputs, **op.options(case), out=out)

        def with_mean() -> Any:
            return call(), out.mean()  # type: ignore[union-attr]  # one tensor

        settled = op.settled(case)

        def problem() -> check.Problem:
            if op.name not in self._others_problems:
                given = inputs if settled == case else op.inputs(settled, generator(settled, self.device))
                self._others_problems[op.name] = check.Problem(op, settled, given)
            return self._others_problems[op.name]

        def trial() -> Any:
            into = empty_outputs(op, settled, inputs[0].device)
            for each in _tuple(into):
                each.view(torch.uint8).fill_(POISON)
            returned = baseline(*problem().inputs, **op.options(settled), out=into)
            return returned if isinstance(returned, (Tensor, tuple)) else into

        fault: Callable[[Operands], str] = lambda found: problem().compare(found, is_baseline=True).reason  # noqa: E731
        is_mean = self.calls.rows is not None and direction == "forward"
        return Entrant(with_mean if is_mean else call, trial, forms_of(op, settled), fault)

    def _function(self, name: str) -> Function:
        if name == "torch":
            return self.calls.eager
        if name != "compile":
            return partial(self.calls.ours, backend=name)
        if self._compiled is None:
            made = self.calls.compiled
            self._compiled = made(_compile) if made else _compile(self.calls.eager)
        return self._compiled


def _compile(eager: Function) -> Function:
    def function(*operands: Tensor) -> Any:
        return eager(*operands)

    made: Function = torch.compile(function, fullgraph=True, dynamic=False)
    return made


def contest(problem: Problem, direction: Pass, lost: dict[str, str]) -> list[dict[str, str]]:
    """A row for everybody who takes part; ``lost`` has the statuses of those who are not to be called again.

    LostGpuError where a call left the GPU in a state in which nothing can be measured.
    """
    statuses: dict[str, str] = {}
    ready: dict[str, list[Call]] = {}
    chosen = problem.chosen(direction)
    for name in problem.names(direction):
        if name in lost:
            statuses[name] = lost[name]
            continue
        statuses[name], made = _admitted(problem, direction, name)
        if name == "auto" and chosen in OURS and statuses[name] == "ok":
            statuses[name] = statuses[chosen]  # whose calls its are
        if statuses[name] == "ok":
            ready[name] = made
    problem.forget()
    torch.cuda.empty_cache()  # graphs have memory of their own
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
    with environment_kept():
        problem.entrant(name, direction, 0).call()
    torch.cuda.synchronize()


def _admitted(problem: Problem, direction: Pass, name: str) -> tuple[str, list[Call]]:
    """The status of the first call, and a call a set of operands where it is ok."""

    def tried() -> tuple[Entrant, Operands]:
        torch.cuda.manual_seed(0)  # which masks are judged by
        entrant = problem.entrant(name, direction, 0)
        poison(entrant.forms, problem.device)
        return entrant, _tuple(entrant.trial())

    status, made = _attempted(name, tried)
    if made is None:
        return status, []
    entrant, results = made
    if (status := judged(entrant, results)) != "ok":
        return status, []
    del made, results
    status, others = _attempted(
        name, lambda: [problem.entrant(name, direction, number).call for number in range(1, len(problem.operands))]
    )
    return status, [entrant.call, *(others or [])]


def _attempted(name: str, attempt: Callable[[], T]) -> tuple[str, T | None]:
    """``ok`` and what an attempt gives, or a status that says why it gives nothing."""
    try:
        with environment_kept():  # torch.compile compiles at the first call
            made = attempt()
        torch.cuda.synchronize()
        return "ok", made
    except NotJudgedError as error:
        return f"{NOT_JUDGED}: {error}", None
    except UnavailableError as error:
        if name in OURS:  # nothing of a backend can be measured here, which is for the user to mend
            raise
        return f"skipped: {error}", None
    except Exception as error:  # of anybody's compiler or library
        status = raised(error) if name in (*OURS, "auto") else f"skipped: {raised(error).removeprefix('wrong: ')}"
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise sampled_timing.LostGpuError(name, status[:_LONGEST]) from None
    return status, None


def judged(entrant: Entrant, results: Operands) -> str:
    """``ok``, what is wrong with a trial's results, or that this could not be found out."""
    if entrant.fault is None:
        return "ok"
    if told := misformed(entrant.forms, results):
        return f"wrong: {told}"
    try:
        with judging():
            told = entrant.fault(results)
    except NotJudgedError as error:
        return f"{NOT_JUDGED}: {error}"
    return f"wrong: {told}" if told else "ok"


def _forward(function: Function, operands: Operands) -> Any:
    with torch.no_grad():
        return function(*operands)


def _summary(times_us: list[float]) -> dict[str, str]:
    """The median of the rounds, and half the distance of their quartiles as a share of it."""
    if not times_us:
        return {"us": "", "spread_pct": ""}
    low, median, high = statistics.quantiles(times_us, n=4, method="inclusive")
    return {"us": f"{median:.5g}", "spread_pct": f"{50 * (high - low) / median:.2g}"}


def _tuple(results: Any) -> Operands:
    return results if isinstance(results, tuple) else (results,)

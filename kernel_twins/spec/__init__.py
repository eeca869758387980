"""The words in which operations and their ladders are written down.

Everything that consumes operations (tests, bench, profiler, log, plots) walks these objects and knows no operation by
name. This module and the specs import neither torch nor Triton, which take seconds and are not needed to read a ladder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kernel_twins.spec.chance import Draws

if TYPE_CHECKING:
    from torch import Generator, Tensor

Backend = Literal["cuda", "triton"]
BACKENDS: tuple[Backend, ...] = ("cuda", "triton")
ITEMSIZE: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

_FILES: Mapping[Backend, tuple[str, str]] = {"cuda": ("cuda-kernels", "cu"), "triton": ("triton-kernels", "py")}

NOT_JUDGED = "not judged"
UNPROVEN = ("wrong", NOT_JUDGED)
"""A status that begins so belongs to a call that ran, but could not be judged."""

_STEP_NAME = re.compile(r"v\d\d_[a-z0-9_]+")
_ARCH = re.compile(r"(>=|==)(\d+)\.(\d+)(a?)")


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One problem: its shape, its dtype, and a variant (layout, values, alignment).

    ``slug`` names the case in every row, label and message; ``Case.parse`` reads it back.
    """

    shape: tuple[int, ...]
    dtype: str
    variant: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(ITEMSIZE)}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape is {self.shape}; every size must be at least 0")
        object.__setattr__(self, "variant", tuple(sorted(self.variant)))

    @classmethod
    def of(cls, *shape: int, dtype: str, **variant: str) -> Case:
        return cls(tuple(shape), dtype, tuple(variant.items()))

    @classmethod
    def parse(cls, slug: str) -> Case:
        """Read a slug such as ``4096x4096x4096-bf16-b.col``."""
        sizes, _, rest = slug.partition("-")
        dtype, *pairs = rest.split("-")
        try:
            if not dtype:
                raise ValueError
            shape = tuple(int(size) for size in sizes.split("x"))
            variant = tuple((key, value) for key, value in (pair.split(".") for pair in pairs))
        except ValueError:
            raise ValueError(f"case is {slug!r}; it must look like 1024x1024-fp32 or 64x64x64-bf16-b.col") from None
        return cls(shape, dtype, variant)

    def get(self, key: str, default: str = "") -> str:
        """The variant's value for ``key``, or ``default``."""
        return dict(self.variant).get(key, default)

    def but(self, **variant: str) -> Case:
        """The same case with these values in its variant; an empty string removes one."""
        changed = {**dict(self.variant), **variant}
        return Case(self.shape, self.dtype, tuple((key, value) for key, value in changed.items() if value))

    @property
    def hostile(self) -> Case | None:
        """The same case with ``values.hostile``; None if it has special values, or one row seen many times."""
        if self.get("values") or "expanded" in dict(self.variant).values():
            return None
        return self.but(values="hostile")

    @property
    def slug(self) -> str:
        """The case's only spelling, in characters that NVTX filters take literally."""
        return "-".join(
            ["x".join(map(str, self.shape)), self.dtype, *(f"{key}.{value}" for key, value in self.variant)]
        )


@dataclass(frozen=True, slots=True)
class Output:
    """Shape and dtype of one output tensor; outputs are row-major and contiguous."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step's author expects of one quantity at the op's profile case, written down before measuring.

    ``quantity`` is a name from the profiler's registry. ``value`` is absolute in that quantity's unit, or, where
    ``relative``, a multiple of the previous step's measurement. ``==`` means within ``tolerance`` (a fraction).
    ``case`` names another timed case; only the time is known there, unless it is the step's own profile case. If a step
    has a profile case of its own, a prediction without a ``case`` is void.
    """

    quantity: str
    compare: Literal["<=", ">=", "=="]
    value: float
    relative: bool = False
    tolerance: float = 0.1
    backends: tuple[Backend, ...] = BACKENDS
    case: Case | None = None


@dataclass(frozen=True, slots=True)
class Name:
    """What is timed or profiled: a step in a backend, or a baseline or reference (its name as the backend, no step)."""

    backend: str
    step: str = ""


class Where(NamedTuple):
    """Configurations in which ``setting`` has one of ``values``, and a pattern of PTX that their kernels contain."""

    setting: str
    values: tuple[int, ...]
    instruction: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One idea on an operation's ladder, present as a ``.cu`` file, a Triton file, or both.

    The header of its file says what it does and why that may pay. ``arch`` is ``>=8.0``, ``>=9.0`` or ``==9.0a``.
    ``accepts`` narrows the op's rule: it returns the reason for a refusal, or an empty string. With ``fp32_out`` the
    step also takes an fp32 ``out`` if the operation's usual one is narrower (cases with ``out.fp32``). A ``wide`` step
    is timed on the op's wide cases, too. ``no_cuda`` and ``no_triton`` say why a language has no such step; empty if it
    has. ``launches`` counts the kernels of one call at the profile case; 0 if the languages differ. ``helpers`` names
    other kernels that the step launches. A step that is not ``deterministic`` may give other last bits in every run. A
    step that is not ``finished`` may spill registers. The Triton file of a ``standalone`` step may be copied whole.

    ``profile_case`` is for a step that leaves the op's profile case to another step's kernel. By language, it holds a
    timed case at which the step's own kernel runs; None if the step is profiled nowhere. ``replaces`` names the step
    whose kernel served that case before, if that is not the step before.

    ``promises`` are patterns of PTX (ops/ptx.py) that every Triton kernel of the step contains, by architecture (80,
    90); ``promises_where`` are those of some configurations only. ``spills`` names the architectures for which some
    configurations spill registers; the search passes over them.
    """

    name: str
    predictions: tuple[Prediction, ...] = ()
    arch: str = ">=8.0"
    accepts: Callable[[Case], str] = lambda case: ""
    fp32_out: bool = False
    wide: bool = False
    no_cuda: str = ""
    no_triton: str = ""
    launches: int = 1
    helpers: tuple[str, ...] = ()
    profile_case: Mapping[Backend, Case | None] = field(default_factory=dict, hash=False)
    replaces: str = ""
    deterministic: bool = True
    finished: bool = True
    standalone: bool = False
    promises: Mapping[int, tuple[str, ...]] = field(default_factory=dict, hash=False)
    promises_where: Mapping[int, tuple[Where, ...]] = field(default_factory=dict, hash=False)
    spills: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not _STEP_NAME.fullmatch(self.name):
            raise ValueError(f"name is {self.name!r}; a step is named like v03_vectorized")
        if not _ARCH.fullmatch(self.arch):
            raise ValueError(f"arch is {self.arch!r}; it must be like >=8.0, >=9.0 or ==9.0a")
        if self.no_cuda and self.no_triton:
            raise ValueError(f"{self.name}: no_cuda and no_triton are given; a step is there in one language at least")
        for each in self.predictions:
            backends = [backend for backend in each.backends if backend in self.backends]
            if each.case and each.quantity != "time" and any(self.profile_case.get(b) != each.case for b in backends):
                raise ValueError(
                    f"quantity is {each.quantity!r}; at {each.case.slug} it must be time, all that is known there: "
                    "predict others at the step's profile_case, and only in the backends that have it"
                )

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The languages in which the step exists."""
        return tuple(name for name, gap in zip(BACKENDS, (self.no_cuda, self.no_triton), strict=True) if not gap)

    @property
    def gap(self) -> str:
        """Why a language lacks it; empty if both have it."""
        return self.no_cuda or self.no_triton

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability can run the step."""
        match = _ARCH.fullmatch(self.arch)
        assert match is not None  # __post_init__ has checked it
        compare, needed = match[1], (int(match[2]), int(match[3]))
        return capability == needed if compare == "==" else capability >= needed


@dataclass(frozen=True, slots=True)
class Reference:
    """A call that computes less than the operation: another operation's last step, on ``operands(*inputs)``."""

    backend: Backend
    op: str
    operands: Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class SizeAxis:
    """The axis of a throughput plot: a case's ``size``.

    Cases of one panel share dtype, variant and ``panel(case)``; None leaves a case out.
    """

    label: str
    size: Callable[[Case], int]
    panel: Callable[[Case], str | None] = lambda case: ""


class Drawn(NamedTuple):
    """A case, and the number of blocks that PyTorch launches for it, if known to be few."""

    case: Case
    blocks: int | None = None


Description = Callable[[Case, "tuple[Tensor, ...]", slice], "tuple[Tensor, Tensor]"]  # an output's values and terms
Deviation = Callable[[Case, "tuple[Tensor, ...]", slice], "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation: what it computes, the cases on which it is tested and timed, and its ladder of steps.

    ``family`` names the folder that holds it in every tree.

    A step, a baseline and a user's kernel are called in the same way: ``call(*inputs, **options(case), out=tensor)``,
    with a tuple of tensors for several outputs, and they write into ``out``. A baseline whose library allocates its
    result may return that instead. ``options`` are arguments that are no tensors.

    ``reference(case, inputs, rows)`` returns, for those rows of the output's first dimension, the float64 result and
    the float64 sum of the absolute terms behind each element (the scale of fp32 rounding, see check.py). It describes
    the first output, ``more_references`` the others in their order. ``check`` raises TypeError or ValueError, naming
    the argument. ``accepts`` returns the reason for refusing a case, or an empty string. ``flops`` and ``bytes`` are
    the operation's minimum, never a step's traffic, so that steps compare; ``ceiling`` names the limit of the hardware
    survey that a rate is compared with. ``bench_cases`` are timed for every step, ``wide_cases`` only for ``wide``
    steps; docs/results.md shows ``headline_cases``. ``size_axis`` is the plot's x axis; without one a case is a bar.

    ``behind`` lists, by language, the steps behind the operation's public function; a call runs the first that the GPU
    and its sizes allow. Beyond a limit, an operator in ``cuda-kernels/*/torch*.cpp`` skips the step at the place
    ``FIRST`` or ``SECOND`` of CUDA's list. The limit belongs to that step, so change both together.

    ``baselines`` maps a name to a call, or to None if the baseline is compiled into the extension. The first is
    PyTorch's own, and sets the accuracy required. ``baseline_cases`` limits a baseline to some timed cases. ``differs``
    says where a baseline's formula is not PyTorch's. ``references`` are timed beside them and compute less, to tell a
    step's extra cost: their ``out`` is not checked, and steps do not compete with them. Baselines that draw their own
    random numbers, or round elsewhere, are judged at ``settled(case)``, where neither matters. ``exemplar`` is
    PyTorch's computation with the options' own numbers: it sets the accuracy required of steps. ``rounds`` says where
    PyTorch loses more than fp32 before it rounds the result, as steps then may; empty elsewhere. ``deviation`` is the
    standard deviation of the first output's elements if the terms of their sums are rounded, ``more_deviations`` are
    the others'. If ``hostile``, steps are
    also judged at ``values.hostile``, inputs in which easily missed elements, such as rows' ends, weigh most. ``draw``
    makes a random case for sampling.py, until one is worth timing; None without a public function.
    """

    name: str
    family: str
    chapter: int
    title: str
    summary: str
    inputs: Callable[[Case, Generator], tuple[Tensor, ...]]
    outputs: Callable[[Case], tuple[Output, ...]]
    reference: Description
    more_references: tuple[Description, ...] = ()
    check: Callable[..., None]
    accepts: Callable[[Case], str] = lambda case: ""
    test_cases: tuple[Case, ...]
    huge_cases: tuple[Case, ...] = ()
    bench_cases: tuple[Case, ...]
    wide_cases: tuple[Case, ...] = ()
    headline_cases: tuple[Case, ...]
    size_axis: SizeAxis | None = None
    profile_case: Case
    ceiling: Literal["dram_copy", "dram_read", "fp32", "bf16"]
    flops: Callable[[Case], int]
    bytes: Callable[[Case], int]
    baselines: Mapping[str, Callable[..., Any] | None]
    baseline_cases: Mapping[str, tuple[Case, ...]] = field(default_factory=dict)
    differs: Callable[[str, Case], str] = lambda baseline, case: ""
    behind: Mapping[Backend, tuple[str, ...]] = field(default_factory=dict)
    steps: tuple[Step, ...]
    options: Callable[[Case], Mapping[str, Any]] = lambda case: {}
    references: Mapping[str, Reference] = field(default_factory=dict)
    exemplar: Callable[..., Any] | None = None
    settled: Callable[[Case], Case] = lambda case: case
    rounds: str = ""
    deviation: Deviation | None = None
    more_deviations: tuple[Deviation, ...] = ()
    hostile: bool = False
    draw: Callable[[Draws], Drawn] | None = None

    def folder(self, backend: Backend) -> str:
        """A ladder's folder in one language, from the repository's root, such as ``cuda-kernels/softmax/softmax``."""
        return f"{_FILES[backend][0]}/{self.family}/{self.name}"

    def file(self, step: str, backend: Backend) -> str:
        """A step's file, from the repository's root."""
        return f"{self.folder(backend)}/{step}.{_FILES[backend][1]}"

    def module(self, step: str) -> str:
        """The name under which a Triton step is imported."""
        return f"kernel_twins._triton.{self.family}.{self.name}.{step}"

    def judged_cases(self, case: Case) -> tuple[Case, ...]:
        """The cases at which a call is judged: the case and, if there is one, its hostile variant."""
        hostile = case.hostile if self.hostile else None
        return (case, hostile) if hostile else (case,)

    def step(self, name: str) -> Step:
        """The step of that name; ValueError lists the names there are."""
        for step in self.steps:
            if step.name == name:
                return step
        raise ValueError(f"step is {name!r}; {self.name} has {', '.join(step.name for step in self.steps)}")

    def steps_of(self, backend: Backend) -> tuple[Step, ...]:
        """The ladder in one language, in reading order."""
        return tuple(step for step in self.steps if backend in step.backends)

    def profile_case_of(self, step: Step, backend: Backend) -> Case | None:
        """The case at which a step is profiled; None if another step's kernel serves all such cases."""
        return step.profile_case.get(backend, self.profile_case)

    def before(self, step: Step, backend: Backend) -> Step | None:
        """The step that another is compared with at its profile case, in the same language; None if not timed there.

        It is the step before, or the one that ``replaces`` names.
        """
        case, ladder = self.profile_case_of(step, backend), self.steps_of(backend)
        earlier = [self.step(step.replaces)] if step.replaces else ladder[: ladder.index(step)]
        return earlier[-1] if case and earlier and self.times(earlier[-1], case) else None

    @property
    def profiled_cells(self) -> tuple[tuple[Case, Name], ...]:
        """Cases and what is profiled there: at the profile case baselines and steps.

        At a step's own profile case: the step, the one that it is compared with, and the first baseline.
        """
        cells = [(self.profile_case, Name(baseline)) for baseline in self.baselines_at(self.profile_case)]
        for backend in BACKENDS:
            for step in self.steps_of(backend):
                case = self.profile_case_of(step, backend)
                if case is None or not self.serves(step, case):
                    continue
                before = self.before(step, backend)
                cells.append((case, Name(next(iter(self.baselines)))))
                cells += [(case, Name(backend, each.name)) for each in (before, step) if each]
        return tuple(dict.fromkeys(cells))

    @property
    def timed_cases(self) -> tuple[Case, ...]:
        """All cases that any step is timed on."""
        return self.bench_cases + self.wide_cases

    @property
    def condition_cases(self) -> tuple[Case, ...]:
        """Cases timed rested and in a chain, too: headline cases bound by arithmetic, and so by power."""
        return () if self.ceiling.startswith("dram") else self.headline_cases

    def baselines_at(self, case: Case) -> tuple[str, ...]:
        """The baselines that are timed on a case."""
        return tuple(name for name in self.baselines if case in self.baseline_cases.get(name, (case,)))

    def last_step(self, backend: Backend, case: Case) -> Step | None:
        """The last step of a language that is timed on a case; None where none is."""
        return next((step for step in reversed(self.steps_of(backend)) if self.times(step, case)), None)

    def refusal(self, step: Step, case: Case) -> str:
        """Why a step does not take a case, by the op's rule or by its own; an empty string where it does."""
        if reason := self.accepts(case) or step.accepts(case):
            return reason
        if not case.get("out") or step.fp32_out:
            return ""
        others = ", ".join(each.name for each in self.steps if each.fp32_out)
        return f"{step.name} does not write out.{case.get('out')}, take {others}"

    def serves(self, step: Step, case: Case) -> bool:
        """Whether a step takes a case."""
        return not self.refusal(step, case)

    def times(self, step: Step, case: Case) -> bool:
        """Whether a run times a step on a case: only ``wide`` steps on wide cases."""
        return self.serves(step, case) and (step.wide or case not in self.wide_cases)

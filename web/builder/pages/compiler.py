"""The stage explorer: what Triton's and NVIDIA's compilers make of a kernel, and the grid of compilations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from builder import code, grids, places, stages
from builder.site import Site
from kernel_twins import OPS
from kernel_twins.report.rows.base import ROOT
from kernel_twins.report.sweeps import evidence, inductor, passes
from kernel_twins.report.sweeps.evidence import Evidence
from kernel_twins.report.sweeps.stages import TITLES
from kernel_twins.spec import Op, Step

_DEFAULT = "matmul_bf16.v04_pipelined.triton"
_EXCERPTED = ("ttgir", "ptx")


@dataclass(frozen=True, slots=True)
class Job:
    """A named pass: which run does it, and what the default kernel shows of it."""

    name: str
    job: str
    runs: str
    found: list[tuple[str, Evidence]]


@dataclass(frozen=True, slots=True)
class Tick:
    """A pass run in the bar: its place, and what it is named for."""

    number: int
    stage: str
    argument: str
    named: str


@dataclass(frozen=True, slots=True)
class Generated:
    """What Inductor makes of an operation, and the step that stands beside it."""

    op: Op
    head: dict[str, str]
    kernels: list[tuple[str, str]]
    lines: list[Markup]
    twin: Step
    page: str
    twin_lines: code.Hunk


def write(site: Site) -> None:
    chosen = stages.choices()
    for each in (choice for group in chosen.values() for choice in group):
        site.payload(f"stages-{each.name}", stages.payload(each.name))
    ticks = list(_ticks())
    site.page(
        "compiler.html",
        "compiler.html.j2",
        "Compiler",
        about="What the compilers make of a kernel, stage by stage, with linked lines.",
        scripts=["compiler.js", "compiler-grid.js"],
        styles=["ladder.css", "compiler.css"],
        choices=chosen,
        default=_DEFAULT,
        facts=stages.facts(_DEFAULT),
        stale=stages.recorded(_DEFAULT).stale,
        jobs=list(_jobs(ticks)),
        ticks=ticks,
        excerpts=list(stages.excerpts(_DEFAULT, _EXCERPTED)),
        titles=TITLES,
        grids=grids.grids(),
        dots=grids.dots(),
        other=grids.other(),
        generated=[_generated(OPS[name], OPS[name].step(twin)) for name, twin in inductor.OPERATIONS.items()],
    )


def _ticks() -> Iterator[Tick]:
    table = passes.read()
    for number, (stage, argument, named) in enumerate(
        zip(table["stage"], table["argument"], table["named"], strict=True), 1
    ):
        yield Tick(number, TITLES[stage], argument, named)


def _jobs(ticks: list[Tick]) -> Iterator[Job]:
    found = evidence.of(stages.recorded(_DEFAULT))
    for each in evidence.PASSES:
        runs = [f"{tick.number}, {tick.argument}" for tick in ticks if each.name in tick.named.split("; ")]
        yield Job(each.name, each.job, "".join(runs), [(TITLES[one.stage], one) for one in found[each.name]])


def _generated(op: Op, twin: Step) -> Generated:
    head, text = inductor.read(inductor.file(op.name))
    lines = code.coloured(code.lexer(".py"), inductor.of_kernels(text))
    file = ROOT / op.file(twin.name, "triton")
    return Generated(op, head, inductor.fused(text), lines, twin, str(places.page(file)), code.whole(file))

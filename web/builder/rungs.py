"""A ladder as its page shows it: each step with its idea, what it changes, what moved, and what was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from builder import code, numbers, prose
from kernel_twins.report.meaning import judged, write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.pages import headers
from kernel_twins.report.rows.base import ROOT
from kernel_twins.spec import BACKENDS, Backend, Case, Name, Op, Step

TITLES: dict[Backend, str] = {"cuda": "CUDA", "triton": "Triton"}


@dataclass(frozen=True, slots=True)
class Moved:
    """A quantity before and after a step, in the words of the log."""

    heading: str
    before: Markup
    after: Markup
    change: str


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the step's author froze, and what came of it."""

    quantity: str
    claim: str
    came: str
    verdict: str
    mark: str


@dataclass(frozen=True, slots=True)
class Twin:
    """A step in one language."""

    backend: Backend
    title: str
    file: str
    case: str
    before: str
    stale: bool
    hunks: list[list[code.Line]]
    length: int
    moved: list[Moved]
    limit: str
    predicted: list[Predicted]


@dataclass(frozen=True, slots=True)
class Rung:
    """A step of the ladder; ``gap`` says why it has no twin."""

    name: str
    title: str
    why: str
    gap: str
    prose: Markup
    drawings: list[Markup]
    twins: list[Twin]


def rungs(results: Results) -> list[Rung]:
    _, sections = prose.steps(results.op.name)
    return [_rung(results, step, sections.get(step.name, "")) for step in results.op.steps]


def _rung(results: Results, step: Step, text: str) -> Rung:
    op, page = results.op, ROOT / "docs" / f"{results.op.name}.md"
    title, why = headers.told(op, step)
    drawn = [Markup((ROOT / "docs" / "drawings" / f"{name}.svg").read_text()) for name in prose.drawings(text)]
    told = prose.html(prose.without_marked(text), page)
    twins = [_twin(results, step, backend) for backend in BACKENDS if backend in step.backends]
    return Rung(step.name, title, why, step.gap, told, drawn, twins)


def _twin(results: Results, step: Step, backend: Backend) -> Twin:
    op, name = results.op, Name(backend, step.name)
    case = results.case_of(step, backend)
    previous = results.previous(step, backend, case) if case else None
    file = _file(op, step, backend)
    limit = results.limiter(name, case) if case else None
    return Twin(
        backend=backend,
        title=TITLES[backend],
        file=op.file(step.name, backend),
        case=case.slug if case else "",
        before=previous.name if previous else "",
        stale=results.stale(name),
        hunks=code.hunks(_file(op, previous, backend) if previous else None, file),
        length=len(code.lines(file)),
        moved=list(_moved(results, name, Name(backend, previous.name) if previous else None, case)) if case else [],
        limit=limit.told() if limit else "",
        predicted=[
            Predicted(
                QUANTITIES[each.judgement.prediction.quantity].title,
                each.claim,
                each.came,
                each.judgement.verdict,
                each.mark,
            )
            for each in judged.of_step(results, step, backend)
        ],
    )


def _moved(results: Results, name: Name, before: Name | None, case: Case) -> Iterator[Moved]:
    after = results.quantities(name, case)
    was = results.quantities(before, case) if before else dict.fromkeys(after)
    for key, quantity in QUANTITIES.items():
        if after[key] is None:
            continue
        heading = f"rate, {results.rate_unit}" if key == "rate" else quantity.heading
        shown = numbers.quantity(results, before, case, key) if before else Markup("")
        yield Moved(heading, shown, numbers.quantity(results, name, case, key), write.change(was[key], after[key]))


def _file(op: Op, step: Step, backend: Backend) -> Path:
    return ROOT / op.file(step.name, backend)

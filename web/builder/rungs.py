"""A ladder as its page shows it: each step with its idea, what it changes, what moved, and what was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from builder import code, numbers, pictures, places, prose
from builder.predictions import Question, questions
from kernel_twins.report.figures import words
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.pages import headers
from kernel_twins.report.rows.base import ROOT
from kernel_twins.spec import BACKENDS, Backend, Case, Name, Op, Step

_MOST_NEW = 0.5  # of a file's lines; with more, what changed is no shorter to read than the file

TITLES: dict[Backend, str] = {backend: words.title(backend) for backend in BACKENDS}


@dataclass(frozen=True, slots=True)
class Moved:
    """A quantity before and after a step, in the words of the log."""

    heading: str
    before: Markup
    after: Markup
    change: Markup


@dataclass(frozen=True, slots=True)
class Twin:
    """A step in one language. ``compared`` is the step that its code is held against, empty at the first one.

    ``hunks`` are those of the code, without the file's header, which the page tells; all of it where it was written
    ``anew``.
    """

    backend: Backend
    title: str
    file: str
    page: str
    case: str
    before: str
    compared: str
    anew: bool
    apart: bool  # no contest timed both steps, so that their clocks may differ
    stale: bool
    hunks: list[code.Hunk]
    length: int
    moved: list[Moved]
    limit: str
    questions: list[Question]


@dataclass(frozen=True, slots=True)
class Gap:
    """A language that has no such step, and why."""

    backend: Backend
    title: str
    why: str


@dataclass(frozen=True, slots=True)
class Rung:
    """A step of the ladder in both languages, or with the reason for one's absence."""

    name: str
    title: str
    why: str
    prose: Markup
    drawings: list[Markup]
    sides: list[Twin | Gap]

    @property
    def twins(self) -> list[Twin]:
        return [side for side in self.sides if isinstance(side, Twin)]

    @property
    def gaps(self) -> list[Gap]:
        return [side for side in self.sides if isinstance(side, Gap)]

    @property
    def predicted(self) -> bool:
        return any(twin.questions for twin in self.twins)


def rungs(results: Results) -> list[Rung]:
    _, sections = prose.steps(results.op.name)
    return [_rung(results, step, sections.get(step.name, "")) for step in results.op.steps]


def _rung(results: Results, step: Step, text: str) -> Rung:
    op, page = results.op, ROOT / "docs" / f"{results.op.name}.md"
    title, why = headers.told(op, step)
    drawn = [pictures.figure(ROOT / "docs" / "drawings" / f"{name}.svg", told) for told, name in prose.drawings(text)]
    told = prose.html(prose.without_marked(text), page)
    sides: list[Twin | Gap] = [
        _twin(results, step, backend) if backend in step.backends else Gap(backend, TITLES[backend], step.gap)
        for backend in BACKENDS
    ]
    return Rung(step.name, title, why, told, drawn, sides)


def _twin(results: Results, step: Step, backend: Backend) -> Twin:
    op, name = results.op, Name(backend, step.name)
    case = results.case_of(step, backend)
    previous = results.previous(step, backend, case) if case else None
    file, compared = _file(op, step, backend), previous or _earlier(op, step, backend)
    old = _file(op, compared, backend) if compared else None
    hunks = code.hunks(old, file) if old else []
    anew = sum(line.kind == "new" for hunk in hunks for line in hunk) > _MOST_NEW * len(code.lines(file))
    limit = results.limiter(name, case) if case else None
    return Twin(
        backend=backend,
        title=TITLES[backend],
        file=op.file(step.name, backend),
        page=places.page(file) or "",
        case=case.slug if case else "",
        before=previous.name if previous else "",
        compared=compared.name if compared else "",
        anew=anew,
        apart=_apart(results, name, previous, case),
        stale=results.stale(name),
        hunks=_below_headers(hunks, old, file) if old and not anew else [code.whole(file)],
        length=len(code.lines(file)),
        moved=list(_moved(results, name, Name(backend, previous.name) if previous else None, case)) if case else [],
        limit=limit.told() if limit else "",
        questions=questions(results, step, backend),
    )


def _apart(results: Results, name: Name, previous: Step | None, case: Case | None) -> bool:
    if previous is None or case is None:
        return False
    before = Name(name.backend, previous.name)
    timed = all(results.time_us(case, each) is not None for each in (name, before))
    return timed and results.ratio(case, name, before) is None


def _below_headers(hunks: list[code.Hunk], old: Path, new: Path) -> list[code.Hunk]:
    """What a step changes in the code below its file's header."""
    ends = {"gone": code.header(old), "new": code.header(new), "same": code.header(new)}
    below = (code.Hunk(line for line in hunk if line.number > ends[line.kind]) for hunk in hunks)
    return [hunk for hunk in below if hunk.changes]


def _earlier(op: Op, step: Step, backend: Backend) -> Step | None:
    ladder = op.steps_of(backend)
    index = ladder.index(step)
    return ladder[index - 1] if index else None


def _moved(results: Results, name: Name, before: Name | None, case: Case) -> Iterator[Moved]:
    known = results.quantities(name, case)
    return (moved(results, case, before, name, key) for key in QUANTITIES if known[key] is not None)


def moved(results: Results, case: Case, before: Name | None, after: Name, key: str) -> Moved:
    """A quantity of two calls; without a call before, of one."""
    return Moved(
        f"rate, {results.rate_unit}" if key == "rate" else QUANTITIES[key].heading,
        numbers.quantity(results, before, case, key) if before else Markup(),
        numbers.quantity(results, after, case, key),
        numbers.change(results, before, after, case, key) if before else Markup(),
    )


def _file(op: Op, step: Step, backend: Backend) -> Path:
    return ROOT / op.file(step.name, backend)

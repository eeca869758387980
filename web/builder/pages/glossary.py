"""The glossary: terms, quantities with the step that moved each most, what warps wait for, and units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from markupsafe import Markup

from builder import moves, numbers, prose, terms
from builder.moves import Move
from builder.rungs import TITLES
from builder.site import WEB, Site
from builder.terms import Term
from kernel_twins.report.meaning import write as words
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.rows.metrics import meaning, stall_metric
from kernel_twins.spec import Name


@dataclass(frozen=True, slots=True)
class Example:
    """The step that moved a number most."""

    op: str
    step: str
    language: str
    case: str
    before: Markup
    after: Markup
    change: str
    stale: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A term as the page shows it; ``metrics`` are ncu's counters, each with its meaning."""

    term: Term
    text: Markup
    unit: str = ""
    metrics: list[tuple[str, str]] = field(default_factory=list)
    example: Example | None = None


def write(site: Site) -> None:
    site.page(
        "glossary.html",
        "glossary.html.j2",
        "Glossary",
        styles=["document.css"],
        groups={title: [_term(each) for each in its] for title, its in terms.groups().items()},
        quantities=[_quantity(site, each) for each in terms.quantities()],
        stalls=[_stall(site, each) for each in terms.stalls()],
        units=prose.html((WEB / "pages" / "units.md").read_text(), terms.FILE, ""),
    )
    site.payload("glossary", {each.id: [each.title, each.short] for each in terms.every()})


def _term(term: Term) -> Entry:
    return Entry(term, prose.html(term.text, terms.FILE, ""))


def _quantity(site: Site, term: Term) -> Entry:
    quantity = QUANTITIES[term.key]
    found = moves.largest(
        site.measured, quantity.unit, lambda results, name, case: results.quantities(name, case)[term.key]
    )
    example = _example(found, lambda move, name: numbers.quantity(move.results, name, move.case, term.key))
    metrics = [(name, meaning(name)) for name in quantity.compute.metrics]
    unit = quantity.unit or ("GB/s or TFLOP/s" if term.key == "rate" else "")
    return Entry(term, Markup("<p>{}</p>").format(term.short), unit, metrics, example)


def _stall(site: Site, term: Term) -> Entry:
    metric = stall_metric(term.key)
    found = moves.largest(
        site.measured, moves.WAIT, lambda results, name, case: results.counters(name, case).get(metric)
    )
    example = _example(found, lambda move, name: numbers.counter(move.results, name, move.case, metric))
    return Entry(term, Markup("<p>{}</p>").format(term.short), moves.WAIT, [(metric, meaning(metric))], example)


def _example(move: Move | None, shown: Callable[[Move, Name], Markup]) -> Example | None:
    if move is None:
        return None
    return Example(
        op=move.results.op.name,
        step=move.after.step or "",
        language=TITLES[move.backend],
        case=move.case.slug,
        before=shown(move, move.before),
        after=shown(move, move.after),
        change=words.change(*move.values),
        stale=move.results.stale(move.after),
    )

"""The ladders: an index by family, and a page an operation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup

from builder import charts, mix, numbers, prose, roofline, rungs
from builder.site import Site
from kernel_twins.report.figures import words
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.judgement import NOISE
from kernel_twins.report.meaning.write import unbroken
from kernel_twins.report.rows.base import ROOT
from kernel_twins.report.sweeps import inductor
from kernel_twins.spec import BACKENDS, Backend, Op

# Of a ladder's page: its title, its list of steps, its figures with what is told below, and comments.
_ELSEWHERE = re.compile(r"^# .*\n|^Steps \(.*\n+(?:- .*\n)+|^!\[.*\n(?:.+\n)*|^<!-- .* -->\n", re.MULTILINE)
_LINE = re.compile(r"^- \[[^\]]+\]\((\w+)\.md\): (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Standing:
    """A last step against the best baseline, at the first of the operation's headline cases."""

    title: str
    step: str
    ratio: Markup
    verdict: str
    baseline: str
    stale: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """An operation in the index; ``standings`` has None for a language without a time."""

    name: str
    title: str
    idea: Markup
    steps: dict[Backend, int]
    case: str
    standings: list[Standing | None]
    measured: bool
    hits: Markup
    judged: Markup


def write(site: Site) -> None:
    ideas = dict(_LINE.findall((ROOT / "docs" / "README.md").read_text()))
    order = [results for name in ideas for results in site.measured if results.op.name == name]
    families = [
        (family, [_entry(results, ideas[results.op.name]) for results in its]) for family, its in _by_family(order)
    ]
    site.page(
        "ladders/index.html",
        "ladders.html.j2",
        "Ladders",
        about="Every operation with its steps in CUDA C++ and Triton.",
        styles=["ladder.css"],
        families=families,
        titles=[words.title(backend) for backend in BACKENDS],
    )
    for results in site.measured:
        site.page(
            f"ladders/{results.op.name}.html",
            "ladder.html.j2",
            results.op.title,
            about=f"{results.op.title}, step by step in CUDA C++ and Triton, with code, counters and predictions.",
            scripts=["roofline.js", "predict.js", "ladder.js"],
            styles=["pictures.css", "ladder.css"],
            op=results.op,
            summary=prose.inline(results.op.summary),
            about_it=_about(results.op),
            generated=results.op.name in inductor.OPERATIONS,
            rungs=rungs.rungs(results),
            roofline=roofline.roofline(results),
            times=charts.times(results),
            sizes=charts.sizes(results),
            mix=mix.mix(results.op),
            series=[(name, words.title(name)) for name in (*BACKENDS, *results.op.baselines)],
            noise={timed: unbroken(f"{100 * share:g} %") for timed, share in NOISE.items()},
        )


def _about(op: Op) -> Markup:
    """What stands before the steps, without the title, the list of steps, and the figures, which the page has."""
    head, _ = prose.steps(op.name)
    return prose.html(_ELSEWHERE.sub("", head), ROOT / "docs" / f"{op.name}.md")


def _by_family(order: Iterable[Results]) -> Iterable[tuple[str, list[Results]]]:
    """Families by their first operation, each once."""
    found: dict[str, list[Results]] = {}
    for results in order:
        found.setdefault(results.op.family, []).append(results)
    return found.items()


def _entry(results: Results, idea: str) -> Entry:
    op = results.op
    return Entry(
        name=op.name,
        title=op.title,
        idea=prose.inline(idea),
        steps={backend: len(op.steps_of(backend)) for backend in BACKENDS},
        case=op.headline_cases[0].slug,
        standings=[_standing(results, backend) for backend in BACKENDS],
        measured=results.measured,
        hits=numbers.count_predicted(results, "hit"),
        judged=numbers.count_predicted(results, "judged"),
    )


def _standing(results: Results, backend: Backend) -> Standing | None:
    case = results.op.headline_cases[0]
    name, best = results.last(backend, case), results.best_baseline(case)
    found = results.ratio(case, name, best) if name and best else None
    if name is None or best is None or found is None:
        return None
    return Standing(
        title=words.title(backend),
        step=name.step,
        ratio=numbers.multiple(results, case, name, best, found),
        verdict=results.standing(case, name, best) or "",
        baseline=words.title(best.backend),
        stale=results.stale(name),
    )

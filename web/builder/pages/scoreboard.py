"""The scoreboard: every timed case of every operation, the last steps against the best baseline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from markupsafe import Markup

from builder import numbers
from builder.rungs import TITLES
from builder.site import Site
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.verdict import Ratio
from kernel_twins.spec import BACKENDS, Backend


@dataclass(frozen=True, slots=True)
class Contest:
    """A last step and the best baseline at a case."""

    op: str
    family: str
    case: str
    dtype: str
    backend: Backend
    title: str
    step: str
    baseline: str
    ratio: Ratio
    shown: Markup
    verdict: str
    stale: bool


def write(site: Site) -> None:
    rows = list(contests(site.measured))
    site.page("scoreboard.html", "scoreboard.html.j2", "Scoreboard", scripts=["scoreboard.js"], contests=rows)


def contests(measured: Iterable[Results]) -> Iterator[Contest]:
    """Those that one run timed, in the specs' order."""
    for results in measured:
        for case in results.op.timed_cases:
            best = results.best_baseline(case)
            for backend in BACKENDS:
                name = results.last(backend, case)
                if best is None or name is None or not (found := results.ratio(case, name, best)):
                    continue
                yield Contest(
                    results.op.name,
                    results.op.family,
                    case.slug,
                    case.dtype,
                    backend,
                    TITLES[backend],
                    name.step or "",
                    best.backend,
                    found,
                    numbers.multiple(results, case, name, best, found),
                    results.standing(case, name, best) or "",
                    results.stale(name),
                )

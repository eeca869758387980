"""Compare: any two calls side by side; before a reader chooses, the largest step of one ladder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from builder import numbers, sides
from builder.rungs import TITLES, Moved, moved
from builder.site import Site
from kernel_twins.report.meaning import static
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.rows import store
from kernel_twins.spec import BACKENDS, Case, Name

_LADDER = "matmul_bf16"


@dataclass(frozen=True, slots=True)
class Story:
    """What is compared before a reader chooses."""

    op: str
    case: str
    before: str
    after: str
    titles: tuple[str, str]
    rows: list[Moved]
    limits: tuple[str, str]


def write(site: Site) -> None:
    measured = [results for results in site.measured if results.measured]
    story = _story(next(results for results in measured if results.op.name == _LADDER))
    rows = store.read(static.FILE, static.STATIC)
    for results in measured:
        site.payload(results.op.name, sides.payload(results, rows))
    chosen = [f"{story.op}/{story.case}/{call}" for call in (story.before, story.after)]
    ops = {results.op.name: results.op.title for results in measured}
    site.payload("compare", sides.words() | {"ops": ops, "chosen": chosen, "static": static.FILE.name})
    site.page(
        "compare.html",
        "compare.html.j2",
        "Compare",
        about="Any two kernels side by side: counters, stalls, instructions, limiter and code.",
        scripts=[
            "vendor/diff.min.js",
            "format.js",
            "verdict.js",
            "compare-view.js",
            "compare-code.js",
            "compare-file.js",
            "compare.js",
        ],
        styles=["compare.css"],
        story=story,
        ops=ops,
    )


def largest_step(results: Results) -> tuple[Name, Name]:
    """The successive steps of one language between which the time at the profiled case changed most."""
    case = results.op.profile_case
    pairs: list[tuple[float, Name, Name]] = []
    for backend in BACKENDS:
        names = [Name(backend, step.name) for step in results.op.steps_of(backend)]
        timed = [(name, time) for name in names if (time := results.time_us(case, name))]
        pairs += [(abs(math.log(a[1] / b[1])), a[0], b[0]) for a, b in itertools.pairwise(timed)]
    _, before, after = max(pairs, key=lambda pair: pair[0])
    return before, after


def _story(results: Results) -> Story:
    case = results.op.profile_case
    before, after = largest_step(results)
    return Story(
        results.op.name,
        case.slug,
        numbers.call(before),
        numbers.call(after),
        (_title(before), _title(after)),
        list(_moved(results, case, before, after)),
        (_limit(results, case, before), _limit(results, case, after)),
    )


def _title(name: Name) -> str:
    return f"{TITLES['cuda' if name.backend == 'cuda' else 'triton']} {name.step}"


def _limit(results: Results, case: Case, name: Name) -> str:
    limit = results.limiter(name, case)
    return f"limited by {limit.told()}" if limit else "not profiled at this case"


def _moved(results: Results, case: Case, before: Name, after: Name) -> Iterator[Moved]:
    """The largest change first."""
    was, now = results.quantities(before, case), results.quantities(after, case)
    known = [key for key in QUANTITIES if was[key] is not None or now[key] is not None]
    for key in sorted(known, key=lambda key: -weight(was[key], now[key])):
        yield moved(results, case, before, after, key)


def weight(before: float | None, after: float | None) -> float:
    """How large a change is: the ratio's logarithm, infinite from and to nothing, least where a side is unknown.

    Rounded, as that of a rate is that of its time.
    """
    if before is None or after is None:
        return -1.0
    if before == after:
        return 0.0
    return round(abs(math.log(after / before)), 6) if before > 0 and after > 0 else math.inf

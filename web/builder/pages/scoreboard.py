"""The scoreboard: timed cases against the best baseline, cases that a seed drew, and calls as a user makes them."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from builder import called, contests, numbers, sampled
from builder.contests import FILTERS, SIZES, VERDICTS, Contest
from builder.forest import Scale
from builder.rungs import TITLES
from builder.site import Site
from kernel_twins.report.meaning.verdict import SAME
from kernel_twins.spec import BACKENDS

SCALE = Scale("forest", 2, (0.5, 0.7, 1, 1.4, 2))

_UNITS = {"GB/s": (1e6, "MB"), "TFLOP/s": (1e9, "GFLOP")}


@dataclass(frozen=True, slots=True)
class Row:
    """A contest as the table has it; ``keys`` are the attributes that it is filtered, sorted and averaged by."""

    contest: Contest
    keys: dict[str, str]
    ratio: Markup
    low: Markup
    high: Markup
    cell: Markup


@dataclass(frozen=True, slots=True)
class Mean:
    """A backend's line over the table."""

    backend: str
    title: str
    geomean: Markup
    counts: dict[str, Markup]


def write(site: Site) -> None:
    rows = contests.of(site)
    site.page(
        "scoreboard.html",
        "scoreboard.html.j2",
        "Scoreboard",
        about="All timed cases against the best baseline, as a forest plot with 99 % intervals.",
        scripts=["format.js", "scoreboard.js"],
        styles=["scoreboard.css"],
        rows=[_row(each) for each in rows],
        means=[_mean(rows, backend, title) for backend, title in TITLES.items()],
        figures=("rows", *VERDICTS),
        filters={key: _values(rows, key) for key in FILTERS},
        axis=SCALE.head(),
        same=f"{100 * (SAME - 1):g} %",
        bounds=[_bounds(unit) for unit in SIZES],
        sampled=sampled.section(site),
        called=called.section(site),
    )


def _row(each: Contest) -> Row:
    keys = {**each.keys, "words": each.words, "case": each.case.slug, "step": each.name.step}
    keys |= {"baseline": each.baseline.backend, "stale": "yes" if each.stale else "no"}
    keys["work"] = f"{contests.work_of(each.results, each.case):.6g}"
    dash = Markup("–")
    if each.ratio is None:
        return Row(each, keys, dash, dash, dash, Markup())
    keys |= {key: f"{getattr(each.ratio, key):.6g}" for key in ("value", "low", "high")}
    ratio = numbers.multiple(each.results, each.case, each.name, each.baseline, each.ratio)
    low, high = (
        numbers.shown(f"{value:.3f}", value, source(each, key))
        for key, value in (("low", each.ratio.low), ("high", each.ratio.high))
    )
    return Row(each, keys, ratio, low, high, SCALE.interval(each.ratio, each.verdict))


def source(each: Contest, key: str) -> str:
    """Of an end of a row's interval."""
    pair = f"{numbers.call(each.name)}|{numbers.call(each.baseline)}"
    return f"{each.op}.timings.csv#{each.case.slug}/{pair}/{key}"


def _mean(rows: list[Contest], backend: str, title: str) -> Mean:
    found = contests.figure(rows, backend, "geomean")
    counts = {key: contests.figure(rows, backend, key) for key in ("rows", *VERDICTS)}
    return Mean(
        backend,
        title,
        numbers.shown(f"{found:.3f} ×", found, f"scoreboard#{backend}/geomean?"),
        {key: numbers.shown(f"{count:.0f}", count, f"scoreboard#{backend}/{key}?") for key, count in counts.items()},
    )


def _values(rows: list[Contest], key: str) -> list[str]:
    """In the order in which they are named elsewhere."""
    found = {row.keys[key] for row in rows}
    order = {"size": ("small", "medium", "large"), "verdict": VERDICTS, "backend": BACKENDS}.get(key)
    if order is None:
        order = tuple(dict.fromkeys(row.keys[key] for row in rows))
    return [value for value in order if value in found]


def _bounds(unit: str) -> str:
    """The size classes of what is bound by bytes, or by arithmetic."""
    scale, name = _UNITS[unit]
    small, large = (f"{bound / scale:,.0f} {name}" for bound in SIZES[unit])
    return f"below {small} a case is small, from {large} on it is large"

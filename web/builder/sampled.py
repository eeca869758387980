"""The public functions at cases that a seed drew: what their ratios come to, each case as a dot."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pandas as pd
from markupsafe import Markup

from builder import numbers, prose
from builder.forest import Scale
from builder.site import Site
from kernel_twins.report.calls import sampled_table
from kernel_twins.report.calls.sampled_cases import CASES
from kernel_twins.report.calls.sampled_figures import LEAST, Figures, figures

SCALE = Scale("strip", 10, (0.1, 0.3, 1, 3, 10))


@dataclass(frozen=True, slots=True)
class Row:
    """A part of the cells, such as a function's forward pass, in a backend; ``worst`` says at which case that is."""

    part: str
    backend: str
    title: str
    mean: Markup
    low: Markup
    worst: Markup
    where: str
    below: Markup
    wrong: Markup
    strip: Markup


_ALL = "all"  # the part of all functions


@dataclass(frozen=True, slots=True)
class Section:
    """The table and how it is read; without rows where nothing is recorded."""

    told: list[Markup]
    cases: int
    least: str
    axis: Markup
    rows: list[Row]


def section(site: Site) -> Section:
    if (table := sampled_table.read(site.data)).empty:
        return Section([Markup(sampled_table.NONE)], CASES, f"{LEAST:g}", SCALE.head(), [])
    rows = [
        _row(part, cells[cells["backend"] == backend], backend, title)
        for part, cells in _parts(site).items()
        for backend, title in sampled_table.OURS.items()
    ]
    layout = "A line is a [public function](docs/functions.html) and a pass, as the `backend` that was asked for."
    told = [prose.inline(line) for line in sampled_table.how_read(site.data, table, layout) if line]
    return Section(told, CASES, f"{LEAST:g}", SCALE.head(), rows)


def _row(part: str, cells: pd.DataFrame, backend: str, title: str) -> Row:
    found = figures(cells, backend)
    worst = cells.sort_values(["ratio", "case"]).iloc[0]

    def number(key: str, text: str) -> Markup:
        return numbers.shown(text, value_of(found, key), f"sampled.csv#{part}/{backend}/{key}")

    timed = number("worst", f"{found.worst:.3f} ×") if found.worst else Markup("wrong" if found.wrong else "no time")
    where = f"{worst['function']} {worst['case']}" + (f", against {worst['against']}" if found.worst else "")
    return Row(
        part=part,
        backend=backend,
        title=title,
        mean=Markup("–") if found.mean is None else number("mean", f"{found.mean:.3f} ×"),
        low=number("low", f"{found.low:.3f} ×"),
        worst=timed,
        where=where,
        below=number("below", f"{100 * found.below:.0f} %"),
        wrong=number("wrong", f"{found.wrong}"),
        strip=SCALE.strip(cells["ratio"], found.mean, backend),
    )


def wrong(site: Site, backend: str) -> Markup:
    """How many of a backend's results were wrong, over all functions; a dash where nothing is recorded."""
    if sampled_table.read(site.data).empty:
        return Markup("–")
    cells = _parts(site)[_ALL]
    found = figures(cells[cells["backend"] == backend], backend).wrong
    return numbers.shown(f"{found}", found, f"sampled.csv#{_ALL}/{backend}/wrong")


def value_of(found: Figures, key: str) -> float:
    """A figure by its name; LookupError where it has none."""
    value = getattr(found, key, None)
    if value is None:
        raise LookupError(f"{key} is no figure of sampled cases, or no case has a time")
    return float(value)


def resolve(site: Site, _: str, key: str) -> float:
    """``PART/BACKEND/FIGURE`` of a source ``sampled.csv``."""
    part, backend, figure = key.rsplit("/", 2)
    return value_of(figures(_parts(site)[part], backend), figure)


@functools.cache
def _parts(site: Site) -> dict[str, pd.DataFrame]:
    return sampled_table.parts(sampled_table.compared(sampled_table.read(site.data)))

"""The public functions as a user calls them: the host's time, forward, backward, and both, beside PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from builder import numbers, prose
from builder.forest import Scale
from builder.site import Site
from kernel_twins.report.calls import functions_table
from kernel_twins.report.calls.functions_table import BESIDE, MEASURED, TITLES
from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.verdict import Ratio
from kernel_twins.report.rows.recorded import median_us

SCALE = Scale("calls", 10, (0.1, 0.3, 1, 3, 10))


@dataclass(frozen=True, slots=True)
class Row:
    """A call in one of our backends, beside PyTorch's; ``verdict`` names what is wrong where it has no time."""

    function: str
    case: str
    title: str
    time: Markup
    torch: Markup
    ratio: Markup
    low: Markup
    high: Markup
    cell: Markup
    verdict: str


@dataclass(frozen=True, slots=True)
class Section:
    """One kind of time."""

    kind: str
    told: Markup
    axis: Markup
    rows: list[Row]


def section(site: Site) -> list[Section]:
    """A table a kind; none where nothing is recorded."""
    table = functions_table.read(site.data)
    axes = {kind: Scale(f"calls-{kind}", SCALE.most, SCALE.ticks) for kind in MEASURED}
    return [
        Section(kind, prose.inline(told), axes[kind].head(), list(_rows(axes[kind], kind, rows)))
        for kind, told in MEASURED.items()
        if len(rows := table[table["kind"] == kind])
    ]


def _rows(axis: Scale, kind: str, rows: Any) -> Iterator[Row]:
    for (function, case), call in rows.groupby(["function", "case"], sort=False):
        of = {row.backend: row for row in call.itertuples()}
        for backend, others in BESIDE[kind].items():
            if backend in of and "torch" in others:
                yield _row(axis, f"{kind}/{function}/{case}", (function, case), of[backend], of.get("torch"))


def _row(axis: Scale, key: str, named: tuple[str, str], ours: Any, theirs: Any) -> Row:
    ratio = functions_table.ratio(ours, theirs)
    verdict = ratio.verdict if ratio else ours.status if ours.status != "ok" else "no time of PyTorch's"
    return Row(
        *named,
        TITLES[ours.backend],
        _time(key, ours),
        _time(key, theirs),
        _end(key, ours.backend, ratio, "value"),
        _end(key, ours.backend, ratio, "low"),
        _end(key, ours.backend, ratio, "high"),
        axis.interval(ratio, verdict) if ratio else Markup(),
        verdict,
    )


def _time(key: str, row: Any) -> Markup:
    if row is None:
        return Markup("–")
    if row.status != "ok":
        return Markup("wrong")
    time = median_us(row)
    return numbers.shown(write.number(time), time, f"functions.csv#{key}/{row.backend}/us")


def _end(key: str, backend: str, ratio: Ratio | None, end: str) -> Markup:
    if ratio is None:
        return Markup("–")
    value = getattr(ratio, end)
    text = f"{value:.3f} ×" if end == "value" else f"{value:.3f}"
    return numbers.shown(text, value, f"functions.csv#{key}/{backend}/{end}")


def resolve(site: Site, _: str, key: str) -> float:
    """``KIND/FUNCTION/CASE/BACKEND/us``, or one of ``value``, ``low`` and ``high`` of the ratio to PyTorch's."""
    kind, function, case, backend, wanted = key.split("/")
    of = _calls(site)[kind, function, case]
    if wanted == "us":
        return median_us(of[backend])
    ratio = functions_table.ratio(of[backend], of["torch"])
    if ratio is None:
        raise LookupError(f"{key}: one of the two has no time")
    return float(getattr(ratio, wanted))


@functools.cache
def _calls(site: Site) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Rows by backend, by kind, function and case."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in functions_table.read(site.data).itertuples():
        found.setdefault((row.kind, row.function, row.case), {})[row.backend] = row
    return found

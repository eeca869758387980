"""What a number tells of itself: the run that measured it, and what its quantity is called."""

from __future__ import annotations

from collections import Counter

from builder import numbers
from builder.site import Site
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.rows import store


def write(site: Site) -> None:
    told = {
        row.run: f"{row.gpu}, driver {row.driver}, {row.date[:10]} (run {row.run})"
        for row in store.read_runs(site.data).itertuples()
    }
    of = {each.op.name: of_calls(each) for each in site.measured if each.measured}
    quantities = {key: each.heading for key, each in QUANTITIES.items()}
    site.payload("runs", {"told": told, "of": of, "quantities": quantities})


def of_calls(results: Results) -> dict[str, str]:
    """The run of each call, ``CASE/BACKEND/STEP``: that of its times, which its counters share.

    The run of most calls stands once, under an empty name.
    """
    cases = {case.slug: case for case in results.op.timed_cases}
    found = {
        f"{slug}/{numbers.call(name)}": row.run
        for slug, name in results.recorded.rows
        if slug in cases and (row := results.recorded.row(cases[slug], name))
    }
    usual, _ = Counter(found.values()).most_common(1)[0]
    return {"": usual} | {call: run for call, run in found.items() if run != usual}

"""The ladders: an index by family, and a page an operation."""

from __future__ import annotations

import itertools

from builder import prose, rungs
from builder.site import Site


def write(site: Site) -> None:
    families = [
        (family, [results.op for results in group])
        for family, group in itertools.groupby(site.measured, key=lambda each: each.op.family)
    ]
    site.page("ladders/index.html", "ladders.html.j2", "Ladders", families=families)
    for results in site.measured:
        site.page(
            f"ladders/{results.op.name}.html",
            "ladder.html.j2",
            results.op.title,
            scripts=["ladder.js"],
            op=results.op,
            summary=prose.inline(results.op.summary),
            rungs=rungs.rungs(results),
        )

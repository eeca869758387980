"""The README's numbers: rendered between markers, everything else in the file is left alone."""

from __future__ import annotations

from kernel_twins._profiling.report import marked
from kernel_twins._profiling.report.analysis import Results
from kernel_twins._profiling.report.log import scoreboard


def render(text: str, results: list[Results]) -> str:
    """``text`` with its result table renewed; ValueError where the markers are missing."""
    if marked.names(text)["results"] != 1:
        raise ValueError("README.md must hold one pair of markers: <!-- results:begin --> and <!-- results:end -->")
    measured = [each for each in results if each.measured]
    rows = scoreboard(measured, {each.op.name: list(each.op.headline_cases) for each in measured})
    return marked.renew(text, {"results": rows})

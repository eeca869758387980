"""The README's numbers: rendered between markers, everything else in the file is left alone."""

from __future__ import annotations

from pathlib import Path

from kernel_twins.report.calls import sampled_table
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.pages import conditions, marked
from kernel_twins.report.pages.log import scoreboard


def render(text: str, folder: Path, results: list[Results]) -> str:
    """``text`` with its tables renewed, of cases by chance and of chosen ones; ValueError where their markers lack."""
    for name in ("sampled", "results", "conditions"):
        if marked.names(text)[name] != 1:
            raise ValueError(f"README.md must hold one pair of markers: <!-- {name}:begin --> and <!-- {name}:end -->")
    measured = [each for each in results if each.measured]
    rows = scoreboard(measured, {each.op.name: list(each.op.headline_cases) for each in measured})
    others = conditions.table(measured) or ["Rested and in a chain, nothing has been recorded yet."]
    return marked.renew(text, {"sampled": sampled_table.headline(folder), "results": rows, "conditions": others})

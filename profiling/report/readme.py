"""The README's numbers: rendered between markers, everything else in the file is left alone."""

from __future__ import annotations

from pathlib import Path

from kernel_twins import OPS
from kernel_twins._profiling.report import marked
from kernel_twins._profiling.report.analysis import Results
from kernel_twins._profiling.report.log import scoreboard
from kernel_twins.ceilings import Ceilings


def render(text: str, folder: Path, ceilings: Ceilings | None) -> str:
    """``text`` with its result table renewed; ValueError where the markers are missing."""
    if marked.names(text)["results"] != 1:
        raise ValueError("README.md must hold one pair of markers: <!-- results:begin --> and <!-- results:end -->")
    results = [Results(op, folder, ceilings) for op in OPS.values()]
    rows = scoreboard(results, {op.name: list(op.headline_cases) for op in OPS.values()})
    return marked.renew(text, {"results": rows})

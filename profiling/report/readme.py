"""The README's numbers: rendered between markers, everything else in the file is left alone."""

from __future__ import annotations

import re
from pathlib import Path

from kernel_twins import OPS
from kernel_twins._profiling.report.analysis import Results
from kernel_twins._profiling.report.log import scoreboard
from kernel_twins.ceilings import Ceilings

_MARKED = re.compile(r"(<!-- results:begin -->\n).*?(<!-- results:end -->)", re.DOTALL)


def render(text: str, folder: Path, ceilings: Ceilings | None) -> str:
    """``text`` with its result table renewed; ValueError where the markers are missing."""
    results = [Results(op, folder, ceilings) for op in OPS.values()]
    rows = "\n".join(scoreboard(results, {op.name: list(op.headline_cases) for op in OPS.values()}))
    renewed, count = _MARKED.subn(lambda match: f"{match[1]}{rows}\n{match[2]}", text)
    if count != 1:
        raise ValueError("README.md must hold one pair of markers: <!-- results:begin --> and <!-- results:end -->")
    return renewed

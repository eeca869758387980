"""How numbers are written in every document: by our own code, so that no library's update changes a digit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kernel_twins.report.meaning.verdict import Ratio

NOT_MEASURED = "Not measured yet."
"""In the place of a table without rows."""
STALE = "†"
STALE_NOTE = f"{STALE}: the step's code changed since it was measured."

_COUNTED = ("byte", "byte/s", "hz", "inst", "sector", "cycle")
_SCALES = {"ns": ("ns", "µs", "ms", "s"), "": ("", "thousand", "million", "billion")} | {
    unit: tuple(prefix + unit for prefix in ("", "K", "M", "G", "T")) for unit in _COUNTED
}
"""The units that a base unit is written in, each a thousand times the one before it."""


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, thousands separated; a dash where nothing was measured."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    decimals = max(0, digits - magnitude)
    text = f"{round(value, decimals):,.{decimals}f}" if magnitude else f"{value:.{digits}g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def change(before: float | None, after: float | None) -> str:
    """The relative difference, a factor where it is more than doubled or halved, ``=`` where there is none."""
    if before is None or after is None:
        return ""
    if before == after:
        return "="
    if before == 0:
        return "new"
    factor = after / before
    if factor >= 2 or factor <= 0.5:
        return f"×{number(factor, 2)}"
    percent = round(100 * (factor - 1), 1)
    return "=" if percent == 0 else f"{percent:+.1f} %".replace("-", "−")


def ratio(found: Ratio | None) -> str:
    """How many times faster, and the interval; a dash where there are no paired rounds."""
    return "–" if found is None else f"{found.value:.3f} × [{found.low:.3f}, {found.high:.3f}]"


def unbroken(text: str) -> str:
    """The text with spaces at which no line ends."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def table(header: list[str], rows: list[list[str]], right: int = 1) -> list[str]:
    """A Markdown table; columns from ``right`` on are set flush right."""
    rule = ["---" if index < right else "--:" for index in range(len(header))]
    return ["| " + " | ".join(cells) + " |" for cells in [header, rule, *rows]]


def in_unit(unit: str, values: Sequence[float]) -> tuple[str, list[str]]:
    """Values of one base unit, to four digits, and the unit they are written in: from 100,000 on, thousands of it.

    ``byte`` becomes Kbyte, Mbyte and so on, ``ns`` µs, ms or s. Shares and ratios (``%``, ``byte/block``) keep their
    unit. What is no number is ``n/a``.
    """
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    units = _SCALES.get(unit, (unit,))
    power = min(max(0, math.floor((math.log10(largest) - 2) / 3)), len(units) - 1) if largest else 0
    return units[power], [number(value / 1000**power, 4) if math.isfinite(value) else "n/a" for value in values]

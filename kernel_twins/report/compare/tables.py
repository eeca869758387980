"""Tables and lines on stdout: cut to the width of a terminal, and in a pipe aligned and never cut."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

_UNLIMITED = 1_000_000  # columns


def console() -> Console:
    """That of stdout; one of unlimited width where stdout is no terminal."""
    if sys.stdout.isatty():
        return Console()
    return Console(file=io.StringIO(), width=_UNLIMITED, color_system=None)


def table(*columns: str, right: range = range(0)) -> Table:
    """Without lines. Columns whose places are in ``right`` are set flush right; only the first one may be wrapped."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, heading in enumerate(columns):
        made.add_column(heading, justify="right" if place in right else "left", no_wrap=place > 0, overflow="fold")
    return made


def fits(made: Table, on: Console, first: int) -> bool:
    """Whether a table is shown whole where its first column gets at least so many characters."""
    longest = max(len(str(cell)) for cell in (made.columns[0].header, *made.columns[0].cells))
    made.columns[0].min_width = min(first, longest)
    return Measurement.get(on, on.options.update(width=_UNLIMITED), made).minimum <= on.width


def notes(on: Console, lines: Iterable[str]) -> None:
    """Print lines, each after an empty one, but for commands, which are indented and belong to the line before."""
    show(on, *(line if line.startswith(" ") else f"\n{line}" for line in lines))


def show(on: Console, *parts: RenderableType) -> None:
    """Print to stdout; texts are wrapped between words, but for commands, which are indented."""
    for part in parts:
        on.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str) and part.startswith(" "))
    if isinstance(on.file, io.StringIO):
        for line in on.file.getvalue().splitlines():
            print(line.rstrip())
        on.file.seek(0)
        on.file.truncate()

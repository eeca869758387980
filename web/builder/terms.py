"""The words that every page explains: the glossary's terms, the log's quantities, and what warps wait for."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from builder import prose
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.pages.places import heading as anchor
from kernel_twins.report.rows.base import ROOT
from kernel_twins.report.rows.metrics import STALLS

FILE = ROOT / "docs" / "glossary.md"
_HEADING = re.compile(r"^(##|###) (.*)$", re.MULTILINE)
_POINTER = re.compile(r"\s*See\s+(?:the|how|\[).*\Z", re.DOTALL)

Kind = Literal["term", "quantity", "stall"]


@dataclass(frozen=True, slots=True)
class Term:
    """A word with its place on the glossary's page, and what it means: in words alone, and as Markdown."""

    kind: Kind
    key: str
    title: str
    short: str
    text: str = ""

    @property
    def id(self) -> str:
        return anchor(self.key) if self.kind == "term" else f"{self.kind}-{self.key}"


@functools.cache
def groups() -> dict[str, list[Term]]:
    """The terms of docs/glossary.md below the headings that they have there."""
    _, *parts = _HEADING.split(FILE.read_text())
    found: dict[str, list[Term]] = {}
    group = ""
    for level, title, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if level == "##":
            group = title
        else:
            short = prose.plain(_POINTER.sub("", text.strip()))
            found.setdefault(group, []).append(Term("term", title, title, short, text))
    return found


def quantities() -> list[Term]:
    return [Term("quantity", key, each.title, each.meaning) for key, each in QUANTITIES.items()]


def stalls() -> list[Term]:
    return [Term("stall", key, key, f"A warp waits for {waits}.") for key, waits in STALLS.items()]


def every() -> list[Term]:
    """All of them, in the page's order."""
    return [*(term for terms in groups().values() for term in terms), *quantities(), *stalls()]

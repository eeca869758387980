"""Where the log's pages lie, and the links between them: the reference GPU's in the tree, another's beside its data."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kernel_twins.report.rows.base import ROOT
from kernel_twins.spec import Op, Step

RETIRED = "Retired rungs"
DOCS = ROOT / "docs"
PROFILER = DOCS / "profiler.md"
_RELATIVE = re.compile(r"\]\((?!\w+://|#)")


@dataclass(frozen=True, slots=True)
class Places:
    """The short log, the folder of its full pages, and the page of what did not work."""

    log: Path
    full: Path
    failures: Path

    def entries(self, op: Op) -> Path:
        """The page with an operation's full entries."""
        return self.full / f"{op.name}.md"

    def entry(self, page: Path, op: Op, step: Step, text: str = "") -> str:
        """A link from ``page`` to a step's full entry."""
        return link(page, self.entries(op), text or step.name, anchor(op, step))

    def retired(self, page: Path, op: Op, rung: str) -> str:
        """A link from ``page`` to the table of an operation's retired predictions."""
        return link(page, self.entries(op), rung, heading(RETIRED))


REFERENCE = Places(ROOT / "KERNEL_LOG.md", DOCS / "log", DOCS / "what-did-not-work.md")


def beside(folder: Path) -> Places:
    """The pages of another GPU, whose data lie in ``folder``."""
    return Places(folder / "KERNEL_LOG.md", folder / "log", folder / "what-did-not-work.md")


def anchor(op: Op, step: Step) -> str:
    """A step's heading, and the name that a link to it ends with: no other step on any page has it."""
    return f"{op.name}-{step.name}"


def heading(title: str) -> str:
    """GitHub's name for a heading."""
    return "".join(each for each in title.lower().replace(" ", "-") if each.isalnum() or each in "_-")


def link(page: Path, target: Path, text: str, place: str = "") -> str:
    """A link from ``page`` to another file, or to the heading of which ``place`` is the anchor."""
    return f"[{text}]({Path(os.path.relpath(target, page.parent)).as_posix()}{'#' if place else ''}{place})"


def from_page(page: Path, lines: list[str]) -> list[str]:
    """Lines whose links start at the root, with links that start at ``page``."""
    to_root = Path(os.path.relpath(ROOT, page.parent)).as_posix()
    start = "](" if to_root == "." else f"]({to_root}/"
    return [_RELATIVE.sub(start, line) for line in lines]

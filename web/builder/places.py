"""Where files of the repository lie on the site, and links between them."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from kernel_twins import OPS
from kernel_twins.report.rows.base import ROOT

_STEP = re.compile(r"(v\d\d_\w+).*")


def page(path: Path) -> str | None:
    """The page of a file, as a path from the site's root, of a kernel with its place there; None where it has none."""
    if not path.is_relative_to(ROOT) or not path.is_file():
        return None
    relative, stem = path.relative_to(ROOT).as_posix(), path.stem
    if relative in _SPECIAL:
        return _SPECIAL[relative]
    if path.parent == ROOT / "docs" / "log" and path.suffix == ".md":
        return f"log/{stem}.html"
    if path.parent == ROOT / "docs" and path.suffix == ".md":
        return f"ladders/{stem}.html" if stem in OPS else f"docs/{stem}.html"
    return f"source.html#{relative}" if path in sources() else None


# Pages of another name, or at another place, than their files.
_SPECIAL = {
    "README.md": "index.html",
    "KERNEL_LOG.md": "log/index.html",
    "docs/README.md": "docs/index.html",
    "docs/glossary.md": "glossary.html",
    "hardware-survey/results/h100-sxm.md": "survey.html",
}
# Pages that are not their files' text, and so have not their headings.
_RETOLD = ("index.html",)


@functools.cache
def sources() -> frozenset[Path]:
    """The files of steps, which can be read."""
    return frozenset(
        ROOT / op.file(step.name, backend) for op in OPS.values() for step in op.steps for backend in step.backends
    )


def fragment(place: str, anchor: str) -> str:
    """An anchor of Markdown as the site has it: on a ladder's page a step is named as its file is.

    Empty where the page is no rendering of its file.
    """
    if place in _RETOLD or "#" in place:
        return ""
    step = _STEP.fullmatch(anchor)
    return step[1] if step and place.startswith("ladders/") else anchor

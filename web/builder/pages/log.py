"""The log: in short, in full for each operation, and what it sums up."""

from __future__ import annotations

from builder import places, prose
from builder.site import Site
from kernel_twins.report.rows.base import ROOT


def write(site: Site) -> None:
    for path in (ROOT / "KERNEL_LOG.md", *sorted((ROOT / "docs" / "log").glob("*.md"))):
        if place := places.page(path):
            shown = prose.document(path, "../")
            site.page(place, "document.html.j2", shown.title, styles=["pictures.css", "document.css"], shown=shown)

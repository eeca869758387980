"""The documents of docs/ that no other page of the site shows, as they are."""

from __future__ import annotations

from builder import places, prose
from builder.site import Site
from kernel_twins import OPS
from kernel_twins.report.rows.base import ROOT

_ELSEWHERE = {"glossary", *OPS}


def write(site: Site) -> None:
    for path in sorted((ROOT / "docs").glob("*.md")):
        if path.stem not in _ELSEWHERE and (place := places.page(path)):
            shown = prose.document(path, "../")
            site.page(place, "document.html.j2", shown.title, styles=["pictures.css", "document.css"], shown=shown)

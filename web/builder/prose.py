"""Prose of docs/*.md as HTML: a ladder's page is split at its steps."""

from __future__ import annotations

import re
from pathlib import Path

from markdown_it import MarkdownIt
from markupsafe import Markup

from builder import places
from kernel_twins.report.rows.base import ROOT

_STEP = re.compile(r"^## (v\d\d_\w+): .*$", re.MULTILINE)
_MARKED = re.compile(r"<!-- ([\w:]+):begin -->\n.*?<!-- \1:end -->", re.DOTALL)
_DRAWING = re.compile(r"^!\[([^\]]*)\]\(drawings/([\w-]+)\.svg\)$", re.MULTILINE)
_LINK = re.compile(r'<a href="(?!https?://)([^"]*)">(.*?)</a>', re.DOTALL)

_MARKDOWN = MarkdownIt("commonmark").enable("table")


def steps(op: str) -> tuple[str, dict[str, str]]:
    """A ladder's page before its steps, and each step's section, as Markdown without the heading."""
    head, *parts = _STEP.split((ROOT / "docs" / f"{op}.md").read_text())
    return head, dict(zip(parts[::2], parts[1::2], strict=True))


def without_marked(text: str) -> str:
    """The prose alone, without what `log` writes between markers: pages compute that for themselves."""
    return _MARKED.sub("", text)


def drawings(text: str) -> list[tuple[str, str]]:
    """The drawings that a text shows: what each is told by, and its name."""
    return _DRAWING.findall(text)


def html(text: str, page: Path, root: str = "../") -> Markup:
    """Markdown of the file ``page`` as HTML, whose links lead to the site's pages.

    ``root`` is the way from the page to the site's root. A link to a file without a page becomes its name.
    """
    place = places.page(page) or ""
    return Markup(_LINK.sub(lambda link: _link(link, page, place, root), _MARKDOWN.render(_DRAWING.sub("", text))))


def _link(link: re.Match[str], page: Path, place: str, root: str) -> str:
    path, _, anchor = link[1].partition("#")
    target = places.page((page.parent / path).resolve()) if path else place
    if target is None:
        return link[2]
    where = "" if target == place else f"{root}{target}"
    return f'<a href="{where}{"#" + places.fragment(target, anchor) if anchor else ""}">{link[2]}</a>'


def inline(text: str) -> Markup:
    """A sentence of Markdown, without a paragraph around it."""
    return Markup(_MARKDOWN.renderInline(text))

"""Prose of docs/*.md as HTML: a ladder's page is split at its steps."""

from __future__ import annotations

import re
from pathlib import Path

from markdown_it import MarkdownIt
from markupsafe import Markup

from kernel_twins.report.rows.base import ROOT

_STEP = re.compile(r"^## (v\d\d_\w+): .*$", re.MULTILINE)
_MARKED = re.compile(r"<!-- ([\w:]+):begin -->\n.*?<!-- \1:end -->", re.DOTALL)
_DRAWING = re.compile(r"^!\[[^\]]*\]\(drawings/([\w-]+)\.svg\)$", re.MULTILINE)
_LINK = re.compile(r'href="(?!https?://|#)([^"#]*)(#[^"]*)?"')

_MARKDOWN = MarkdownIt("commonmark").enable("table")


def steps(op: str) -> tuple[str, dict[str, str]]:
    """A ladder's page before its steps, and each step's section, as Markdown without the heading."""
    head, *parts = _STEP.split((ROOT / "docs" / f"{op}.md").read_text())
    return head, dict(zip(parts[::2], parts[1::2], strict=True))


def without_marked(text: str) -> str:
    """The prose alone, without what `log` writes between markers: pages compute that for themselves."""
    return _MARKED.sub("", text)


def drawings(text: str) -> list[str]:
    """The names of the drawings that a text shows."""
    return _DRAWING.findall(text)


def html(text: str, page: Path) -> Markup:
    """Markdown of ``page`` as HTML. Links to files that the site has no page for lead to the repository's."""
    return Markup(_LINK.sub(lambda link: _target(link, page), _MARKDOWN.render(_DRAWING.sub("", text))))


def _target(link: re.Match[str], page: Path) -> str:
    path = (page.parent / link[1]).resolve()
    relative = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else link[1]
    return f'href="{REPOSITORY}{relative}{link[2] or ""}"'


REPOSITORY = "../../../"  # build/site/ladders/ lies three folders deep in a checkout


def inline(text: str) -> Markup:
    """A sentence of Markdown, without a paragraph around it."""
    return Markup(_MARKDOWN.renderInline(text))

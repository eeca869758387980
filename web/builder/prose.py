"""Prose of docs/*.md as HTML: a ladder's page is split at its steps, other documents are shown whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup
from mdit_py_plugins.anchors import anchors_plugin

from builder import code, pictures, places
from builder.tables import arranged
from kernel_twins.report.pages.places import heading as anchor
from kernel_twins.report.rows.base import ROOT

_STEP = re.compile(r"^## (v\d\d_\w+): .*$", re.MULTILINE)
_MARKED = re.compile(r"<!-- ([\w:]+):begin -->\n.*?<!-- \1:end -->", re.DOTALL)
_DRAWING = re.compile(r"^!\[([^\]]*)\]\(drawings/([\w-]+)\.svg\)$", re.MULTILINE)
_PICTURE = re.compile(r"^!\[([^\]]*)\]\(([^)]+\.svg)\)$", re.MULTILINE)
_COMMENT = re.compile(r"^<!-- .*? -->\n", re.MULTILINE)
_TITLE = re.compile(r"\A# (.*)\n")
_HEADING = re.compile(r'<h2 id="([^"]*)">(.*?)</h2>')
_LINK = re.compile(r'<a href="(?!https?://)([^"]*)">(.*?)</a>', re.DOTALL)

_MARKDOWN = (
    MarkdownIt("commonmark", {"highlight": lambda text, language, _: code.block(text, language)})
    .enable("table")
    .use(anchors_plugin, max_level=4, slug_func=anchor)
)


@dataclass(frozen=True, slots=True)
class Document:
    """A file of Markdown as a page: title, text, and the headings of the second level with their ids."""

    title: str
    body: Markup
    headings: list[tuple[str, str]]


def document(page: Path, root: str) -> Document:
    """A whole file, with its pictures. ``root`` is the way from its page to the site's root."""
    text = _COMMENT.sub("", page.read_text())
    title = _TITLE.match(text)
    if title is None:
        raise ValueError(f"{page.relative_to(ROOT)} must begin with a heading of the first level")
    body = _html(_TITLE.sub("", text), page, root, title[1])
    return Document(
        plain(title[1]), body, [(Markup(found[2]).striptags(), found[1]) for found in _HEADING.finditer(body)]
    )


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
    """Markdown of the file ``page`` as HTML without its drawings, whose links lead to the site's pages.

    ``root`` is the way from the page to the site's root. A link to a file without a page becomes its name.
    """
    return _html(_DRAWING.sub("", text), page, root, "Table")


def _html(text: str, page: Path, root: str, title: str) -> Markup:
    """``title`` names the tables that stand below no heading."""
    figures = _PICTURE.sub(lambda found: _figure(found, page), text)
    tokens = _MARKDOWN.parse(figures)
    rendered = _MARKDOWN.renderer.render(arranged(tokens, title), _MARKDOWN.options, {})
    place = places.page(page) or ""
    return Markup(_LINK.sub(lambda link: _link(link, page, place, root), rendered))


def _figure(found: re.Match[str], page: Path) -> str:
    """A picture as a block of HTML, which Markdown ends at an empty line."""
    return str(pictures.figure((page.parent / found[2]).resolve(), found[1])) + "\n"


def _link(link: re.Match[str], page: Path, place: str, root: str) -> str:
    path, _, anchored = link[1].partition("#")
    target = places.page((page.parent / path).resolve()) if path else place
    if target is None:
        return link[2]
    where = "" if target == place else f"{root}{target}"
    name = places.fragment(target, anchored)
    return f'<a href="{where}{"#" if name else ""}{name}">{link[2]}</a>'


def inline(text: str) -> Markup:
    """A sentence of Markdown, without a paragraph around it."""
    return Markup(_MARKDOWN.renderInline(text))


def plain(text: str) -> str:
    """A text of Markdown in words alone."""
    words = [_words(each) for each in _MARKDOWN.parse(text) if each.type == "inline"]
    return " ".join(" ".join(words).split())


def _words(token: Token) -> str:
    return "".join(" " if each.type == "softbreak" else each.content for each in token.children or [])

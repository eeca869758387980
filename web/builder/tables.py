"""Tables of Markdown as pages have them: with a caption, headings that name their rows, and room to scroll."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from markdown_it.token import Token
from markupsafe import Markup

_OPEN = Markup('<div class="wide" tabindex="0" role="region" aria-label="{name}">\n')
_CAPTION = Markup('<caption class="unseen">{name}</caption>\n')


def arranged(tokens: Sequence[Token], title: str) -> list[Token]:
    """The tokens of a text whose tables are named after the heading above them, or ``title``."""
    return list(_arranged(tokens, title))


def _arranged(tokens: Sequence[Token], title: str) -> Iterator[Token]:
    seen: Counter[str] = Counter()
    first = False  # whether the next cell of a body is its row's first
    body = False
    for index, token in enumerate(tokens):
        if token.type == "heading_open":
            title = _words(tokens[index + 1])
        elif token.type == "table_open":
            seen[title] += 1
            name = title if seen[title] == 1 else f"{title}, table {seen[title]}"
            yield _html(_OPEN.format(name=name))
            token.attrSet("class", "words")
            yield token
            yield _html(_CAPTION.format(name=name))
            continue
        elif token.type == "table_close":
            yield token
            yield _html(Markup("</div>\n"))
            continue
        elif token.type in ("tbody_open", "tbody_close"):
            body = token.type == "tbody_open"
        elif token.type == "tr_open":
            first = body
        elif token.type == "th_open":
            if _words(tokens[index + 1]):
                token.attrSet("scope", "col")
            else:  # a heading must say something
                token.tag = tokens[index + 2].tag = "td"
        elif token.type == "td_open" and first:
            first = False
            if _words(tokens[index + 1]):
                token.attrSet("scope", "row")
                token.tag = tokens[index + 2].tag = "th"
        yield token


def _words(token: Token) -> str:
    return "".join(each.content for each in token.children or []).strip()


def _html(text: Markup) -> Token:
    return Token("html_block", "", 0, content=str(text))

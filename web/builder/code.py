"""Code in colours, whole and as what changed: lines of HTML, made once for each file.

Colours are those of elements with short names, as there are many: kt.css has them.
"""

from __future__ import annotations

import difflib
import functools
import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from markupsafe import Markup
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Number, String, _TokenType

_LEXERS = {".cu": "cuda", ".cuh": "cuda", ".h": "cuda", ".py": "python"}
# The first that fits; names and signs have the colour of the text.
_COLOURS = {
    Comment.PreprocFile: "var",
    Comment.Preproc: "b",
    Comment: "i",
    Keyword: "b",
    String: "var",
    Number: "u",
}
_CONTEXT = 3  # lines that stay around a change

_HEADER = re.compile(r'\A(?:(?://[^\n]*\n)+|""".*?"""\n)', re.DOTALL)

Kind = Literal["same", "new", "gone"]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a diff: its number in the file that has it, and its code."""

    kind: Kind
    number: int
    code: Markup


@functools.cache
def lines(path: Path) -> tuple[Markup, ...]:
    """A file's lines."""
    return tuple(coloured(lexer(path.suffix), path.read_text()))


@functools.cache
def lexer(suffix: str) -> Lexer:
    return get_lexer_by_name(_LEXERS[suffix], stripnl=False)


def coloured(lexer: Lexer, text: str) -> list[Markup]:
    """A text's lines, without what follows the last. A token that goes over several lines is coloured in each."""
    found: list[list[str]] = [[]]
    for token, part in lexer.get_tokens(text):
        first, *others = (_coloured(token, piece) for piece in part.split("\n"))
        found[-1].append(first)
        found += [[each] for each in others]
    return [Markup("".join(pieces)) for pieces in found[:-1]]


def _coloured(token: _TokenType, text: str) -> Markup:
    colour, shown = _colour(token), escaped(text)
    return Markup(f"<{colour}>{shown}</{colour}>") if colour and text.strip() else shown


def escaped(text: str) -> Markup:
    """Text between tags, where quotes may stay as they are."""
    return Markup(html.escape(text, quote=False))


@functools.cache
def _colour(token: _TokenType) -> str:
    return next((colour for kind, colour in _COLOURS.items() if kind in token.split()), "")


class Hunk(list[Line]):
    """Lines of a diff that lie together."""

    @property
    def changes(self) -> bool:
        """Whether any of its lines is new or gone."""
        return any(line.kind != "same" for line in self)

    @property
    def before(self) -> int:
        """How many lines of the old file lie before the hunk, as far as its own lines tell."""
        gone = next((index for index, line in enumerate(self) if line.kind == "gone"), None)
        if gone is None:
            return 0
        return self[gone].number - 1 - sum(line.kind == "same" for line in self[:gone])

    @property
    def after(self) -> int:
        """How many lines of the new file lie before the hunk; where it has none of the new file, as many as before."""
        first = next((line.number for line in self if line.kind != "gone"), self.before + 1)
        return first - 1


def header(path: Path) -> int:
    """How many lines the comment or docstring takes that a file begins with."""
    found = _HEADER.match(path.read_text())
    return len(found[0].splitlines()) if found else 0


def whole(path: Path) -> Hunk:
    """A file's lines below its header, none of them changed."""
    first = header(path) + 1
    return Hunk(Line("same", number, line) for number, line in enumerate(lines(path)[first - 1 :], first))


def hunks(old: Path, new: Path) -> list[Hunk]:
    """What a step changes of the one before, in runs of lines with some around them."""
    before, after = (path.read_text().splitlines() for path in (old, new))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        Hunk(
            line
            for tag, i, i_end, j, j_end in group
            for line in _lines(tag, range(i, i_end), range(j, j_end), old, new)
        )
        for group in matcher.get_grouped_opcodes(_CONTEXT)
    ]


def _lines(tag: str, left: range, right: range, old: Path, new: Path) -> list[Line]:
    if tag == "equal":
        return [Line("same", n + 1, lines(new)[n]) for n in right]
    gone = [Line("gone", n + 1, lines(old)[n]) for n in left]
    return [*gone, *(Line("new", n + 1, lines(new)[n]) for n in right)]


def block(text: str, language: str) -> str:
    """A block of prose in colours, as an element; without a language as it is."""
    tokens = get_lexer_by_name(language or "text", stripnl=False).get_tokens(text)
    return str(
        Markup('<pre class="code" tabindex="0"><code>{}</code></pre>').format(
            Markup().join(_coloured(token, part) for token, part in tokens)
        )
    )

"""Links from a page's words to the glossary: a term's first use in each section, and quantities in tables' headings."""

from __future__ import annotations

import functools
import re

from markupsafe import escape

from builder import terms
from builder.terms import Term

# Words that prose also uses in their everyday sense, or on every line.
_EVERYDAY = {"Step", "Ladder", "Twin", "Gap", "Wave", "Line", "Part", "Stage", "Rung, retired"}
# Nothing is marked inside of these.
_CLOSED = {
    "a", "button", "caption", "code", "data", "h1", "h2", "h3", "h4", "kbd", "label", "nav", "option", "output",
    "select", "summary", "td", "title",
}  # fmt: skip
_TOKEN = re.compile(r"<!--.*?-->|<(script|style|svg|pre|textarea)\b.*?</\1>|<(/?)([a-z][\w-]*)[^>]*>", re.DOTALL)
_MAIN = re.compile(r"<main\b.*?</main>", re.DOTALL)
_SECTIONS = {"h1", "h2", "h3", "section", "article"}


def marked(page: str, root: str) -> str:
    """The page with its terms marked. ``root`` is the way from it to the site's root."""
    return _MAIN.sub(lambda main: _marked(main[0], root), page)


def _marked(text: str, root: str) -> str:
    parts: list[str] = []
    seen: set[str] = set()
    closed = end = 0
    heading = False  # inside a table's heading
    for token in _TOKEN.finditer(text):
        between = text[end : token.start()]
        parts.append(between if closed else _links(between, heading, seen, root))
        parts.append(token[0])
        end = token.end()
        name, opens = token[3], not token[2]
        if name in _CLOSED:
            closed += 1 if opens else -1
        if name == "th":
            heading = opens
        if name in _SECTIONS and opens:
            seen = set()
    return "".join(parts) + text[end:]


def _links(text: str, heading: bool, seen: set[str], root: str) -> str:
    if heading:
        return " · ".join(_heading(each, seen, root) for each in text.split(" · "))
    words, pattern = _words()
    return pattern.sub(lambda found: _link(found[0], words[_stem(found[0])], seen, root), text)


def _heading(text: str, seen: set[str], root: str) -> str:
    """A quantity as tables name it: its title, and mostly the unit behind a comma."""
    title, _, unit = text.strip().partition(", ")
    term = _titles().get(title)
    if term is None or len(unit.split()) > 3:
        return text
    return text.replace(title, _link(title, term, seen, root), 1)


def _link(text: str, term: Term, seen: set[str], root: str) -> str:
    if term.id in seen:
        return text
    seen.add(term.id)
    return f'<a class="term" href="{root}glossary.html#{term.id}">{text}</a>'


@functools.cache
def _titles() -> dict[str, Term]:
    return {str(escape(term.title)): term for term in terms.quantities()}


@functools.cache
def _words() -> tuple[dict[str, Term], re.Pattern[str]]:
    """The words of prose, without a plural's ending, and what finds them. Quantities are found in headings alone."""
    known = {
        _stem(term.title): term
        for term in [*terms.stalls(), *(each for group in terms.groups().values() for each in group)]
        if term.title not in _EVERYDAY and (term.kind == "term" or "_" in term.title)
    }
    longest = sorted(known, key=len, reverse=True)
    return known, re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest))})s?(?![\w-])", re.IGNORECASE)


def _stem(word: str) -> str:
    return word.lower().removesuffix("s")

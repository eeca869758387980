"""The index behind the search box: every heading of every page, with the first sentence below it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from builder.site import Site

_LEVELS = ("h1", "h2", "h3")
_LONGEST = 140  # of a sentence
_SENTENCE = re.compile(r"(.+?[.:!?])(?=\s|$)")


@dataclass(slots=True)
class Entry:
    """A heading, with the element that a link to it names, and the text below."""

    level: str
    anchor: str
    title: str = ""
    text: str = ""


def write(site: Site) -> None:
    """``[place, anchor, title, page's title, sentence]`` for every heading, in the order of pages."""
    found: list[list[str]] = []
    for path in sorted(site.folder.rglob("*.html")):
        place = path.relative_to(site.folder).as_posix()
        found += [row for row, level in _page(place, path) if level in _levels(place)]
    site.payload("search", found)


def _levels(place: str) -> tuple[str, ...]:
    """The headings that tell a reader more than their page: those below a step's are the same at all steps."""
    if place == "index.html":  # its steps are a ladder's
        return ("h1",)
    return ("h1", "h2") if place.startswith("ladders/") else _LEVELS


def _page(place: str, path: Path) -> list[tuple[list[str], str]]:
    """The rows of a page, each with its heading's level."""
    reader = _Reader()
    reader.feed(path.read_text())
    title = next((each.title for each in reader.entries if each.level == "h1"), "")
    return [
        (
            [place, each.anchor, _tidy(each.title), "" if each.level == "h1" else _tidy(title), _first(each.text)],
            each.level,
        )
        for each in reader.entries
        if each.level == "h1" or each.anchor
    ]


def _tidy(text: str) -> str:
    return " ".join(text.split())


def _first(text: str) -> str:
    """The first sentence, cut between words where it is long."""
    tidy = _tidy(text)
    sentence = found[1] if (found := _SENTENCE.match(tidy)) else tidy
    return sentence if len(sentence) <= _LONGEST else sentence[:_LONGEST].rsplit(" ", 1)[0] + " …"


@dataclass(frozen=True, slots=True)
class _Open:
    """A part of the page that is not closed yet, and the heading that names it."""

    tag: str
    id: str
    heading: str


class _Reader(HTMLParser):
    """Headings in ``main``, and the first paragraph below each."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self._open: list[_Open] = []
        self._into = ""  # the element whose text is read: a heading or a paragraph
        self._aside = False  # in a small remark of a heading, such as a unit

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        if tag in ("section", "article", "main"):
            self._open.append(_Open(tag, given.get("id", ""), given.get("aria-labelledby", "")))
        self._aside = tag == "small"
        if not self._open:
            return
        if tag in _LEVELS:
            name = given.get("id", "")
            around = next((each.id for each in reversed(self._open) if name and each.heading == name), "")
            self.entries.append(Entry(tag, around or name))
            self._into = tag
        elif tag in ("p", "li") and self.entries and not self.entries[-1].text.strip():
            self._into = tag

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[-1].tag:
            self._open.pop()
        if tag == self._into:
            self._into = ""
        self._aside = False

    def handle_data(self, data: str) -> None:
        if self._aside:
            return
        if self._into in _LEVELS:
            self.entries[-1].title += data
        elif self._into:
            self.entries[-1].text += data

"""Pages as their markup has them: names, links, what is loaded, and numbers."""

from __future__ import annotations

import base64
import functools
import json
import re
import zlib
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

# Elements that load what an attribute names. Others, such as links, lead there when a reader chooses.
_LOADING = {
    "script": ("src",), "link": ("href",), "img": ("src", "srcset"), "source": ("src", "srcset"), "iframe": ("src",),
    "embed": ("src",), "object": ("data",), "video": ("src", "poster"), "audio": ("src",), "track": ("src",),
    "input": ("src",), "use": ("href", "xlink:href"), "image": ("href", "xlink:href"), "base": ("href",),
    "form": ("action",),
}  # fmt: skip
_STYLED = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


@dataclass(frozen=True, slots=True, order=True)
class Number:
    """A ``<data>`` element: its value and source, and what a reader sees."""

    value: str
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Page:
    """What the checks ask of a page."""

    ids: tuple[str, ...]
    links: tuple[str, ...]
    loads: tuple[str, ...]
    numbers: tuple[Number, ...]


def pages(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.html"))


@functools.cache
def read(path: Path) -> Page:
    reader = _Reader()
    reader.feed(path.read_text())
    reader.close()
    return Page(tuple(reader.ids), tuple(reader.links), tuple(reader.loads), tuple(reader.numbers))


def payload(site: Path, name: str) -> Any:
    """What ``KT.load(name)`` gives."""
    packed = (site / "data" / f"{name}.js").read_text().removeprefix(f'KT.put("{name}","').removesuffix('");\n')
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def styled(style: str) -> list[str]:
    """What a style sheet loads."""
    return [url or imported for url, imported in _STYLED.findall(style)]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.numbers: list[Number] = []
        self._base = ""  # of a table's sources
        self._number: tuple[str, str] | None = None
        self._text = ""
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag in ("a", "area") and "href" in given else []
        self.loads += [given[key] for key in _LOADING.get(tag, ()) if key in given]
        self.loads += styled(given.get("style", ""))
        self._base = given.get("data-base", "") if tag == "table" else self._base
        if tag == "data":
            source = given.get("data-src", "")
            whole = self._base + source if source.startswith("/") else source
            self._number, self._text = (given.get("value", ""), whole), ""
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        if tag == "data" and self._number:
            self.numbers.append(Number(*self._number, self._text))
            self._number = None
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._number:
            self._text += data
        if self._in_style:
            self.loads += styled(data)

"""What must hold of a built site, each as a function that returns the faults in words."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

from builder import provenance
from builder.site import WEB, Site
from tests.site import reading
from tests.site.reading import Number

FOLDER_BYTES = 12_000_000
PAGE_BYTES = 1_500_000
FIRST_PAGE_BYTES = 350_000  # compressed, with all that it loads
SCRIPT_BYTES = 200_000  # our own, unminified
WIDGET_LINES = 250

_ELSEWHERE = re.compile(r"([a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)
_REQUESTING = re.compile(r"\b(fetch|import|importScripts|XMLHttpRequest|WebSocket|EventSource)\s*\(|https?://")
_MARKUP = "http://www.w3.org/"
_DIGITS = re.compile(r"[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def unparsed(pages: Iterable[Path]) -> list[str]:
    """Where a page is no valid HTML."""
    import html5lib

    faults = []
    for page in pages:
        parser = html5lib.HTMLParser()
        parser.parse(page.read_text())
        faults += [f"{page.name}:{line}: {error} {given}" for (line, _), error, given in parser.errors]
    return faults


def repeated(folder: Path) -> list[str]:
    """Where two elements of a page have one name."""
    return [
        f"{page.relative_to(folder)}: id {name} {count} times"
        for page in reading.pages(folder)
        for name, count in Counter(reading.read(page).ids).items()
        if count > 1
    ]


def foreign(folder: Path) -> list[str]:
    """What would be loaded from elsewhere than the folder."""
    loaded = [(page, load) for page in reading.pages(folder) for load in reading.read(page).loads]
    loaded += [(style, load) for style in folder.rglob("*.css") for load in reading.styled(style.read_text())]
    faults = [
        f"{file.relative_to(folder)} loads {load}"
        for file, load in loaded
        if _ELSEWHERE.match(load) and not load.startswith("data:")
    ]
    for script in own_scripts(folder):
        for found in _REQUESTING.finditer(script.read_text().replace(_MARKUP, "")):
            faults.append(f"{script.relative_to(folder)} has {found[0]}")
    return faults


def own_scripts(folder: Path) -> list[Path]:
    """Scripts that are neither a library's nor data."""
    return [
        path for path in sorted(folder.rglob("*.js")) if path.relative_to(folder).parts[0] not in ("vendor", "data")
    ]


def placed(folder: Path, places: Iterable[str]) -> list[str]:
    """Where a file names a place of the machine that built it."""
    texts = {path.relative_to(folder): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}
    return [f"{path} names {place}" for path, text in texts.items() for place in places if place in text]


def broken(folder: Path) -> list[str]:
    """Links to what is not there. A fragment with ``=`` is a widget's state and names no element."""
    faults = []
    for page in reading.pages(folder):
        found = reading.read(page)
        for link in dict.fromkeys((*found.links, *found.loads)):
            if _ELSEWHERE.match(link):
                continue
            path, _, fragment = link.partition("#")
            target = (page.parent / unquote(path)).resolve() if path else page
            if not target.is_file():
                faults.append(f"{page.relative_to(folder)} leads to {link}, which is no file")
            elif fragment and "=" not in fragment and unquote(fragment) not in reading.read(target).ids:
                faults.append(f"{page.relative_to(folder)} leads to {link}, which has no such element")
    return faults


def over_budget(folder: Path) -> list[str]:
    """What is larger than it may be."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    sizes = [
        ("the folder", sum(path.stat().st_size for path in files), FOLDER_BYTES),
        ("own scripts", sum(path.stat().st_size for path in own_scripts(folder)), SCRIPT_BYTES),
        ("the first page, compressed", _first_page(folder), FIRST_PAGE_BYTES),
        *((str(page.relative_to(folder)), page.stat().st_size, PAGE_BYTES) for page in reading.pages(folder)),
    ]
    widgets = [(path.name, len(path.read_text().splitlines())) for path in (WEB / "lib" / "widgets").glob("*.js")]
    return [
        *(f"{what} has {size:,} bytes of {most:,}" for what, size, most in sizes if size > most),
        *(f"{name} has {lines} lines of {WIDGET_LINES}" for name, lines in widgets if lines > WIDGET_LINES),
    ]


def _first_page(folder: Path) -> int:
    page = folder / "index.html"
    loaded = [page, *(page.parent / load for load in reading.read(page).loads if not _ELSEWHERE.match(load))]
    return sum(len(gzip.compress(path.read_bytes(), mtime=0)) for path in loaded)


def wrong(site: Site, numbers: Iterable[Number]) -> list[str]:
    """Numbers whose source is no row, or says something else."""
    return [f"{number.text} of {number.source}: {fault}" for number in numbers for fault in _wrong(site, number)]


def _wrong(site: Site, number: Number) -> Iterator[str]:
    try:
        value = provenance.value(site, number.source)
    except (LookupError, StopIteration, ValueError) as error:
        yield f"unresolved: {error!r}"
        return
    if abs(float(number.value) - value) > 1e-5 * abs(value):
        yield f"the value is {number.value}, the rows say {value:.6g}"
    if not shows(number.text, value):
        yield f"the rows say {value:.6g}"


def shows(text: str, value: float) -> bool:
    """Whether a text's number is the value, rounded to the digits that it has; shares may be in per cent."""
    found = _DIGITS.findall(text)
    if len(found) != 1:
        return False
    digits = found[0].replace(",", "").replace("−", "-")
    mantissa, _, exponent = digits.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    scales = (1, 100) if "%" in text else (1,)
    return any(abs(float(digits) - scale * value) <= 0.501 * unit for scale in scales)

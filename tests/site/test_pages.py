"""Every page, opened from disk in Chromium: in both themes, wide and narrow, by keyboard, and without JavaScript."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.site import browsing, reading
from tests.site.browsing import NARROW, WIDE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PARTS = 8  # so that processes share the pages

Check = Callable[["Page"], list[str]]


@functools.cache
def examples(site: Path) -> frozenset[Path]:
    """Of the pages of a folder, which one template writes, the first and the largest; at the root all."""
    found: set[Path] = set()
    for folder, group in itertools.groupby(reading.pages(site), key=lambda page: page.parent):
        pages = list(group)
        found |= set(pages) if folder == site else {pages[0], max(pages, key=lambda page: page.stat().st_size)}
    return frozenset(found)


def opened(site: Path, part: int, browser: Browser, **settings: Any) -> Iterator[tuple[Path, Page, list[str]]]:
    """The part's pages, each with what is complained of while it is open."""
    with browser.new_context(**settings) as context:
        for path in reading.pages(site)[part::PARTS]:
            with browsing.visit(context, path) as (page, heard):
                yield path, page, heard


def faults(site: Path, path: Path, page: Page, heard: list[str], *checks: Check) -> Iterator[str]:
    for check in checks:
        yield from (f"{path.relative_to(site)}: {fault}" for fault in check(page))
    yield from (f"{path.relative_to(site)}: {fault}" for fault in heard)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_page_in_a_wide_window(part: int, site: Path, browser: Browser) -> None:
    found: list[str] = []
    for path, page, heard in opened(site, part, browser, viewport=WIDE, color_scheme="light"):
        checks = (browsing.structure, browsing.overflow, browsing.inaccessible)
        once = (browsing.unreachable, in_the_dark) if path in examples(site) else ()
        found += faults(site, path, page, heard, *checks, *once)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_page_in_a_narrow_window(part: int, site: Path, browser: Browser) -> None:
    found: list[str] = []
    for path, page, heard in opened(site, part, browser, viewport=NARROW, color_scheme="dark"):
        checks = (in_a_narrow_window,) if path in examples(site) else ()
        found += faults(site, path, page, heard, browsing.overflow, *checks)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_page_without_javascript(part: int, site: Path, browser: Browser) -> None:
    found: list[str] = []
    for path, page, heard in opened(site, part, browser, viewport=NARROW, java_script_enabled=False):
        found += faults(site, path, page, heard, browsing.structure, browsing.overflow, browsing.scriptless)
    assert not found, "\n".join(found)


def test_the_front_page_is_printed_on_one_sheet(site: Path, browser: Browser) -> None:
    with browser.new_context() as context, browsing.visit(context, site / "index.html") as (page, _):
        assert len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4"))) == 1


def test_pointing_at_a_number_tells_its_row_and_its_run(site: Path, browser: Browser) -> None:
    with browser.new_context() as context, browsing.visit(context, site / "scoreboard.html") as (page, heard):
        number = page.locator('data[data-src*=".timings.csv"]:visible').first
        number.hover()
        page.wait_for_function("document.querySelector('data[title]')?.title.includes('driver')")
        told = number.get_attribute("title") or ""
        assert not heard
    source, run, hint = told.split("\n")
    assert re.fullmatch(r"(\w+)\.timings\.csv#\S+", source)
    assert re.fullmatch(r"NVIDIA H100 .*, driver [\d.]+, \d{4}-\d\d-\d\d \(run \S+\)", run)
    assert hint.startswith("Click:")


def in_a_narrow_window(page: Page) -> list[str]:
    return browsing.inaccessible(page, contrast=False)


def in_the_dark(page: Page) -> list[str]:
    page.emulate_media(color_scheme="dark")
    found = browsing.inaccessible(page, only_contrast=True)
    page.emulate_media(color_scheme="light")
    return [f"dark: {fault}" for fault in found]

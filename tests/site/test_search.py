"""Search: what a reader looks for stands among the first three, and the keyboard suffices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.site import reading

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

INDEX_BYTES = 250_000
WANTED = {
    "bank conflict": {"glossary.html#bank-conflict", "interview.html#07_bank_conflict"},
    "wgmma": {"glossary.html#wgmma"},
    "online softmax": {"glossary.html#online-softmax", "ladders/softmax.html#v02_online"},
    "swizzle": {"ladders/matmul_bf16.html#v03_swizzled"},
    "multicast": {"ladders/matmul_bf16.html#v12_multicast"},
}


def search(page: Page, site: Path, wanted: str) -> list[str]:
    """The places of what is found, from the site's root."""
    page.fill("kt-search input", wanted)
    page.wait_for_selector(f'kt-search[data-found="{wanted}"]')
    found = page.locator("kt-search a").evaluate_all("links => links.map((each) => each.href)")
    return [each.removeprefix(site.as_uri()).lstrip("/") for each in found]


def test_what_a_reader_wants_is_among_the_first_three(site: Path, browser: Browser) -> None:
    page = browser.new_page()
    page.goto((site / "docs" / "profiler.html").as_uri())  # links lead from any folder
    for wanted, places in WANTED.items():
        assert places <= set(search(page, site, wanted)[:3]), wanted
    assert search(page, site, "multcast")[0].endswith("v12_multicast")
    assert search(page, site, "qqqqq") == []
    page.close()


def test_the_keyboard_suffices(site: Path, browser: Browser) -> None:
    page = browser.new_page()
    page.goto((site / "glossary.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("bank conflict")
    page.wait_for_selector('kt-search[data-found="bank conflict"]')
    assert page.input_value("kt-search input") == "bank conflict"
    first, second = (page.locator("kt-search a").nth(index) for index in (0, 1))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert second.evaluate("link => link === document.activeElement")
    page.keyboard.press("ArrowUp")
    assert first.evaluate("link => link === document.activeElement")
    page.keyboard.press("Escape")
    assert page.locator("kt-search ul").is_hidden()
    assert page.locator("kt-search input").evaluate("input => input === document.activeElement")
    page.keyboard.type(" ")
    page.keyboard.press("Enter")
    page.wait_for_url("**/glossary.html#bank-conflict")
    page.close()


def test_nothing_is_loaded_before_it_is_needed(site: Path, browser: Browser) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "glossary.html").as_uri())
    assert not [url for url in asked if "minisearch" in url or url.endswith("data/search.js")]
    page.focus("kt-search input")
    page.wait_for_function("() => KT.data.has('search') && typeof MiniSearch === 'function'")
    page.close()


def test_every_page_has_the_box_and_the_index_is_whole(site: Path) -> None:
    assert (site / "data" / "search.js").stat().st_size <= INDEX_BYTES
    rows = reading.payload(site, "search")
    places = {place for place, *_ in rows}
    for page in reading.pages(site):
        place = page.relative_to(site).as_posix()
        assert "<kt-search>" in page.read_text(), place
        assert place in places, place
    for place, anchor, title, _, _ in rows:
        assert title and (not anchor or anchor in reading.read(site / place).ids), (place, anchor)

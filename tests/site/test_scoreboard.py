"""The scoreboard in a browser: what is shown, averaged, ordered and copied is what the rows say."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest

from kernel_twins.report.calls import sampled_table

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from builder.site import Site

CHOICES = [
    {},
    {"op": "softmax"},
    {"family": "matmul", "dtype": "bf16"},
    {"size": "small"},
    {"backend": "triton", "verdict": "SLOW"},
    {"q": "b.col cuda"},
    {"family": "norm", "dtype": "fp32", "size": "large"},
]


@pytest.fixture
def page(site: Path, browser: Browser) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        heard: list[str] = []
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.goto((site / "scoreboard.html").as_uri())
        yield page
        assert heard == []


def copied(page: Page) -> list[dict[str, str]]:
    text = page.evaluate("document.querySelector('kt-scoreboard').csv()")
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: urlencode(choice) or "all")
def test_means_and_counts_follow_the_filters(page: Page, committed: Site, choice: dict[str, str]) -> None:
    from builder import contests, provenance

    for key, value in choice.items():
        control = page.locator(f".filters [name={key}]")
        control.fill(value) if key == "q" else control.select_option(value)
    shown = contests.chosen(contests.of(committed), urlencode(choice))
    assert len(shown) > 0 and page.locator(".board tr[data-op]:visible").count() == len(shown)
    for backend in ("cuda", "triton"):
        if not any(row.backend == backend for row in shown):
            assert page.locator(f".means tr[data-backend={backend}] [data-figure=geomean]").inner_text() == "–"
            continue
        for each in page.locator(f".means tr[data-backend={backend}] data").all():
            expected = provenance.value(committed, str(each.get_attribute("data-src")))
            assert float(str(each.get_attribute("value"))) == pytest.approx(expected, rel=1e-5)
        mean = page.locator(f".means tr[data-backend={backend}] [data-figure=geomean]").inner_text()
        assert mean == f"{contests.figure(shown, backend, 'geomean'):.3f} ×"


def test_what_is_copied_is_what_is_shown(page: Page) -> None:
    page.locator("[name=op]").select_option("linear")
    page.locator("[name=backend]").select_option("triton")
    rows = copied(page)
    visible = page.locator(".board tr[data-op]:visible")
    assert [row["case"] for row in rows] == visible.locator("td:nth-child(2)").all_inner_texts()
    assert {(row["op"], row["backend"]) for row in rows} == {("linear", "triton")}
    shown = [text.removesuffix(" ×") for text in visible.locator("td:nth-child(5)").all_inner_texts()]
    assert [f"{float(row['ratio']):.3f}" for row in rows] == shown
    page.get_by_role("button", name="Copy as CSV").click()
    page.wait_for_function(f"document.querySelector('.filters output').value === '{len(rows)} rows copied'")


def test_columns_sort_both_ways(page: Page) -> None:
    page.locator("[name=op]").select_option("matmul_bf16")
    head = page.locator("th[data-sort=value]")
    head.get_by_role("button").click()
    up = [float(row["ratio"]) for row in copied(page)]
    assert up == sorted(up) and head.get_attribute("aria-sort") == "ascending"
    head.get_by_role("button").click()
    assert [float(row["ratio"]) for row in copied(page)] == up[::-1]
    assert head.get_attribute("aria-sort") == "descending"
    page.locator("th[data-sort=verdict] button").click()
    verdicts = [row["verdict"] for row in copied(page)]
    assert verdicts == sorted(verdicts) and head.get_attribute("aria-sort") is None


def test_the_hash_restores_what_was_chosen(page: Page, browser: Browser) -> None:
    page.locator("[name=family]").select_option("softmax")
    page.locator("[name=q]").fill("65536")
    page.locator("th[data-sort=low] button").click()
    expected = copied(page)
    with browser.new_context() as context:
        other = context.new_page()
        other.goto(page.url)
        assert copied(other) == expected
        assert other.locator("[name=family]").input_value() == "softmax"
        assert other.locator("[name=q]").input_value() == "65536"
    page.get_by_role("button", name="Show all").click()
    assert "#" not in page.url and len(copied(page)) > len(expected)


def test_filters_and_order_work_by_keyboard(page: Page) -> None:
    page.locator("[name=verdict]").focus()
    page.keyboard.type("SLOW")
    page.wait_for_function("location.hash.includes('verdict=SLOW')")
    assert {row["verdict"] for row in copied(page)} == {"SLOW"}
    page.locator("th[data-sort=value] button").focus()
    page.keyboard.press("Enter")
    ratios = [float(row["ratio"]) for row in copied(page)]
    assert ratios == sorted(ratios)


def test_slow_is_written_as_large_as_fast(page: Page) -> None:
    sizes = page.evaluate(
        "['FAST', 'SLOW'].map((each) => getComputedStyle(document.querySelector(`.board .verdict.${each}`)).fontSize)"
    )
    assert sizes[0] == sizes[1]


def test_without_scripts_all_rows_and_means_are_there(site: Path, browser: Browser) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto((site / "scoreboard.html").as_uri())
        assert page.locator(".board tr[data-op]").count() == page.locator(".board tr[data-op]:visible").count() > 400
        assert page.locator(".board tr[data-op] svg").count() > 400
        assert page.locator(".means data[data-src$='geomean?']").count() == 2
        assert not page.locator(".filters").is_visible()


def test_sampled_cases_that_are_wrong_are_told(page: Page, committed: Site) -> None:
    cells = sampled_table.compared(sampled_table.read(committed.data))
    wrong = int(cells["status"].str.startswith("wrong").sum())
    section = page.locator("[aria-label='Sampled cases'] tbody tr")
    told = [int(row.locator("td").nth(6).inner_text()) for row in section.all() if "all" not in row.inner_text()[:4]]
    assert sum(told) == wrong
    dots = "[...document.querySelectorAll('.row .dots')].map((each) => each.getAttribute('d').split('M').length - 1)"
    parts = sampled_table.parts(cells)
    assert sum(page.evaluate(dots)) == sum(int((part["ratio"] > 0).sum()) for part in parts.values())

"""The glossary: its links, its examples against a search over all rows, and the card on every page."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from markupsafe import escape

from builder import marking, terms
from kernel_twins.harness.ceilings import REFERENCE_GPU
from kernel_twins.report.meaning import analysis
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.rows.base import DATA
from kernel_twins.report.rows.metrics import METRICS, STALLS, stall_metric
from kernel_twins.spec import Name
from tests.site import reading

if TYPE_CHECKING:
    from playwright.sync_api import Browser


Numbers = dict[str, float | None]
Pair = tuple[str, str, Numbers, Numbers]  # operation and step, numbers before and after


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Of every step with one before it; counters have ncu's names."""
    found = []
    for results in analysis.load(REFERENCE_GPU, DATA / REFERENCE_GPU):
        for step in results.op.steps:
            for backend in ("cuda", "triton"):
                case = results.case_of(step, backend) if backend in step.backends else None
                before = results.previous(step, backend, case) if case else None
                if case and before:
                    was, now = (
                        Numbers(results.counters(name, case)) | results.quantities(name, case)
                        for name in (Name(backend, before.name), Name(backend, step.name))
                    )
                    found.append((results.op.name, step.name, was, now))
    return found


def entry(site: Path, name: str) -> str:
    text = (site / "glossary.html").read_text()
    found = re.search(rf'<section class="entry" id="{re.escape(name)}".*?</section>', text, re.DOTALL)
    assert found, name
    return found[0]


@pytest.mark.parametrize("key", [*QUANTITIES, *STALLS])
def test_the_step_that_moved_a_number_most(key: str, site: Path, pairs: list[Pair]) -> None:
    stall = key in STALLS
    metric = stall_metric(key) if stall else key
    differs = stall or QUANTITIES[key].unit in ("%", "cycles an issue")
    best, where = 0.0, None
    for op, step, before, after in pairs:
        was, now = before.get(metric), after.get(metric)
        if was is None or now is None or (not differs and min(was, now) <= 0):
            continue
        size = abs(now - was) if differs else abs(math.log(now / was))
        if size > best:
            best, where = size, (op, step)
    shown = re.search(
        r'Moved most by <a href="ladders/(\w+)\.html#(\w+)">', entry(site, f"{'stall' if stall else 'quantity'}-{key}")
    )
    assert (shown.groups() if shown else None) == where


def test_a_quantity_names_its_counters(site: Path) -> None:
    for key, quantity in QUANTITIES.items():
        text = entry(site, f"quantity-{key}")
        assert all(
            f"<code>{metric}</code>: {escape(METRICS[metric].meaning)}" in text for metric in quantity.compute.metrics
        )


def test_every_link_to_the_glossary_resolves(site: Path) -> None:
    names = set(reading.read(site / "glossary.html").ids)
    links = [
        (page, link.partition("#")[2])
        for page in reading.pages(site)
        for link in reading.read(page).links
        if link.partition("#")[0].endswith("glossary.html") and "#" in link
    ]
    assert len({name for _, name in links}) > 40
    assert [(page.name, name) for page, name in links if name not in names] == []
    assert names >= {term.id for term in terms.every()}


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        (
            "<p>A bank conflict.</p>",
            '<p>A <a class="term" href="../glossary.html#bank-conflict">bank conflict</a>.</p>',
        ),
        ("<p>Wavefronts</p>", '<p><a class="term" href="../glossary.html#wavefront">Wavefronts</a></p>'),
        ("<p><code>wgmma</code>, <a>TMA</a>, TMAs-like, a step</p>", None),
        ("<td>TMA</td><pre>TMA</pre><h2>TMA</h2>", None),
        (
            '<th scope="row">DRAM busy, % · spills</th>',
            '<th scope="row"><a class="term" href="../glossary.html#quantity-dram_share">DRAM busy</a>, % · '
            '<a class="term" href="../glossary.html#quantity-spills">spills</a></th>',
        ),
        ("<th>time at which it rained</th>", None),
    ],
)
def test_what_is_marked(text: str, marked: str | None) -> None:
    page = "TMA <main>{}</main> TMA"
    assert marking.marked(page.format(text), "../") == page.format(marked or text)


def test_a_term_is_marked_once_a_section() -> None:
    page = "<main><p>TMA and TMA</p><h2>next</h2><p>TMA</p></main>"
    found = [each.start() for each in re.finditer('class="term"', marking.marked(page, ""))]
    assert len(found) == 2


def test_every_terms_card_opens_and_closes(site: Path, browser: Browser, tmp_path: Path) -> None:
    """All terms on one page of the site's own making, by pointer and by keyboard."""
    page = browser.new_page()
    page.goto((site / "docs" / "profiler.html").as_uri())
    page.evaluate(
        """ids => {
          const links = ids.map((id) => `<p><a class="term" href="../glossary.html#${id}">${id}</a></p>`);
          document.querySelector("main").innerHTML = links.join("");
        }""",
        [term.id for term in terms.every()],
    )
    card = page.locator("#term-card")
    for term in terms.every():
        link = page.locator(f'a.term[href$="#{term.id}"]')
        link.focus()
        card.wait_for(state="visible")
        assert card.inner_text().split() == f"{term.title} {term.short}".split()
        assert link.get_attribute("aria-describedby") == "term-card"
        box = card.bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= 1280
        page.keyboard.press("Escape")
        card.wait_for(state="hidden")
    page.close()


def test_a_card_follows_the_pointer_and_may_be_entered(site: Path, browser: Browser) -> None:
    page = browser.new_page()
    page.goto((site / "docs" / "profiler.html").as_uri())
    page.locator("a.term").first.hover()
    card = page.locator("#term-card")
    card.wait_for(state="visible")
    card.hover()
    page.wait_for_timeout(400)
    assert card.is_visible()
    page.mouse.move(0, 0)
    card.wait_for(state="hidden")
    page.locator("a.term").first.hover()
    card.wait_for(state="visible")
    page.locator("a.term").first.click()
    page.wait_for_url("**/glossary.html#*")
    page.close()

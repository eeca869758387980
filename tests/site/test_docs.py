"""Documents and the log as pages: nothing of them is lost, and links lead to headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builder import pictures, places, prose
from kernel_twins import OPS
from kernel_twins.report.rows.base import ROOT

LOG = [ROOT / "KERNEL_LOG.md", *sorted((ROOT / "docs" / "log").glob("*.md"))]
DOCUMENTS = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.stem not in {*OPS, "glossary"}]
LOG_BYTES = 2_500_000


def rows(text: str) -> int:
    """Of Markdown's tables, the headings' among them."""
    lines = re.findall(r"^ *\|.*\|$", text, re.MULTILINE)
    return sum(not re.fullmatch(r" *\|[ :|-]+\|", line) for line in lines)


@pytest.mark.parametrize("path", [*DOCUMENTS, *LOG], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_has_all_of_its_document(path: Path, site: Path) -> None:
    text, place = path.read_text(), places.page(path)
    assert place
    page = (site / place).read_text()
    prose_alone = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#{2,4} (.*)$", prose_alone, re.MULTILINE)
    assert len(re.findall(r"<h[234] id=", page)) == len(headings)
    assert page.count("<tr>") == rows(text)
    assert page.count("<details>") == text.count("<details>")
    assert page.count('<figure class="picture">') == len(re.findall(r"^!\[", text, re.MULTILINE))
    assert page.count("<pre") == len(re.findall(r"^ *```\w*$", text, re.MULTILINE)) / 2


def test_the_log_stays_small(site: Path) -> None:
    assert sum(path.stat().st_size for path in (site / "log").glob("*.html")) <= LOG_BYTES


def test_a_table_has_a_name_and_rows_that_are_named() -> None:
    page = ROOT / "docs" / "profiler.md"
    html = prose.html("## One\n\n| | b |\n| --- | --: |\n| c | 1 |\n| | 2 |\n\n| d |\n| --- |\n| e |\n", page)
    assert '<caption class="unseen">One</caption>' in html
    assert '<caption class="unseen">One, table 2</caption>' in html
    assert '<td></td>\n<th style="text-align:right" scope="col">b</th>' in html
    assert '<th scope="row">c</th>' in html
    assert '<td></td>\n<td style="text-align:right">2</td>' in html


def test_a_link_leads_to_the_site_or_becomes_its_name() -> None:
    page = ROOT / "docs" / "profiler.md"
    told = {
        "softmax.md#v02_online-maximum-and-sum-in-one-pass": '<a href="../ladders/softmax.html#v02_online">x</a>',
        "glossary.md#bank": '<a href="../glossary.html#bank">x</a>',
        "#verdicts": '<a href="#verdicts">x</a>',
        "../README.md#two-commands": '<a href="../index.html">x</a>',
        "../CONTRIBUTING.md": "x",
        "https://example.org/": '<a href="https://example.org/">x</a>',
    }
    for link, html in told.items():
        assert prose.html(f"[x]({link})", page) == f"<p>{html}</p>\n"


def test_a_picture_follows_the_theme_and_its_names_are_its_own(site: Path) -> None:
    for path in [*(ROOT / "docs" / "drawings").glob("*.svg"), *(ROOT / "profiling" / "plots").glob("*.svg")]:
        shown = pictures.svg(path, "told")
        assert not re.search(r"#[0-9a-fA-F]{6}\b", shown), path.name
        assert all(name.startswith(f"{path.stem}-") for name in re.findall(r'id="([^"]*)"', shown)), path.name
        used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', shown))
        assert used <= set(re.findall(r'id="([^"]*)"', shown)), path.name
    variables = (site / "pictures.css").read_text()
    assert all(f"--p-{part}:" in variables for part in pictures.PARTS)


def test_code_in_prose_has_colours() -> None:
    html = prose.html("```python\nx = 1  # one\n```\n", ROOT / "docs" / "profiler.md")
    assert html == '<pre class="code" tabindex="0"><code>x = <u>1</u>  <i># one</i>\n</code></pre>\n'


def test_no_document_is_left_without_a_page(site: Path) -> None:
    for path in (ROOT / "docs").rglob("*.md"):
        place = places.page(path)
        assert place and (site / place).is_file(), path.name

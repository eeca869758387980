"""README.md is one page: short, true to the files that it quotes, and as wide as GitHub's column."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kernel_twins import OPS
from kernel_twins.report.calls import sampled_table
from kernel_twins.report.pages import checks, front
from kernel_twins.report.rows import store
from kernel_twins.report.rows.libraries import LIBRARIES
from tests import browser

README = store.ROOT / "README.md"
COLUMN = 846  # px, of a README on GitHub
FIRST_SCREEN = 900  # px

# GitHub's sizes, as far as they decide how wide something is.
STYLE = """
body { margin: 0; font: 16px/1.5 "Noto Sans", Helvetica, Arial, sans-serif }
article { width: 846px; word-wrap: break-word }
img { max-width: 100% }
table { display: block; width: max-content; max-width: 100%; overflow: auto; border-collapse: collapse }
th, td { padding: 6px 13px; border: 1px solid }
code, pre { font: 13.6px monospace }
code { padding: .2em .4em }
pre { padding: 16px; overflow: auto }
pre code { padding: 0 }
"""
SIZES = """
const wide = [...document.querySelectorAll("table, pre, article")].filter(each => each.scrollWidth > each.clientWidth);
document.body.textContent = JSON.stringify({
  picture: Math.round(document.querySelector("img").getBoundingClientRect().bottom),
  wide: wide.map(each => `${each.scrollWidth} px: ${each.textContent.trim().slice(0, 40)}`),
});
"""


def test_it_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert max(len(line) for line in lines if not line.startswith(("|", "!["))) <= 120


def test_its_diff_is_of_two_files_that_are_there() -> None:
    """Each line begins as one that the later step has and the earlier one has not, or the other way round."""
    op, name = OPS[front.STEP[0]], front.STEP[1]
    before = op.before(op.step(name), "cuda")
    assert before is not None
    text = README.read_text()
    old, new = (
        {line.partition("  //")[0].rstrip() for line in (store.ROOT / op.file(step, "cuda")).read_text().splitlines()}
        for step in (before.name, name)
    )
    (diff,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    assert len(added) + len(removed) == len(diff.splitlines()) == 12
    assert {*added} <= new and {*removed} <= old - new
    assert any(line not in old for line in added)
    assert f"{op.file(before.name, 'cuda')})" in text and f"{op.file(name, 'cuda')})" in text


def test_its_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"""(?:src="|!\[[^\]]*\]\()([^")]+)""", README.read_text())
    assert len(pictures) == 3
    for each in pictures:
        assert (store.ROOT / each).stat().st_size <= 200_000, each


def test_its_alternatives_are_those_that_have_times() -> None:
    (told,) = re.findall(r"Alternatives are (.*?);", README.read_text(), re.DOTALL)
    sampled = sampled_table.taking_part(sampled_table.read(checks.FOLDER))
    assert [library.title for library in LIBRARIES.values() if library.title in told] == sampled


@browser.needed
def test_nothing_is_wider_than_the_column_and_the_picture_is_on_the_first_screen(tmp_path: Path) -> None:
    markdown_it = pytest.importorskip("markdown_it")
    body = markdown_it.MarkdownIt("commonmark").enable("table").render(README.read_text())
    page = tmp_path / "README.html"
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><base href="{store.ROOT.as_uri()}/"><style>{STYLE}</style>'
        f"<article>{body}</article><script>addEventListener('load', () => {{{SIZES}}})</script>"
    )
    said = browser.dom(page, COLUMN, 1000)
    sizes = json.loads(said[said.index("<body>") + len("<body>") : said.rindex("</body>")])
    assert sizes["wide"] == []
    assert 0 < sizes["picture"] <= FIRST_SCREEN

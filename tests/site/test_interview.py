"""The interview: twelve questions, each short, with numbers that resolve and a step that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder import answers, provenance
from builder.site import Site
from kernel_twins import OPS
from kernel_twins.harness.ceilings import REFERENCE_GPU
from kernel_twins.report.meaning import analysis
from kernel_twins.report.rows.base import DATA, InvalidDataError
from tests.site import browsing, reading

if TYPE_CHECKING:
    from playwright.sync_api import Browser

QUESTIONS, LINES = 12, 5
_END = re.compile(r"[.?](?= [A-Z]|$| v\d\d )")


@pytest.fixture(scope="session")
def told() -> list[answers.Answer]:
    return answers.load(analysis.load(REFERENCE_GPU, DATA / REFERENCE_GPU))


def test_there_are_twelve_and_each_is_short(told: list[answers.Answer]) -> None:
    assert len(told) == QUESTIONS
    for each in told:
        text = re.sub(r"\s+", " ", each.prose.striptags())
        assert 1 <= len(_END.findall(text)) <= LINES, text


def test_each_has_a_number_and_a_link_that_resolves(told: list[answers.Answer], site: Path) -> None:
    for each in told:
        assert "<data " in "".join(cell for row in each.rows for cell in row.cells)
        place, _, anchor = each.link.partition("#")
        assert anchor in reading.read(site / place).ids, each.link


def test_every_number_resolves(site: Path) -> None:
    built = Site(site.parent / "again")
    numbers = reading.read(site / "interview.html").numbers
    assert len(numbers) > 5 * QUESTIONS
    for each in numbers:
        assert f"{provenance.value(built, each.source):.6g}" == each.value, each.source


def test_attention_without_rows_is_told_exactly(told: list[answers.Answer]) -> None:
    (each,) = (each for each in told if each.op == "attention")
    op = OPS["attention"]
    assert each.badge == "exact"
    assert each.case == op.profile_case.slug
    shown = "".join(cell for row in each.rows for cell in row.cells)
    values = {found[1]: float(found[0]) for found in re.findall(r'value="([^"]+)" data-src="exact#[^"]*/(\w+)"', shown)}
    batch, heads, length, _ = op.profile_case.shape
    assert values["bytes"] == pytest.approx(op.bytes(op.profile_case) / 1e9, rel=1e-5)
    assert values["flops"] == pytest.approx(op.flops(op.profile_case) / 1e9, rel=1e-5)
    assert values["score_bytes"] == pytest.approx(2 * 2 * batch * heads * length**2 / 1e9, rel=1e-5)
    assert values["stored_intensity"] < values["ridge"] < values["intensity"]


def test_a_file_without_a_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "01_why.md").write_text("Why?\n")
    monkeypatch.setattr(answers, "FOLDER", tmp_path)
    with pytest.raises(InvalidDataError, match="begin it with TOML"):
        answers.load(analysis.load(REFERENCE_GPU, DATA / REFERENCE_GPU))


def test_each_answer_fits_five_lines_of_a_wide_window(site: Path, browser: Browser) -> None:
    with (
        browser.new_context(viewport={"width": 1280, "height": 900}) as context,
        browsing.visit(context, site / "interview.html") as (page, heard),
    ):
        lines = page.evaluate(
            "[...document.querySelectorAll('.answer')].map((each) =>"
            " Math.round(each.offsetHeight / parseFloat(getComputedStyle(each).lineHeight)))"
        )
        assert len(lines) == QUESTIONS
        assert max(lines) <= LINES
        assert not heard


def test_it_can_be_printed(site: Path, browser: Browser) -> None:
    with browser.new_context() as context, browsing.visit(context, site / "interview.html") as (page, _):
        sheets = len(re.findall(rb"/Type\s*/Page\b", page.pdf(prefer_css_page_size=True)))
        page.emulate_media(media="print")
        assert not page.locator("nav:visible").count()
    assert sheets <= 3

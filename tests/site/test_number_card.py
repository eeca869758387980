"""A number tells on a click what it is, where its rows are, and how to measure it anew."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.site.conftest import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.mark.parametrize(
    ("place", "number", "what"),
    [
        ("scoreboard.html", ".board tbody td data[data-src$='/ratio']", "How many times as fast"),
        ("scoreboard.html", ".board tbody td data[data-src$='/low']", "The lower end of that ratio's 99 % interval"),
        ("ladders/softmax.html", ".rung:not([hidden]) .moved td data[data-src$='/time']", "time, µs of"),
        ("ladders/softmax.html", ".rung:not([hidden]) .moved td data[data-src*='counters']", "from ncu's counters"),
    ],
)
def test_a_click_tells_a_numbers_origin(site: Path, browser: Browser, place: str, number: str, what: str) -> None:
    page = browser.new_page()
    page.goto((site / place).as_uri())
    shown = page.locator(number).first
    shown.evaluate("each => { for (let at = each; at; at = at.parentElement) { at.hidden = false; at.open = true; } }")
    shown.click()
    card = page.locator("kt-number .card")
    card.wait_for()
    told = card.inner_text()
    assert told.startswith(shown.inner_text())
    assert what in told
    (table,) = re.findall(r"Rows: (\S+\.csv)", told)
    assert (ROOT / table).exists()
    assert "Run: NVIDIA" in told
    (command,) = re.findall(r"python (profiling/ncu_report\.py .*)", told)
    planned = command.replace(" collect ", " plan ")  # takes the same choice, and measures nothing
    done = subprocess.run([sys.executable, *planned.split()], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    page.keyboard.press("Escape")
    assert card.is_hidden()
    page.close()


def test_a_number_of_another_table_names_its_source(site: Path, browser: Browser) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.locator("data[data-src^='rule#']").first.click()
    assert "Source: rule#" in page.locator("kt-number .card").inner_text()
    page.close()

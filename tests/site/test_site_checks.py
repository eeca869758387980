"""The checks find what is planted: each fault in a page that is sound without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from builder import provenance
from tests.site import browsing, checks
from tests.site.browsing import WIDE
from tests.site.reading import Number

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from builder.site import Site

TEXT = "A twin computes what the other one computes, step by step, and both are measured by the same counters. " * 2
SOUND = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Sound</title><link rel="stylesheet" href="kt.css">
<script src="kt.js" defer></script></head>
<body><header><nav aria-label="Site"><a href="index.html#text">Text</a></nav></header>
<main><h1 id="text">Sound</h1><p>{TEXT}</p></main><footer><p>End</p></footer></body></html>
"""


def planted(folder: Path, *change: str, style: str = "", script: str = "") -> Path:
    """A site of one page, of which a part is changed into another."""
    old, new = change or ("", "")
    assert old in SOUND
    (folder / "index.html").write_text(SOUND.replace(old, new, 1))
    (folder / "kt.css").write_text(style)
    (folder / "kt.js").write_text(script)
    return folder


def static(folder: Path) -> list[str]:
    pytest.importorskip("html5lib")
    return [
        *checks.unparsed([folder / "index.html"]),
        *checks.repeated(folder),
        *checks.foreign(folder),
        *checks.placed(folder, ["/opt/builder"]),
        *checks.broken(folder),
        *checks.over_budget(folder),
    ]


def test_a_sound_page_has_no_fault(tmp_path: Path) -> None:
    assert not static(planted(tmp_path))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("End", "End</b>"), "index.html:5: unexpected-end-tag"),
        (("<footer>", '<footer id="text">'), "id text 2 times"),
        (('href="index.html#text"', 'href="gone.html"'), "leads to gone.html, which is no file"),
        (('href="index.html#text"', 'href="."'), "leads to ., which is no file"),
        (("#text", "#gone"), "leads to index.html#gone, which has no such element"),
        (('"kt.js"', '"https://example.org/kt.js"'), "loads https://example.org/kt.js"),
        (('"kt.css"', '"//example.org/kt.css"'), "loads //example.org/kt.css"),
        (("<p>", '<p style="background: url(https://example.org/a.png)">'), "loads https://example.org/a.png"),
        (("End", "built in /opt/builder"), "names /opt/builder"),
        (("End", "e" * checks.PAGE_BYTES), "bytes of 1,500,000"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_planted_fault_is_found(change: tuple[str, str], fault: str, tmp_path: Path) -> None:
    assert fault in "\n".join(static(planted(tmp_path, *change)))


@pytest.mark.parametrize(
    ("file", "content", "fault"),
    [
        ("style", '@import "https://example.org/a.css";', "kt.css loads https://example.org/a.css"),
        ("script", "fetch('data.json');", "kt.js has fetch("),
        ("script", "x = 'https://example.org';", "kt.js has https://"),
        ("script", " " * 200_001, "own scripts has 200,001 bytes"),
    ],
)
def test_a_fault_planted_beside_a_page_is_found(file: str, content: str, fault: str, tmp_path: Path) -> None:
    assert fault in "\n".join(static(planted(tmp_path, **{file: content})))


def test_a_planted_number_is_found(committed: Site) -> None:
    op = next(each for each in committed.measured if each.op.name == "softmax").op
    source = f"softmax.timings.csv#{op.profile_case.slug}/torch/-/time"
    value = provenance.value(committed, source)
    sound = Number(f"{value:.6g}", source, f"{value:.1f} µs")
    assert not checks.wrong(committed, [sound])
    for number in (
        Number(f"{value * 1.001:.6g}", source, sound.text),
        Number(sound.value, source, f"{value + 0.2:.1f} µs"),
        Number(sound.value, source.replace("torch", "nobody"), sound.text),
        Number(sound.value, source.replace("timings", "gone"), sound.text),
    ):
        assert checks.wrong(committed, [number]), number


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("1,235", 1234.6, True),
        ("1,235", 1236.0, False),
        ("−3.2 %", -0.0321, True),
        ("0.995 ×", 0.9952, True),
        ("0.995 ×", 0.9942, False),
        ("1.2e-05", 1.24e-5, True),
        ("1 of 2", 1.0, False),
        ("none", 0.0, False),
    ],
)
def test_what_a_text_shows(text: str, value: float, shown: bool) -> None:
    assert checks.shows(text, value) is shown


@pytest.mark.parametrize(
    ("change", "script", "fault"),
    [
        ((), "", ""),
        ((), "console.warn('so')", "warning: so"),
        ((), "throw new Error('so')", "raised"),
        ((), "new Image().src = 'https://localhost:9/a.png'", "asks https://localhost:9/a.png"),
        (("<footer>", "<h1>Two</h1><footer>"), "", "not one h1"),
        (("<footer><p>End</p></footer>", ""), "", "no footer"),
        (("End", '<span style="display: inline-block; width: 2000px">End</span>'), "", "2008 px of 1280"),
        (("End", '<span style="color: #ccc">End</span>'), "", "color-contrast (serious)"),
        (("End", '<img src="kt.css">'), "", "image-alt (critical)"),
        (("End", '<button tabindex="3">Press</button>'), "", "button Press is out of order"),
        (("End", '<button style="outline: none">Press</button>'), "", "button Press does not show that it has the"),
        (
            ("End", '<button id="a">A</button><button>B</button>'),
            "a.onkeydown = () => false",
            "B is not reached by Tab",
        ),
        ((TEXT, ""), "", "hardly a text"),
        (("End", "<kt-map></kt-map>"), "", ""),
        (("<h1", "<kt-map></kt-map><h1"), "", "KT-MAP is empty"),
    ],
)
def test_a_browser_finds_a_planted_fault(
    change: tuple[str, ...], script: str, fault: str, tmp_path: Path, browser: Browser
) -> None:
    found: list[str] = []
    page_checks = (browsing.structure, browsing.overflow, browsing.scriptless, browsing.unreachable)
    page_path = planted(tmp_path, *change, script=script) / "index.html"
    with browser.new_context(viewport=WIDE) as context, browsing.visit(context, page_path) as (page, heard):
        found += [told for check in (*page_checks, browsing.inaccessible) for told in check(page)]
        found += heard
    assert fault in "\n".join(found)
    assert bool(found) == bool(fault), found

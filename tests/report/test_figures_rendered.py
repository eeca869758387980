"""The committed figures as a browser shows them, as wide as GitHub does: no text over another one, none cut off."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path

from kernel_twins.report.rows import store
from tests import browser

PLOTS = store.ROOT / "profiling" / "plots"
WIDTH = 846

pytestmark = browser.needed

# Of a line's box, what lies above its capitals and below its descenders takes no part.
PAGE = """<!doctype html><meta charset="utf-8">
<style>body {{ margin: 0 }} svg {{ width: {width}px; height: auto; display: block }}</style>
{figures}
<pre id="faults"></pre>
<script>
const faults = [];
for (const figure of document.querySelectorAll("section")) {{
  const svg = figure.querySelector("svg"), card = svg.getBoundingClientRect();
  const scale = card.width / svg.viewBox.baseVal.width;
  const texts = [...svg.querySelectorAll("text")].map(text => {{
    const box = text.getBoundingClientRect(), size = parseFloat(getComputedStyle(text).fontSize) * scale;
    const said = text.textContent, top = box.top + 2, bottom = box.bottom - 2;
    return {{ said, size, left: box.left, right: box.right, top, bottom }};
  }});
  const tell = fault => faults.push(`${{figure.id}}: ${{fault}}`);
  if (!texts.length) tell("no text");
  texts.forEach((a, index) => {{
    if (a.left < card.left + 4 || a.right > card.right - 4 || a.top < card.top || a.bottom > card.bottom)
      tell(`"${{a.said}}" is cut off`);
    if (a.size < 10.9) tell(`"${{a.said}}" has ${{a.size.toFixed(1)}} pixels`);
    for (const b of texts.slice(index + 1))
      if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
        tell(`"${{a.said}}" lies on "${{b.said}}"`);
  }});
}}
document.getElementById("faults").textContent = JSON.stringify(faults);
</script>
"""


def faults(folder: Path, figures: Mapping[str, str]) -> list[str]:
    """What is wrong with the texts of the figures, SVG by name, a line each."""
    sections = "\n".join(f'<section id="{name}">{svg[svg.index("<svg") :]}</section>' for name, svg in figures.items())
    page = folder / "figures.html"
    page.write_text(PAGE.format(width=WIDTH, figures=sections))
    dom = browser.dom(page, WIDTH, 1200)
    found = re.search(r'<pre id="faults">(.*?)</pre>', dom, re.DOTALL)
    assert found and found[1]
    told: list[str] = json.loads(html.unescape(found[1]))
    return told


def test_texts_of_committed_figures_neither_overlap_nor_are_cut_off(tmp_path: Path) -> None:
    figures = {path.stem: path.read_text() for path in sorted(PLOTS.glob("*.svg"))}
    assert figures
    assert faults(tmp_path, figures) == []


def test_a_figure_with_such_faults_is_found(tmp_path: Path) -> None:
    texts = (
        '<text x="50" y="50" font-size="12">under</text><text x="52" y="52" font-size="12">over</text>'
        '<text x="820" y="90" font-size="12">beyond</text><text x="50" y="150" font-size="8">small</text>'
    )
    figure = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 200">{texts}</svg>'
    assert faults(tmp_path, {"bad": figure}) == [
        'bad: "under" lies on "over"',
        'bad: "beyond" is cut off',
        'bad: "small" has 8.0 pixels',
    ]

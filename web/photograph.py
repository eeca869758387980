"""The README's pictures of the site: ``python web/photograph.py``, after ``make site``.

Needs Chromium, Playwright, and Pillow, which matplotlib brings.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
SITE = ROOT / "build" / "site"
PICTURES = {"front": "index.html", "ladder": "ladders/matmul_bf16.html#v03_swizzled"}
WIDTH, HEIGHT = 1280, 1390
COLOURS = 128  # as many keep a picture below 200 KB


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None or not SITE.exists():
        needed = "Chromium: apt-get install chromium" if chromium is None else "the site: make site"
        print(f"photograph.py needs {needed}", file=sys.stderr)
        return 3
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        for name, place in PICTURES.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
            page.goto(f"{SITE.as_uri()}/{place}")
            taken = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
            # Median cut, the default, loses the colours of small marks.
            few = taken.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            few.save(FOLDER / f"{name}.png", optimize=True)
            page.close()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

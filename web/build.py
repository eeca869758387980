"""Build the site: ``python web/build.py`` writes build/site/, which opens from disk."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "web")]

from builder import pages  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the site from the committed measurements; needs no GPU.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="a folder that is made anew")
    asked = parser.parse_args()
    began = time.monotonic()
    written = pages.build(asked.out)
    size = sum(each.stat().st_size for each in asked.out.rglob("*") if each.is_file())
    print(f"{len(written)} pages, {size / 1e6:.1f} MB, {time.monotonic() - began:.0f} s: {asked.out}/ladders/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())

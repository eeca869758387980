"""Build the site: ``python web/build.py`` writes build/site/, which opens from disk."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "web"), str(ROOT / "hardware-survey")]

try:
    from builder.pages import PAGES
    from builder.site import Site
except ModuleNotFoundError as error:
    sys.exit(f"web/build.py needs {error.name}, which is not installed: pip install -e '.[site]'")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the site from the committed measurements; needs no GPU.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="a folder that is made anew")
    parser.add_argument("--only", choices=sorted(PAGES), metavar="PAGE", nargs="+", help=f"of {', '.join(PAGES)}")
    asked = parser.parse_args()
    began = time.monotonic()
    if not asked.only and asked.out.exists():
        if any(asked.out.iterdir()) and not (asked.out / "kt.js").is_file():
            sys.exit(f"--out {asked.out} has files and is no site of ours: name a folder that may be made anew")
        shutil.rmtree(asked.out)
    site = Site(asked.out)
    for name, write in PAGES.items():
        if asked.only is None or name in asked.only:
            write(site)
    files = [each for each in asked.out.rglob("*") if each.is_file()]
    pages, size = sum(each.suffix == ".html" for each in files), sum(each.stat().st_size for each in files)
    print(f"{asked.out / 'index.html'}: {pages} pages, {size / 1e6:.1f} MB, in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

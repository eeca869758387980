"""A page as headless Chromium leaves it, once its scripts have run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

# The shell has no windows of its own to draw, and opens a page in half the time.
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)

needed = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


def dom(page: Path, width: int, height: int) -> str:
    """The page's document, in a window of so many pixels; what the browser keeps lies beside the page."""
    assert CHROMIUM
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--window-size={width},{height}"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout

"""The site as it is built from this tree: once a run, however many processes run tests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import CHROMIUM

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from builder.site import Site

ROOT = Path(__file__).resolve().parents[2]

_GENERATOR = ("jinja2", "markdown_it", "mdit_py_plugins", "pygments")
collect_ignore_glob = [] if all(map(find_spec, _GENERATOR)) else ["test_*.py"]

# Laid before all other modules: the build finds neither torch nor Triton, and no network.
_HIDDEN = {
    "torch.py": "raise ImportError('hidden: the site is built without it')\n",
    "triton.py": "raise ImportError('hidden: the site is built without it')\n",
    "sitecustomize.py": "import sys\n"
    "def refuse(event, arguments):\n"
    "    if event in ('socket.connect', 'socket.getaddrinfo', 'socket.sendto'):\n"
    "        raise ConnectionError(f'the site is built without a network, but {event} {arguments}')\n"
    "sys.addaudithook(refuse)\n",
}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run, which all its processes have."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def _once(folder: Path, make: Callable[[Path], None], *, wait: bool = True) -> Path:
    """A folder that the first process makes, for which others wait, or not."""
    with folder.with_suffix(".lock").open("w") as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if not folder.exists():
            make(folder)
    return folder


def _build(folder: Path, **environment: str) -> None:
    half = folder.with_suffix(".half")  # a build that fails leaves no site
    command = [sys.executable, str(ROOT / "web" / "build.py"), "--out", str(half)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    half.rename(folder)


def _build_anew(folder: Path) -> None:
    hidden = folder.with_name("hidden")
    hidden.mkdir(exist_ok=True)
    for name, text in _HIDDEN.items():
        (hidden / name).write_text(text)
    _build(folder, PYTHONPATH=str(hidden), PYTHONHASHSEED="1")


@pytest.fixture(scope="session")
def site(shared: Path) -> Path:
    """The built site. A process that would wait for it builds it anew meanwhile."""
    if not _once(shared / "site", _build, wait=False).exists():
        _once(shared / "anew", _build_anew, wait=False)
    return _once(shared / "site", _build)


@pytest.fixture(scope="session")
def site_anew(shared: Path) -> Path:
    """The site, built a second time: without torch, Triton and network, with strings hashed otherwise."""
    return _once(shared / "anew", _build_anew)


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """What resolves numbers: the committed rows."""
    from builder.site import Site

    return Site(tmp_path_factory.mktemp("committed"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, once a process; without one tests are skipped, but in CI."""
    if not CHROMIUM:
        stop = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        stop("needs Chromium: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        yield started
        started.close()

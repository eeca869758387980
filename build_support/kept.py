"""A cache of results that depend only on files, with digests of those files, in the user's cache directory.

An entry is valid while all files that were read to make it are unchanged. The folder is ``kernel-twins`` below
XDG_CACHE_HOME or ~/.cache; with ``KERNEL_TWINS_NO_CACHE=1`` nothing is read or written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OFF = "KERNEL_TWINS_NO_CACHE"

_known: dict[tuple[Path, int, int, int, int], str] = {}  # digests by path, size and times


def folder() -> Path | None:
    """The cache's folder; None if there is no cache."""
    if os.environ.get(OFF) == "1":
        return None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kernel-twins"


def find(kind: str, key: Sequence[str]) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    """The values and blobs that ``keep`` stored under a key; None if one of the files, or a blob, has changed since."""
    if (place := _place(kind, key)) is None:
        return None
    try:
        entry = json.loads((place / "entry.json").read_text())
        blobs = {name: (place / name).read_bytes() for name in entry["blobs"]}
    except (OSError, ValueError):
        return None
    if entry["key"] != list(key) or any(_digest(blobs[name]) != said for name, said in entry["blobs"].items()):
        return None
    if any(_file_digest(_absolute(name)) != said for name, said in entry["files"].items()):
        return None
    return entry["values"], blobs


def keep(
    kind: str,
    key: Sequence[str],
    files: Iterable[Path],
    values: Mapping[str, Any],
    blobs: Mapping[str, bytes],
    *,
    since: int,
) -> None:
    """Store a result that was made from files, by work that began at ``since`` (time.time_ns).

    Nothing is stored if a file has changed since then, because it is unknown which contents were read, or if the folder
    cannot be written.
    """
    if (place := _place(kind, key)) is None:
        return
    files = list(files)
    try:
        if any(max(found.st_mtime_ns, found.st_ctime_ns) >= since for found in map(os.stat, files)):
            return
    except OSError:
        return
    read = {_name(path): _file_digest(path) for path in files}
    if "" in read.values():
        return
    entry = {
        "key": list(key),
        "files": read,
        "values": dict(values),
        "blobs": {name: _digest(content) for name, content in blobs.items()},
    }
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, content in [*blobs.items(), ("entry.json", json.dumps(entry).encode())]:
            _write(place / name, content)
    except OSError:
        return


@contextlib.contextmanager
def alone(kind: str, key: Sequence[str]) -> Iterator[None]:
    """A lock: other processes that would make the same result wait."""
    if (top := folder()) is None:
        yield
        return
    try:
        (top / "locks").mkdir(parents=True, exist_ok=True)
        lock = (top / "locks" / _digest(json.dumps([kind, *key]).encode())[:2]).open("w")
    except OSError:
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _place(kind: str, key: Sequence[str]) -> Path | None:
    top = folder()
    return top and top / kind / _digest(json.dumps(list(key)).encode())[:32]


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, also if other processes write it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def _name(path: Path) -> str:
    """Files of the clone, by their path in it, so that another clone of the same files finds the entry."""
    path = Path(os.path.normpath(path))
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _absolute(name: str) -> Path:
    return ROOT / name


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _file_digest(path: Path) -> str:
    """A file's digest; empty if there is no such file."""
    try:
        found = path.stat()
        written = (path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if written not in _known:
            _known[written] = _digest(path.read_bytes())
        return _known[written]
    except OSError:
        return ""

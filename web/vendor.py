"""Fetch the site's libraries anew from npm, as web/vendor/vendor.json names them: ``python web/vendor.py``.

To take another version, write it into vendor.json: what does not fit is told, with the digest to put there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TypedDict

FOLDER = Path(__file__).resolve().parent / "vendor"


class File(TypedDict):
    """A file of a package, and the digest of what is committed."""

    path: str
    sha256: str


class Library(TypedDict):
    """A package of npm, with the digest of its archive, and the files that are taken of it."""

    name: str
    version: str
    licence: str
    integrity: str
    files: dict[str, File]


def libraries() -> list[Library]:
    found: list[Library] = json.loads((FOLDER / "vendor.json").read_text())
    return found


def fetch(library: Library, folder: Path) -> dict[str, bytes]:
    """A library's files by name; SystemExit where the archive or a file is another one than vendor.json says."""
    package = f"{library['name']}@{library['version']}"
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
    archive = folder / subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    _same(f"the archive of {package}", f"sha512-{digest}", library["integrity"])
    with tarfile.open(archive) as packed:
        taken = {name: packed.extractfile(f"package/{file['path']}") for name, file in library["files"].items()}
        content = {name: member.read() for name, member in taken.items() if member}
    for name, file in library["files"].items():
        _same(f"{file['path']} of {package}", hashlib.sha256(content[name]).hexdigest(), file["sha256"])
    return content


def _same(what: str, found: str, expected: str) -> None:
    if found != expected:
        sys.exit(f"{what} is {found}, and vendor.json says {expected}: nothing was written of it")


def main() -> int:
    if not shutil.which("npm"):
        sys.exit("npm is needed: sudo apt-get install npm, or sudo dnf install npm")
    for library in libraries():
        with tempfile.TemporaryDirectory() as folder:
            for name, content in fetch(library, Path(folder)).items():
                (FOLDER / name).write_bytes(content)
        print(f"{library['name']} {library['version']}: {', '.join(library['files'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The libraries that the site brings along are those that vendor.json names, and load nothing else."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

import vendor

FILES = {name: file for library in vendor.libraries() for name, file in library["files"].items()}
SCRIPTS = sorted(name for name in FILES if name.endswith(".js"))


def test_every_library_has_its_script_and_its_licence() -> None:
    for library in vendor.libraries():
        assert sorted(name.rpartition(".")[2] for name in library["files"]) == ["LICENSE", "js"], library["name"]


def test_nothing_else_lies_there() -> None:
    assert {path.name for path in vendor.FOLDER.iterdir()} == {*FILES, "vendor.json"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_is_what_was_fetched(name: str) -> None:
    content = (vendor.FOLDER / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == FILES[name]["sha256"]
    assert len(content) <= 2**20


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_library_names_no_address_but_those_of_markup(name: str) -> None:
    code = re.sub(r"/\*.*?\*/|^\s*//.*?$", "", (vendor.FOLDER / name).read_text(), flags=re.DOTALL | re.MULTILINE)
    assert {url.split("/")[2] for url in re.findall(r"https?://[^\s\"'`]+", code)} <= {"www.w3.org"}


def test_another_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text('#!/bin/sh\necho other > "$4/diff.tgz"\necho diff.tgz\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SystemExit, match=r"^the archive of diff@9\.0\.0 is sha512-\S+, and vendor\.json says sha512-"):
        vendor.fetch(vendor.libraries()[0], tmp_path)

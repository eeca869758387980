"""Copies of the tree in which tests do what a contributor does: lay files beside the others, edit some, build.

A copy is a whole clone but for git's own: whatever runs in it finds its own files. It is built from the objects of this
tree's build and those of the new files, so that nothing is compiled twice.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from build_support import extension, kept, parts, sources
from kernel_twins.ops import OPS

FOLDERS = (
    "build_support", "cuda-kernels", "docs", "hardware-survey", "kernel_twins", "profiling", "tests",
    "triton-kernels", "web",
)  # fmt: skip
FILES = (
    "CONTRIBUTING.md", "KERNEL_LOG.md", "LICENSE", "Makefile", "README.md", "pyproject.toml", "requirements.txt",
    "setup.py",
)  # fmt: skip
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so", "new_operation", "new_step")

Edits = Mapping[str, Sequence[tuple[str, str]]]
"""By file, what is replaced in it, and by what."""


def files() -> list[Path]:
    """All of this tree that copies are made of."""
    found = [path for folder in FOLDERS for path in (kept.ROOT / folder).rglob("*") if path.is_file()]
    own = [path for path in found if "__pycache__" not in path.parts and path.suffix != ".so"]
    return [*own, *(kept.ROOT / file for file in FILES)]


def copied(copy: Path) -> Path:
    """A new copy, in a folder that is not there yet."""
    for folder in FOLDERS:
        shutil.copytree(kept.ROOT / folder, copy / folder, ignore=_LEFT_OUT)
    for file in FILES:
        shutil.copy(kept.ROOT / file, copy / file)
    return copy


def lay(fixture: str, copy: Path) -> list[str]:
    """Lay the files of a fixture into the folders of the copy that they lie in; their names. Each must be new."""
    top = kept.ROOT / "tests" / "fixtures" / fixture
    files = sorted(path.relative_to(top) for path in top.rglob("*") if path.is_file() and path.suffix != ".pyc")
    for file in files:
        assert not (copy / file).exists(), f"{file} is there already"
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(top / file, copy / file)
    return list(map(str, files))


def edit(edits: Edits, copy: Path) -> None:
    for file, replacements in edits.items():
        text = (copy / file).read_text()
        for old, new in replacements:
            assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        (copy / file).write_text(text)


def run(copy: Path, *arguments: str, **variables: str) -> str:
    """What Python prints, called with these arguments in a copy; AssertionError with all that it said, if it fails."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env=own | {"PYTHONDONTWRITEBYTECODE": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def unbuilt() -> str:
    """Why no copy can be built of this tree's objects; empty where one can be."""
    lacking = [file for file in _others() if not sources.object_of(file, kept.ROOT).exists()]
    return f"{lacking[0]} is not compiled: python setup.py build_ext" if lacking else ""


def build(copy: Path, command: str = "build_ext") -> str:
    return run(copy, "-c", f"from tests import copies; copies.build_here({str(kept.ROOT)!r}, {command!r})")


def build_here(other: str, command: str) -> None:
    """As setup.py builds, but for the sources of another tree: of these its objects are taken."""
    described = extension.describe()
    others = {file for file in _others() if (Path(other) / file).exists()}
    for each in described["ext_modules"]:
        taken = [file for file in map(Path, each.sources) if file in others]
        each.sources = [source for source in each.sources if Path(source) not in others]
        each.extra_objects = [str(sources.object_of(file, Path(other))) for file in taken]
    with mock.patch.object(extension, "describe", return_value=described):
        sys.argv = ["setup.py", "--quiet", command]
        runpy.run_path("setup.py", run_name="__main__")


def _others() -> list[Path]:
    """What is compiled and not generated."""
    divided = parts.divide(OPS.values())
    return [file for file in (*divided.public_files, *divided.ladder_files) if file.parent != sources.GENERATED]

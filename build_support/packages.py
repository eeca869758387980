"""Maps the repository's folders to packages of a wheel."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from setuptools import find_packages
from setuptools.command.build_py import build_py

# Folders whose names cannot be imported, and the names of their packages.
MAPPED = {"kernel_twins._triton": "triton-kernels"}


def describe(root: Path) -> dict[str, Any]:
    """The packages, package_dir and package_data arguments of ``setup``."""
    package_dir = {
        f"{parent}.{path.relative_to(root / folder).as_posix().replace('/', '.')}": path.relative_to(root).as_posix()
        for parent, folder in MAPPED.items()
        for path in sorted((root / folder).rglob("*"))
        if _is_package(path)
    }
    own = find_packages(str(root), include=["kernel_twins", "kernel_twins.*"])
    package_data = {
        "kernel_twins": ["*.pyi"],
        "kernel_twins.functional": ["*.json"],
        "kernel_twins._triton.tuned": ["*.json"],
    }
    return {"packages": own + list(package_dir), "package_dir": package_dir, "package_data": package_data}


class BuildPython(build_py):
    """Starts from an empty folder: setuptools would keep modules in build/ that have moved since, and pack them."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib) / "kernel_twins", ignore_errors=True)
        super().run()


def _is_package(path: Path) -> bool:
    # A folder there needs no __init__.py, and tuned/ holds only the autotuner's winners, no code.
    return path.is_dir() and path.name.isidentifier() and any([*path.glob("*.py"), *path.glob("*.json")])

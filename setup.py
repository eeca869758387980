"""Builds kernel_twins._C and maps the repository's folders to packages; the rest stands in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a PEP 517 build does not put this folder there

from build_support import extension, packages  # noqa: E402

described = extension.describe()
described["cmdclass"]["build_py"] = packages.BuildPython
setup(license="MIT", **packages.describe(ROOT), **described)

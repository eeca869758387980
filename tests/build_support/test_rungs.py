"""Rungs that read alone: how much a learner must open besides a step's own file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_support import sources
from kernel_twins import OPS
from kernel_twins.report.rows import identity

MOST_LINES = 250  # of headers, beside those that all kernels share
SENDING = {"matmul_bf16": ("v15_dispatch", "v18_few_rows"), "linear": ("v01_fused", "v02_few_rows")}
"""As the last step does, which hands them cases."""

_LIB = sources.ROOT / "cuda-kernels" / "lib"
_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)


@pytest.mark.parametrize("op", OPS)
def test_a_rung_needs_few_lines_of_headers(op: str) -> None:
    *rungs, _ = OPS[op].steps_of("cuda")  # the last step sends cases to kernels, which headers hold
    for step in (step for step in rungs if step.name not in SENDING.get(op, ())):
        file = identity.step_file(op, step.name, "cuda")
        headers = [path for path in _with_headers(file) if path != file and not path.is_relative_to(_LIB)]
        lines = sum(len(path.read_text().splitlines()) for path in headers)
        assert lines <= MOST_LINES, f"{op} {step.name}: {lines} lines in {', '.join(path.name for path in headers)}"


def _with_headers(file: Path) -> set[Path]:
    found, ahead = {file}, [file]
    while ahead:
        for header in _included(ahead.pop()):
            if header not in found:
                found.add(header)
                ahead.append(header)
    return found


def _included(file: Path) -> Iterator[Path]:
    folders = (file.parent, *(sources.ROOT / path for path in sources.INCLUDE_DIRS))
    for name in _INCLUDE.findall(file.read_text()):
        yield next(path for folder in folders if (path := (folder / name).resolve()).exists())

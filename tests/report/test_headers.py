"""Why a step may pay, read from the header of its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_twins import OPS
from kernel_twins.report.pages import headers
from kernel_twins.report.rows.base import InvalidDataError

OP = OPS["vector_add"]
STEP = OP.steps[0]
CUDA = """// vector_add v01_scalar: one element a thread.
//
// Change:   none yet.
// Why:      {first},
//           across two lines.
// Counter:  time.
#include "args.h"
"""
TRITON = '''"""softmax v08_cooperative: programs share a row.

Why:      {first},
          across two lines.
"""
'''


def why(monkeypatch: pytest.MonkeyPatch, root: Path, text: str, op: str = "vector_add", step: str = STEP.name) -> str:
    """What is read where a step's file, CUDA's if it has one, holds that text."""
    spec = OPS[op]
    path = root / spec.file(step, spec.step(step).backends[0])
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setattr(headers, "ROOT", root)
    return headers.why(spec, spec.step(step))


def test_lines_are_joined_up_to_the_next_field(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = CUDA.format(first="the definition, word for word")
    assert why(monkeypatch, tmp_path, text) == "The definition, word for word, across two lines."


def test_a_step_without_cuda_is_read_in_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = TRITON.format(first="set-up is paid once")
    assert why(monkeypatch, tmp_path, text, "softmax", "v08_cooperative") == "Set-up is paid once, across two lines."


@pytest.mark.parametrize("first", ["v04's rows", "mma.sync gets half", "cp_async copies", "16 loads", "TF32 keeps"])
def test_what_is_no_word_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: str) -> None:
    assert why(monkeypatch, tmp_path, CUDA.format(first=first)).startswith(f"{first},")


def test_a_header_without_a_reason_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InvalidDataError, match=r"v01_scalar\.cu has no 'Why:' in its header: say there why"):
        why(monkeypatch, tmp_path, "// vector_add v01_scalar\n//\n// Change:   none yet.\n")


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_every_step_tells_why(op) -> None:
    for step in op.steps:
        told = headers.why(op, step)
        assert told.endswith((".", ")")) and "//" not in told and "  " not in told, (step.name, told)

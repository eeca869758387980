"""What a step does and why that may pay, read from the header of its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_twins import OPS
from kernel_twins.__main__ import main
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


def told(
    monkeypatch: pytest.MonkeyPatch, root: Path, text: str, op: str = "vector_add", step: str = STEP.name
) -> tuple[str, str]:
    """What is read where a step's file, CUDA's if it has one, holds that text."""
    spec = OPS[op]
    path = root / spec.file(step, spec.step(step).backends[0])
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.setattr(headers, "ROOT", root)
    return headers.told(spec, spec.step(step))


def test_lines_are_joined_up_to_the_next_field(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = CUDA.format(first="the definition, word for word")
    assert told(monkeypatch, tmp_path, text) == (
        "One element a thread.",
        "The definition, word for word, across two lines.",
    )


def test_a_step_without_cuda_is_read_in_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = TRITON.format(first="set-up is paid once")
    title, why = told(monkeypatch, tmp_path, text, "softmax", "v08_cooperative")
    assert (title, why) == ("Programs share a row.", "Set-up is paid once, across two lines.")


def test_a_title_of_two_lines_is_joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = CUDA.format(first="it").replace("one element a thread.", "one element\n// a thread.")
    assert told(monkeypatch, tmp_path, text)[0] == "One element a thread."


@pytest.mark.parametrize("first", ["v04's rows", "mma.sync gets half", "cp_async copies", "16 loads", "TF32 keeps"])
def test_what_is_no_word_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: str) -> None:
    assert told(monkeypatch, tmp_path, CUDA.format(first=first))[1].startswith(f"{first},")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("// vector_add v01_scalar: one element.\n//\n// Change:   none yet.\n", "Why:"),
        ("// vector_add\n//\n// Why:      it is.\n", "title"),
    ],
)
def test_a_header_without_either_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text, field) -> None:
    with pytest.raises(InvalidDataError, match=rf"v01_scalar\.cu has no '{field}' in its header: say there what"):
        told(monkeypatch, tmp_path, text)


def test_a_list_of_the_ladders_has_the_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    found = capsys.readouterr().out
    assert "  v01_scalar           cuda triton  >=8.0    One thread adds one element.\n" in found
    assert all(headers.told(op, step)[0] in found for op in OPS.values() for step in op.steps)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_every_step_tells_both(op) -> None:
    for step in op.steps:
        for each in headers.told(op, step):
            assert each.endswith((".", ")")) and "//" not in each and "  " not in each, (step.name, each)

"""What the header of a step's file says: the leading comment in CUDA C++, the module's docstring in Triton."""

from __future__ import annotations

import re
from pathlib import Path

from kernel_twins.report.rows.base import ROOT, InvalidDataError, shown
from kernel_twins.spec import Op, Step

_FIELDS = {
    "title": re.compile(r"^(?:// |\"\"\")\w+ v\d\d_\w+:(.+(?:\n(?:// |(?!//))\S.*)*)"),
    "Why:": re.compile(r"^(?:// )?Why:(.+(?:\n(?://)? {9,}\S.*)*)", re.MULTILINE),  # lines that go on are indented
}
_WORD = re.compile(r"[a-z]+(?=[ ,;:'-])")  # not v04's, nor mma.sync or st_async


def file_of(op: Op, step: Step) -> Path:
    """A step's CUDA file, or its Triton file where it has no other."""
    return ROOT / op.file(step.name, step.backends[0])


def told(op: Op, step: Step) -> tuple[str, str]:
    """Title and ``Why:`` of a step's file, each in whole sentences; InvalidDataError where it lacks one."""
    path = file_of(op, step)
    text = path.read_text()
    fields = []
    for field, pattern in _FIELDS.items():
        if (found := pattern.search(text)) is None:
            raise InvalidDataError(
                f"{shown(path)} has no {field!r} in its header: say there what the step does and why it may pay"
            )
        said = " ".join(line.removeprefix("//").strip() for line in found[1].splitlines())
        fields.append(said[0].upper() + said[1:] if _WORD.match(said) else said)
    title, why = fields
    return title, why

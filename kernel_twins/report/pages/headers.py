"""What the header of a step's file says: the leading comment in CUDA C++, the module's docstring in Triton."""

from __future__ import annotations

import re

from kernel_twins.report.rows.base import InvalidDataError, shown
from kernel_twins.report.rows.store import ROOT
from kernel_twins.spec import Op, Step

_WHY = re.compile(r"^(?:// )?Why:(.+(?:\n(?://)? {9,}\S.*)*)", re.MULTILINE)  # lines that go on are indented
_WORD = re.compile(r"[a-z]+(?=[ ,;:'-])")  # not v04's, nor mma.sync or st_async


def why(op: Op, step: Step) -> str:
    """The ``Why:`` of a step's CUDA file, or of its Triton file where it has no other, in one line of whole sentences.

    InvalidDataError where the file has none.
    """
    path = ROOT / op.file(step.name, "cuda" if "cuda" in step.backends else "triton")
    found = _WHY.search(path.read_text())
    if found is None:
        raise InvalidDataError(f"{shown(path)} has no 'Why:' in its header: say there why the step may pay")
    told = " ".join(line.removeprefix("//").strip() for line in found[1].splitlines())
    return told[0].upper() + told[1:] if _WORD.match(told) else told

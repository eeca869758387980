"""How many instructions of each opcode a listing holds: what a long difference comes to."""

from __future__ import annotations

import re
from collections import Counter

from kernel_twins.compiler import disassembly

STAGES = ("ptx", "sass")
"""The stages that are made of instructions."""

_PTX = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)(?=[\s;])", re.MULTILINE)
_SASS = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
_WIDTHS = ("64", "128")


def counts(text: str, stage: str) -> Counter[str]:
    """Instructions by opcode, without NOPs, in the text of a stage as ``show`` prints it.

    Of SASS an opcode's first part and the width of an access, ``LDG.128`` of ``LDG.E.128.CONSTANT``; of PTX all of it.
    """
    if stage == "ptx":
        return Counter(_PTX.findall(text))
    codes = (disassembly.opcode(instruction) for instruction in _SASS.findall(text))
    return Counter(_brief(code) for code in codes if code != "NOP")


def _brief(code: str) -> str:
    name, *parts = code.split(".")
    return ".".join([name, *(part for part in parts if part in _WIDTHS)])

"""Five passes of Triton's compiler, each with its job, and what of it a kernel's stages show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kernel_twins.report.sweeps.stages import Recorded

Patterns = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """``patterns`` are sought in their order: a stage, and a regular expression. ``dump`` is one for passes.py."""

    name: str
    job: str
    patterns: Patterns
    dump: str


@dataclass(frozen=True, slots=True)
class Evidence:
    stage: str
    number: int  # of the stage's lines, from 0
    line: int  # of the step's file, 0 for none
    text: str


# Several elements along one dimension: what is several along two is the default of a product's result.
_WIDE_LAYOUT = r"#ttg\.blocked<\{sizePerThread = \[(?:1, )*(?:[2-9]|\d\d+)(?:, 1)*\].*?order = \[[^\]]*\]"
_SWIZZLED = (
    r"(?:nvmma_shared<\{swizzlingByteWidth = [1-9]\d*"
    r"|swizzle_byte_width = [1-9]\d*"
    r"|swizzled_shared<\{vec = \d+, perPhase = \d+, maxPhase = (?:[2-9]|\d\d))"
)
PASSES = (
    Pass(
        "coalescing",
        "gives a thread neighbouring elements, along the dimension that is contiguous in memory",
        (("ttgir", _WIDE_LAYOUT),),
        _WIDE_LAYOUT,
    ),
    Pass(
        "shared memory",
        "puts tiles where all threads of a block read them, and gives each its place there",
        (("ttgir", r"ttg\.local_alloc\b"), ("llir", r"@global_smem\b")),
        r"ttg\.shared = [1-9]",
    ),
    Pass(
        "swizzle",
        "permutes a tile's pieces, so that rows and columns lie in different banks",
        (("ttgir", _SWIZZLED),),
        _SWIZZLED,
    ),
    Pass(
        "vectorization",
        "reads what a thread has side by side in one access",
        (
            ("ptx", r"ld\.global[\w.:]*\.v[248]\.b32\b"),
            ("ptx", r"cp\.async\.c[ag]\.shared\.global .*0x(?:10|8)\b"),
            ("sass", r"LDG\.E\.(?:64|128)"),
            ("sass", r"LDGSTS\.E\.(?:\w+\.)*128"),
        ),
        r"cp\.async\.cg\.shared\.global .*0x10",
    ),
    Pass(
        "tensor cores",
        "turns a product of tiles into the tensor cores' instructions",
        (
            ("ttgir", r"ttng\.warp_group_dot\b"),
            ("ttgir", r"tt\.dot .*#mma"),
            ("ptx", r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.m\w+"),
            ("sass", r"HGMMA|HMMA"),
        ),
        r"ttng\.warp_group_dot\b",
    ),
)


def of(recorded: Recorded) -> dict[str, list[Evidence]]:
    """By pass: the first line of each pattern that is found; none where the pass found nothing to do."""
    return {each.name: list(_found(recorded, each.patterns)) for each in PASSES}


def _found(recorded: Recorded, patterns: Patterns) -> Iterator[Evidence]:
    for stage, pattern in patterns:
        for number, (line, text) in enumerate(recorded.stages.get(stage, [])):
            if re.search(pattern, text):
                yield Evidence(stage, number, line, text.strip())
                break

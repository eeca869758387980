"""The CUDA twins' PTX, of one instantiation of the step's own kernel."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from pathlib import Path

from build_support import sources, toolkit
from kernel_twins.report.sweeps.cells import Kernel

_ENTRY = re.compile(r"^(?=(?:\.visible |\.weak )?\.entry )", re.MULTILINE)
_TAIL = re.compile(r"^\s*\.file\s", re.MULTILINE)
_PARTS = ("_ZN", "_INTERNAL_")


@functools.cache
def found() -> toolkit.Toolkit:
    return toolkit.find(os.environ, "13.0")


def ptxas() -> Path:
    return found().home / "bin" / "ptxas"


def ptx(kernel: Kernel) -> tuple[str, str]:
    """The instantiation's symbol, and PTX that holds it alone, with line tables."""
    source = sources.ROOT / kernel.op.file(kernel.step.name, "cuda")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "step.ptx"
        command = [
            str(found().nvcc),
            *sources.NVCC_FLAGS,
            *(f"-I{sources.ROOT / path}" for path in sources.INCLUDE_DIRS),
            *("-gencode=arch=compute_90a,code=compute_90a", "-ptx", str(source), "-o", str(output)),
        ]
        subprocess.run(command, check=True, capture_output=True)
        head, *entries = _ENTRY.split(output.read_text())
    tail = entries[-1][_TAIL.search(entries[-1]).start() :]  # type: ignore[union-attr]
    step = f"{kernel.op.name}_{kernel.step.name}_kernel"
    (symbol, entry), *_ = [
        (match[1], _TAIL.split(entry)[0])
        for entry in entries
        if (match := re.search(r"\.entry (\w+)", entry)) and step in match[1] and kernel.cuda in match[1]
    ]
    return symbol, head + entry + tail

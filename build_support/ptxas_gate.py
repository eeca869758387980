"""Fails if ptxas warns that a step's wgmma or setmaxnreg has no effect, or if a finished step spills registers.

``python -m build_support.ptxas_gate`` reads ptxas's output of every CUDA step from the extension's build.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from build_support import compiler, sources
from kernel_twins import remedies
from kernel_twins.compiler import disassembly
from kernel_twins.ops import OPS

# C7508-C7515: setmaxnreg ignored, wgmma serialised, and the like: the code is correct, and much slower.
_WARNING = re.compile(r".*\(C75(?:0[89]|1[0-5])\).*")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def complaints(log: str, finished: bool) -> list[str]:
    """Complaints about one file's ``ptxas -v`` output; spills count only in a finished step."""
    found = []
    kernel = "?"
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernel = entry[1]
        if _WARNING.fullmatch(line):
            found.append(line.strip())
        spill = _SPILL.search(line)
        if finished and spill and (int(spill[1]) or int(spill[2])):
            found.append(f"{kernel} spills registers: {spill[0]}")
    return found


def main() -> int:
    ladders = [(op, step) for op in OPS.values() for step in op.steps_of("cuda")]
    libraries = disassembly.find_extensions()
    newer = disassembly.newer_sources(libraries, sources.ROOT) if libraries else []
    if not libraries or newer:
        why = f"{newer[0]} is newer than the build" if newer else "the extension is not built"
        print(f"the ptxas gate stops, {why}: run `{remedies.BUILD}`", file=sys.stderr)
        return 1
    failures = []
    for op, step in ladders:
        source = Path(op.file(step.name, "cuda"))
        log = compiler.log_of(sources.object_of(source))
        said = log.read_text() if log.exists() else ""
        if "for 'sm_90a'" not in said:
            failures.append(f"{source} was not built for 9.0a: run `TORCH_CUDA_ARCH_LIST=9.0a {remedies.BUILD}`")
        failures += [f"{source}: {complaint}" for complaint in complaints(said, step.finished)]
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"ptxas: {len(ladders)} steps, {len(failures)} complaints")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

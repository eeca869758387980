"""Fails where ptxas warns that a step lost its tensor-core or register plan, or where a finished step spills.

``python -m build_support.ptxas_gate`` compiles every CUDA step for 9.0a with the package index's compiler, whose
version is pinned, and reads what ptxas says. Nothing is compiled twice while its sources stay the same.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from build_support import sources, toolkit
from build_support.toolkit import BuildError, Toolkit
from kernel_twins.ops import OPS

FOLDER = sources.ROOT / "build" / "ptxas"
# C7508-C7515: setmaxnreg ignored, wgmma serialised, and their kin; correct code at a fraction of its speed.
_WARNING = re.compile(r".*\(C75(?:0[89]|1[0-5])\).*")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def complaints(log: str, finished: bool) -> list[str]:
    """What is wrong in one file's ``ptxas -v`` output; spills count only in a finished step."""
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


def compile_steps(cuda: Toolkit, root: Path, files: list[Path], folder: Path) -> dict[Path, str]:
    """Compile files (relative to the root) to cubins for 9.0a, below a folder; returns what ptxas said of each.

    CalledProcessError where one does not compile; the compiler's own message has been printed by then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arch = sources.DEFAULT_ARCH.replace(".", "")
    command = [
        str(cuda.nvcc),
        *sources.NVCC_FLAGS,
        *(f"-I{sources.ROOT / path}" for path in sources.INCLUDE_DIRS),
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        *("-Xptxas", "-v"),
    ]
    logs = {path: path.with_suffix(".log") for path in files}
    rules = [
        "rule cubin",
        f"  command = {shlex.join(command)} -MD -MF $out.d -cubin $in -o $out.cubin > $out.new 2>&1"
        " && mv $out.new $out || (cat $out.new; exit 1)",
        "  depfile = $out.d",
        "  deps = gcc",
        *(f"build {log}: cubin {str(root / path).replace(' ', '$ ')}" for path, log in logs.items()),
    ]
    (folder / "build.ninja").write_text("\n".join(rules) + "\n")
    toolkit.put_installed_commands_on_path()
    subprocess.run(["ninja", "-C", str(folder), "--quiet"], check=True)
    return {path: (folder / log).read_text() for path, log in logs.items()}


def main() -> int:
    ladders = [(op, step) for op in OPS.values() for step in op.steps_of("cuda")]
    steps = {Path(f"cuda-kernels/{op.name}/{step.name}.cu"): step for op, step in ladders}
    try:
        cuda = toolkit.from_index(13)
    except BuildError as error:
        print(f"the ptxas gate uses the pinned compiler: {error}, pip install -r requirements.txt", file=sys.stderr)
        return 1
    try:
        logs = compile_steps(cuda, sources.ROOT, list(steps), FOLDER)
    except subprocess.CalledProcessError:
        print("the ptxas gate stops: a step does not compile", file=sys.stderr)
        return 1
    failures = [f"{path}: {said}" for path, step in steps.items() for said in complaints(logs[path], step.finished)]
    for failure in failures:
        print(failure, file=sys.stderr)
    version = ".".join(map(str, cuda.version))
    print(f"ptxas {version}, {sources.DEFAULT_ARCH}: {len(steps)} steps, {len(failures)} complaints")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

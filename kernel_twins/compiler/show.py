"""A step's compiled code at any stage, and the difference between two steps or between the twins.

Nothing is run and no GPU is needed. A CUDA step's SASS comes from the built extension, and its PTX from nvcc. A Triton
step is compiled ahead of time as for the reference GPU (see aot.py). All of it is for compute capability 9.0a.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kernel_twins.compiler import aot, disassembly
from kernel_twins.errors import UnavailableError
from kernel_twins.spec import Backend, Case, Op, Step

STAGES: Mapping[str, tuple[str, ...]] = {"cuda": ("ptx", "sass"), "triton": ("ttir", "ttgir", "llir", "ptx", "sass")}
"""The stages of compilation in each language that can be printed."""

Kernel = tuple[str, str]  # its short name, and its text at a stage

_BRANCH = re.compile(r"((?:@!?U?P\w+ )?(?:BRA|BSSY|CALL|WARPSYNC)\b.*?)(0x[0-9a-f]+) *$")
_ENTRY = re.compile(r"^(?=(?:\.visible |\.weak )?\.entry )", re.MULTILINE)
_LOCATION = r"loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"

# Filters of each stage: a pattern of lines to drop, then (pattern, replacement) pairs for the others.
_DROPPED = {
    "ttir": r"#loc\d*\b",
    "llir": r"!|;|attributes |source_filename|target ",
    "ptx": r"//|\.(?:loc|file|reg|version|target|address_size|pragma)\b|\$L__(?:tmp|func_)\w+:",
    "sass": r"$^",
}
_RENAMED = {
    "ttir": ((_LOCATION, ""), (r"%\d+", "%"), (r"(%[A-Za-z]\w*?)_\d+\b", r"\1"), (r"\^bb\d+", "^bb")),
    "llir": (
        (r" +; preds = .*$|, ![\w.]+ !\d+| #\d+", ""),
        (r"(%[\w.]*?)\.?\d+(?![\w.])", r"\1"),
        (r"^([\w.]*?)\d+:", r"\1:"),
    ),
    "ptx": ((r"//.*$", ""), (r"%([a-z]+)\d+\b", r"%\1"), (r"\$L_\w+", "$L")),
    "sass": ((r"\.reuse\b", ""), (r"\b(U?[RP]|B)\d+\b", r"\1"), (r"\.L\d+", ".L")),
}


def show(op: Op, step: Step, backend: Backend, stage: str, case: Case, kernel: str = "") -> str:
    """One stage of a step's kernels for a case: of a CUDA step, all instantiations of the case's dtype.

    Arguments and errors are those of ``kernels``.
    """
    head, found = kernels(op, step, backend, stage, case, kernel)
    return "\n".join([*([head] if head else []), *(text for _, text in found)])


def kernels(op: Op, step: Step, backend: Backend, stage: str, case: Case, kernel: str = "") -> tuple[str, list[Kernel]]:
    """The head of a stage, and the step's kernels, each with a comment that names it as its first line.

    ``kernel`` chooses those whose name is, or holds, that text; whatever the step's name in it. ValueError where the
    language has no such step, stage or kernel; UnavailableError says which tool is missing.
    """
    if backend not in step.backends:
        raise ValueError(f"{op.name} {step.name} exists in {', '.join(step.backends)} only: {step.gap}")
    if stage not in STAGES[backend]:
        raise ValueError(f"--stage is {stage}; {backend} has {', '.join(STAGES[backend])}")
    head, found = _cuda(op, step, stage, case) if backend == "cuda" else ("", _triton(op, step, stage, case))
    names = _chosen(op, [name for name, _ in found], kernel, f"{op.name} {step.name} {backend}")
    return head, [(name, text) for name, text in found if name in names]


def _chosen(op: Op, names: Sequence[str], kernel: str, owner: str) -> set[str]:
    """Names that are the text, else those that hold it; in all of them the steps' own names are left out."""

    def bare(name: str) -> str:
        return re.sub("|".join(rf"\b{op.name}_{step.name}_" for step in op.steps), "", name)

    found = [name for name in names if bare(name) == bare(kernel)]
    found = found or [name for name in names if bare(kernel) in bare(name)]
    if not found:
        raise ValueError(f"--kernel is {kernel!r}; {owner} has {', '.join(names)}")
    return set(found)


def _cuda(op: Op, step: Step, stage: str, case: Case) -> tuple[str, list[Kernel]]:
    return _cuda_ptx(op, step, case) if stage == "ptx" else ("", _cuda_sass(op, step, case))


def _triton(op: Op, step: Step, stage: str, case: Case) -> list[Kernel]:
    kernels = aot.compiled(op, step, case)
    if stage != "sass":
        return [(kernel.name, f"// {kernel.name}\n{kernel.asm[stage]}") for kernel in kernels]
    found = []
    for kernel in kernels:
        with aot.cubin(kernel) as cubin:
            usage = disassembly.resource_usage(cubin)[kernel.name]
            shared = f"{kernel.metadata.shared} bytes of dynamic shared memory"
            heading = f"{kernel.name}: {usage.registers} registers, {shared}"
            found.append((kernel.name, _listing(heading, disassembly.sass(cubin)[kernel.name])))
    return found


def diff(op: Op, step: Step, backend: Backend, stage: str, case: Case, other: str, kernel: str = "") -> str:
    """A unified diff from ``other`` (another step of the op, or "twin", the same step in the other language) to a step.

    ``kernel`` chooses kernels of both sides. Empty if they do not differ. Twins share only the stages ptx and sass.
    Details that differ between any two compilations are filtered out: numbers of registers, predicates and SSA values
    (``R12`` becomes ``R``, ``%rd5`` ``%rd``), labels, jump targets, ``.reuse`` flags, the step's own name, declarations
    of registers, comments, source locations, debug sections and metadata, module headers. Offsets, constants and the
    order of instructions stay.
    """
    before, language = other_side(op, step, backend, stage, case, other)
    sides = [(before, language), (step, backend)]
    old, new = (
        essentials(show(op, each, by, stage, case, kernel), stage, f"{op.name}_{each.name}") for each, by in sides
    )
    was, now = (f"{op.name} {each.name} {by} {stage}" for each, by in sides)
    return "\n".join(difflib.unified_diff(old, new, was, now, lineterm=""))


def other_side(op: Op, step: Step, backend: Backend, stage: str, case: Case, other: str) -> tuple[Step, Backend]:
    """What a step is compared with; ValueError where there is no such step or stage, or it does not take the case."""
    if other == "twin":
        if stage not in ("ptx", "sass"):
            raise ValueError(f"--stage is {stage}; twins have ptx and sass in common")
        return step, "triton" if backend == "cuda" else "cuda"
    before = op.step(other)
    if reason := op.refusal(before, case):
        raise ValueError(f"--diff is {other}, which does not take {case.slug}: {reason}")
    return before, backend


def essentials(text: str, stage: str, name: str) -> list[str]:
    """A stage's lines after ``diff``'s filters; ``name`` is the step's, such as vector_add_v01_scalar."""
    stage = "ttir" if stage == "ttgir" else stage
    code = re.split(r"^\s*\.section\s+\.debug", text, maxsplit=1, flags=re.MULTILINE)[0] if stage == "ptx" else text
    lines = []
    for line in code.splitlines():
        line = re.sub(rf"\w*{name}_kernel\w*?(_param_\d+)?\b", r"kernel\1", line.strip())
        if not line or re.match(_DROPPED[stage], line):
            continue
        for pattern, to in _RENAMED[stage]:
            line = re.sub(pattern, to, line)
        if line := " ".join(line.split()):
            lines.append(line)
    return lines


def _cuda_sass(op: Op, step: Step, case: Case) -> list[Kernel]:
    for library in disassembly.require_extensions():
        usages = disassembly.resource_usage(library, disassembly.ARCH)
        if names := disassembly.step_kernels(usages, op.name, step.name, case.dtype):
            break
    else:
        raise disassembly.not_built(op.name, step.name)
    code = disassembly.sass(library, names, disassembly.ARCH)
    found = []
    for symbol, name in names.items():
        usage = usages[symbol]
        shared = f"{usage.shared_bytes} bytes of static shared memory"
        found.append((name, _listing(f"{name}: {usage.registers} registers, {shared}", code[symbol])))
    return found


def _listing(heading: str, code: list[tuple[int, str]]) -> str:
    """Instructions as text, with labels at branch targets, without the padding at the end."""
    instructions = [(address, text.strip()) for address, text in code]
    while instructions and instructions[-1][1] == "NOP":
        instructions.pop()
    known = {address for address, _ in instructions}
    branches = {text: int(match[2], 16) for _, text in instructions if (match := _BRANCH.match(text))}
    labels = {address: f".L{index}" for index, address in enumerate(sorted(set(branches.values()) & known))}
    lines = [f"// {heading}, {disassembly.length(text for _, text in instructions)} instructions"]
    for address, text in instructions:
        if address in labels:
            lines.append(f"{labels[address]}:")
        target = labels.get(branches.get(text, -1))
        lines.append("    " + (_BRANCH.sub(rf"\g<1>{target}", text) if target else text))
    return "\n".join(lines) + "\n"


def _cuda_ptx(op: Op, step: Step, case: Case) -> tuple[str, list[Kernel]]:
    """The PTX that nvcc gives to ptxas, compiled anew with the build's flags but without line information."""
    try:
        from build_support import sources, toolkit
    except ImportError:
        raise UnavailableError("PTX of a CUDA step is compiled from its source: run this in a clone's folder") from None
    built_with = disassembly.compiler_version(disassembly.find_extensions()).rpartition(".")[0]
    try:
        cuda = toolkit.find(os.environ, built_with or "13.0")
    except toolkit.BuildError as error:
        raise UnavailableError(str(error)) from error
    source = sources.ROOT / op.file(step.name, "cuda")
    arch = disassembly.ARCH.replace("sm", "compute")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "step.ptx"
        command = [
            str(cuda.nvcc),
            *(flag for flag in sources.NVCC_FLAGS if flag != "-lineinfo"),
            *(f"-I{sources.ROOT / path}" for path in sources.INCLUDE_DIRS),
            *(f"-gencode=arch={arch},code={arch}", "-ptx", str(source), "-o", str(output)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnavailableError(f"{source.name} does not compile: {done.stderr.strip()}")
        head, *entries = _ENTRY.split(output.read_text())
    by_symbol = {match[1]: entry for entry in entries if (match := re.search(r"\.entry (\w+)", entry))}
    names = disassembly.step_kernels(by_symbol, op.name, step.name, case.dtype)
    kernels = [(name, f"// {name}\n{_uncommented(by_symbol[symbol])}") for symbol, name in names.items()]
    return _uncommented(head), kernels


def _uncommented(ptx: str) -> str:
    """PTX without comment lines, which name other instantiations, and without runs of empty lines."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"^\s*//.*\n", "", ptx, flags=re.MULTILINE)).strip() + "\n"

"""R1: what the compilers make of chosen kernels at every stage, a text file a kernel, setting and language.

A file begins with its head, ``name: value`` behind ``#``; a stage begins with ``==``; each of its lines is the line of
the step's file that it comes from (empty: of none), a tab, and the text.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_twins.compiler import disassembly
from kernel_twins.report.rows import identity
from kernel_twins.report.rows.base import CannotRunError
from kernel_twins.report.sweeps import SWEEPS, compiling, cuda, lines
from kernel_twins.report.sweeps.cells import KERNELS, Kernel, Setting
from kernel_twins.report.sweeps.lines import Line

FOLDER = SWEEPS / "stages"
TITLES = {
    "ttir": "TTIR", "ttgir": "TTGIR", "llir": "LLVM IR", "ptx": "PTX", "sass": "SASS", "amdgcn": "AMDGCN",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recorded:
    """One kernel at one setting."""

    head: Mapping[str, str]
    stages: Mapping[str, list[Line]]

    def text(self) -> str:
        parts = [f"# {name}: {value}".rstrip() for name, value in self.head.items()]
        for stage, found in self.stages.items():
            parts += [f"== {stage}", *(f"{at or ''}\t{line}" for at, line in found)]
        return "\n".join(parts) + "\n"

    @property
    def stale(self) -> bool:
        """Whether the step's code changed since."""
        return self.head["code"] != identity.source_digest(*(self.head[key] for key in ("op", "step", "backend")))


def name(kernel: Kernel, backend: str, setting: Setting = Setting()) -> str:  # noqa: B008
    return ".".join(filter(None, (kernel.op.name, kernel.step.name, backend, setting.name)))


def read(path: Path) -> Recorded:
    head: dict[str, str] = {}
    stages: dict[str, list[Line]] = {}
    current: list[Line] = []
    for line in path.read_text().splitlines():
        if line.startswith("# ") and not stages:
            key, _, value = line[2:].partition(": ")
            head[key.rstrip(":")] = value
        elif line.startswith("== "):
            current = stages.setdefault(line[3:], [])
        else:
            at, _, text = line.partition("\t")
            current.append((int(at or 0), text))
    return Recorded(head, stages)


def record(chosen: list[str], progress: Callable[[str], None]) -> int:
    """Write the files of some kernels, ``OP`` or ``OP/STEP``, or of all; returns how many changed."""
    wanted = [each for each in KERNELS if not chosen or {each.op.name, f"{each.op.name}/{each.step.name}"} & {*chosen}]
    if not wanted:
        raise ValueError(f"KERNEL is {' '.join(chosen)}; recorded are {', '.join(map(_spell, KERNELS))}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    changed = 0
    for kernel in wanted:
        for file, made in of(kernel):
            progress(file)
            path, text = FOLDER / f"{file}.txt", made.text()
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
                changed += 1
    return changed


def of(kernel: Kernel) -> Iterator[tuple[str, Recorded]]:
    """All recordings of a kernel, by name."""
    with compiling.anew():
        for setting in (Setting(), *kernel.settings):
            yield name(kernel, "triton", setting), of_triton(kernel, setting)
    if kernel.cuda:
        yield name(kernel, "cuda"), of_cuda(kernel)


def of_triton(kernel: Kernel, setting: Setting) -> Recorded:
    made = compiling.of_kernel(kernel, setting)
    own = Path(kernel.op.file(kernel.step.name, "triton")).name
    ptx = lines.own_places(made.asm["ptx"], own)
    stages = {stage: lines.mlir(made.asm[stage], own) for stage in ("ttir", "ttgir") if stage in made.asm}
    stages["llir"] = lines.folded(lines.llvm(made.asm["llir"], own))
    stages["ptx"] = lines.folded(lines.ptx(ptx))
    stages["sass"] = lines.folded(_sass(compiling.assemble(ptx, _tool("ptxas")), made.asm["cubin"]))
    code, why = compiling.amdgcn(made) if not setting.name else ("", "")
    if code:
        stages["amdgcn"] = lines.folded(lines.amdgcn(code, own))
    head = {
        **_head(kernel, "triton", setting, made.name),
        "signature": ", ".join(f"{key}: {value}" for key, value in made.src.signature.items() if value != "constexpr"),
        "multiples of 16": ", ".join(_multiples(made.src)),
        "constexprs": ", ".join(f"{key}={value}" for key, value in _constants(made.src)),
        "options": ", ".join(f"{key}={value}" for key, value in compiling.options(made).items()),
        "compiler": f"triton {made.metadata.triton_version}",
        **_usage(made.asm["cubin"], made.name, "shared bytes"),
        "shared bytes": str(made.metadata.shared),
    }
    return Recorded({**head, **({compiling.AMD: why} if why else {})}, stages)


def of_cuda(kernel: Kernel) -> Recorded:
    symbol, text = cuda.ptx(kernel)
    ptx = lines.own_places(text, Path(kernel.op.file(kernel.step.name, "cuda")).name)
    cubin = compiling.assemble(ptx, cuda.ptxas())
    head = {
        **_head(kernel, "cuda", Setting(), disassembly.short_name(symbol)),
        "compiler": f"nvcc {'.'.join(map(str, cuda.found().version))}",
        **_usage(cubin, symbol, "static shared bytes"),
    }
    return Recorded(head, {"ptx": lines.folded(lines.ptx(ptx)), "sass": lines.folded(_sass(cubin, None))})


def _head(kernel: Kernel, backend: str, setting: Setting, symbol: str) -> dict[str, str]:
    return {
        "op": kernel.op.name,
        "step": kernel.step.name,
        "backend": backend,
        "setting": setting.told,
        "off": setting.off,
        "kernel": symbol,
        "case": kernel.case.slug,
        "code": identity.source_digest(kernel.op.name, kernel.step.name, backend),
    }


def _usage(cubin: bytes, symbol: str, shared: str) -> dict[str, str]:
    """Sizes, of which a binary knows no shared memory that its launch asks for; ``shared`` names it."""
    with _file(cubin) as file:
        usage = disassembly.resource_usage(file)[symbol]
    return {
        "registers": str(usage.registers),
        "stack bytes": str(usage.stack_bytes),
        shared: str(usage.shared_bytes),
    }


def _multiples(source: Any) -> Iterator[str]:
    for (index,), attributes in source.attrs.items():
        if any(each[0] == "tt.divisibility" for each in attributes):
            yield source.fn.arg_names[index]


def _constants(source: Any) -> Iterator[tuple[str, object]]:
    for (index, *_), value in source.constants.items():
        yield source.fn.arg_names[index], value


def _sass(cubin: bytes, launched: bytes | None) -> list[Line]:
    """Instructions with their lines; those of ``launched`` must be the same, whose lines are of several files."""
    found = lines.sass(_disassembled(cubin))
    meant = found if launched is None else lines.sass(_disassembled(launched))
    if [text for _, text in found] != [text for _, text in meant]:
        raise CannotRunError("ptxas makes other code where lines are told otherwise")
    return found


def _disassembled(cubin: bytes) -> str:
    with _file(cubin) as file:
        command = [str(_tool("nvdisasm")), "-g", "-c", str(file)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def _file(cubin: bytes) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        yield Path(file.name)


def _tool(tool: str) -> Path:
    """One of those in Triton's wheel, whose version is pinned with it."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool


def _spell(kernel: Kernel) -> str:
    return f"{kernel.op.name}/{kernel.step.name}"

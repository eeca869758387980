"""A compiled kernel's registers, shared memory, stack and instructions, read with NVIDIA's cuobjdump.

The tool is the toolkit's or the one in Triton's wheel. It takes an extension, whose cubins are compressed, and a bare
cubin alike; ``arch`` picks one of the architectures that an extension was built for (``sm_90a``), a bare cubin needs
none.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kernel_twins import remedies
from kernel_twins.errors import UnavailableError

ARCH = "sm_90a"
RESERVED_SHARED = 1024
"""Bytes of a block's shared memory that CUDA reserves from compute capability 8.0 on; cuobjdump counts them."""

CLASSES: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "LDG.128": r"LDG\..*\b128\b",
        "LDG": r"LDG\b",
        "LDS.128": r"LDS\..*\b128\b",
        "LDS": r"LDS\b",
        "LDSM": r"LDSM\b",
        "LDGSTS": r"LDGSTS\b",
        "UBLKCP": r"UBLKCP\b",
        "UTMALDG": r"UTMALDG\b",
        "HMMA": r"HMMA\b",
        "HGMMA": r"HGMMA\b",
        "FFMA": r"FFMA\b",
        "MUFU": r"MUFU\b",
        "LDL": r"LDL\b",
        "STL": r"STL\b",
    }.items()
}
"""Classes of instructions; an opcode belongs to the first class whose pattern matches its beginning.

16-byte and other loads from global and shared memory, fragments for mma.sync from shared memory, asynchronous copies
(cp.async, bulk, bulk through a tensor map), tensor cores (mma.sync, wgmma), fp32 FMA, special functions, local memory.
"""

_SOURCES = (".cu", ".cuh", ".h", ".cpp")
_TYPES = {"fp32": "float", "fp16": "__half", "bf16": "__nv_bfloat16"}
_BUILTIN = {"b": "bool", "i": "int", "j": "unsigned", "l": "long", "m": "unsigned long", "f": "float", "d": "double"}
_FUNCTION = re.compile(r"Function : (\S+)")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INFO = re.compile(r"^\.nv\.info\.(\S+)$|Attribute:\s+EIATTR_(?:MAX_THREADS|REQNTID)$|^\s*Value:\s+(0x.*)$")
_OPCODE = re.compile(r"(?:@!?U?P\w+\s+)?(\S+)")
_ELF, _EM_CUDA = b"\x7fELF", b"\xbe\0"  # how a cubin begins, and its machine, 18 bytes on
_FATBIN = re.compile(rb"\x50\xed\x55\xba\x01\0(..)(.{8})", re.DOTALL)  # its header's bytes, and those that follow it
_COMPILER = re.compile(rb"ptxas\0Cuda compilation tools, release [\d.]+, V([\d.]+)")

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Usage:
    """A kernel's registers a thread, bytes of static shared memory a block, and stack bytes a thread.

    The shared memory is that of the kernel's own variables, without bytes that CUDA reserves or a launch adds.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int


def short_name(symbol: str) -> str:
    """``step_kernel<float, 8>`` from ``_Z11step_kernelIfLi8EEvPf``; a symbol of another form is returned as it is.

    Kernels in an unnamed namespace are read, too; their mangled name holds a hash of the file's path. The function
    exists because neither cuobjdump nor Python has a demangler.
    """
    unnamed = re.match(r"_ZN(\d+)(?=_GLOBAL__N_)", symbol)
    mangled = f"_Z{symbol[unnamed.end() + int(unnamed[1]) :]}" if unnamed else symbol
    match = re.match(r"_Z(\d+)", mangled)
    if match is None:
        return symbol
    end = match.end() + int(match[1])
    name, rest = mangled[match.end() : end], mangled[end:]
    if not rest.startswith("I"):
        return name
    arguments, rest = _template_arguments(rest[1:], ["", name] if unnamed else [name])
    return f"{name}<{', '.join(arguments)}>" if rest else symbol


def _template_arguments(rest: str, known: list[str]) -> tuple[list[str], str]:
    """The template arguments in a mangled name up to an E, and the rest; the rest is empty if one has another form.

    ``known`` has the names that the mangled name may refer to, in the order of their first use.
    """
    arguments: list[str] = []
    while rest and not rest.startswith("E"):
        if match := re.match(r"Lb([01])E", rest):
            arguments.append("true" if match[1] == "1" else "false")
            rest = rest[match.end() :]
        elif match := re.match(r"L[ijlm](n?)(\d+)E", rest):
            arguments.append(f"{'-' if match[1] else ''}{match[2]}")
            rest = rest[match.end() :]
        elif match := re.match(f"[{''.join(_BUILTIN)}]", rest):
            arguments.append(_BUILTIN[match[0]])
            rest = rest[match.end() :]
        elif match := re.match(r"L(?=\d|S)", rest):  # an enumerator
            name, rest = _class_name(rest[1:], known)
            match = re.match(r"(\d+)E", rest)
            if match is None:
                return arguments, ""
            arguments.append(f"{name}({match[1]})")
            rest = rest[match.end() :]
        else:
            name, rest = _class_name(rest, known)
            if not rest:
                return arguments, ""
            arguments.append(name)
    return arguments, rest[1:]


def _class_name(rest: str, known: list[str]) -> tuple[str, str]:
    """A class's or enum's name, and the rest, which is empty if it has another form. A new name is added to ``known``.

    ``S_`` stands for the first name, ``S0_`` for the second, ``S1_`` for the third.
    """
    if match := re.match(r"S(\d?)_", rest):
        place = int(match[1]) + 1 if match[1] else 0
        return (known[place], rest[match.end() :]) if place < len(known) else ("", "")
    match = re.match(r"(\d+)", rest)
    if match is None:
        return "", ""
    end = match.end() + int(match[1])
    name, rest = rest[match.end() : end], rest[end:]
    known.append(name)
    if rest.startswith("I"):  # an instantiated class template
        its, rest = _template_arguments(rest[1:], known)
        name = f"{name}<{', '.join(its)}>"
        known.append(name)
    return name, rest


def is_of(op: str, step: str) -> Callable[[str], bool]:
    """Whether a symbol is a step's kernel. In a mangled name the length precedes the name."""
    pattern = re.compile(rf"(?:^|\d){op}_{step}_")
    return lambda symbol: bool(pattern.search(symbol))


def step_kernels(symbols: Iterable[str], op: str, step: str, dtype: str) -> dict[str, str]:
    """A CUDA step's kernels for a dtype: short names by symbol, in the binary's order.

    Kernels with an element type among their template arguments count if it is the dtype's; all other kernels count.
    """
    own = is_of(op, step)
    found = {symbol: short_name(symbol) for symbol in symbols if own(symbol)}
    types = {symbol: set(re.findall(r"\w+", name)[1:]) & set(_TYPES.values()) for symbol, name in found.items()}
    return {symbol: name for symbol, name in found.items() if not types[symbol] or _TYPES[dtype] in types[symbol]}


def not_built(op: str, step: str) -> UnavailableError:
    return UnavailableError(
        f"the extension has no kernel of {op} {step} for {ARCH}: "
        f"run {remedies.told(remedies.build('TORCH_CUDA_ARCH_LIST=9.0a'))}"
    )


def find_cuobjdump() -> Path | None:
    """cuobjdump of CUDA_HOME, of the PATH, or of Triton's wheel, in this order. Does not import Triton."""
    homes = [os.environ["CUDA_HOME"]] if os.environ.get("CUDA_HOME") else []
    candidates = [Path(home) / "bin" / "cuobjdump" for home in homes]
    if found := shutil.which("cuobjdump"):
        candidates.append(Path(found))
    spec = importlib.util.find_spec("triton")
    for folder in (spec and spec.submodule_search_locations) or []:
        candidates.append(Path(folder) / "backends" / "nvidia" / "bin" / "cuobjdump")
    return next((path for path in candidates if path.is_file()), None)


def find_extensions() -> list[Path]:
    """The compiled CUDA side for this Python, found without importing it: what public functions run, then the ladders.

    [] where it is not built. The ladders' other steps, kernel_twins._ladder, are missing where a wheel was installed.
    """
    specs = [importlib.util.find_spec(f"kernel_twins.{name}") for name in ("_C", "_ladder")]
    found = [Path(spec.origin) for spec in specs if spec and spec.origin]
    return found if specs[0] else []


def require_extensions() -> list[Path]:
    """The compiled CUDA side; UnavailableError names the commands that build it."""
    if not (libraries := find_extensions()):
        raise UnavailableError(f"the CUDA side is not built: run {remedies.told(remedies.build())}")
    return libraries


def of_all(libraries: Iterable[Path], read: Callable[[Path], Mapping[str, _Found]]) -> dict[str, _Found]:
    """What is read of each library, by mangled name."""
    return {name: found for library in libraries for name, found in read(library).items()}


def newer_sources(libraries: Iterable[Path], root: Path) -> list[str]:
    """The CUDA sources of a checkout that were written after its extensions, relative to the root, in order."""
    built = min(library.stat().st_mtime for library in libraries)
    files = (path for path in (root / "cuda-kernels").rglob("*") if path.suffix in _SOURCES)
    return sorted(str(path.relative_to(root)) for path in files if path.stat().st_mtime > built)


def compiler_version(libraries: Iterable[Path]) -> str:
    """The version of ptxas that compiled extensions, such as ``13.0.88``, by the notes in their cubins (0.5 s).

    Empty where there is no such note, or where parts differ. Of cubins of one name, as sources of several operations
    have, one is looked at.
    """
    versions = {
        version for library in libraries for cubin in _extracted(library) for version in _COMPILER.findall(cubin)
    }
    return versions.pop().decode() if len(versions) == 1 else ""


def resource_usage(binary: Path, arch: str = "") -> dict[str, Usage]:
    """Every kernel's resources, by mangled name, in the binary's order; {} if it has none for the architecture."""
    return parse_usage(_run(binary, arch, "-res-usage"))


def parse_usage(text: str) -> dict[str, Usage]:
    return {
        name: Usage(int(registers), max(0, int(shared) - RESERVED_SHARED), int(stack) + int(local))
        for name, registers, stack, shared, local in _USAGE.findall(text)
    }


def block_limits(binary: Path, arch: str = "") -> dict[str, int]:
    """The largest block, in threads, of each kernel that was compiled with such a bound."""
    return parse_block_limits(_run(binary, arch, "-elf"))


def parse_block_limits(text: str) -> dict[str, int]:
    limits: dict[str, int] = {}
    kernel, is_limit = "", False
    for line in text.splitlines():
        if match := _INFO.search(line):
            if match[1]:
                kernel = match[1]
            elif match[2] and is_limit:
                x, y, z = (int(size, 16) for size in match[2].split())
                limits[kernel] = x * y * z
            is_limit = not (match[1] or match[2])
        elif "Attribute:" in line:
            is_limit = False
    return limits


def sass(binary: Path, symbols: Iterable[str] = (), arch: str = "") -> dict[str, list[tuple[int, str]]]:
    """Address and text of every instruction, by mangled name: of some kernels, or of all.

    All of the extensions take 80 s of one core, of which every core has some. A name that the binary does not have is
    left out.
    """
    if names := ",".join(symbols):
        return parse_sass(_run(binary, arch, "-sass", "-fun", names))
    return {
        name: code
        for some in _of_parts(binary, lambda part: parse_sass(_run(part, arch, "-sass")))
        for name, code in some.items()
    }


def cubins(binary: Path) -> list[bytes]:
    """Those that a file holds, or is."""
    return [cubin for some in _of_parts(binary, _extracted) for cubin in some]


def _of_parts(binary: Path, read: Callable[[Path], _Found]) -> Iterator[_Found]:
    """What is read of each source's device code in a file, by all cores: the tool itself has use for one.

    It also writes cubins of one name over one another, as sources of several operations have.
    """
    if len(parts := _fatbins(binary.read_bytes())) < 2:
        yield read(binary)
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        paths = [Path(folder) / f"{i}.fatbin" for i in range(len(parts))]
        for path, part in zip(paths, parts, strict=True):
            path.write_bytes(part)
        yield from pool.map(read, paths)


def _fatbins(content: bytes) -> list[bytes]:
    """The device code in a file, one fat binary for each source that was compiled."""
    found, position = [], 0
    while match := _FATBIN.search(content, position):
        position = match.start() + int.from_bytes(match[1], "little") + int.from_bytes(match[2], "little")
        found.append(content[match.start() : position])
    return found


def _extracted(binary: Path) -> list[bytes]:
    """The cubins that the tool writes out of a file, or the file where it is one."""
    content = binary.read_bytes()
    if content.startswith(_ELF) and content[18:20] == _EM_CUDA:
        return [content]
    with tempfile.TemporaryDirectory() as folder:
        _run(binary, "", "-xelf", "all", cwd=Path(folder))
        return [path.read_bytes() for path in sorted(Path(folder).iterdir())]


def parse_sass(text: str) -> dict[str, list[tuple[int, str]]]:
    _, *parts = _FUNCTION.split(text)
    return {
        name: [(int(address, 16), code) for address, code in _INSTRUCTION.findall(body)]
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def opcode(instruction: str) -> str:
    """``LDG.E.128`` from ``@!P0 LDG.E.128 R4, desc[UR4][R2.64]``."""
    match = _OPCODE.match(instruction)
    return match[1] if match else ""


def mix(instructions: Iterable[str]) -> dict[str, int]:
    """The number of instructions in each class, in the table's order; others are not counted."""
    count: Counter[str] = Counter()
    for code in map(opcode, instructions):
        if name := next((name for name, pattern in CLASSES.items() if pattern.match(code)), ""):
            count[name] += 1
    return {name: count[name] for name in CLASSES}


def length(instructions: Iterable[str]) -> int:
    """The number of instructions, without the NOPs that pad a kernel's end."""
    return sum(opcode(instruction) != "NOP" for instruction in instructions)


def spilled_bytes(instructions: Iterable[str]) -> int:
    """Bytes that a thread's STL instructions store, each counted once.

    They are spilled registers, or an array that is indexed and so has no registers; the binary does not tell which.
    """
    return sum(_width(code) for code in map(opcode, instructions) if CLASSES["STL"].match(code))


def _width(code: str) -> int:
    widths = {"U8": 1, "S8": 1, "8": 1, "U16": 2, "S16": 2, "16": 2, "64": 8, "128": 16}
    return next((widths[part] for part in code.split(".")[1:] if part in widths), 4)


def _run(binary: Path, arch: str, *options: str, cwd: Path | None = None) -> str:
    tool = find_cuobjdump()
    if tool is None:
        raise UnavailableError("there is no cuobjdump: pip install triton, or put a CUDA toolkit's bin folder on PATH")
    command = [str(tool), *options, *(["-arch", arch] if arch else []), str(binary.resolve())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UnavailableError(f"{tool} cannot read {binary}: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout

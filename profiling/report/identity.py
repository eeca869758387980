"""Which code a measurement belongs to: a digest of a step's source and one of what the compiler made of it.

The source's digest ignores comments and layout and can be taken anywhere; it covers the files of other steps that a
step takes kernels from, or leaves some shapes to. The binary's digest (normalized SASS, or PTX for Triton) pins
headers, flags and configuration; the committed static rows hold it, so that it can be compared where nothing is
compiled. A row whose digests are not those of the tree is stale.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
import time
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path

from kernel_twins import disassembly
from kernel_twins._profiling.report.store import ROOT

_CUDA_NOISE = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_OTHER_STEP = {
    "cuda": re.compile(r"\b([a-z]\w*?)_(v\d\d_\w+)\("),  # a launcher's name
    "triton": re.compile(r"^from kernel_twins\._triton\.(\w+)\.(\w+) import\b", re.MULTILINE),
}
_NO_CODE = {tokenize.COMMENT, tokenize.NL}
_BLOCKS = {tokenize.INDENT: "{", tokenize.DEDENT: "}"}  # what is in a loop and what is not is code


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def step_file(op: str, step: str, backend: str) -> Path:
    folder, suffix = ("cuda-kernels", "cu") if backend == "cuda" else ("triton-kernels", "py")
    return ROOT / folder / op / f"{step}.{suffix}"


def source_digest(op: str, step: str, backend: str) -> str:
    """Digest of a step's file without comments, docstrings and white space.

    Where the step takes code from others, directly or through another, "+" and a digest of their files follow.
    """
    own = step_file(op, step, backend)
    others = sorted(_with_others(own, backend) - {own})
    source = _code_digest(own.read_text(), backend == "triton")
    return f"{source}+{digest(' '.join(map(file_digest, others)))}" if others else source


def _with_others(file: Path, backend: str) -> set[Path]:
    """The file, and those of other steps that it takes code from."""
    files, ahead = {file}, [file]
    while ahead:
        for op, step in _OTHER_STEP[backend].findall(ahead.pop().read_text()):
            other = step_file(op, step, backend)
            if other not in files and other.exists():
                files.add(other)
                ahead.append(other)
    return files


def file_digest(path: Path) -> str:
    """Digest of any file of code, or of JSON, without comments, docstrings and white space."""
    return _code_digest(path.read_text(), path.suffix == ".py")


@functools.cache  # every case of a run asks for every step's, and a file may be several steps'
def _code_digest(text: str, python: bool) -> str:
    if python:
        return digest("\n".join(_python_tokens(text)))
    return digest("".join(_CUDA_NOISE.sub(r"\1", text).split()))


def _python_tokens(text: str) -> Iterable[str]:
    statement: list[str] = []
    for token in _whole_strings(text):
        if token.type in _BLOCKS:
            yield _BLOCKS[token.type]
        elif token.type == tokenize.NEWLINE:
            yield from [*statement, ";"] if statement else []
            statement = []
        elif token.type not in _NO_CODE and (statement or token.type != tokenize.STRING):
            statement.append(token.string)  # a statement that begins with a string is a docstring


def _whole_strings(text: str) -> Iterable[tokenize.TokenInfo]:
    """The tokens of a Python file as Python 3.11 has them: from 3.12 on an f-string comes in pieces."""
    lines = text.splitlines(keepends=True)
    begin, depth = (0, 0), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] == "FSTRING_START":
            begin = begin if depth else token.start
            depth += 1
        elif tokenize.tok_name[token.type] == "FSTRING_END":
            depth -= 1
            if depth == 0:
                (row, col), (end_row, end_col) = begin, token.end
                between = [*lines[row - 1 : end_row - 1], lines[end_row - 1][:end_col]]
                string = "".join(between)[col:]
                yield tokenize.TokenInfo(tokenize.STRING, string, begin, token.end, "".join(lines[row - 1 : end_row]))
        elif depth == 0:
            yield token


def sass_digests(library: Path) -> dict[str, str]:
    """Digest of the instructions of every kernel in a compiled extension, by mangled name; {} without cuobjdump.

    Of an extension for several architectures it is that of the static rows', where it is among them. They are kept for
    as long as the extension, and what reads it, stays the same, since reading all of it keeps every core busy.
    """
    from build_support import kept

    if (tool := disassembly.find_cuobjdump()) is None:
        return {}
    if entry := kept.find("sass", [library.name]):
        return dict(entry[0])
    began = time.time_ns()
    digests = kernel_digests(disassembly.sass(library, arch=disassembly.ARCH) or disassembly.sass(library))
    read = [library, tool, Path(disassembly.__file__), Path(__file__)]
    kept.keep("sass", [library.name], read, digests, {}, since=began)
    return digests


def kernel_digests(kernels: Mapping[str, Iterable[tuple[int, str]]]) -> dict[str, str]:
    """Digest of every kernel's instructions, which come with their addresses, by mangled name."""
    return {name: digest("\n".join(code for _, code in body)) for name, body in kernels.items()}


def cuda_digest(op: str, step: str, kernels: Mapping[str, str]) -> str:
    """One digest for all instantiations of a step's kernels, given those of all kernels."""
    own = disassembly.is_of(op, step)
    return digest("\n".join(sorted(code for name, code in kernels.items() if own(name))))


def ptx_digest(texts: Iterable[str]) -> str:
    """One digest for the PTX of all kernels of a Triton step."""
    return digest("\n".join(sorted(map(_normal_ptx, texts))))


def _normal_ptx(text: str) -> str:
    code, *_ = text.partition("\t.section\t.debug")
    return "\n".join(
        line.split("//")[0].strip()
        for line in code.splitlines()
        if not line.strip().startswith((".loc", ".file", "//"))
    )

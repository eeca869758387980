"""Which code a measurement belongs to: a digest of a step's source and one of what the compiler made of it.

The source's digest ignores comments, layout and the paths of files, so that a move changes none, and can be taken
anywhere; it covers the files of other steps that a step takes kernels from, or leaves some shapes to, and in Triton the
modules beside them that they import. The binary's digest (normalized SASS, or PTX for Triton) pins headers, flags and
configuration; the committed static rows hold it, so that it can be compared where nothing is compiled. A row whose
digests are not those of the tree is stale.

Earlier rules hashed include lines and module paths, and missed kernels that a function imports as it runs.
``profiling/data/rekeyed.csv`` pairs their digests with those of the rule that followed, both of the same tree.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import time
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from kernel_twins import OPS
from kernel_twins.compiler import disassembly
from kernel_twins.report.rows.store import ROOT
from kernel_twins.spec import Backend

Span = tuple[tuple[int, int], tuple[int, int]]  # from a line and column to others

_CUDA_NOISE = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"', re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*from kernel_twins\.?(\S*) import (\([^)]*\)|.*)", re.MULTILINE)
_LAUNCHER = re.compile(r"\b([a-z]\w*?)_(v\d\d_\w+)\(")
_READ_BY_TRITON = ("tl.", "gl.")  # annotations that it compiles by, such as tl.constexpr and tl.int64
_NO_CODE = {tokenize.COMMENT, tokenize.NL}
_BLOCKS = {tokenize.INDENT: "{", tokenize.DEDENT: "}"}  # what is in a loop and what is not is code


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def step_file(op: str, step: str, backend: str) -> Path:
    return ROOT / OPS[op].file(step, cast(Backend, backend))


def source_digest(op: str, step: str, backend: str) -> str:
    """Digest of a step's file without comments, docstrings and white space.

    Where the step takes code from others, directly or through another, "+" and a digest of their files follow.
    """
    own = step_file(op, step, backend)
    steps = _closure([own], lambda file: _named(file.read_text(), backend))
    others = sorted(steps - {own}, key=lambda file: (file.parent.name, file.stem))
    source = _code_digest(own.read_text(), backend == "triton")
    return f"{source}+{digest(' '.join(map(file_digest, others)))}" if others else source


def _closure(files: Iterable[Path], named: Callable[[Path], Iterable[Path]]) -> set[Path]:
    """The files, and those that any of them names, directly or through another."""
    found: set[Path] = set()
    ahead = list(files)
    while ahead:
        if (file := ahead.pop()) not in found:
            found.add(file)
            ahead += named(file)
    return found


def _named(text: str, backend: str) -> Iterator[Path]:
    """The files of other steps that a text takes code from; of Triton also what else lies in steps' folders."""
    named = _LAUNCHER.findall(text) if backend == "cuda" else _modules(text)
    files = (step_file(op, step, backend) for op, step in named if op in OPS)
    return (file for file in files if file.exists())


def _modules(text: str) -> Iterator[tuple[str, str]]:
    """Operation and module of what a Triton file imports from steps' folders: a module's names, or the module."""
    for module, names in _IMPORT.findall(text):
        match module.split("."):
            case "_triton", _, op, name:
                yield op, name
            case "_triton", _, op:
                yield from ((op, name) for name in re.findall(r"\w+", names))


def reached(files: Iterable[Path]) -> set[Path]:
    """The files, what they include and import, the kernels that an included header declares, and other steps whose
    launchers they name; but for specs, and for the report.
    """
    return _closure(files, lambda file: _imports(file.read_text()) if file.suffix == ".py" else _includes(file))


def _includes(file: Path) -> Iterator[Path]:
    text = file.read_text()
    folders = (file.parent, ROOT / "cuda-kernels", ROOT / "hardware-survey")
    for name in _INCLUDE.findall(text):
        header = next(path for folder in folders if (path := (folder / name).resolve()).exists())
        yield header
        if (kernel := header.with_name(f"function_{header.stem}.cu")).exists():  # which the header declares
            yield kernel
    yield from _named(text, "cuda")


def _imports(text: str) -> Iterator[Path]:
    for module, names in _IMPORT.findall(text):
        inside = (f"{module}.{name}".removeprefix(".") for name in re.findall(r"\w+", names))
        for each in (module, *inside):  # a name may be a module, too
            package, _, rest = each.partition(".")
            parts = ("triton-kernels", rest) if package == "_triton" else ("kernel_twins", each)
            path = ROOT.joinpath(parts[0], *parts[1].split(".")).with_suffix(".py")
            if path.exists() and package != "report" and path not in _registry():
                yield path


@functools.cache
def _registry() -> set[Path]:
    """Where operations are described and looked up: nothing there is run when one of them is called."""
    specs = (path for path in (ROOT / "kernel_twins" / "ops").rglob("*.py") if path.stem in OPS)
    looked_up = ("spec/__init__", "spec/chance", "errors", "harness/load", "harness/ceilings")
    return {ROOT / "kernel_twins" / f"{name}.py" for name in looked_up} | {*specs}


def files_digest(files: Iterable[Path]) -> str:
    """Digest of what files hold, wherever they lie."""
    return digest("\n".join(sorted(map(file_digest, files))))


def file_digest(path: Path) -> str:
    """Digest of any file of code, or of JSON, without comments, docstrings, white space and paths of its own kin."""
    return _code_digest(path.read_text(), path.suffix == ".py")


@functools.cache  # every case of a run asks for every step's, and a file may be several steps'
def _code_digest(text: str, python: bool) -> str:
    if python:
        return digest("\n".join(_python_tokens(text)))
    return digest("".join(_INCLUDE.sub("", _CUDA_NOISE.sub(r"\1", text)).split()))


def _python_tokens(text: str) -> Iterable[str]:
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and _is_kin(node.module)]
    yield from sorted(ast.unparse(name) for node in imports for name in node.names)  # in any order, from anywhere
    passed_over = [*map(_span, imports), *_unread_annotations(tree)]
    statement: list[str] = []
    for token in _whole_strings(text):
        if token.type in _BLOCKS:
            yield _BLOCKS[token.type]
        elif any(begin <= token.start < end for begin, end in passed_over):
            continue
        elif token.type == tokenize.NEWLINE:
            yield from [*statement, ";"] if statement else []
            statement = []
        elif token.type not in _NO_CODE and (statement or token.type != tokenize.STRING):
            statement.append(token.string)  # a statement that begins with a string is a docstring


def _is_kin(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "kernel_twins"


def _span(node: ast.ImportFrom | ast.arg) -> Span:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _unread_annotations(tree: ast.Module) -> Iterator[Span]:
    """Where the annotations of kernels' arguments are that Triton does not read: a type checker's."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and any(
            ".jit" in ast.unparse(each) for each in function.decorator_list
        ):
            for argument in (*function.args.args, *function.args.kwonlyargs):
                if argument.annotation and not ast.unparse(argument.annotation).startswith(_READ_BY_TRITON):
                    (line, column), end = _span(argument)
                    yield (line, column + len(argument.arg)), end


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


def sass_digests(libraries: Iterable[Path]) -> dict[str, str]:
    """Digest of the instructions of every kernel in compiled extensions, by mangled name; {} without cuobjdump.

    Of an extension for several architectures it is that of the static rows', where it is among them. They are kept for
    as long as the extension, and what reads it, stays the same, since reading all of it keeps every core busy.
    """
    if (tool := disassembly.find_cuobjdump()) is None:
        return {}
    return disassembly.of_all(libraries, lambda library: _sass_digests(library, tool))


def _sass_digests(library: Path, tool: Path) -> dict[str, str]:
    from build_support import kept

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

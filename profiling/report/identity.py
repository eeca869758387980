"""Which code a measurement belongs to: a digest of a step's source and one of what the compiler made of it.

The source's digest ignores comments and layout and can be taken anywhere; a row whose source digest is not the
tree's is stale. The binary's digest (normalized SASS, or PTX for Triton) pins headers, flags and configuration.
"""

from __future__ import annotations

import hashlib
import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernel_twins import disassembly
from kernel_twins._profiling.report.store import ROOT

_CUDA_NOISE = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def step_file(op: str, step: str, backend: str) -> Path:
    folder, suffix = ("cuda-kernels", "cu") if backend == "cuda" else ("triton-kernels", "py")
    return ROOT / folder / op / f"{step}.{suffix}"


def source_digest(op: str, step: str, backend: str) -> str:
    """Digest of a step's file without comments, docstrings and white space."""
    text = step_file(op, step, backend).read_text()
    if backend == "cuda":
        return digest("".join(_CUDA_NOISE.sub(r"\1", text).split()))
    return digest("\n".join(_python_tokens(text)))


def _python_tokens(text: str) -> Iterable[str]:
    starts_statement = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _LAYOUT:
            if token.type not in (tokenize.COMMENT, tokenize.NL):  # those stand inside brackets too
                starts_statement = True
        elif not (starts_statement and token.type == tokenize.STRING):  # a string alone is a docstring
            starts_statement = False
            yield token.string


def sass_digests(library: Path) -> dict[str, str]:
    """Digest of the instructions of every kernel in a compiled extension, by mangled name; {} without cuobjdump."""
    if disassembly.find_cuobjdump() is None:
        return {}
    kernels = disassembly.sass(library)
    return {name: digest("\n".join(code for _, code in body)) for name, body in kernels.items()}


def cuda_digest(op: str, step: str, kernels: dict[str, str]) -> str:
    """One digest for all instantiations of a step's kernels."""
    symbol = f"{op}_{step}_"
    return digest("\n".join(sorted(code for name, code in kernels.items() if symbol in name)))


def triton_digest(module: Any) -> str:
    """Digest of the PTX that a Triton step's module has compiled so far in this process."""
    from triton.runtime.jit import JITFunction

    ptx = []
    for member in vars(module).values():
        while hasattr(member, "fn") and not isinstance(member, JITFunction):
            member = member.fn  # an autotuned or heuristic kernel wraps the jitted one
        if isinstance(member, JITFunction):
            for cache, *_ in member.device_caches.values():
                ptx += [_normal_ptx(kernel.asm["ptx"]) for kernel in cache.values()]
    return digest("\n".join(sorted(ptx)))


def _normal_ptx(text: str) -> str:
    code, *_ = text.partition("\t.section\t.debug")
    return "\n".join(
        line.split("//")[0].strip()
        for line in code.splitlines()
        if not line.strip().startswith((".loc", ".file", "//"))
    )

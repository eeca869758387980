"""The compilers' stages as the explorer shows them: coloured lines, each with its line of the step's file."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from markupsafe import Markup
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name

from builder import code, lexers, numbers
from kernel_twins import OPS
from kernel_twins.report.pages import headers
from kernel_twins.report.rows.base import ROOT
from kernel_twins.report.sweeps import evidence, lines, stages
from kernel_twins.report.sweeps.cells import KERNELS, Kernel, Setting
from kernel_twins.report.sweeps.lines import Line
from kernel_twins.report.sweeps.stages import Recorded
from kernel_twins.spec import Backend

_LANGUAGES: dict[Backend, str] = {"cuda": "CUDA", "triton": "Triton"}
_QUANTITIES = ("registers", "stack bytes", "shared bytes", "static shared bytes")
_AROUND = 2  # lines of an excerpt before and behind


@dataclass(frozen=True, slots=True)
class Choice:
    """A recording that a reader may choose; ``label`` is its setting."""

    name: str
    label: str


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Lines of a stage around what a pass left there."""

    stage: str
    name: str
    first: int
    lines: list[Markup]


def choices() -> dict[str, list[Choice]]:
    """What is recorded, by kernel: Triton as launched, its settings, CUDA."""
    found: dict[str, list[Choice]] = {}
    for kernel in KERNELS:
        named: list[tuple[Backend, Setting]] = [("triton", each) for each in (Setting(), *kernel.settings)]
        names = [
            Choice(stages.name(kernel, backend, setting), f"{_LANGUAGES[backend]}, {setting.told}")
            for backend, setting in (*named, ("cuda", Setting()))
        ]
        if present := [each for each in names if path(each.name).exists()]:
            found[_title(kernel)] = present
    return found


def _title(kernel: Kernel) -> str:
    return f"{kernel.op.name} {kernel.step.name[:3]}, {headers.told(kernel.op, kernel.step)[0]}"


def path(name: str) -> Path:
    return stages.FOLDER / f"{name}.txt"


@functools.cache
def recorded(name: str) -> Recorded:
    return stages.read(path(name))


def payload(name: str) -> dict[str, object]:
    """What ``compiler.js`` shows of a recording."""
    made = recorded(name)
    shown: list[object] = [["source", "source", list(range(1, len(_source(made)) + 1)), "\n".join(_source(made)), None]]
    for stage, found in made.stages.items():
        text = "\n".join(coloured(stage, found))
        shown.append([stage, stages.TITLES[stage], [at for at, _ in found], text, _counts(found)])
    return {
        "facts": facts(name),
        "stale": made.stale,
        "absent": "absent" if made.head["backend"] == "triton" else "nothing: CUDA's source says this itself",
        "lacks": made.head.get("gfx942", ""),
        "evidence": [[each, [[stages.TITLES[one.stage], one.line, one.text] for one in every]]
                     for each, every in evidence.of(made).items()],
        "stages": shown,
    }  # fmt: skip


def _counts(found: Sequence[Line]) -> dict[int, int]:
    """How many lines come from each line of the source, folded ones counted as often as they stand there."""
    by_line = sorted(found, key=lambda line: line[0])
    return {at: lines.count(list(group)) for at, group in groupby(by_line, key=lambda line: line[0]) if at}


def _source(made: Recorded) -> Sequence[Markup]:
    backend: Backend = "cuda" if made.head["backend"] == "cuda" else "triton"
    return code.lines(ROOT / OPS[made.head["op"]].file(made.head["step"], backend))


def facts(name: str) -> list[tuple[str, str]]:
    """How it was compiled, and to what: names and HTML."""
    head = recorded(name).head
    told = [
        (key, str(Markup("{}").format(head[key])))
        for key in ("setting", "kernel", "signature", "multiples of 16", "constexprs", "options", "compiler")
        if head.get(key)
    ]
    sizes = [
        (key, numbers.shown(head[key], float(head[key]), f"stages/{name}.txt#{key}"))
        for key in _QUANTITIES
        if key in head
    ]
    return [*told, *((key, str(value)) for key, value in sizes)]


def coloured(stage: str, found: Sequence[Line]) -> list[Markup]:
    return code.coloured(_lexer(stage), "\n".join(text for _, text in found) + "\n")[: len(found)]


@functools.cache
def _lexer(stage: str) -> Lexer:
    if stage in ("ttir", "ttgir"):
        return lexers.MlirLexer(stripnl=False)
    if stage == "sass":
        return lexers.SassLexer(stripnl=False)
    return get_lexer_by_name({"llir": "llvm", "ptx": "ptx", "amdgcn": "amdgpu"}[stage], stripnl=False)


def excerpts(name: str, chosen: Sequence[str]) -> Iterator[Excerpt]:
    """The lines around what was found in these stages, in their order there."""
    made = recorded(name)
    for stage in chosen:
        found = [(one.number, each) for each, every in evidence.of(made).items() for one in every if one.stage == stage]
        text = coloured(stage, made.stages[stage])
        for number, each in sorted(found):
            first = max(0, number - _AROUND)
            yield Excerpt(stages.TITLES[stage], each, first + 1, text[first : number + _AROUND + 1])

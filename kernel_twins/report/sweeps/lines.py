"""Compilers' texts as lines that are the same in every compilation, each with the line of the step's file it is of.

A line that was inlined from another file has the line of the call; 0 stands for none. Long lists of like types and of
registers in a row are written as the first and the last, and lines that repeat but for their numbers are written once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from kernel_twins.compiler import disassembly

Line = tuple[int, str]
Frame = tuple[str, int]  # a file's name and a line, the innermost first

_LOC = r"loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_MLIR_LOC = re.compile(rf"\s?{_LOC}")
_MLIR_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
_MLIR_PLACE = re.compile(r'^"([^"]*)":(\d+):\d+')
_MLIR_NAMED = re.compile(r'^"[^"]*"\((.*)\)$')
_MLIR_CALL = re.compile(r"^callsite\((#loc\d*) at (#loc\d*)\)$")

_LLVM_NODE = re.compile(r"^(!\d+) = (?:distinct )?!DI(\w+)\((.*)\)$", re.MULTILINE)
_LLVM_NOISE = re.compile(r", ![\w.]+ !\d+|(?<=[)\w]) ![\w.]+ !\d+|(?<= )#\d+|\s*;.*$")
_LLVM_DEBUG = re.compile(r"!dbg (!\d+)")

_PTX_LOC = re.compile(r"^\s*\.loc\s+(\d+) (\d+) (\d+)(.*)$")
_PTX_FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]*)"', re.MULTILINE)
_INLINED = re.compile(r"inlined_at (\d+) (\d+) (\d+)")
_COMMENTED = re.compile(r"([\w.-]+):(\d+):\d+")
_PTX_DROPPED = re.compile(r"^\s*(?://|\.loc\b|\.file\b|\.pragma\b|\$L__(?:tmp|func_|info)\w*:|$)")
_SASS_LINE = re.compile(r'^\s*//## File "([^"]*)", line (\d+)')
_SASS_CODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*$")
_SASS_LABEL = re.compile(r"^(\.L_x?_?\d+):$")
_GCN_DROPPED = re.compile(r"^\s*(?:;|\.|$)(?!LBB)|^\.L(?:tmp|func)\w*:")

_LONGEST = 12  # lines that repeat together
_FEWEST = 4  # lines that are worth folding
_AGAIN = re.compile(r"^ {4}… and (\d+) like the (?:(\d+) lines|line) above$")

_LIKE = re.compile(r"(=\w|\bfloat|\bi\d+|\bdouble|\bptr(?: addrspace\(\d\))?)(?:(,\s?)\1){7,}(?![\w%])")
_LIST = re.compile(r"(?:(?:\w+ )?[%$]?[a-z]*\d+,\s?){7,}(?:\w+ )?[%$]?[a-z]*\d+")
_ITEM = re.compile(r"((?:\w+ )?[%$]?[a-z]*)(\d+)$")


def mlir(text: str, own: str) -> list[Line]:
    """TTIR or TTGIR, whose locations stand behind each operation."""
    aliases = dict(_MLIR_ALIAS.findall(text))

    def frames(place: str) -> list[Frame]:
        if match := _MLIR_PLACE.match(place):
            return [(_name(match[1]), int(match[2]))]
        if match := _MLIR_CALL.match(place):
            return [*frames(match[1]), *frames(match[2])]
        if match := _MLIR_NAMED.match(place):
            return frames(match[1])
        return frames(aliases[place]) if place in aliases else []

    found = []
    for line in text.splitlines():
        if _MLIR_ALIAS.match(line) or not line.strip():
            continue
        places = re.findall(_LOC, line)
        at = _own(frames(places[-1][4:-1]), own) if places else 0
        found.append((at, _MLIR_LOC.sub("", line).rstrip()))
    return found


def llvm(text: str, own: str) -> list[Line]:
    """LLVM IR: globals and functions that are defined, without metadata and attributes."""
    nodes = {name: (kind, dict(re.findall(r'(\w+): ("[^"]*"|[^,]+)', rest))) for name, kind, rest in
             _LLVM_NODE.findall(text)}  # fmt: skip

    def file_of(scope: str) -> str:
        _, fields = nodes[scope]
        return nodes[fields["file"]][1]["filename"].strip('"') if "file" in fields else file_of(fields["scope"])

    def frames(name: str) -> Iterator[Frame]:
        _, fields = nodes[name]
        if int(fields["line"]):
            yield _name(file_of(fields["scope"])), int(fields["line"])
        if "inlinedAt" in fields:
            yield from frames(fields["inlinedAt"])

    found: list[Line] = []
    inside = False
    for line in text.splitlines():
        inside = inside or line.startswith("define ")
        if inside or line.startswith("@"):
            match = _LLVM_DEBUG.search(line)
            known = match and nodes.get(match[1], ("",))[0] == "Location"
            at = _own(frames(match[1]), own) if match and known else 0
            if shown := _LLVM_NOISE.sub("", line).rstrip():
                found.append((at, briefly(shown)))
        inside = inside and line != "}"
    return found


def own_places(ptx: str, own: str) -> str:
    """PTX in which every ``.loc`` names a line of the file ``own``, or 0: assemblers then tell of that file alone.

    Triton tells in a comment where code was inlined, nvcc by ``inlined_at``.
    """
    files = {number: _name(path) for number, path in _PTX_FILE.findall(ptx)}
    (index,) = (number for number, name in files.items() if name == own)
    callers: dict[tuple[str, ...], tuple[str, ...]] = {}
    lines = []
    for line in ptx.splitlines():
        if match := _PTX_LOC.match(line):
            place, rest = (match[1], match[2], match[3]), match[4]
            if caller := _INLINED.search(rest):
                callers[place] = caller.groups()
            frames = [(name, int(at)) for name, at in _COMMENTED.findall(rest)] or list(_chain(place, callers, files))
            lines.append(f"\t.loc\t{index} {_own(frames, own)} 0")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _chain(
    place: tuple[str, ...], callers: dict[tuple[str, ...], tuple[str, ...]], files: dict[str, str]
) -> Iterator[Frame]:
    seen = set()
    while place not in seen:
        seen.add(place)
        yield files[place[0]], int(place[1])
        place = callers.get(place, place)


def ptx(text: str) -> list[Line]:
    """PTX of ``own_places``: the kernel alone."""
    code, *_ = re.split(r"^\s*\.(?:section|file)\b", text, maxsplit=1, flags=re.MULTILINE)
    return list(_followed(code, _PTX_LOC, 2, _PTX_DROPPED, lambda line: re.sub(r"\s*//.*$", "", line)))


def sass(text: str) -> list[Line]:
    """What nvdisasm prints of a cubin of ``own_places``: instructions and labels, without NOPs, which pad."""
    found: list[Line] = []
    at = 0
    for line in text.splitlines():
        if match := _SASS_LINE.match(line):
            at = int(match[2])
        elif match := _SASS_CODE.match(line):
            if disassembly.opcode(match[1]) != "NOP":
                found.append((at, f"    {match[1]}"))
        elif match := _SASS_LABEL.match(line):
            found.append((0, line))
    while found and found[-1][1].endswith(":"):
        found.pop()
    return found


def amdgcn(text: str, own: str) -> list[Line]:
    """AMD's assembly, whose comments tell where code was inlined."""
    code, *_ = re.split(r"^\s*\.section\b", text.partition("\n.Lfunc_begin0:")[2], maxsplit=1, flags=re.MULTILINE)
    found: list[Line] = []
    at = 0
    for line in code.splitlines():
        if line.strip().startswith(".loc"):
            at = _own([(name, int(number)) for name, number in _COMMENTED.findall(line)], own)
        elif not _GCN_DROPPED.match(line):
            found.append((0 if line.endswith(":") else at, line.partition(";")[0].expandtabs(4).rstrip()))
    return found


def _followed(
    text: str, mark: re.Pattern[str], group: int, dropped: re.Pattern[str], shown: Callable[[str], str]
) -> Iterator[Line]:
    at = 0
    for line in text.splitlines():
        if match := mark.match(line):
            at = int(match[group])
        elif not dropped.match(line):
            yield at, briefly(shown(line).expandtabs(4).rstrip())


def folded(lines: Sequence[Line]) -> list[Line]:
    """Lines of one source line that repeat, alone or several together, once; behind them how often they do."""
    shapes = [(at, re.sub(r"\d+", "#", text)) for at, text in lines]
    found: list[Line] = []
    i = 0
    while i < len(lines):
        together, times = max(((p, _times(shapes, i, p)) for p in range(1, _LONGEST + 1)), key=lambda x: x[0] * x[1])
        if times >= 3 and together * times >= _FEWEST:
            which = f"{together} lines" if together > 1 else "line"
            found += [*lines[i : i + together], (lines[i][0], f"    … and {times - 1} like the {which} above")]
            i += together * times
        else:
            found.append(lines[i])
            i += 1
    return found


def _times(shapes: Sequence[tuple[int, str]], start: int, together: int) -> int:
    """How often lines repeat from ``start`` on; 0 where they do not three times, or are of several source lines."""
    unit = shapes[start : start + together]
    if len({at for at, _ in unit}) > 1:
        return 0
    times = 1
    while shapes[start + times * together : start + (times + 1) * together] == unit:
        times += 1
    return times if times >= 3 else 0


def count(lines: Sequence[Line]) -> int:
    """How many lines there are where none is folded."""
    again = [match for _, text in lines if (match := _AGAIN.match(text))]
    return len(lines) - len(again) + sum(int(match[1]) * int(match[2] or 1) for match in again)


def briefly(line: str) -> str:
    """``{ 64 x float }`` for a list of as many, ``%r1…%r64`` for registers in a row; from eight on."""
    line = _LIKE.sub(lambda match: f"{match[0].count(match[2]) + 1} x {match[1]}", line)
    return _LIST.sub(lambda match: _rows(match[0]), line)


def _rows(text: str) -> str:
    separator = ", " if ", " in text else ","
    items = [match for item in text.split(separator) if (match := _ITEM.fullmatch(item.strip()))]
    runs: list[list[re.Match[str]]] = []
    for item in items:
        last = runs[-1][-1] if runs else None
        if last and last[1] == item[1] and int(last[2]) + 1 == int(item[2]):
            runs[-1].append(item)
        else:
            runs.append([item])
    return separator.join(part for run in runs for part in _run(run))


def _run(run: Sequence[re.Match[str]]) -> list[str]:
    if len(run) < 8:
        return [each[0] for each in run]
    return [f"{run[0][0]}…{run[-1][0].split()[-1]}"]


def _own(frames: Iterator[Frame] | Sequence[Frame], own: str) -> int:
    return next((line for file, line in frames if file == own and line), 0)


def _name(path: str) -> str:
    return path.rpartition("/")[2]

"""What the compilers made of each step: registers, spills, and which instructions, as recorded without a GPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from markupsafe import Markup

from builder import numbers
from builder.plots import Axis, Plot
from kernel_twins.compiler.disassembly import CLASSES
from kernel_twins.report.figures import words
from kernel_twins.report.meaning import static
from kernel_twins.report.rows import store
from kernel_twins.spec import BACKENDS, Op

# Instructions that do the same for a reader who looks at shares, by the name of their colour.
_KINDS = {
    "device": ("global loads", ("LDG.128", "LDG")),
    "l2": ("asynchronous copies", ("LDGSTS", "UBLKCP", "UTMALDG")),
    "shared": ("shared loads", ("LDS.128", "LDS", "LDSM")),
    "tensor": ("tensor cores", ("HMMA", "HGMMA")),
    "registers": ("FFMA", ("FFMA",)),
    "idle": ("special functions", ("MUFU",)),
    "alarm": ("spills", ("LDL", "STL")),
}
_COLUMNS = ("registers", "spill_bytes", "instructions")
_WIDE, _LEFT, _ROW, _BAR, _TOP = 900, 190, 30, 11, 8


@dataclass(frozen=True, slots=True)
class Mix:
    """The figure, its key as (colour, name), and the table."""

    svg: Markup
    key: list[tuple[str, str]]
    heading: list[str]
    rows: list[tuple[str, list[Markup]]]


def mix(op: Op) -> Mix | None:
    """None where the operation has no static rows."""
    cells = [(op.name, step.name, backend) for step in op.steps for backend in step.backends]
    mine = [row for cell in cells for row in _rows().get(cell, [])]
    if not mine:
        return None
    present = [name for name in CLASSES if any(int(row[name]) for row in mine)]
    kinds = {kind: (title, [each for each in names if each in present]) for kind, (title, names) in _KINDS.items()}
    key = [(kind, title) for kind, (title, names) in kinds.items() if names]
    plot = Plot(_WIDE, _TOP + _ROW * len(op.steps) + 40)
    bottom = _TOP + _ROW * len(op.steps)
    shares = {cell: _shares(_rows().get(cell, [])) for cell in cells}
    axis = Axis(0, max(sum(its.values()) for its in shares.values()) or 1.0, _LEFT, _WIDE - 80)
    for tick in axis.ticks(64):
        plot.line([(axis.at(tick), _TOP), (axis.at(tick), bottom)], "grid")
    plot.across(axis, bottom, 64)
    plot.text(_WIDE - 80, bottom + 30, "% of the kernel's instructions", "tick end")
    rows = []
    for index, step in enumerate(op.steps):
        plot.text(_LEFT - 8, _TOP + _ROW * index + _ROW / 2 + 4, step.name, "name end")
        for row, backend in enumerate(BACKENDS):
            if backend not in step.backends:
                continue
            sofar, y = 0.0, _TOP + _ROW * index + 3 + row * (_BAR + 1)
            for kind, share in shares[op.name, step.name, backend].items():
                plot.rect(axis.at(sofar), y, axis.at(sofar + share) - axis.at(sofar), _BAR, f"part {kind}")
                sofar += share
            plot.text(axis.at(sofar) + 4, y + 9.5, words.title(backend), "tick start")
            numbered = [_cell((op.name, step.name, backend), column) for column in (*_COLUMNS, *present)]
            rows.append((f"{step.name}, {words.title(backend)}", numbered))
    told = f"Which instructions the steps of {op.title} are made of, CUDA above Triton: {', '.join(t for _, t in key)}."
    heading = ["step", "registers", "bytes spilled", "instructions", *present]
    return Mix(plot.svg(told, "mix"), key, heading, rows)


def compiled(op: str, step: str, backend: str) -> list[dict[str, str]]:
    """The rows of all kernels that a step is compiled to; LookupError where there is none."""
    return _rows()[op, step, backend]


@functools.cache
def _rows() -> dict[static.Cell, list[dict[str, str]]]:
    found: dict[static.Cell, list[dict[str, str]]] = {}
    for row in store.read(static.FILE, static.STATIC).to_dict("records"):
        found.setdefault((row["op"], row["step"], row["backend"]), []).append(row)
    return found


def _cell(cell: static.Cell, column: str) -> Markup:
    """A number, or the least and the greatest where a step has several kernels; a dash without a row."""
    found = [int(row[column]) for row in _rows().get(cell, [])]
    if not found:
        return Markup("–")
    source = f"{static.FILE.name}#{'/'.join(cell)}/{column}"
    low, high = (
        numbers.shown(f"{value:,}", value, f"{source}/{end}")
        for end, value in {"min": min(found), "max": max(found)}.items()
    )
    return low if min(found) == max(found) else low + "–" + high


def _shares(rows: list[dict[str, str]]) -> dict[str, float]:
    """In percent of the longest kernel's instructions, by kind; without those that it has not."""
    if not rows:
        return {}
    longest = max(rows, key=lambda row: int(row["instructions"]))
    counts = {kind: sum(int(longest[name]) for name in names) for kind, (_, names) in _KINDS.items()}
    return {kind: 100 * count / int(longest["instructions"]) for kind, count in counts.items() if count}

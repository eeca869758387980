"""``show --summary``: how many instructions of each opcode a step has, and another one beside it."""

from __future__ import annotations

from collections import Counter

from kernel_twins.compiler import opcodes
from kernel_twins.compiler import show as stages
from kernel_twins.report.compare import tables
from kernel_twins.report.meaning import write
from kernel_twins.spec import Backend, Case, Op, Step

_MOST_TOLD = 4  # kernels of one side, each with its registers


def show(op: Op, step: Step, backend: Backend, stage: str, case: Case, other: str, kernel: str) -> None:
    """Print the counts of a step's kernels, after those of ``other`` where that is not empty, largest change first.

    ValueError and UnavailableError as ``show`` and ``diff`` of the compiler's stages.
    """
    if stage not in opcodes.STAGES:
        raise ValueError(
            f"--stage is {stage}; --summary counts instructions, which are in {' and '.join(opcodes.STAGES)}"
        )
    sides = [(step, backend)]
    if other:
        sides.insert(0, stages.other_side(op, step, backend, stage, case, other))
    kernels = [stages.kernels(op, each, by, stage, case, kernel)[1] for each, by in sides]
    counts = [opcodes.counts("\n".join(text for _, text in found), stage) for found in kernels]
    on = tables.console()
    for (each, by), found, count in zip(sides, kernels, counts, strict=True):
        several = "kernels" if len(found) > 1 else "kernel"
        tables.show(on, f"{each.name} {by}: {count.total():,} instructions in {len(found)} {several}")
        few = [text.partition("\n")[0].removeprefix("// ") for _, text in found] if len(found) <= _MOST_TOLD else []
        tables.show(on, *(f"  {line}" for line in few or ["--kernel NAME chooses one of them"]))
    rows = sorted(
        set().union(*counts), key=lambda name: (-abs(counts[-1][name] - counts[0][name]), -counts[0][name], name)
    )
    if not other:
        rows = [name for name, _ in counts[0].most_common()]
    changed = [name for name in rows if not other or counts[0][name] != counts[1][name]]
    headings = [each.name if other != "twin" else by for each, by in sides]
    made = tables.table("opcode", *headings, *(["change"] if other else []), right=range(1, 4))
    for name in changed:
        made.add_row(name, *(f"{count[name]:,}" for count in counts), *([_change(name, *counts)] if other else []))
    tables.show(on, "", made)
    if same := len(rows) - len(changed):
        tables.show(on, f"\n{same} opcodes are as often in both")


def _change(name: str, before: Counter[str], after: Counter[str]) -> str:
    return write.change(before[name], after[name]) if after[name] else "gone"

"""README.md's generated parts: a line a public function, products sustained and rested, and what one step changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from kernel_twins.report.calls import sampled_table
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.limiter import Limit
from kernel_twins.report.pages import scoreboard
from kernel_twins.report.pages.ladder_page import before_and_after
from kernel_twins.spec import Name

STEP = ("matmul_bf16", "v03_swizzled")
"""The step of the diff in README.md, and what the table under it shows."""
_MOVED = [("time",), ("rate",), ("bank_conflicts",), ("instructions",)]


def parts(folder: Path, results: Iterable[Results]) -> dict[str, list[str]]:
    """The lines between README.md's markers, by marker."""
    known = {each.op.name: each for each in results}
    public = dict.fromkeys(op for function in FUNCTIONS.values() for op in function.ops)
    return {
        "functions": _functions(folder, known),
        "products": scoreboard.sustained_and_rested(known[op] for op in public if op in known),
        "step": _step(known),
    }


def _functions(folder: Path, results: Mapping[str, Results]) -> list[str]:
    header = ["function", "against", *sampled_table.OURS.values(), "limited by"]
    rows = [
        [f"`{name}`" if name in FUNCTIONS else name, *cells, _limit(name, results)]
        for name, cells in sampled_table.by_function(folder).items()
    ]
    return write.table(header, rows, right=len(header)) if rows else [sampled_table.NONE]


def _limit(function: str, results: Mapping[str, Results]) -> str:
    """What limits the CUDA side's forward pass: the step behind it, or the last one before that was profiled."""
    found = results.get(FUNCTIONS[function].ops[0]) if function in FUNCTIONS else None
    if found is None:
        return "–"
    first = next(iter(found.op.behind.get("cuda", ())), "")
    ladder = found.op.steps_of("cuda")
    for step in reversed(ladder[: [each.name for each in ladder].index(first) + 1] if first else ()):
        case = found.op.profile_case_of(step, "cuda")
        if case and (limit := found.limiter(Name("cuda", step.name), case)):
            return _short(limit)
    return "–"


def _short(limit: Limit) -> str:
    match limit.kind:
        case "balanced":
            return " and ".join(f"{unit} {_percent(share)}" for unit, share in [*limit.shares.items()][:2])
        case kind:
            return kind if limit.share is None else f"{kind} {_percent(limit.share)}"


def _percent(share: float) -> str:
    return write.unbroken(f"{share:.0f} %")


def _step(results: Mapping[str, Results]) -> list[str]:
    op, step = STEP
    found = results.get(op)
    if found is None or not found.measured:
        return [write.NOT_MEASURED]
    return write.table(*before_and_after(found, found.op.step(step), ["cuda"], _MOVED))

"""docs/<op>.md: the parts between markers, which say what was measured. The prose around them is left alone.

``<!-- limit:begin -->`` holds what bounds the operation, ``<!-- counters:v03_vectorized:begin -->`` what the counters
showed of that step: its time and rate, the quantities that its predictions speak of, and its times where they name
another case.
"""

from __future__ import annotations

from kernel_twins._profiling.report import marked, write
from kernel_twins._profiling.report.analysis import Results
from kernel_twins._profiling.report.deltas import TITLES, at_other_cases, before_and_after
from kernel_twins.spec import Name, Op, Step

_COUNTERS = "counters:"


def render(text: str, results: Results) -> str:
    """A page with its marked parts renewed; one that no step asks for stays as it is (``gaps`` names it)."""
    parts = {_COUNTERS + step.name: _counters(results, step) for step in results.op.steps}
    return marked.renew(text, parts | {"limit": [_limit(results)]})


def gaps(text: str, op: Op) -> list[str]:
    """What keeps a page from telling the whole ladder, a line each."""
    found = marked.names(text)
    wanted = ["limit", *(_COUNTERS + step.name for step in op.steps)]
    return [
        f"docs/{op.name}.md has {found[name]} pairs of markers {name}, must have {int(name in wanted)}"
        for name in dict.fromkeys([*wanted, *found])
        if found[name] != (name in wanted)
    ]


def _limit(results: Results) -> str:
    op = results.op
    case = op.profile_case
    intensity = op.flops(case) / op.bytes(case)
    told = (
        f"At `{case.slug}` the operation takes {write.number(op.flops(case) / 1e9)} GFLOP and moves at least "
        f"{write.number(op.bytes(case) / 1e6)} MB, {write.number(intensity)} FLOP a byte."
    )
    ceilings = results.ceilings
    if ceilings is None or not results.ceiling_us:
        return f"{told} This GPU has not been surveyed yet."
    pipe = "bf16" if op.ceiling == "bf16" else "fp32"
    balance = ceilings.balance_points()[f"{pipe}_dram"]
    bound = "device memory" if intensity < balance else "arithmetic"
    return (
        f"{told} The survey's balance point for {pipe} is {write.number(balance)} FLOP a byte read from device memory, "
        f"so {bound} is the limit: at the surveyed {op.ceiling.replace('_', ' ')} rate of "
        f"{write.number(results.ceiling)} {results.rate_unit} it takes {write.number(results.ceiling_us)} µs."
    )


def _counters(results: Results, step: Step) -> list[str]:
    case = results.op.profile_case
    status = {backend: results.status(case, Name(backend, step.name)) for backend in step.backends}
    measured = [backend for backend, each in status.items() if each]
    if not measured:
        return ["Not measured yet."]
    predicted = dict.fromkeys(each.quantity for each in step.predictions)
    keys = [("time",), ("rate",), *((key,) for key in predicted if key not in ("time", "rate"))]
    notes = []
    for backend, each in status.items():
        if each != "ok":
            notes.append(f"{TITLES[backend]}: {each or 'not measured yet'}.")
        if results.stale(Name(backend, step.name)):
            notes.append(f"{TITLES[backend]}: changed since it was measured.")
    header, rows = before_and_after(results, step, measured, keys)
    table = write.table(header, rows + at_other_cases(results, step, measured))
    return [*table, "", " ".join(notes)] if notes else table

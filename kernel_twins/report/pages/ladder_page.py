"""docs/<op>.md: the parts between markers, which say what was measured. The prose around them is left alone.

``<!-- limit:begin -->`` holds what bounds the operation, ``<!-- counters:v03_vectorized:begin -->`` what the counters
showed of that step: its time and rate, the quantities that its predictions speak of, and its times where they name
another case.
"""

from __future__ import annotations

from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.pages import marked
from kernel_twins.report.pages.deltas import TITLES, at_other_cases, before_and_after
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
    if ceilings is None or not (floor_us := results.ceiling_us(case)):
        return f"{told} This GPU has not been surveyed yet."
    pipe = "bf16" if op.ceiling == "bf16" else "fp32"
    balance = ceilings.balance_points()[f"{pipe}_dram"]
    bound = "device memory" if intensity < balance else "arithmetic"
    return (
        f"{told} The survey's balance point for {pipe} is {write.number(balance)} FLOP a byte read from device memory, "
        f"so {bound} is the limit: at the surveyed {op.ceiling.replace('_', ' ')} rate of "
        f"{write.number(results.ceiling)} {results.rate_unit} it takes {write.number(floor_us)} µs."
    )


def _counters(results: Results, step: Step) -> list[str]:
    op = results.op
    cases = {backend: op.profile_case_of(step, backend) for backend in step.backends}
    status = {b: results.status(case or op.profile_case, Name(b, step.name)) for b, case in cases.items()}
    measured = [backend for backend, each in status.items() if each]
    if not measured:
        return ["Not measured yet."]
    predicted = dict.fromkeys(
        each.quantity
        for each in step.predictions
        if any((each.case or op.profile_case) == cases.get(backend) for backend in each.backends)
    )
    keys = [("time",), ("rate",), *((key,) for key in predicted if key not in ("time", "rate"))]
    notes = []
    for backend, each in status.items():
        if each != "ok":
            notes.append(f"{TITLES[backend]}: {each or 'not measured yet'}.")
        if (case := cases[backend]) != op.profile_case:
            notes.append(f"{TITLES[backend]}: leaves `{op.profile_case.slug}` to another step's kernel.")
        if case and (case, Name(backend, step.name)) in results.unprofiled():
            notes.append(f"{TITLES[backend]}: counters not recorded yet.")
        if results.stale(Name(backend, step.name)):
            notes.append(f"{TITLES[backend]}: changed since it was measured.")
    header, rows = before_and_after(results, step, measured, keys)
    table = write.table(header, rows + at_other_cases(results, step, measured))
    return [*table, "", " ".join(notes)] if notes else table

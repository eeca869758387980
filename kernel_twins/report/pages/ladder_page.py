"""docs/<op>.md: the parts between markers, which say what was measured. The prose around them is left alone.

A part is ``<!-- name:begin -->``, the lines, ``<!-- name:end -->``, each marker at the end of its line. ``limit`` holds
what bounds the operation, ``counters:v03_vectorized`` what the counters showed of that step: its time and rate, the
quantities that its predictions speak of, and its times where they name another case.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.quantities import QUANTITIES
from kernel_twins.report.pages import places
from kernel_twins.spec import Backend, Case, Name, Op, Step

TITLES = {"cuda": "CUDA", "triton": "Triton"}
NOT_MEASURED = "*not measured*"
"""Of a step that is in the spec and has no row yet."""
_COUNTERS = "counters:"
_SECTION = re.compile(r"^## ((v\d\d_\w+): .*)$", re.MULTILINE)
_LINK = re.compile(r"(\((?:docs/)?(\w+)\.md#)(v\d\d_\w+)[\w-]*\)")
_MARKED = re.compile(r"(<!-- ([\w:]+):begin -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def marks(text: str) -> Counter[str]:
    """How often each part is marked."""
    return Counter(match[2] for match in _MARKED.finditer(text))


def renewed(text: str, parts: Mapping[str, Sequence[str]]) -> str:
    """``text`` with the lines of the given parts in place of the old ones; other parts stay as they are."""
    return _MARKED.sub(
        lambda match: match[1] + "\n".join(parts[match[2]]) + "\n" + match[3] if match[2] in parts else match[0], text
    )


def relinked(text: str, docs: Path) -> str:
    """``text`` with its links to steps' sections as the headings of the pages in ``docs`` read now."""

    def renewed(link: re.Match[str]) -> str:
        page = docs / f"{link[2]}.md"
        sections = _SECTION.findall(page.read_text() if page.exists() else "")
        anchors = {step: places.heading(heading) for heading, step in sections}
        return f"{link[1]}{anchors[link[3]]})" if link[3] in anchors else link[0]

    return _LINK.sub(renewed, text)


def render(text: str, results: Results) -> str:
    """A page with its marked parts renewed; one that no step asks for stays as it is (``gaps`` names it)."""
    parts = {_COUNTERS + step.name: _counters(results, step) for step in results.op.steps}
    return renewed(text, parts | {"limit": [_limit(results)]})


def gaps(text: str, op: Op) -> list[str]:
    """What keeps a page from telling the whole ladder, a line each."""
    found = marks(text)
    wanted = ["limit", *(_COUNTERS + step.name for step in op.steps)]
    return [
        f"docs/{op.name}.md has {found[name]} pairs of markers {name}, must have {int(name in wanted)}: "
        + _wanted(name, name in wanted)
        for name in dict.fromkeys([*wanted, *found])
        if found[name] != (name in wanted)
    ]


def remedy(op: Op) -> str:
    """What measures a step that has no row yet."""
    return f"run `python profiling/ncu_report.py --op {op.name}` on a machine with the GPU"


def _wanted(name: str, is_wanted: bool) -> str:
    """What to write where a pair of markers is missing or too much."""
    markers = f"<!-- {name}:begin --> and <!-- {name}:end -->"
    if not is_wanted:
        return f"no step has this name, take {markers} out"
    if not name.startswith(_COUNTERS):
        return f"write {markers} once, where the page tells what bounds the operation"
    return (
        f"write a section on {name.removeprefix(_COUNTERS)}, with its idea, a drawing (a function under @drawn in "
        f"kernel_twins/report/drawings/), links to its files, and {markers} once, between which `log` writes"
    )


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
        return [f"*Not measured* yet: {remedy(op)}."]
    predicted = dict.fromkeys(
        each.quantity
        for each in step.predictions
        if any((each.case or op.profile_case) == cases.get(backend) for backend in each.backends)
    )
    keys = [("time",), ("rate",), *((key,) for key in predicted if key not in ("time", "rate"))]
    notes = []
    for backend, each in status.items():
        if each != "ok":
            notes.append(f"{TITLES[backend]}: {each or f'{NOT_MEASURED} yet: {remedy(op)}'}.")
        if (case := cases[backend]) != op.profile_case:
            notes.append(f"{TITLES[backend]}: leaves `{op.profile_case.slug}` to another step's kernel.")
        if case and (case, Name(backend, step.name)) in results.unprofiled():
            notes.append(f"{TITLES[backend]}: counters not recorded yet.")
        if results.stale(Name(backend, step.name)):
            notes.append(f"{TITLES[backend]}: changed since it was measured.")
    header, rows = before_and_after(results, step, measured, keys)
    table = write.table(header, rows + at_other_cases(results, step, measured))
    return [*table, "", " ".join(notes)] if notes else table


def before_and_after(
    results: Results, step: Step, backends: Sequence[Backend], quantities: Sequence[tuple[str, ...]]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table; each of ``quantities`` names those that share a row, left out if none is known.

    A language's column is of the case at which the step is profiled, and without quantities where it is not.
    """
    cases = {backend: results.op.profile_case_of(step, backend) for backend in backends}
    header, columns = [_place(cases.values())], []
    for backend, case in cases.items():
        previous = results.op.before(step, backend)
        before = results.quantities(Name(backend, previous.name), case) if previous and case else None
        after = results.quantities(Name(backend, step.name), case) if case else dict.fromkeys(QUANTITIES)
        columns.append((before, after))
        place = "" if header[0] else f" {_place([case])}".rstrip()
        header.append(f"{TITLES[backend]} {previous.name[:3] + ' → ' if previous else ''}{step.name[:3]}{place}")
    rows = []
    for keys in quantities:
        cells = [_cell(keys, before, after) for before, after in columns]
        if any(cell.strip("– ·→") for cell in cells):
            rows.append([" · ".join(_heading(results, key) for key in keys), *cells])
    return header, rows


def at_other_cases(results: Results, step: Step, backends: Sequence[Backend]) -> list[list[str]]:
    """Rows for the same header: the times at each other case that the step's predictions name.

    A time before that is of another step than the header's has its number.
    """
    rows = []
    for case in dict.fromkeys(each.case for each in step.predictions if each.case):
        if all(case == results.op.profile_case_of(step, backend) for backend in backends):
            continue
        cells = []
        for backend in backends:
            previous = results.previous(step, backend, case)
            before = {"time": results.time_us(case, Name(backend, previous.name))} if previous else None
            who = f"{previous.name[:3]}: " if previous and previous != results.op.before(step, backend) else ""
            cells.append(who + _cell(("time",), before, {"time": results.time_us(case, Name(backend, step.name))}))
        rows.append([f"time at {case.slug}, µs", *cells])
    return rows


def _place(cases: Iterable[Case | None]) -> str:
    """The one case of all columns, empty where there is none or there are several."""
    (case, *others) = set(cases)
    return f"at {case.slug}" if case and not others else ""


def _heading(results: Results, key: str) -> str:
    return f"rate, {results.rate_unit}" if key == "rate" else QUANTITIES[key].heading


def _cell(keys: tuple[str, ...], before: dict[str, float | None] | None, after: dict[str, float | None]) -> str:
    now = " · ".join(write.number(after[key]) for key in keys)
    if before is None:
        return now
    was = " · ".join(write.number(before[key]) for key in keys)
    changes = [write.change(before[key], after[key]) for key in keys]
    told = f" ({' · '.join(changes)})" if any(each not in ("", "=") for each in changes) else ""
    return f"{was} → {now}{told}"

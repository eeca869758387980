"""Numbers back to rows: a source, as ``<data data-src>`` names it, to the value that the committed data give.

A source is ``TABLE#KEY``. TABLE is a file of the GPU's folder, or of hardware-survey/; KEY names a cell, in the table's
own words. The kind of a table is its name without the operation: ``timings.csv`` for ``softmax.timings.csv``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from builder import answers, called, chips, claims, contests, grids, mix, numbers, sampled, stages
from builder.site import Site
from kernel_twins.report.figures import roofs, words
from kernel_twins.report.meaning import static
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.rows import store
from kernel_twins.spec import Case, Name


def value(site: Site, source: str) -> float:
    """What the rows say; LookupError where there is none."""
    table, _, key = source.partition("#")
    for suffix, resolve in RESOLVERS.items():
        if table == suffix or table.endswith(f".{suffix}"):
            return resolve(site, table.removesuffix(suffix).rstrip("."), key)
    raise LookupError(f"{source}: no table of this name is known; known are {', '.join(RESOLVERS)}")


def _cell(site: Site, op: str, key: str) -> float:
    """``CASE/BACKEND/STEP/QUANTITY``, or ``CASE/BACKEND/STEP|BACKEND/STEP/HOW``, as numbers.py writes them.

    A quantity is one of the log's, or a counter by ncu's name.
    """
    results = next(each for each in site.measured if each.op.name == op)
    slug, _, rest = key.partition("/")
    case = _case(results, slug)
    call, _, quantity = rest.rpartition("/")
    if "|" in call:
        ours, theirs = (_name(each) for each in call.split("|"))
        found = _compared(results, case, ours, theirs, quantity)
    else:
        found = _known(results, case, _name(call), quantity)
    if found is None:
        raise LookupError(f"{quantity} of {call} was not measured at {slug}")
    return found


def _compared(results: Results, case: Case, ours: Name, theirs: Name, how: str) -> float | None:
    if how == "multiple":
        return words.against(results, case, ours, theirs)
    if how in ("ratio", "low", "high", "paired"):
        ratio = results.ratio(case, ours, theirs)
        if ratio is None:
            return None
        return 1 / ratio.value if how == "paired" else float(getattr(ratio, "value" if how == "ratio" else how))
    now, was = (results.quantities(each, case)[how.removeprefix("more.")] for each in (ours, theirs))
    if now is None or not was:
        return None
    return now / was - how.startswith("more.")


def _known(results: Results, case: Case, name: Name, quantity: str) -> float | None:
    known = {**results.counters(name, case), **results.quantities(name, case), **roofs.point(results, case, name)}
    return known.get(quantity)


def _case(results: Results, slug: str) -> Case:
    return next(case for case in results.op.timed_cases if case.slug == slug)


def _name(call: str) -> Name:
    backend, step = call.split("/")
    return Name(backend) if step == "-" else Name(backend, step)


def _figure(site: Site, _: str, key: str) -> float:
    """``BACKEND/FIGURE?CHOICE``: what the scoreboard's rows of a choice come to."""
    told, _, choice = key.partition("?")
    backend, _, figure = told.partition("/")
    return contests.figure(contests.chosen(contests.of(site), choice), backend, figure)


def _compiled(site: Site, _: str, key: str) -> float:
    """``OP/STEP/BACKEND/KERNEL/COLUMN`` of the static rows, or ``COLUMN/min`` or ``max`` over a step's kernels."""
    head, _, last = key.rpartition("/")
    if last not in ("min", "max"):
        return float(_static()[head][last])
    op, step, backend, column = head.split("/")
    found = [int(row[column]) for row in mix.compiled(op, step, backend)]
    return float(min(found) if last == "min" else max(found))


@functools.cache
def _static() -> dict[str, dict[str, str]]:
    rows = store.read(static.FILE, static.STATIC).to_dict("records")
    return {"/".join(row[key] for key in static.KEY): row for row in rows}


def _predicted(site: Site, _: str, key: str) -> float:
    """``OP/VERDICT``: how many predictions that were frozen before measuring had it, or ``OP/judged``: either."""
    op, _, verdict = key.partition("/")
    results = next(each for each in site.measured if each.op.name == op)
    return float(numbers.predicted(results)[verdict])


def _rule(site: Site, _: str, key: str) -> float:
    """A figure that a rule of claims.py takes from many rows."""
    return claims.value(site.measured, key)


def _ceiling(site: Site, _: str, key: str) -> float:
    """A limit of the GPU, as its survey measured it."""
    return float(getattr(site.measured[0].ceilings, key))


def _exact(site: Site, _: str, key: str) -> float:
    """``OP/CASE/KEY``: what follows from the spec."""
    op, slug, quantity = key.split("/")
    results = next(each for each in site.measured if each.op.name == op)
    return answers.exactly(results, _case(results, slug), quantity)


def _gridded(site: Site, _: str, key: str) -> float:
    """``KERNEL/M/N/K/DTYPE/WARPS/STAGES/FACT`` of the grid of compilations."""
    place, _, fact = key.rpartition("/")
    return float(grids.rows()[place][fact])


def _stage(site: Site, name: str, key: str) -> float:
    """A number in the head of a recording of the compilers' stages."""
    return float(stages.recorded(name.removeprefix("stages/")).head[key])


# A page that shows numbers of another table adds it here.
RESOLVERS: dict[str, Callable[[Site, str, str], float]] = {
    "timings.csv": _cell,
    "counters.csv": _cell,
    "scoreboard": _figure,
    "sampled.csv": sampled.resolve,
    "functions.csv": called.resolve,
    "predictions.csv": _predicted,
    static.FILE.name: _compiled,
    chips.SURVEY: lambda site, op, key: chips.survey_value(key),
    chips.SHEETS: lambda site, op, key: chips.sheet_value(key),
    "rule": _rule,
    "ceilings": _ceiling,
    "exact": _exact,
    "sweeps/compile.csv": _gridded,
    "txt": _stage,
}

"""Numbers of pages: each is written with the place of the row that it comes from, by which tests find it again.

A source is ``FILE#CASE/BACKEND/STEP/QUANTITY``, with ``-`` for a baseline's step, or ``FILE#CASE/A|B/HOW`` for a
comparison of two calls: ``ratio`` is how many times faster A is, ``paired`` the same of times, ``multiple`` the ratio,
or that of medians where no run timed both, a quantity's name A's over B's, and ``more.QUANTITY`` the share by which A's
is more. FILE is a table of the GPU's folder, such as ``softmax.timings.csv``.
"""

from __future__ import annotations

from markupsafe import Markup

from kernel_twins.report.figures import roofs, words
from kernel_twins.report.meaning import judged, write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.judged import Judged
from kernel_twins.report.meaning.verdict import Ratio
from kernel_twins.spec import Case, Name

# Quantities that the bench gives; all others are ncu's.
_TIMED = ("time", "rate", "ceiling_share", "error_over_torch", "paired", "multiple")


def shown(text: str, value: float, source: str) -> Markup:
    """A number as pages have it; hovering tells its source."""
    return Markup('<data value="{value:.6g}" data-src="{source}">{text}</data>').format(
        value=value, source=source, text=text
    )


def call(name: Name) -> str:
    """A step or a baseline, as sources name it."""
    return f"{name.backend}/{name.step or '-'}"


def quantity(results: Results, name: Name, case: Case, key: str) -> Markup:
    """A quantity of a call, to three digits; a dash where it was not measured."""
    value = results.quantities(name, case)[key]
    if value is None:
        return Markup("–")
    return shown(write.number(value), value, _source(results, case, call(name), key))


def point(results: Results, name: Name, case: Case, key: str) -> Markup:
    """Where a call stands under the roofs, ``key`` of roofs.point; a dash where it was not timed and profiled."""
    value = roofs.point(results, case, name).get(key)
    return Markup("–") if value is None else shown(write.number(value), value, _source(results, case, call(name), key))


def change(results: Results, before: Name, after: Name, case: Case, key: str) -> Markup:
    """How a quantity changed, in the words of the log; empty where either was not measured."""
    was, now = (results.quantities(name, case)[key] for name in (before, after))
    told = write.change(was, now)
    if was is None or now is None or not any(letter.isdigit() for letter in told):
        return Markup("{}").format(told)
    value, how = (now / was - 1, f"more.{key}") if "%" in told else (now / was, key)
    source = _source(results, case, f"{call(after)}|{call(before)}", key).removesuffix(key) + how
    return shown(told, value, source)


def came(results: Results, of: Judged, case: Case, before: Name | None) -> Markup:
    """What a prediction was held against; empty where nothing was measured."""
    judgement, name = of.judgement, Name(of.backend, of.step)
    if judgement.actual is None:
        return Markup()
    key = judgement.prediction.quantity
    if not judgement.prediction.relative or before is None:
        return shown(of.came, judgement.actual, _source(results, case, call(name), key))
    paired = key == "time" and results.ratio(case, name, before)
    source = _source(results, case, f"{call(name)}|{call(before)}", "paired" if paired else key)
    return shown(of.came, judgement.actual, source)


def multiple_at(results: Results, case: Case, name: Name, against: Name) -> Markup:
    """How many times as fast, of medians where no run timed both; a dash where either has no time."""
    found = words.against(results, case, name, against)
    if found is None:
        return Markup("–")
    return shown(words.times(found), found, _source(results, case, f"{call(name)}|{call(against)}", "multiple"))


def predicted(results: Results) -> dict[str, int]:
    """How many predictions that were frozen before measuring were hit, and how many were judged; retired ones count."""
    steps = ((step, backend) for step in results.op.steps for backend in step.backends)
    found = [each for step, backend in steps for each in judged.of_step(results, step, backend)]
    outcomes = [
        (each.judgement.verdict == "hit", each.missed)
        for each in [*found, *judged.of_folded(results)]
        if each.mark == "pre-registered"
    ]
    return {"hit": sum(hit for hit, _ in outcomes), "judged": sum(hit or missed for hit, missed in outcomes)}


def count_predicted(results: Results, key: str) -> Markup:
    value = predicted(results)[key]
    return shown(str(value), value, f"predictions.csv#{results.op.name}/{key}")


def _source(results: Results, case: Case, calls: str, key: str) -> str:
    table = "timings" if key in _TIMED else "counters"
    return f"{results.op.name}.{table}.csv#{case.slug}/{calls}/{key}"


def counter(results: Results, name: Name, case: Case, metric: str) -> Markup:
    """One of ncu's counters of a call, to three digits; a dash where it was not recorded."""
    value = results.counters(name, case).get(metric)
    if value is None:
        return Markup("–")
    return shown(write.number(value), value, f"{results.op.name}.counters.csv#{case.slug}/{call(name)}/{metric}")


def ratio(results: Results, case: Case, name: Name, against: Name) -> Markup:
    """How many times faster a call is than another one; a dash where no run timed both."""
    found = results.ratio(case, name, against)
    return Markup("–") if found is None else multiple(results, case, name, against, found)


def multiple(results: Results, case: Case, name: Name, against: Name, found: Ratio) -> Markup:
    source = f"{results.op.name}.timings.csv#{case.slug}/{call(name)}|{call(against)}/ratio"
    return shown(f"{found.value:.3f} ×", found.value, source)

"""Numbers of pages: each is written with the place of the row that it comes from, by which tests find it again.

A source is ``FILE#CASE/BACKEND/STEP/QUANTITY``, with ``-`` for a baseline's step, or ``FILE#CASE/A|B/ratio`` for a
comparison of two calls. FILE is a table of the GPU's folder, such as ``softmax.timings.csv``.
"""

from __future__ import annotations

from markupsafe import Markup

from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.verdict import Ratio
from kernel_twins.spec import Case, Name

# Quantities that the bench gives; all others are ncu's.
_TIMED = ("time", "rate", "ceiling_share", "error_over_torch")


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
    table = "timings" if key in _TIMED else "counters"
    return shown(write.number(value), value, f"{results.op.name}.{table}.csv#{case.slug}/{call(name)}/{key}")


def ratio(results: Results, case: Case, name: Name, against: Name) -> Markup:
    """How many times faster a call is than another one; a dash where no run timed both."""
    found = results.ratio(case, name, against)
    return Markup("–") if found is None else multiple(results, case, name, against, found)


def multiple(results: Results, case: Case, name: Name, against: Name, found: Ratio) -> Markup:
    source = f"{results.op.name}.timings.csv#{case.slug}/{call(name)}|{call(against)}/ratio"
    return shown(f"{found.value:.3f} ×", found.value, source)

"""The names under which calls are profiled, in the characters that ncu's filters take literally."""

from __future__ import annotations

from kernel_twins.report.rows.errors import InvalidDataError
from kernel_twins.spec import Case, Name, Op


def write(op: Op, case: Case, name: Name) -> str:
    """``kl.OP.BACKEND.STEP``, and ``.CASE`` where that is not the operation's profile case."""
    place = "" if case == op.profile_case else f".{case.slug}"
    return f"kl.{op.name}.{name.backend}.{name.step or 'baseline'}{place}"


def read(op: Op, label: str) -> tuple[Case, Name]:
    """What a label of an operation means; InvalidDataError where it is none of them."""
    parts = label.split(".", 4)
    if len(parts) < 4 or parts[:2] != ["kl", op.name]:
        raise InvalidDataError(f"label is {label!r}; one of {op.name} reads kl.{op.name}.BACKEND.STEP or ends in .CASE")
    _, _, backend, step, *place = parts
    case = Case.parse(place[0]) if place else op.profile_case
    return case, Name(backend, "" if step == "baseline" else step)

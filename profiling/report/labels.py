"""The names under which calls are profiled, in the characters that ncu's filters take literally."""

from __future__ import annotations

from kernel_twins._profiling.report.errors import InvalidDataError
from kernel_twins.spec import Name


def write(op: str, name: Name) -> str:
    return f"kl.{op}.{name.backend}.{name.step or 'baseline'}"


def read(label: str) -> tuple[str, Name]:
    """The operation and the step or baseline; InvalidDataError where a label is not one of ours."""
    parts = label.split(".")
    if len(parts) != 4 or parts[0] != "kl":
        raise InvalidDataError(f"label is {label!r}; one of ours reads kl.OP.BACKEND.STEP")
    _, op, backend, step = parts
    return op, Name(backend, "" if step == "baseline" else step)

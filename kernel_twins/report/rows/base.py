"""What every room of the report stands on, pandas left out: exit codes and errors, places, and names of calls."""

from __future__ import annotations

from pathlib import Path

from kernel_twins.harness.ceilings import REFERENCE_GPU as REFERENCE_GPU
from kernel_twins.spec import Case, Name, Op

# 1 is left to a check that failed, 2 to argparse.
OK, FAILED, USAGE, CANNOT_RUN, INVALID_DATA, INTERRUPTED = 0, 1, 2, 3, 4, 130

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "profiling" / "data"
RUNS = ROOT / "runs"  # ignored by git: unfinished runs, and the results of GPUs that are not published


class CannotRunError(RuntimeError):
    """This machine lacks something; the message names it and the command that mends it."""


class InvalidDataError(ValueError):
    """A report or a table is not what it should be; nothing of it may be used."""


def shown(path: Path) -> str:
    """A path as messages and documents name it: within the checkout, where it is there."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def label(op: Op, case: Case, name: Name) -> str:
    """What a profiled call is named, in the characters that ncu's filters take literally.

    ``kl.OP.BACKEND.STEP``, and ``.CASE`` where that is not the operation's profile case.
    """
    place = "" if case == op.profile_case else f".{case.slug}"
    return f"kl.{op.name}.{name.backend}.{name.step or 'baseline'}{place}"


def labelled(op: Op, label: str) -> tuple[Case, Name]:
    """What a label of an operation means; InvalidDataError where it is none of them."""
    parts = label.split(".", 4)
    if len(parts) < 4 or parts[:2] != ["kl", op.name]:
        raise InvalidDataError(f"label is {label!r}; one of {op.name} reads kl.{op.name}.BACKEND.STEP or ends in .CASE")
    _, _, backend, step, *place = parts
    case = Case.parse(place[0]) if place else op.profile_case
    return case, Name(backend, "" if step == "baseline" else step)

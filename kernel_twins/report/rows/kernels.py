"""Whose kernels a call launched: a step's counters are those of its own kernel, told by its symbol, or are refused.

A step may leave a case to another step's kernel. What was counted then says nothing of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kernel_twins.compiler import disassembly
from kernel_twins.spec import Name, Op


def foreign(op: Op, name: Name, kernels: Sequence[str]) -> str:
    """Why launches are not the step's, empty where they are: of its kernel, and of helpers that the spec names.

    A baseline's may be anybody's, and so may those of a step that the spec does not have any more.
    """
    step = next((each for each in op.steps if each.name == name.step), None)
    if step is None:
        return ""
    own = disassembly.is_of(op.name, step.name)
    others = [kernel for kernel in dict.fromkeys(kernels) if not own(kernel)]
    if kernels and all(kernel in others for kernel in kernels):
        return f"no launch is of the step's own kernel, but of {', '.join(others)}"
    unnamed = [kernel for kernel in others if kernel not in step.helpers]
    return f"{', '.join(unnamed)} ran beside the step's kernel and is no helper of its Step" if unnamed else ""


def refused(op: Op, table: pd.DataFrame) -> dict[tuple[str, Name], str]:
    """The cells of a table with a row for every kernel or more that are not the step's, by slug and name, and why."""
    found: dict[tuple[str, Name], str] = {}
    for (case, backend, step), kernels in table.groupby(["case", "backend", "step"], sort=False)["kernel"]:
        name = Name(backend, step)
        if reason := foreign(op, name, kernels.unique().tolist()):
            found[case, name] = reason
    return found

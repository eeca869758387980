"""The public functions, found: the package ``functional/<family>`` declares a family's. No torch or GPU is needed.

All is timed and rendered in the order of their operations' chapters, and of those of one operation as declared.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kernel_twins import OPS, functional
from kernel_twins.functional.function import Function

if TYPE_CHECKING:
    from kernel_twins.functional.contests import Contest


def _discover() -> dict[str, Function]:
    families = [
        f"{functional.__name__}.{info.name}" for info in pkgutil.iter_modules(functional.__path__) if info.ispkg
    ]
    found = [each for family in families for each in _declared(family)]
    ordered = sorted(found, key=lambda function: OPS[function.ops[0]].chapter)
    functions = {function.name: function for function in ordered}
    if len(functions) < len(found):
        names = [function.name for function in found]
        raise ValueError(f"declared twice: {', '.join(name for name in functions if names.count(name) > 1)}")
    return functions


def _declared(family: str) -> tuple[Function, ...]:
    """A family's functions, none where it declares none; ValueError where one is of another family's operations."""
    module = importlib.import_module(family)
    declared: tuple[Function, ...] = getattr(module, "FUNCTIONS", ())
    for function in declared:
        if function.family != family.rpartition(".")[2]:
            raise ValueError(f"{module.__file__}: {function.name} is of {function.family}, must be of its folder")
    return declared


FUNCTIONS: dict[str, Function] = _discover()


def contests() -> Iterator[Contest]:
    """What is timed of the functions at cases that we chose, one after the other, since operands take memory."""
    for function in FUNCTIONS.values():
        yield from function.contests()

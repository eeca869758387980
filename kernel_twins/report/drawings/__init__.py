"""The drawings of docs/, one small SVG an idea. They show where data are and how they move, and no measured number.

A drawing is a public function without arguments that returns a ``Drawing``; its name, with hyphens, is its file's.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator

from kernel_twins.report.drawings.primitives import Drawing


def _found() -> Iterator[tuple[str, Callable[[], Drawing]]]:
    for each in pkgutil.iter_modules(__path__, f"{__name__}."):
        for name, function in inspect.getmembers(importlib.import_module(each.name), inspect.isfunction):
            signature = inspect.signature(function, eval_str=True)
            own = function.__module__ == each.name and not name.startswith("_")
            if own and signature.return_annotation is Drawing and not signature.parameters:
                yield name.replace("_", "-"), function


def _by_name() -> dict[str, Callable[[], Drawing]]:
    drawings: dict[str, Callable[[], Drawing]] = {}
    for name, function in _found():
        if name in drawings:
            raise ValueError(f"{name} is drawn in {drawings[name].__module__} and in {function.__module__}")
        drawings[name] = function
    return drawings


DRAWINGS = _by_name()

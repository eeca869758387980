"""The specs: one module an operation, each with its ``OP``. A new module here is found by itself."""

from __future__ import annotations

import importlib
import pkgutil

from kernel_twins.spec import Op


def _discover() -> dict[str, Op]:
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return {op.name: op for op in sorted((module.OP for module in modules), key=lambda op: op.chapter)}


OPS: dict[str, Op] = _discover()


def get(name: str) -> Op:
    """The operation of that name; ValueError lists the names there are."""
    if name not in OPS:
        raise ValueError(f"op is {name!r}; there are {', '.join(OPS)}")
    return OPS[name]

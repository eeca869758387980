"""The specs: a folder for each family, a module with an ``OP`` for each operation. They are found by scanning."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from kernel_twins.spec import Op


def _discover() -> dict[str, Op]:
    families = [f"{__name__}.{info.name}" for info in pkgutil.iter_modules(__path__) if info.ispkg]
    modules = [
        importlib.import_module(f"{family}.{info.name}")
        for family in families
        for info in pkgutil.iter_modules(importlib.import_module(family).__path__)
    ]
    found = [_op_of(module) for module in modules if hasattr(module, "OP")]
    return {op.name: op for op in sorted(found, key=lambda op: (op.chapter, op.name))}


def _op_of(module: ModuleType) -> Op:
    """A module's operation; ValueError if its family is not the folder's name, or its name not the file's."""
    op: Op = module.OP
    _, folder, file = module.__name__.rsplit(".", 2)
    if op.family != folder:
        raise ValueError(f"{module.__file__}: OP.family is {op.family!r}, must be {folder!r} like its folder")
    if op.name != file:
        raise ValueError(f"{module.__file__}: OP.name is {op.name!r}, must be {file!r} like its file")
    return op


OPS: dict[str, Op] = _discover()


def get(name: str) -> Op:
    """The operation of that name; ValueError lists the known names."""
    if name not in OPS:
        raise ValueError(f"op is {name!r}; there are {', '.join(OPS)}")
    return OPS[name]

"""Who imports whom: no module comes back to itself, and every room imports from those before it alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from build_support.packages import MAPPED

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"kernel_twins": "kernel_twins", "build_support": "build_support", **MAPPED}

ROOMS = (
    ("errors", "remedies"),
    ("spec",),
    ("ops", "named"),
    ("harness",),
    ("compiler", "_triton"),
    ("built",),  # which steps can be called here
    ("functional",),
    ("swap",),
    ("nn",),
    ("kernel_twins",),  # the package's own names
    ("contest*",),  # in functional/<family>: they call what a user calls
    ("report",),
    ("__main__",),
)
REPORT_ROOMS = (
    ("rows",),
    ("ncu", "meaning"),
    ("calls",),
    ("measure", "compare", "drawings", "figures", "sweeps"),
    ("pages",),
    ("report",),  # the modules that lie beside the rooms: what a user types
)
NOTES = "kernel_twins._triton.lib.tuning"
"""A search notes its winner where the report looks for it; launching does not come that way."""


def _modules() -> dict[str, Path]:
    """Every module's file; a package is its ``__init__``."""
    found: dict[str, Path] = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts])
            found.setdefault(name.removesuffix(".__init__"), path)
    return found


def _statements(node: ast.AST, inside: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports below a node, those for a type checker alone among them, and with ``inside`` those in functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif inside or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _statements(child, inside)


def _imported(tree: ast.Module, modules: Mapping[str, Path], inside: bool) -> set[str]:
    named = set()
    for statement in _statements(tree, inside):
        if isinstance(statement, ast.Import):
            named |= {alias.name for alias in statement.names}
        else:
            module = statement.module or ""
            names = [f"{module}.{alias.name}" for alias in statement.names]
            named |= {name if name in modules else module for name in names}
    return named & modules.keys()


def _graph(inside: bool) -> dict[str, set[str]]:
    modules = _modules()
    return {name: _imported(ast.parse(path.read_text()), modules, inside) for name, path in modules.items()}


@pytest.mark.parametrize("inside", [False, True], ids=["top", "everywhere"])
def test_no_module_comes_back_to_itself(inside: bool) -> None:
    graph = _graph(inside)
    assert all(graph[name] for name in ("kernel_twins", "build_support.extension", "kernel_twins._triton.lib.tuning"))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize(("package", "rooms"), [("kernel_twins", ROOMS), ("kernel_twins.report", REPORT_ROOMS)])
def test_a_room_imports_from_those_before_it(package: str, rooms: tuple[tuple[str, ...], ...]) -> None:
    floors = {room: floor for floor, names in enumerate(rooms) for room in names}
    graph = {name: others for name, others in _graph(inside=True).items() if f"{name}.".startswith(f"{package}.")}

    def room_of(module: str) -> str:
        if re.search(r"\.contest(_\w+)?$", module):
            return "contest*"
        own = module.removeprefix(package).split(".")
        is_room = len(own) > 1 and (package == "kernel_twins" or f"{package}.{own[1]}" in packages)
        return own[1] if is_room else package.rpartition(".")[2]

    packages = {name for name in graph if any(other.startswith(f"{name}.") for other in graph)}
    upwards = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others & graph.keys()
        if room_of(other) != room_of(name) and floors[room_of(other)] >= floors[room_of(name)] and name != NOTES
    ]
    assert not upwards

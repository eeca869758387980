"""docs/functions.md's generated parts: the signatures as they stand in the code, and the host's time of small calls."""

from __future__ import annotations

import ast
from pathlib import Path

from kernel_twins.functional.function import Function
from kernel_twins.report.calls import functions_table
from kernel_twins.report.calls.functions import FUNCTIONS
from kernel_twins.report.meaning import write
from kernel_twins.report.rows.base import ROOT
from kernel_twins.report.rows.recorded import median_us

_BACKENDS = ("torch", "cuda", "triton", "auto")


def parts(folder: Path) -> dict[str, list[str]]:
    """The lines between the page's markers, by marker."""
    return {"signatures": _signatures(), "host": _host(folder)}


def _signatures() -> list[str]:
    rows = [[f"`{function.name}`", f"`{_arguments(function)}`"] for function in FUNCTIONS.values()]
    return write.table(["function", "arguments"], rows, right=2)


def _arguments(function: Function) -> str:
    """Names and defaults of a function's arguments but ``backend``, by which its definition is told from others."""
    files = sorted((ROOT / "kernel_twins" / "functional" / function.family).glob("*.py"))
    statements = (statement for file in files for statement in ast.parse(file.read_text()).body)
    named = (each.args for each in statements if isinstance(each, ast.FunctionDef) and each.name == function.name)
    *_, public = (each for each in named if "backend" in {argument.arg for argument in (*each.args, *each.kwonlyargs)})
    for argument in (*public.args, *public.kwonlyargs):
        argument.annotation = None
    if public.args[-1].arg == "backend":
        del public.args[-1], public.defaults[-1]
    kept = [index for index, argument in enumerate(public.kwonlyargs) if argument.arg != "backend"]
    public.kw_defaults = [public.kw_defaults[index] for index in kept]
    public.kwonlyargs = [public.kwonlyargs[index] for index in kept]
    return ast.unparse(public).replace("'", '"')


def _host(folder: Path) -> list[str]:
    rows = functions_table.read(folder)
    rows = rows[(rows["kind"] == "host") & (rows["status"] == "ok")]
    if rows.empty:
        return [write.NOT_MEASURED]
    lines = []
    for (function, case), call in rows.groupby(["function", "case"], sort=False):
        times = {row.backend: median_us(row) for row in call.itertuples()}
        lines.append([f"{function} {case}", *(write.number(times.get(backend)) for backend in _BACKENDS)])
    header = ["host's time, µs", *(functions_table.TITLES[backend] for backend in _BACKENDS)]
    return write.table(header, lines)

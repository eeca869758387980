"""The grid of compilations as tables: warps down, stages across; and which instruction a product gets."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pandas as pd
from markupsafe import Markup

from builder import numbers
from kernel_twins.report.sweeps import grid

_FILE = "sweeps/compile.csv"
_SHOWN = (("registers", "registers"), ("stack_bytes", "B stack"), ("shared_bytes", "B shared"))
_MOST = 255  # registers of a thread


@dataclass(frozen=True, slots=True)
class Square:
    """A cell; ``heat`` is its registers' share of the most that a thread can have, in percent."""

    sizes: list[tuple[Markup, str]]
    instruction: str
    refused: str
    heat: int
    spills: bool


@dataclass(frozen=True, slots=True)
class Grid:
    """A kernel's tile."""

    kernel: str
    tile: str
    stages: list[str]
    rows: list[tuple[str, list[Square]]]
    stale: bool
    compiler: str


@dataclass(frozen=True, slots=True)
class Dots:
    """The bare product of bf16 at a number of warps: rows of the tile down, columns across."""

    warps: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]


def grids() -> list[Grid]:
    table = grid.read()
    found = []
    for (kernel, *_), some in table[table["kernel"] != grid.DOT].groupby(grid.KEY[:4], sort=False):
        stages = list(dict.fromkeys(some["stages"]))
        across = [
            (warps, [_square(row) for row in group.to_dict("records")])
            for warps, group in some.groupby("warps", sort=False)
        ]
        first = some.iloc[0]
        stale = first["code"] != grid.code(kernel)
        found.append(Grid(kernel, _tile(first), stages, across, stale, first["compiler"]))
    return found


def _tile(row: pd.Series) -> str:
    return " × ".join(row[key] for key in ("block_m", "block_n", "block_k") if row[key])


def _square(row: dict[str, str]) -> Square:
    source = f"{_FILE}#{key(row)}"
    sizes = [
        (numbers.shown(f"{int(row[name]):,}", float(row[name]), f"{source}/{name}"), unit)
        for name, unit in _SHOWN
        if row[name]
    ]
    heat = round(100 * int(row["registers"] or 0) / _MOST)
    return Square(sizes, row["instruction"], row["refused"], heat, row["stack_bytes"] not in ("", "0"))


@functools.cache
def rows() -> dict[str, dict[str, str]]:
    """The grid's rows by their places."""
    return {key(row): row for row in grid.read().to_dict("records")}


def key(row: dict[str, str]) -> str:
    """A row's place, as sources name it."""
    return "/".join(row[name] or "-" for name in grid.KEY)


def dots() -> list[Dots]:
    table = grid.read()
    table = table[(table["kernel"] == grid.DOT) & (table["dtype"] == "bf16") & (table["block_k"] == "64")]
    found = []
    for warps, some in table.groupby("warps", sort=False):
        columns = list(dict.fromkeys(some["block_n"]))
        rows = [(m, [row["instruction"] or row["refused"] for row in group.to_dict("records")])
                for m, group in some.groupby("block_m", sort=False)]  # fmt: skip
        found.append(Dots(warps, columns, rows))
    return found


def other() -> list[tuple[str, str, str]]:
    """Products of other types and depths: tile, type, instruction or why there is none."""
    table = grid.read()
    some = table[(table["kernel"] == grid.DOT) & ~((table["dtype"] == "bf16") & (table["block_k"] == "64"))]
    return [(_tile(row), row["dtype"], row["instruction"] or row["refused"]) for _, row in some.iterrows()]

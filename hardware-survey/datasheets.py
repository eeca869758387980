"""The datasheet figures of some GPUs, each with its source, and the table of them.

Rates of tensor cores are dense, with fp32 accumulators. ``boost_clock`` is the clock behind the fp32 figure,
``tensor_clock`` the one behind the tensor figures.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).parent / "datasheets.csv"

COLUMNS = (
    ("CC", "compute_capability"),
    ("SMs", "multiprocessors"),
    ("fp32", "fp32"),
    ("tf32", "tf32"),
    ("fp16", "fp16"),
    ("bf16", "bf16"),
    ("fp8", "fp8"),
    ("int8", "int8"),
    ("GB/s", "memory_bandwidth"),
    ("GB", "memory"),
    ("L2 MB", "l2"),
    ("shared/block KiB", "shared_memory_per_block"),
    ("W", "power"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure, as text so that it is shown as its source writes it."""

    text: str
    unit: str
    source: str
    note: str

    @property
    def value(self) -> float:
        return float(self.text)


@dataclass(frozen=True, slots=True)
class Datasheet:
    """One GPU's figures by quantity; a figure that its sources do not give is absent."""

    gpu: str
    name: str
    cells: dict[str, Cell]

    def value(self, quantity: str) -> float | None:
        cell = self.cells.get(quantity)
        return cell.value if cell else None


def load() -> dict[str, Datasheet]:
    """All datasheets by the slug that ``kernel_twins.harness.ceilings.gpu_slug`` gives."""
    sheets: dict[str, Datasheet] = {}
    with PATH.open(newline="") as file:
        for row in csv.DictReader(file):
            sheet = sheets.setdefault(row["gpu"], Datasheet(row["gpu"], row["name"], {}))
            sheet.cells[row["quantity"]] = Cell(row["value"], row["unit"], row["source"], row["note"])
    return sheets


def table(here: str = "") -> str:
    """The figures as a Markdown table, by memory bandwidth; the GPU with the slug ``here`` stands in bold."""
    sheets = sorted(load().values(), key=lambda sheet: sheet.value("memory_bandwidth") or 0)
    rows = []
    for sheet in sheets:
        texts = [sheet.name, *(sheet.cells[key].text if key in sheet.cells else "-" for _, key in COLUMNS)]
        rows.append([f"**{text}**" for text in texts] if sheet.gpu == here else texts)
    note = "Rates in TFLOP/s (int8: TOP/s), dense, fp32 accumulators. The source of each figure is in datasheets.csv."
    return markdown(["GPU", *(title for title, _ in COLUMNS)], rows) + f"\n{note}\n"


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns are flush right but for the first."""
    lines = [titles, ["---", *("---:" for _ in titles[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

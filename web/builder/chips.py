"""What a chip allows the operations: roofs that were surveyed, and those of datasheets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import datasheets
import render

from kernel_twins import OPS
from kernel_twins.harness.ceilings import PUBLISHED, REFERENCE_GPU, Ceilings
from kernel_twins.report.figures import roofs
from kernel_twins.spec import Op

# The datasheet's figure behind a pipe of ``roofs.pipe_of``, and how many of its operations one of ours takes.
_PIPES = {"bf16 tensor": ("bf16", 1), "fp32 FMA": ("fp32", 1), "3 × TF32": ("tf32", 3)}


@dataclass(frozen=True, slots=True)
class Chip:
    """Rates of memory in GB/s, by the names of the survey's ceilings, and of pipes in TFLOP/s, by their names.

    ``source`` is the table behind them. A pipe that the chip has not, or its datasheet does not tell of, is absent.
    """

    gpu: str
    name: str
    source: str
    memory: Mapping[str, float]
    pipes: Mapping[str, float]

    @property
    def key(self) -> str:
        """The chip's only name on the page: the reference GPU stands there twice."""
        return f"{self.gpu}-surveyed" if self.source == SURVEY else self.gpu

    def memory_of(self, op: Op) -> float:
        return self.memory[op.ceiling if op.ceiling in self.memory else "dram_read"]

    def pipe_of(self, op: Op) -> float | None:
        return self.pipes.get(pipe(op))

    def floor_us(self, op: Op) -> float | None:
        """The least time at the operation's profile case: its bytes, or its arithmetic, whichever takes longer."""
        rate = self.pipe_of(op)
        if rate is None:
            return None
        case = op.profile_case
        return max(op.bytes(case) / (1e3 * self.memory_of(op)), op.flops(case) / (1e6 * rate))

    def rate(self, op: Op) -> float | None:
        """TFLOP/s at the floor."""
        floor = self.floor_us(op)
        return op.flops(op.profile_case) / (1e6 * floor) if floor else None


SURVEY = f"{REFERENCE_GPU}.json"
SHEETS = "datasheets.csv"


def pipe(op: Op) -> str:
    """The pipe that does the operation's arithmetic."""
    return roofs.pipe_of(op.name, surveyed_ceilings())[0]


def intensity(op: Op) -> float:
    """FLOP a byte at the operation's profile case, of the least that it must do and move."""
    return op.flops(op.profile_case) / op.bytes(op.profile_case)


@cache
def survey() -> dict[str, Any]:
    """The reference GPU's survey, as committed."""
    found: dict[str, Any] = json.loads((PUBLISHED / SURVEY).read_text())
    return found


@cache
def surveyed_ceilings() -> Ceilings:
    return Ceilings.of(survey())


def surveyed() -> Chip:
    """The reference GPU, as it was measured."""
    found = surveyed_ceilings()
    memory = {"dram_read": found.dram_read, "dram_copy": found.dram_copy}
    split = roofs.pipe_of(roofs.SPLIT, found)
    pipes = {"bf16 tensor": found.bf16, "fp32 FMA": found.fp32, split[0]: split[1]}
    return Chip(REFERENCE_GPU, datasheets.load()[REFERENCE_GPU].name, SURVEY, memory, pipes)


def by_datasheet() -> list[Chip]:
    """All chips of the datasheet table, by their bandwidth."""
    found = [_of(sheet) for sheet in datasheets.load().values() if sheet.value("memory_bandwidth")]
    return sorted(found, key=lambda chip: chip.memory["dram_read"])


def _of(sheet: datasheets.Datasheet) -> Chip:
    rates = {name: (sheet.value(key), parts) for name, (key, parts) in _PIPES.items()}
    pipes = {name: rate / parts for name, (rate, parts) in rates.items() if rate}
    return Chip(sheet.gpu, sheet.name, SHEETS, {"dram_read": sheet.cells["memory_bandwidth"].value}, pipes)


def survey_value(key: str) -> float:
    """A number of the survey: ``MEASUREMENT/FIELD``, ``balance/PIPE_MEMORY`` or ``floor/OPERATION``.

    Besides the fields of the file there are ``spread`` and ``of_datasheet``, in percent. LookupError where it is not.
    """
    name, _, cell = key.partition("/")
    if name == "balance":
        return surveyed_ceilings().balance_points()[cell]
    if name == "floor":
        return _floor(surveyed(), cell)
    row = next((row for row in survey()["measurements"] if row["name"] == name), None)
    if row is None:
        raise LookupError(f"{key}: the survey has no measurement {name}")
    if cell == "spread":
        return float(100 * row["iqr"] / row["value"])
    if cell == "of_datasheet":
        limit = render.datasheet_limit(name, survey()["device"], datasheets.load().get(REFERENCE_GPU))
        if limit is None:
            raise LookupError(f"{key}: the datasheet promises nothing")
        return float(100 * row["value"] / limit)
    return float(row[cell])


def sheet_value(key: str) -> float:
    """A number of the datasheets: ``GPU/QUANTITY``, or ``GPU/floor/OPERATION``."""
    gpu, _, cell = key.partition("/")
    kind, _, op = cell.partition("/")
    if kind == "floor":
        return _floor(next(chip for chip in by_datasheet() if chip.gpu == gpu), op)
    return datasheets.load()[gpu].cells[cell].value


def _floor(chip: Chip, op: str) -> float:
    found = chip.floor_us(OPS[op])
    if found is None:
        raise LookupError(f"{chip.name} has no rate for {op}")
    return found

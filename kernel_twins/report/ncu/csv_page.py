"""The CSV of ``ncu --import REPORT --csv --page raw``: where NVIDIA's module is missing, and tables made elsewhere.

The page is treacherous, so what cannot be read in exactly one way is refused: ncu does not escape quotes in names,
prints numbers in the user's locale, mixes its messages in, and with automatic units prints NaN as 0.000000. Base units
have two decimals, so that small ratios lose digits: NVIDIA's module is exact.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal

from kernel_twins.report.ncu.reader import DEVICE, Launch, missing, the_label
from kernel_twins.report.ncu.units import to_base
from kernel_twins.report.rows.base import InvalidDataError
from kernel_twins.report.rows.metrics import CYCLES, DURATION, METRICS

REMEDY = "export it with `LC_ALL=C ncu --import REPORT --csv --page raw --print-units base`"

_KERNEL = "Kernel Name"
_FIXED = {
    **dict.fromkeys(("ID", "Process ID", "Context", "Stream"), re.compile(r"[\d.,]*")),
    **dict.fromkeys(("Block Size", "Grid Size"), re.compile(r"[\d(), x.]*")),
    "CC": re.compile(r"\d+[.,]\d+|"),
    **dict.fromkeys(("Process Name", "Host Name", "Device"), re.compile(r".*")),
}
"""ncu's own columns and what they hold; others are metrics, the kernel's name and texts that its user chose."""
_METRIC = re.compile(r"[a-zA-Z]\w*__[\w.]+")
_LABEL = re.compile(r"\bkl(?:\.[\w-]+){3}")
_GROUPED = r"[-+]?[1-9]\d{{0,2}}(?:\{0}\d{{3}})+(?:\{1}\d+)?"
_PLAIN = r"[-+]?\d+(?:\{0}\d+)?(?:[eE][-+]?\d{{1,3}})?"
_LOCALES = {
    "C": ("", ".", re.compile(_PLAIN.format("."))),
    "en_US": (",", ".", re.compile(f"{_PLAIN.format('.')}|{_GROUPED.format(',', '.')}")),
    "de_DE": (".", ",", re.compile(f"{_PLAIN.format(',')}|{_GROUPED.format('.', ',')}")),
}
"""Sign between groups of three digits, decimal sign, and what numbers look like."""
_NOT_FINITE = re.compile(r"(?:\(!\) )?([-+]?(?:nan|inf))", re.IGNORECASE)
_CSV = re.compile(r"{0}(?:,{0})*".format(r'(?:"(?:[^"]|"")*"|[^",]*)'))
"""A line whose quotes enclose fields or are doubled. Python's reader also takes one in the middle of a bare field."""
_MISSING = ("", "n/a")
_ZERO_OR_NAN = re.compile(r"0[.,]0{6}")
"""How automatic units print both: of anybody's page it is left out, a missing number rather than a wrong one."""
_NEVER_ZERO = (DURATION, CYCLES)


def parse(text: str, name: str, everything: bool = False) -> list[Launch]:
    """The launches of a raw page, in base units; ``name`` is the file's, for messages.

    The registry's metrics, each launch under one of our labels; with ``everything`` all metrics that are numbers, and
    our labels where there are any. InvalidDataError says which row, column or number cannot be trusted.
    """
    try:
        return list(_launches(text, everything))
    except InvalidDataError as error:
        raise InvalidDataError(f"{name}: {error}") from None


def _launches(text: str, everything: bool) -> Iterator[Launch]:
    header, units, rows = _table(text)
    columns = [column for column in header if (_METRIC.fullmatch(column) if everything else column in METRICS)]
    if not columns:
        raise InvalidDataError(missing(DURATION, [column for column in header if _METRIC.fullmatch(column)]))
    cells = {column: [row[column] for row in rows] for column in columns}
    numbers = {column: found for column, found in cells.items() if column in METRICS or not _is_text(found)}
    read = _in_one_locale(numbers)
    for row in rows:
        metrics: dict[str, float] = {}
        spelled: dict[str, str] = {}
        for column in numbers:
            if row[column] in _MISSING or (everything and _ZERO_OR_NAN.fullmatch(row[column])):
                continue
            metrics[column], spelled[column] = to_base(read(row[column]), units[column], column)
            if column in _NEVER_ZERO and metrics[column] == 0:
                raise InvalidDataError(f"{column} of {row[_KERNEL]} is 0, which is how ncu prints NaN here: {REMEDY}")
        texts = " ".join(row[column] for column in header if _is_free(column) and column != _KERNEL)
        label = the_label(_LABEL.findall(texts), row[_KERNEL], not everything)
        yield Launch(label, row[_KERNEL], metrics, spelled, row.get(DEVICE, ""))


def _table(text: str) -> tuple[list[str], dict[str, str], list[dict[str, str]]]:
    """Header, units and rows; all rows have all columns."""
    lines = text.removeprefix("\ufeff").split("\n")
    if lines.pop().strip():
        raise InvalidDataError("its last line has no end: it is cut short")
    lines = [line.removesuffix("\r") for line in lines]
    if failed := next((line for line in lines if line.startswith("==ERROR==")), None):
        raise InvalidDataError(f"ncu failed: {failed.removeprefix('==ERROR==').strip()}")
    start = next((index for index, line in enumerate(lines) if _KERNEL in line and "," in line), len(lines))
    table = [line for line in lines[start:] if line.strip() and not line.startswith("==")]
    if not table:
        told = [line for line in lines if line.startswith("==")]
        raise InvalidDataError(f"it holds no raw page{f', ncu says {told[-1]!r}' if told else ''}: {REMEDY}")
    header = next(csv.reader(table[:1]))
    if twice := sorted({column for column in header if header.count(column) > 1}):
        raise InvalidDataError(f"it has two columns {', '.join(twice)}")
    if _KERNEL not in header or "Metric Name" in header:
        raise InvalidDataError(f"it is another page of ncu's, with columns {', '.join(header[:6])} …: {REMEDY}")
    records = [dict(zip(header, _fields(line, header), strict=True)) for line in table[1:]]
    if not records or records[0][_KERNEL]:
        raise InvalidDataError(f"it has no row of units under its header: {REMEDY}")
    units, *rows = records
    for number, row in enumerate(rows, 1):
        for column, cell in row.items():
            if (column in _FIXED and not _FIXED[column].fullmatch(cell)) or (column == _KERNEL and not cell):
                raise InvalidDataError(f"row {number} has {cell!r} under {column}: it is cut short or was shifted")
    if not rows:
        raise InvalidDataError("it holds no launch: it is cut short, or no kernel was profiled")
    return header, units, rows


def _fields(line: str, header: list[str]) -> list[str]:
    """The fields of one line, also where a name holds quotes, which ncu does not escape."""
    fields = next(csv.reader([line]), []) if _CSV.fullmatch(line) else []
    if len(fields) == len(header):
        return fields
    if len(line) < 2 or not (line.startswith('"') and line.endswith('"')):
        raise InvalidDataError(f"a line does not have the {len(header)} fields of the header: {line[:120]!r}")
    fields = line[1:-1].split('","')
    surplus, free = len(fields) - len(header), [column for column in header if _is_free(column)]
    if surplus < 0 or (surplus and len(free) > 1) or '",","' in line:
        raise InvalidDataError(
            f"a line has {len(fields)} fields, the header {len(header)}, and its quotes do not tell which are part of "
            f"{' or '.join(free)}: {line[:120]!r}; read the report with NVIDIA's module (pip install ncu-report)"
        )
    if surplus == 0:
        return fields
    at = header.index(_KERNEL)  # the only text that can hold them: all else is anchored at one of the line's ends
    return [*fields[:at], '","'.join(fields[at : at + surplus + 1]), *fields[at + surplus + 1 :]]


def _is_free(column: str) -> bool:
    """Whether a column may hold any text."""
    return column not in _FIXED and not _METRIC.fullmatch(column)


def _is_text(cells: list[str]) -> bool:
    """Whether a column holds texts, such as a device's name, and not numbers."""
    return any(re.search("[^\\d.,'’\\s+-]", cell) and not _readings(cell) for cell in cells if cell not in _MISSING)


def _readings(cell: str) -> dict[str, Decimal]:
    """What a cell says in each locale in which it is a number."""
    if match := _NOT_FINITE.fullmatch(cell):
        return dict.fromkeys(_LOCALES, Decimal(match[1]))
    return {
        locale: Decimal(cell.replace(group, "").replace(point, "."))
        for locale, (group, point, pattern) in _LOCALES.items()
        if pattern.fullmatch(cell)
    }


def _in_one_locale(columns: Mapping[str, list[str]]) -> Callable[[str], Decimal]:
    """How to read the table's numbers: in the locale that fits all of them, unless several do and disagree."""
    metrics = {cell: column for column, cells in columns.items() for cell in cells if cell not in _MISSING}
    readings = {cell: _readings(cell) for cell in metrics}
    left = set(_LOCALES)
    for cell, values in readings.items():
        if not left & values.keys():
            wrong = "is not in the locale of the other numbers" if values else "is no number"
            raise InvalidDataError(f"{metrics[cell]} {wrong} of {', '.join(_LOCALES)}: {cell!r}; {REMEDY}")
        left &= values.keys()
    for cell, values in readings.items():
        several = {values[locale] for locale in left if values[locale].is_finite()}
        if len(several) > 1:
            either = " or ".join(str(value) for value in sorted(several))
            raise InvalidDataError(f"{metrics[cell]} is {cell!r}, {either} depending on the locale: {REMEDY}")
    locale = min(left)
    return lambda cell: readings[cell][locale]

"""``extract FILE``: a column for each launch of anybody's report, with the counters that the registry knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kernel_twins.report.compare import counters, tables
from kernel_twins.report.compare.foreign import judge
from kernel_twins.report.ncu import extract, kernel_names
from kernel_twins.report.ncu.reader import Launch
from kernel_twins.report.rows.metrics import METRICS

_MEANING = 36  # characters that the meaning of a counter needs at least
_NAMES_ELSEWHERE = "ncu's names of the counters stand in a wider terminal, and in a pipe"


def show(path: Path) -> None:
    """Print a report's launches and the limiter's verdict on each; errors as ``foreign_launches`` raises them."""
    launches = extract.foreign_launches(path)
    on = tables.console()
    devices = ", ".join(dict.fromkeys(launch.device or "an unnamed GPU" for launch in launches))
    tables.show(on, f"{path}: {len(launches)} launch{'es' if len(launches) > 1 else ''} on {devices}\n")
    names = kernel_names.numbered([launch.kernel for launch in launches])
    known = [metric for metric in METRICS if any(metric in launch.metrics for launch in launches)]
    zero = [metric for metric in known if not any(launch.metrics.get(metric) for launch in launches)]
    rows = [_row(metric, launches) for metric in known if metric not in zero]
    if rows:
        tables.show(on, *_tables(on, rows, names))
    if zero:
        tables.show(on, f"0 in every launch: {'; '.join(counters.meaning(metric) for metric in zero)}\n")
    judged = judge(launches, path)
    for index, (name, verdict) in enumerate(zip(names, judged.verdicts, strict=True)):
        tables.show(on, f"[{index}] {name}: {verdict.told}")
    others = len({metric for launch in launches for metric in launch.metrics} - METRICS.keys())
    rest = [f"{others} more metrics, and the kernels' full names: `extract --all` prints them as CSV"] if others else []
    tables.notes(on, (*judged.notes, *rest))


def _row(metric: str, launches: Sequence[Launch]) -> tuple[str, str, list[str], str]:
    """Meaning, unit, the values of the launches (a dash where one lacks it), and ncu's name."""
    holding = [launch for launch in launches if metric in launch.metrics]
    unit = holding[0].units[metric]
    meaning, shown, values = counters.told(metric, unit, [launch.metrics[metric] for launch in holding])
    texts = iter(values)
    return meaning, shown, [next(texts) if metric in launch.metrics else "–" for launch in launches], metric


def _tables(on: Console, rows: Sequence[tuple[str, str, list[str], str]], names: Sequence[str]) -> list[Table | str]:
    """One table with all that a console has room for; without ncu's names, then by some launches at a time."""
    every, places = range(len(names)), [f"[{index}]" for index in range(len(names))]
    titles = [f"{place} {name}" for place, name in zip(places, names, strict=True)]
    for headings, named in ((titles, True), (places, True), (titles, False), (places, False)):
        made = _table(rows, headings, every, named)
        if tables.fits(made, on, _MEANING):
            return [made, "" if named else f"\n{_NAMES_ELSEWHERE}\n"]
    some: list[Table | str] = []
    left = list(every)
    while left:
        count = 1
        while count < len(left) and tables.fits(_table(rows, places, left[: count + 1], False), on, _MEANING):
            count += 1
        made = _table(rows, places, left[:count], False)
        tables.fits(made, on, _MEANING)
        some += [made, ""]
        left = left[count:]
    return [*some, f"{_NAMES_ELSEWHERE}\n"]


def _table(
    rows: Sequence[tuple[str, str, list[str], str]], headings: Sequence[str], chosen: Sequence[int], named: bool
) -> Table:
    columns = ["counter", "unit", *(headings[index] for index in chosen), *(["name in ncu"] if named else [])]
    made = tables.table(*columns, right=range(2, len(chosen) + 2))
    for meaning, unit, values, metric in rows:
        made.add_row(meaning, unit, *(values[index] for index in chosen), *([metric] if named else []))
    return made

"""From reports to launches, from launches to rows, which are checked before anything of them is recorded."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

import kernel_twins
from kernel_twins.report.ncu import csv_page
from kernel_twins.report.ncu.ncu import find
from kernel_twins.report.ncu.reader import Launch, missing
from kernel_twins.report.ncu.units import to_base
from kernel_twins.report.rows import base, kernels
from kernel_twins.report.rows.base import CANNOT_RUN, INVALID_DATA, OK, CannotRunError, InvalidDataError
from kernel_twins.report.rows.metrics import CYCLES, DURATION, METRICS, Tier, meaning, names
from kernel_twins.report.rows.store import TABLES
from kernel_twins.spec import Op

_TIMEOUT_S = 300  # a report of a hundred launches takes some seconds
_MAX_SHARE = 102.0  # percent; counters of two passes disagree a little: 100.7 % of L2's sectors were seen to hit
_CLOCK = "gpc__cycles_elapsed.avg.per_second"
_CLOCK_HZ = (100e6, 4e9)
_HITS, _SECTORS = "lts__t_sectors_lookup_hit.sum", "lts__t_sectors.sum"
_FEW_DIGITS = 1_000.0  # below it two decimals are fewer digits than the automatic units' six
_FAULTS_TOLD = 3  # of one cell; where more is wrong, more of it is the same


def launches_of(report: Path, everything: bool = False) -> list[Launch]:
    """The launches of a report, in order: the registry's metrics of labelled ones, or all of anybody's.

    NVIDIA's module reads it in a process of its own; where that is missing, ncu prints it, to six digits or better.
    CannotRunError where there is neither, InvalidDataError with the report's name where that is not what it should be.
    """
    if not report.is_file():
        raise InvalidDataError(f"{report}: there is no such report")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "launches.json"
        command = [sys.executable, "-m", "kernel_twins.report.ncu.reader", str(report), str(file)]
        root = str(Path(kernel_twins.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        done = _run([*command, "--all"] if everything else command, report, PYTHONPATH=path)
        if done.returncode == OK:
            return [Launch(**launch) for launch in json.loads(file.read_text())]
    if done.returncode == CANNOT_RUN:
        return _by_ncu(report, everything, _last(done))
    if done.returncode == INVALID_DATA:
        raise InvalidDataError(_last(done))
    raise InvalidDataError(f"{report.name}: NVIDIA's reader failed with exit code {done.returncode}: {_last(done)}")


def _by_ncu(report: Path, everything: bool, reason: str) -> list[Launch]:
    try:
        ncu = str(find())
    except CannotRunError:
        raise CannotRunError(
            f"{report.name} cannot be read here, {reason}: `pip install ncu-report`, or install Nsight Compute and put "
            "its ncu on PATH"
        ) from None
    base, auto = (
        csv_page.parse(_page(ncu, report, units), f"{report.name} in {units} units", everything)
        for units in ("base", "auto")
    )
    return [_precise(report.name, *pair) for pair in zip(base, auto, strict=True)]


def _page(ncu: str, report: Path, units: str) -> str:
    done = _run([ncu, "--import", str(report), "--csv", "--page", "raw", "--print-units", units], report, LC_ALL="C")
    if done.returncode != OK:
        raise InvalidDataError(f"{report.name}: ncu --import failed with exit code {done.returncode}: {_last(done)}")
    return done.stdout


def _precise(report: str, base: Launch, auto: Launch) -> Launch:
    """One launch from both of ncu's pages: base units have two decimals, automatic ones six, but print NaN as zero."""
    metrics = {}
    for metric, value in base.metrics.items():
        other = auto.metrics.get(metric, value)
        if not math.isnan(value) and not math.isclose(value, other, rel_tol=1e-5, abs_tol=0.0051):
            raise InvalidDataError(f"{report}: ncu prints {metric} as {value:g} in base units, as {other:g} in others")
        metrics[metric] = other if abs(value) < _FEW_DIGITS else value
    return dataclasses.replace(base, metrics=metrics)


def _run(command: list[str], report: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S, check=False,
            env=os.environ | environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InvalidDataError(f"{report.name}: reading it did not end within {_TIMEOUT_S} s") from None


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"


def counter_rows(
    launches: Iterable[Launch], expected: dict[str, int], op: Op, run: str, codes: dict[str, str], tier: Tier
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of the counters table, of every metric of the tier, and of the quarantine table; in ``expected``'s order.

    ``expected`` says how many launches each label must have; 0 leaves the number open, but for none (baselines). A
    cell with a fault goes to quarantine as a whole, and so does one of another step's kernel. InvalidDataError where a
    label is none of those expected: then the report is another one.
    """
    rows, refused = [], []
    for label, found in _by_label(launches, expected).items():
        case, name = base.labelled(op, label)
        cell = (case.slug, name.backend, name.step)
        foreign = kernels.foreign(op, name, [each.kernel for each in found])
        seen = [foreign] if foreign else []
        if not found or expected[label] not in (0, len(found)):
            seen.append(f"{len(found)} launches were profiled, {expected[label] or 'at least 1'} expected")
        seen += [fault for each in found for fault in _faults(each, tier)]
        faults = list(dict.fromkeys(seen))  # a fault that all launches share is told once
        if faults:
            more = f"; and {len(faults) - _FAULTS_TOLD} more" if len(faults) > _FAULTS_TOLD else ""
            refused.append((*cell, "; ".join(faults[:_FAULTS_TOLD]) + more, codes.get(label, ""), run))
            continue
        for index, launch in enumerate(found):
            for metric in names(tier):
                value, unit = to_base(launch.metrics[metric], launch.units[metric], metric)
                rows.append((*cell, str(index), launch.kernel, metric, _exact(value), unit, codes.get(label, ""), run))
    return pd.DataFrame(rows, columns=TABLES["counters"]), pd.DataFrame(refused, columns=TABLES["quarantine"])


def cycle_rows(
    launches: Iterable[Launch], expected: dict[str, int], repeats: int, op: Op, run: str, codes: dict[str, str]
) -> pd.DataFrame:
    """Rows of the cycles table, from a report in which every label was called ``repeats`` times in a row.

    A call's cycles are the sum over its launches; how many those are is in ``expected``, where 0 means the number
    found divided by ``repeats``. Of another step's kernel there is no row. InvalidDataError names the label whose
    launches or cycles cannot be those.
    """
    rows = []
    for label, found in _by_label(launches, expected).items():
        case, name = base.labelled(op, label)
        if kernels.foreign(op, name, [launch.kernel for launch in found]):
            continue
        size = expected[label] or len(found) // repeats
        if not found or len(found) != size * repeats:
            wanted = f"{size} times {repeats}" if expected[label] else f"a multiple of {repeats}"
            raise InvalidDataError(f"{label}: {len(found)} launches were profiled, {wanted} expected")
        if faults := [fault for launch in found for fault in _value_faults(launch, CYCLES)]:
            raise InvalidDataError(f"{label}: {faults[0]}")
        cycles = [launch.metrics[CYCLES] for launch in found]
        calls = [_exact(sum(cycles[start : start + size])) for start in range(0, len(cycles), size)]
        rows.append((case.slug, name.backend, name.step, " ".join(calls), codes.get(label, ""), run))
    return pd.DataFrame(rows, columns=TABLES["cycles"])


def foreign_launches(path: Path) -> list[Launch]:
    """The launches of anybody's report, or of a raw page that ncu printed as CSV, in base units.

    A page with an unknown unit is refused, because it may be a scaled one.
    """
    if path.suffix == ".csv":
        try:
            return csv_page.parse(path.read_bytes().decode(), path.name, everything=True)
        except OSError as error:
            raise InvalidDataError(f"{path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise InvalidDataError(f"{path.name} is not text in UTF-8 ({error.reason})") from None
    return [_in_base_units(launch) for launch in launches_of(path, everything=True)]


def foreign_table(path: Path) -> pd.DataFrame:
    """Anybody's report or page as a long table in base units.

    ``launch`` counts from 0, ``label`` is empty where there is none of ours, ``meaning`` where the registry does not
    know the metric.
    """
    rows = [
        (index, launch.kernel, launch.label, metric, value, launch.units[metric], meaning(metric))
        for index, launch in enumerate(foreign_launches(path))
        for metric, value in launch.metrics.items()
    ]
    return pd.DataFrame(rows, columns=["launch", "kernel", "label", "metric", "value", "unit", "meaning"])


def _in_base_units(launch: Launch) -> Launch:
    based = {metric: _based(value, launch.units.get(metric, ""), metric) for metric, value in launch.metrics.items()}
    metrics = {metric: value for metric, (value, _) in based.items()}
    return dataclasses.replace(launch, metrics=metrics, units={metric: unit for metric, (_, unit) in based.items()})


def _based(value: float, unit: str, metric: str) -> tuple[float, str]:
    try:
        return to_base(value, unit, metric)
    except InvalidDataError:
        return value, unit  # NVIDIA's module always answers in base units, also in those that we do not know


def _by_label(launches: Iterable[Launch], expected: dict[str, int]) -> dict[str, list[Launch]]:
    by_label: dict[str, list[Launch]] = {label: [] for label in expected}
    for launch in launches:
        if launch.label not in by_label:
            raise InvalidDataError(
                f"{launch.kernel} has the label {launch.label!r}, which is none of the cells that were asked for"
            )
        by_label[launch.label].append(launch)
    return by_label


def _faults(launch: Launch, tier: Tier) -> Iterator[str]:
    """What makes a launch's counters impossible, a reason with metric, value and limit each."""
    for metric in names(tier):
        yield from _value_faults(launch, metric)
    hits, sectors = (launch.metrics.get(metric) for metric in (_HITS, _SECTORS))
    if _HITS in names(tier) and hits is not None and sectors is not None and hits > sectors * _MAX_SHARE / 100:
        yield f"{_HITS} is {_exact(hits)}, must be at most {_MAX_SHARE:g} % of {_SECTORS}, which is {_exact(sectors)}"


def _value_faults(launch: Launch, metric: str) -> Iterator[str]:
    if metric not in launch.metrics:
        yield missing(metric, launch.metrics)
        return
    try:
        value, unit = to_base(launch.metrics[metric], launch.units[metric], metric)
    except InvalidDataError as error:
        yield str(error)
        return
    described = METRICS[metric]
    limit = ""
    if unit != described.unit:
        limit = f"must be in {described.unit or 'no unit'}"
    elif not math.isfinite(value):
        limit = "must be a finite number"
    elif metric in (DURATION, CYCLES) and not value > 0:
        limit = "must be more than 0"
    elif metric == _CLOCK and not _CLOCK_HZ[0] <= value <= _CLOCK_HZ[1]:
        limit = "must be from {:g} to {:g} hz".format(*_CLOCK_HZ)
    elif value < 0:
        limit = "must be at least 0"
    elif described.is_share and value > _MAX_SHARE:
        limit = f"must be at most {_MAX_SHARE:g} %"
    if limit:
        yield f"{metric} is {_exact(value)} {unit}".rstrip() + f", {limit}"


def _exact(value: float) -> str:
    """A number with all its digits; whole ones, counts among them, without exponent or point."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(value)

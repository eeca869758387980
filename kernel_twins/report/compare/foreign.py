"""Anybody's report, as far as it tells: what limits each launch, and what a verdict lacks.

A report of our own holds all counters; anybody's holds those that its user asked for, of a GPU that the survey may not
know. ncu's own duration stands for the time of the launch here, as there is no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_twins.harness import ceilings
from kernel_twins.harness.ceilings import Ceilings
from kernel_twins.report.meaning.limiter import COUNTERS, limiter
from kernel_twins.report.ncu.csv_page import REMEDY
from kernel_twins.report.ncu.reader import Launch
from kernel_twins.report.rows.metrics import DURATION

_MULTIPROCESSORS = "device__attribute_multiprocessor_count"
_READ = tuple(dict.fromkeys(name for names in COUNTERS.values() for name in names))
_STALLS = "WarpStateStats"  # ncu's section that holds all of them
_PROFILE = "ncu --clock-control none --section {section} --metrics {metrics} -o report PROGRAM"
_EXPORT = "LC_ALL=C ncu --import report.ncu-rep --csv --page raw --print-units base > report.csv"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of one launch: a sentence without its full stop, and the counters that it would take to decide."""

    told: str
    lacking: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on every launch of a report, in order, and lines on what keeps the limiter from judging more."""

    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]


def judge(launches: Sequence[Launch], path: Path) -> Judged:
    """The limiter's verdicts on a report, which was read from ``path``; values are in base units."""
    surveys = {device: _survey(device) for device in dict.fromkeys(launch.device for launch in launches)}
    verdicts = tuple(_verdict(launch, surveys[launch.device][0]) for launch in launches)
    notes = [why for _, why in surveys.values() if why]
    lacking = [name for name in _READ if any(name in verdict.lacking for verdict in verdicts)]
    if lacking:
        notes += _remedy(lacking, path)
    elif any("stalls not measured" in verdict.told for verdict in verdicts):
        notes += [f"What warps wait for is not in the report: profile again with `--section {_STALLS}` besides"]
    return Judged(verdicts, tuple(notes))


def _survey(device: str) -> tuple[Ceilings | None, str]:
    """What a GPU can do, and where it is not known why not."""
    if not device:
        return None, "L2 and shared memory are not judged: the report does not name its GPU"
    try:
        return ceilings.load(ceilings.gpu_slug(device)), ""
    except FileNotFoundError as error:
        return None, f"L2 and shared memory are not judged on {device}: {error}"


def _verdict(launch: Launch, survey: Ceilings | None) -> Verdict:
    counters = {metric: value for metric, value in launch.metrics.items() if math.isfinite(value)}
    duration_ns, blocks_at_once = counters.get(DURATION), counters.get(_MULTIPROCESSORS)
    limit = limiter(
        counters,
        time_us=duration_ns / 1e3 if duration_ns else None,
        ceilings=survey,
        floor_us=None,
        multiprocessors=int(blocks_at_once) if blocks_at_once else None,
    )
    if limit is None:
        return Verdict("Not judged: the report holds no counter that tells how busy a unit is", _READ)
    if limit.kind != "undecided":
        return Verdict(f"Limited by {limit.told()}")
    needed = {name for kind in limit.missing for name in COUNTERS[kind]}
    lacking = tuple(name for name in _READ if name in needed and name not in counters)
    return Verdict(f"U{limit.told()[1:]}", lacking)


def _remedy(lacking: Sequence[str], path: Path) -> list[str]:
    """How to have what is lacking: a new profile, or of a page that holds it, another export."""
    is_page = path.suffix == ".csv"
    text = path.read_text() if is_page else ""
    printed = [name for name in lacking if name in text]
    notes = []
    if printed:
        notes.append(
            f"Left out: {', '.join(printed)}, which the page prints as 0 in automatic units, as ncu does with what it "
            f"could not measure: {REMEDY}"
        )
    if absent := [name for name in lacking if name not in text]:
        command = _PROFILE.format(section=_STALLS, metrics=",".join(_READ))
        notes.append(f"Not in the report: {', '.join(absent)}. All that the limiter reads is recorded by")
        notes += [f"  {command}", *([f"  {_EXPORT}"] if is_page else [])]
    return notes

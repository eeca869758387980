"""The last steps against the best baseline: every timed case of every operation, and what a choice of them comes to.

A choice is told as the page's address does: ``op=softmax&dtype=bf16``, of ``FILTERS`` and of ``q``, words that must all
stand in a row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import geometric_mean
from typing import NamedTuple
from urllib.parse import parse_qsl

from builder.rungs import TITLES
from builder.site import Site
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.verdict import Ratio
from kernel_twins.spec import BACKENDS, Backend, Case, Name

VERDICTS = ("FAST", "SAME", "SLOW", "AMBIGUOUS", "wrong", "no time")
FILTERS = ("family", "op", "dtype", "size", "backend", "verdict")


class Bounds(NamedTuple):
    """Below the first a case is small, from the second on it is large."""

    small: float
    large: float


# By the unit of the rate: bytes that a case must move, or its FLOP. 50 MB are an H100's L2.
SIZES = {"GB/s": Bounds(50e6, 1e9), "TFLOP/s": Bounds(1e10, 2e11)}


@dataclass(frozen=True, slots=True)
class Contest:
    """A last step and the best baseline at a case; without a ratio where one of the two has no time."""

    results: Results
    case: Case
    backend: Backend
    name: Name
    baseline: Name
    ratio: Ratio | None
    verdict: str
    told: str
    size: str
    stale: bool

    @property
    def paired(self) -> Ratio:
        """The ratio; LookupError without one."""
        if self.ratio is None:
            raise LookupError(f"no run timed both of {self.name} and {self.baseline} at {self.case.slug}")
        return self.ratio

    @property
    def link(self) -> str:
        """The step on its ladder's page, from the site's root."""
        return f"ladders/{self.op}.html#{self.name.step}"

    @property
    def op(self) -> str:
        return self.results.op.name

    @property
    def title(self) -> str:
        return TITLES[self.backend]

    @property
    def keys(self) -> dict[str, str]:
        """What it is filtered by."""
        return {
            "family": self.results.op.family,
            "op": self.op,
            "dtype": self.case.dtype,
            "size": self.size,
            "backend": self.backend,
            "verdict": self.verdict,
        }

    @property
    def words(self) -> str:
        """What is searched."""
        names = (self.op, self.case.slug, self.backend, self.name.step, self.baseline.backend, self.told)
        return " ".join(names).lower()


def contests(measured: Iterable[Results]) -> Iterator[Contest]:
    """In the specs' order; a step that was never tried is none, a wrong one is."""
    for results in measured:
        for case in results.op.timed_cases:
            baseline = results.best_baseline(case)
            for backend in BACKENDS:
                name = results.last(backend, case)
                status = results.status(case, name) if name else ""
                if baseline is None or name is None or not status:
                    continue
                ratio = results.ratio(case, name, baseline)
                verdict = results.standing(case, name, baseline) or "no time"
                if status.startswith("wrong"):
                    verdict = "wrong"
                told = verdict if ratio else status
                size, stale = size_class(results, case), results.stale(name)
                yield Contest(results, case, backend, name, baseline, ratio, verdict, told, size, stale)


def size_class(results: Results, case: Case) -> str:
    """``small``, ``medium`` or ``large``."""
    bounds = SIZES[results.rate_unit]
    work = work_of(results, case)
    return "small" if work < bounds.small else "large" if work >= bounds.large else "medium"


def work_of(results: Results, case: Case) -> float:
    """The bytes that a case must move, or its FLOP, by what bounds the operation."""
    return results.op.bytes(case) if results.rate_unit == "GB/s" else results.op.flops(case)


@functools.cache
def of(site: Site) -> list[Contest]:
    """A site's rows."""
    return list(contests(site.measured))


def chosen(rows: Iterable[Contest], choice: str) -> list[Contest]:
    """The rows that a choice shows; all of an empty one."""
    wanted = dict(parse_qsl(choice))
    words = wanted.pop("q", "").lower().split()
    return [
        row
        for row in rows
        if all(row.keys[key] == value for key, value in wanted.items()) and all(word in row.words for word in words)
    ]


def figure(rows: Iterable[Contest], backend: str, key: str) -> float:
    """``geomean`` of a backend's ratios, or how many of its rows have a verdict, or ``rows`` with any.

    LookupError where no row has a ratio.
    """
    own = [row for row in rows if row.backend == backend]
    if key != "geomean":
        return float(len([row for row in own if key in ("rows", row.verdict)]))
    ratios = [row.ratio.value for row in own if row.ratio]
    if not ratios:
        raise LookupError(f"no row of {backend} has a ratio")
    return geometric_mean(ratios)

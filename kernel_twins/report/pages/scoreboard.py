"""The last steps against the best baseline: case by case, and of what arithmetic bounds by condition."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.judgement import explained
from kernel_twins.report.pages.ladder_page import TITLES
from kernel_twins.report.rows.recorded import CONDITIONS
from kernel_twins.spec import BACKENDS, Backend, Case, Name

MEANING = (
    "*sustained*, samples follow each other, so that products run at the power limit and below the full clock; "
    "*rested*, each sample begins when the SM clock is back at its maximum, with an untimed one just before it; *in a "
    "chain*, a small kernel stands between two calls, so that none begins while the one before it ends, and its time "
    "is in theirs. Clock and watts are medians over readings while samples ran; the sensor of watts is slower than a "
    "rested sample, and has the rest in it. A verdict is of paired rounds under one condition; ncu's cycles are asked "
    "about sustained ones alone."
)
"""Of the conditions."""

_TWINS = 8
_TITLES = {"sustained": "sustained", "rested": "rested", "chain": "in a chain"}
_BOTH = ("sustained", "rested")


def scoreboard(cells: Iterable[tuple[Results, Case]]) -> list[str]:
    """A row for each case: both languages' last steps that take it, and which of them is faster.

    The Triton step that may be copied as a whole has a row of its own where a later one takes the case.
    """
    header = ["case", "best baseline", "CUDA, last step", "× baseline", "Triton, last step", "× baseline"]
    return _marked([*header, "Triton × CUDA"], [row for results, case in cells for row in _score(results, case)])


def slowest_twins(cells: Iterable[tuple[Results, Case]]) -> list[str]:
    """A row for each ladder whose last step in Triton is SLOW beside CUDA's: where most so, and why by the counters.

    Those are of the case itself or, where it was not profiled, of the ladder's slowest one that was.
    """
    slow: dict[str, list[tuple[float, Results, Case]]] = {}
    for results, case in cells:
        ratio = results.ratio(case, *_twins(results, case))
        if ratio and results.standing(case, *_twins(results, case)) == "SLOW":
            slow.setdefault(results.op.name, []).append((ratio.value, results, case))
    ladders = sorted((sorted(each, key=itemgetter(0)) for each in slow.values()), key=lambda each: each[0][0])
    rows = []
    for ladder in ladders[:_TWINS]:
        value, results, case = ladder[0]
        steps = " beside ".join(name.step[:3] for name in _twins(results, case))
        told = (f"at {each.slug}, {ratio:.3f} ×: {why}" for ratio, _, each in ladder if (why := _why(results, each)))
        page = f"[{results.op.name}]({results.op.name}.md) {case.slug}"
        rows.append([page, f"{value:.3f} ×", steps, next(told, "not profiled where it is slower")])
    header = ["case", "Triton × CUDA", "steps", "cause by the counters, CUDA → Triton"]
    return write.table(header, rows, right=4) if rows else ["No twin was measured as slower."]


def _twins(results: Results, case: Case) -> tuple[Name, Name]:
    return _last(results, "triton", case), _last(results, "cuda", case)


def _why(results: Results, case: Case) -> str:
    """What the counters say of the last steps at a case; empty where one was not profiled there."""
    triton, cuda = _twins(results, case)
    told, limit = explained(results.counters(cuda, case), results.counters(triton, case)), results.limiter(triton, case)
    return f"{told}; Triton is limited by {limit.told()}" if told and limit else told


def by_condition(results: Iterable[Results]) -> list[str]:
    """Three rows for each case that was timed under all conditions; no lines where none was."""
    rows = [row for each in results for case in each.op.condition_cases for row in _conditions(each, case)]
    header = ["product", "", "chip", "best baseline, µs"]
    header += ["CUDA, µs", "× baseline", "Triton, µs", "× baseline"]
    return _marked(header, rows, right=3) if rows else []


def sustained_and_rested(results: Iterable[Results]) -> list[str]:
    """A short row for the profile case of each operation that was timed under both conditions."""
    rows = [_glance(each, case) for each in results if (case := each.op.profile_case) in each.op.condition_cases]
    header = ["product", "against"]
    header += [f"{TITLES[backend]}, {_TITLES[condition]}" for backend in BACKENDS for condition in _BOTH]
    return write.table(header, rows, right=len(header)) if rows else ["No product has been measured yet."]


def _glance(results: Results, case: Case) -> list[str]:
    baseline = results.best_baseline(case, "rested")
    row = [f"{results.op.name} {case.slug}", baseline.backend if baseline else "–"]
    for backend in BACKENDS:
        name = _last(results, backend, case)
        for condition in _BOTH:
            rate = results.rate(case, name, condition)
            ratio = results.ratio(case, name, baseline, condition) if baseline else None
            told = write.unbroken(f"{write.number(rate)} {results.rate_unit}")
            if baseline and ratio:
                told += (
                    f"<br>{write.unbroken(f'{ratio.value:.3f} ×')} {results.standing(case, name, baseline, condition)}"
                )
            row.append(told if rate else "–")
    return row


def _marked(header: list[str], rows: list[list[str]], right: int = 1) -> list[str]:
    """A table, and what the mark means where a time was measured before the step's code changed."""
    table = write.table(header, rows, right)
    return [*table, "", write.STALE_NOTE] if any(write.STALE in cell for row in rows for cell in row) else table


def _mark(results: Results, name: Name) -> str:
    return f" {write.STALE}" if results.stale(name) else ""


def _last(results: Results, backend: Backend, case: Case) -> Name:
    """The last step that was measured; a name that nobody has where the language has no step for the case."""
    return results.last(backend, case) or Name(backend)


def _score(results: Results, case: Case) -> list[list[str]]:
    cuda, triton = (_last(results, backend, case) for backend in BACKENDS)
    title = f"{results.op.name} {case.slug}"
    cells = best_baseline(results, case, title) + _beside(results, case, cuda)
    rows = [[*cells, *_beside(results, case, triton), _twins_ratio(results, case, cuda, triton)]]
    for step in results.op.steps:
        name = Name("triton", step.name)
        if step.standalone and name != triton and results.status(case, name):
            cells = [f"{title}, standalone {step.name[:3]}", *["–"] * 3, *_beside(results, case, name)]
            rows.append([*cells, _twins_ratio(results, case, cuda, name)])
    return rows


def _beside(results: Results, case: Case, name: Name) -> list[str]:
    """A step's rate, and its ratio to the best baseline."""
    mark = _mark(results, name) if results.rate(case, name) else ""
    return [_rate(results, case, name) + mark, against(results, case, name, results.best_baseline(case))]


def _twins_ratio(results: Results, case: Case, cuda: Name, triton: Name) -> str:
    ratio = results.ratio(case, triton, cuda)
    return f"{ratio.value:.3f} × {results.standing(case, triton, cuda)}" if ratio else "–"


def best_baseline(results: Results, case: Case, title: str) -> list[str]:
    """The first cells of a case's row."""
    baseline = results.best_baseline(case)
    return [title, f"{_rate(results, case, baseline)} {baseline.backend}" if baseline else "–"]


def against(results: Results, case: Case, name: Name, baseline: Name | None, condition: str = "sustained") -> str:
    """A step's ratio to the baseline, and the verdict; a dash where there is none."""
    ratio = results.ratio(case, name, baseline, condition) if baseline else None
    if baseline is None or ratio is None:
        return "–"
    return f"{write.ratio(ratio)} {results.standing(case, name, baseline, condition)}"


def _rate(results: Results, case: Case, name: Name) -> str:
    rate = results.rate(case, name)
    return results.status(case, name) or "–" if rate is None else f"{write.number(rate)} {results.rate_unit}"


def _conditions(results: Results, case: Case) -> list[list[str]]:
    """Against the baseline that was timed under all conditions, the fastest of the sustained ones."""
    baseline = results.best_baseline(case, "rested")
    if baseline is None:
        return []
    rows: list[list[str]] = []
    for condition in CONDITIONS:
        title = "" if rows else f"{results.op.name} {case.slug}"
        theirs = write.number(results.time_us(case, baseline, condition), 4)
        chip = results.sensors(case, condition).replace("_", " ")  # NVML's words, which a column should break
        row = [title, _TITLES[condition], chip, f"{theirs} {baseline.backend}"]
        for backend in BACKENDS:
            name = _last(results, backend, case)
            ratio = against(results, case, name, baseline, condition)
            row += ["–", ratio]
            if ratio != "–":
                row[-2] = write.number(results.time_us(case, name, condition), 4) + _mark(results, name)
        rows.append(row)
    return rows

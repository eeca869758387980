"""What came of the predictions: the score of all, and the misses by their size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import get_args

from kernel_twins.report.meaning import write
from kernel_twins.report.meaning.analysis import Results
from kernel_twins.report.meaning.judged import MISSED, Judged, of_step
from kernel_twins.report.meaning.judgement import Outcome, score
from kernel_twins.report.meaning.retired import withdrawn
from kernel_twins.spec import Backend, Step

_MEANING = (
    "A prediction is pre-registered where it was frozen before the first measurement of its cell, trials and tuning "
    "included; everything else is post hoc. To measure again changes nothing. It is void, and neither hit nor miss, "
    "where it is of a case that the step leaves to another step's kernel."
)
_RETIRED = (
    " Retired are those of rungs that were folded into later steps, and of steps that were compared with them: they "
    "keep the verdict that they had."
)


def total(judged: Iterable[Judged]) -> str:
    """The score of what was predicted before it was measured, in a sentence."""
    found = [each for each in judged if each.mark == "pre-registered"]
    counts, retired = Counter(each.judgement.verdict for each in found), sum(each.retired for each in found)
    missed = sum(counts[outcome] for outcome in MISSED)
    rest = ", ".join(f"{counts[each]} {each}" for each in ("not judged", "void") if counts[each])
    wrong = f", {counts['wrong direction']} of them in the wrong direction" if counts["wrong direction"] else ""
    return (
        f"**{counts.total()} pre-registered predictions{f', {retired} of them retired' if retired else ''}: "
        f"{counts['hit']} hits, {missed} misses**{wrong}"
        f"{f'; {rest}' if rest else ''}."
    )


def in_short(judged: list[Judged]) -> list[str]:
    """A table of hits and misses, a row a ladder; how many of them are retired, where any is."""
    counts: dict[str, Counter[tuple[bool, str]]] = {}
    retired: Counter[str] = Counter()
    for each in judged:
        outcome = "miss" if each.missed else each.judgement.verdict
        counts.setdefault(each.op.name, Counter())[each.mark == "pre-registered", outcome] += 1
        retired[each.op.name] += each.retired and outcome in ("hit", "miss")
    columns = [(before, outcome) for before in (True, False) for outcome in ("hit", "miss")]
    rows = [[name, *(str(found[column]) for column in columns)] for name, found in counts.items()]
    header = ["ladder", "hits", "misses", "post hoc: hits", "misses"]
    if retired.total():
        header.append("retired among them")
        rows = [[*row, str(retired[row[0]])] for row in rows]
    return write.table(header, rows)


def section(results: list[Results], judged: list[Judged]) -> list[str]:
    """How often each ladder's predictions came true, and how many of them were made before measuring."""
    scores = score((each.op.name, each.mark, each.judgement) for each in judged)
    retired = Counter((each.op.name, each.mark) for each in judged if each.retired)
    gone = Counter((each.op.name, mark) for each in results for mark in withdrawn(each.recorded.folder, each.op))
    outcomes = get_args(Outcome)
    rows = []
    for key in dict.fromkeys([*scores, *gone]):
        found = scores.get(key, Counter())
        told = [str(retired[key])] if retired else []
        rows.append([*key, *(str(found[outcome]) for outcome in outcomes), *told, str(gone[key])])
    header = ["ladder", "made", *outcomes, *(["retired among them"] if retired else []), "withdrawn"]
    return [f"{total(judged)} {_MEANING}{_RETIRED if retired else ''}", "", *write.table(header, rows, right=2)]


def worst(judged: Iterable[Judged], most: int) -> list[Judged]:
    """The pre-registered predictions that missed by most, the largest first."""
    missed = [each for each in judged if each.missed and each.mark == "pre-registered"]
    return sorted(missed, key=lambda each: -each.size)[:most]


def standing(results: Results, step: Step, backend: Backend) -> str:
    """How many of a step's predictions came true and how many did not, as ``2 / 1``; a dash where none was judged."""
    verdicts = [each.judgement.verdict for each in of_step(results, step, backend)]
    hits, misses = verdicts.count("hit"), sum(verdict in MISSED for verdict in verdicts)
    return f"{hits} / {misses}" if hits + misses else "–"
